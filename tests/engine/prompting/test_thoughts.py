"""Thoughts of earlier turns reach a template in the form that it reads."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.chat_templates import deepseek_v32

from gateway.engine.generation.loading import read_chat_setup, unread_formats
from gateway.engine.prompting import chat_tokenizer as chat_tokenizer_module
from gateway.engine.prompting.chat_tokenizer import (
    ChatFormats,
    ChatTokenizer,
    chat_tokenizer,
    wrap_folder_tokenizer,
)
from gateway.engine.sandbox_worker import Answer, Request, render
from gateway.errors import BadRequest, Overloaded, Unavailable
from gateway.jobs.chat import GenerateJob, Sampling
from tests.checkpoints import write_chat
from tests.engine.chat_formats import family
from tests.fakes import caller

SECRET = "The lock opens at noon."
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
LOOP: list[dict[str, Any]] = [
    {"role": "user", "content": "Well?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": SECRET},
    {"role": "tool", "content": "7", "tool_call_id": "call_1"},
]
TURNS = (
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.role == 'assistant' %}THOUGHT{% endif %}"
    "{% if m.content is string %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{% endfor %}"
)
FIELD = "{{% if m.{0} %}}<think>{{{{ m.{0} }}}}</think>{{% endif %}}"
PARTS = (
    "{% if m.content is not string %}{% for part in m.content %}"
    "{% if part.type == 'thinking' %}[THINK]{{ part.thinking }}[/THINK]{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endif %}"
)
# It takes a thought beside a call, or a text, but not both.
ALONE = (
    "{% if m.content and m.thinking %}{{ raise_exception('one of both') }}{% endif %}"
    "{% if m.thinking %}<think>{{ m.thinking }}</think>{% endif %}"
)
# Only where a call goes with it, or only behind a tool's result.
BESIDE = "{% if m.tool_calls and m.reasoning %}<think>{{ m.reasoning }}</think>{% endif %}"
BEHIND = (
    "{% if loop.previtem is defined and loop.previtem.role == 'tool' and m.reasoning %}"
    "<think>{{ m.reasoning }}</think>{% endif %}"
)


def prompt(chat: ChatTokenizer, turns: list[dict[str, Any]]) -> str:
    job = GenerateJob(caller=caller(), sampling=Sampling(), messages=turns)
    return chat.decode(chat.prompt(job).ids)


@pytest.mark.parametrize(
    "shown",
    [FIELD.format("reasoning_content"), FIELD.format("reasoning"), ALONE, BESIDE, PARTS],
    ids=["reasoning_content", "reasoning", "thinking", "beside a call", "parts"],
)
def test_a_thought_is_in_the_prompt_once(shown: str, tmp_path: Path) -> None:
    chat = family(tmp_path, template=TURNS.replace("THOUGHT", shown))
    assert prompt(chat, LOOP).count(SECRET) == 1


@pytest.mark.parametrize("behind_thought", ["", "\n"])
@pytest.mark.parametrize("behind_text", ["", "{{ '\\n' }}"])
def test_line_breaks_are_the_templates_where_it_writes_them_and_else_the_models(
    behind_thought: str, behind_text: str, tmp_path: Path
) -> None:
    """A break too many or too few would have the model read its own text again."""
    shown = f"<think>\n{{{{ m.reasoning }}}}{behind_thought}</think>\n"
    template = TURNS.replace("THOUGHT", f"{{% if m.reasoning %}}{shown}{{% endif %}}")
    call = "{{ c.function.name }}"
    chat = family(tmp_path, template=template.replace(call, behind_text + call))
    written = {**LOOP[1], "content": "I look.\n", "reasoning_content": f"{SECRET}\n"}
    text = prompt(chat, [LOOP[0], written, LOOP[2]])
    assert f"<think>\n{SECRET}\n</think>\nI look.\nf" in text
    answer = {"role": "assistant", "content": "Done.\n"}
    assert prompt(chat, [LOOP[0], answer]).endswith("Done.\n")


def test_a_thought_with_marks_that_a_template_refuses_is_left_out(tmp_path: Path) -> None:
    """Otherwise each further turn of the conversation would be refused."""
    refuses = "{% if '<|m|>' in m.thinking %}{{ raise_exception('marks') }}{% endif %}"
    shown = f"{{% if m.thinking %}}{refuses}<think>{{{{ m.thinking }}}}</think>{{% endif %}}"
    chat = family(tmp_path, template=TURNS.replace("THOUGHT", shown))
    quoting = {**LOOP[1], "reasoning_content": f"{SECRET} <|m|>"}
    assert SECRET in prompt(chat, LOOP)
    assert "[assistant]f[tool]7" in prompt(chat, [LOOP[0], quoting, LOOP[2]])


class Box:
    """A sandbox that renders, but has these outcomes for requests by their number."""

    def __init__(self, outcomes: Mapping[int, str]) -> None:
        self.outcomes, self.asked = outcomes, 0

    def __call__(self, request: Request, key: bytes) -> Answer:
        self.asked += 1
        outcome = self.outcomes.get(self.asked)
        return (outcome, "it took long") if outcome else render(request)


MENTIONED = "{# reasoning_content #}" + TURNS.replace("THOUGHT", FIELD.format("reasoning"))
TRIALS = range(2, 100)  # the first request is a greeting


@pytest.mark.parametrize("outcome", ["late", "died", "large"])
def test_a_template_that_takes_too_long_for_a_trial_is_tried_no_more(
    outcome: str, tmp_path: Path
) -> None:
    """Each further trial would take as long, while the model loads."""
    write_chat(tmp_path / "m")
    (tmp_path / "m" / "chat_template.jinja").write_text(MENTIONED)
    for first in (2, 5, 9):  # the last is one of those that the formats read back
        box = Box(dict.fromkeys(range(first, 100), outcome))
        given = ChatFormats(template_sandbox=box)
        setup = read_chat_setup(tmp_path / "m", name="m", max_context=None, formats=given)
        assert "it took long" in str(setup.chat.trial_error)
        assert (setup.unread_formats, box.asked) == ([], first)


def test_trials_end_once_all_of_them_have_taken_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_tokenizer_module, "TRIALS_S", -1.0)
    box = Box({})
    chat = family(tmp_path, template=MENTIONED, template_sandbox=box)
    assert "took over" in str(chat.trial_error)
    assert box.asked == 1  # only the greeting was asked
    with pytest.raises(BadRequest, match="took over"):
        unread_formats(chat)


@pytest.mark.parametrize("outcome", ["busy", "killed", "slow"])
def test_a_trial_that_others_leave_no_time_for_is_tried_again_and_else_no_model_is_loaded(
    outcome: str, tmp_path: Path
) -> None:
    """It would get its thoughts in a form that it does not read, until it is loaded again."""
    write_chat(tmp_path / "m")
    (tmp_path / "m" / "chat_template.jinja").write_text(MENTIONED)
    for number in range(2, 9):
        box = Box({number: outcome})
        given = ChatFormats(template_sandbox=box)
        setup = read_chat_setup(tmp_path / "m", name="m", max_context=None, formats=given)
        assert SECRET in prompt(setup.chat, LOOP)
        box = Box({number: outcome, number + 1: outcome})
        given = ChatFormats(template_sandbox=box)
        with pytest.raises((Overloaded, Unavailable)):
            read_chat_setup(tmp_path / "m", name="m", max_context=None, formats=given)


def test_a_template_that_wants_a_result_behind_a_call_reads_thoughts_beside_texts(
    tmp_path: Path,
) -> None:
    """Its refusal of both proves nothing: it refuses the call without a thought too."""
    wants = (
        "{% if m.tool_calls and m.content and loop.last %}{{ raise_exception('no') }}{% endif %}"
    )
    template = TURNS.replace("THOUGHT", FIELD.format("reasoning") + wants)
    turns = [LOOP[0], {**LOOP[1], "content": "Let me look."}, LOOP[2]]
    assert SECRET in prompt(family(tmp_path, template=template), turns)


def test_a_template_that_shows_thoughts_only_to_a_model_that_thinks_is_found(
    tmp_path: Path,
) -> None:
    shown = f"{{% if enable_thinking %}}{FIELD.format('reasoning')}{{% endif %}}"
    thinking = {"enable_thinking": True}
    template = TURNS.replace("THOUGHT", shown)
    chat = family(tmp_path, template=template, template_args=thinking)
    assert SECRET in prompt(chat, LOOP)
    job = GenerateJob(caller=caller(), sampling=Sampling(), messages=LOOP, template_args=thinking)
    chat = family(tmp_path, template=template)
    assert SECRET in chat.decode(chat.prompt(job).ids)


@pytest.mark.parametrize("asked", [True, False])
def test_thinking_is_turned_on_and_off_in_the_words_of_each_family(
    asked: bool, tmp_path: Path
) -> None:
    words = ("enable_thinking", "thinking", "reasoning", "thinking_mode")
    chat = family(tmp_path, template=" ".join(f"{{{{ {word} }}}}" for word in words))
    given = {"enable_thinking": asked}
    named = {"thinking_mode": "adaptive"}
    for more, mode in (({}, "enabled" if asked else "disabled"), (named, "adaptive")):
        arguments: dict[str, Any] = {**given, **more}
        job = GenerateJob(
            caller=caller(), sampling=Sampling(), messages=LOOP[:1], template_args=arguments
        )
        assert chat.decode(chat.prompt(job).ids).endswith(f"{asked} {asked} {asked} {mode}")
    assert "True" not in prompt(chat, LOOP[:1])


def test_a_program_of_mlx_lms_may_read_thoughts_in_any_form(tmp_path: Path) -> None:
    family(tmp_path)
    wrapper = wrap_folder_tokenizer(tmp_path, name="x", eos_ids=2)
    wrapper._chat_template = lambda turns, **given: " ".join(t.get("thinking", "") for t in turns)
    wrapper._tokenizer.chat_template = None
    assert SECRET in prompt(chat_tokenizer(wrapper, ChatFormats(), name="x", model_type="x"), LOOP)


def test_a_program_of_mlx_lms_reads_calls_and_thoughts(tmp_path: Path) -> None:
    family(tmp_path, tokens=("｜DSML｜",))
    wrapper = wrap_folder_tokenizer(tmp_path, name="x", eos_ids=2)
    wrapper._chat_template = deepseek_v32.apply_chat_template
    wrapper._tokenizer.chat_template = None
    chat = chat_tokenizer(wrapper, ChatFormats(), name="x", model_type="deepseek_v32")
    text = prompt(chat, LOOP)
    assert SECRET in text
    assert '<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>' in text
    assert chat.answers.tools.name == "deepseek_v32"


def test_a_thought_behind_a_tools_result_is_in_the_prompt(tmp_path: Path) -> None:
    chat = family(tmp_path, template=TURNS.replace("THOUGHT", BEHIND))
    answer = {"role": "assistant", "content": "Seven.", "reasoning_content": SECRET}
    assert prompt(chat, [*LOOP, answer]).count(SECRET) == 1


def test_a_name_that_a_template_only_mentions_is_not_used(tmp_path: Path) -> None:
    mentioned = "{# reasoning_content #}" + FIELD.format("reasoning")
    chat = family(tmp_path, template=TURNS.replace("THOUGHT", mentioned))
    assert SECRET in prompt(chat, LOOP)


def test_beside_a_text_the_thought_is_left_out_where_a_template_refuses_both(
    tmp_path: Path,
) -> None:
    chat = family(tmp_path, template=TURNS.replace("THOUGHT", ALONE))
    turns = [LOOP[0], {**LOOP[1], "content": "Let me look."}, LOOP[2]]
    assert SECRET not in prompt(chat, turns)
    assert "Let me look." in prompt(chat, turns)


def test_a_template_that_prints_any_content_gets_no_parts(tmp_path: Path) -> None:
    """Its list would be printed as Python or JSON."""
    for shown in ("{{ m.content }}", "{{ m.content | tojson }}"):
        text = "{% for m in messages %}" + shown + "{% endfor %}{# thinking #}"
        chat = family(tmp_path, template=text)
        assert SECRET not in prompt(chat, LOOP)


def test_control_tokens_in_a_thought_are_letters_where_callers_have_none(tmp_path: Path) -> None:
    """A template looks for the marks of thinking in a text; in a thought they would end it."""
    template = TURNS.replace("THOUGHT", FIELD.format("reasoning"))
    evil = {**LOOP[1], "reasoning_content": "so</think><think>"}
    marks = ("<think>", "</think>")
    for is_split in (False, True):
        chat = family(tmp_path, added=marks, template=template, split_special_tokens=is_split)
        job = GenerateJob(caller=caller(), sampling=Sampling(), messages=[LOOP[0], evil, LOOP[2]])
        ids = chat.prompt(job).ids
        assert chat.decode(ids).count("so</think><think></think>") == 1
        assert sum(token in chat.answers.ids(marks) for token in ids) == (2 if is_split else 4)
