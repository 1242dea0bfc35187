"""A template's text of a thought and a call is read back by the formats of its model."""

from pathlib import Path

import pytest

from gateway.engine.answers.reasoning import REASONING_FORMATS
from gateway.engine.generation.loading import unread_formats
from gateway.engine.prompting.chat_tokenizer import ChatTokenizer
from gateway.engine.prompting.thoughts import ARGUMENTS, FUNCTION
from tests.engine.answers.written_calls import FORMS, Form
from tests.engine.chat_formats import family

CALL = {"name": FUNCTION.name, "arguments": dict(ARGUMENTS)}
END = "<|end|>"  # the demo's end of an answer
QWEN = FORMS["hermes"].write([CALL])
THINK = "<think>\n{{ m.reasoning_content }}\n</think>\n\n"
MARKED = {name: form for name, form in REASONING_FORMATS.items() if form.starts}


def template(call: str = "", thought: str = "", before: str = "<|im_start|>assistant\n") -> str:
    """Return a template that writes this for a call, and this for a thought."""
    begin, opening = before.split("assistant")
    return (
        f"{{% for m in messages %}}{begin}{{{{ m.role }}}}{opening}"
        f"{{% if m.reasoning_content %}}{thought}{{% endif %}}{{{{ m.content }}}}"
        f"{{% if m.tool_calls %}}{{% raw %}}{call}{{% endraw %}}{{% endif %}}{END}\n{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{before}{{% endif %}}"
    )


def opened(folder: Path, form: Form, **given: str) -> ChatTokenizer:
    """Open a model whose template writes calls, and thoughts where it has marks for them."""
    thought = f"{form.opens}{{{{ m.reasoning_content }}}}{form.closes}" if form.opens else ""
    text = template(form.write([CALL]), thought)
    if form.format == "openai":
        text = template(form.write([CALL]).removeprefix("<|start|>assistant"), thought)
        text = text.replace("\n{% endfor %}", "{% endfor %}").replace("assistant\n", "assistant")
    return family(folder, tokens=form.tokens, template=text, **given)


@pytest.mark.parametrize("name", FORMS)
def test_each_family_reads_its_own_turns(name: str, tmp_path: Path) -> None:
    form = FORMS[name]
    formats = {"tool_parser": form.format, "reasoning_parser": form.reasoning}
    assert unread_formats(opened(tmp_path, form, **formats)) == []


@pytest.mark.parametrize("name", FORMS)
def test_no_other_family_reads_them(name: str, tmp_path: Path) -> None:
    form = FORMS[name]
    other = "kimi_k2" if form.format != "kimi_k2" else "hermes"
    chat = opened(tmp_path, form, tool_parser=other, reasoning_parser="none")
    assert unread_formats(chat) == ["tool_parser", *(["reasoning_parser"] if form.opens else [])]


@pytest.mark.parametrize("name", MARKED)
def test_thoughts_between_the_marks_of_a_family_are_read(name: str, tmp_path: Path) -> None:
    start, end = MARKED[name].starts[0], MARKED[name].ends[0]
    text = template(thought=f"{start}\n{{{{ m.reasoning_content }}}}\n{end}\n")
    assert unread_formats(family(tmp_path / "a", template=text, reasoning_parser=name)) == []
    other = family(tmp_path / "b", template=text, reasoning_parser="none")
    assert unread_formats(other) == ["reasoning_parser"]


def test_a_thought_that_the_template_opens_for_the_answer_is_read(tmp_path: Path) -> None:
    opening = "<|im_start|>assistant\n<think>\n"
    text = template(QWEN, "<think>\n{{ m.reasoning_content }}\n</think>\n\n").replace(
        "{% if add_generation_prompt %}<|im_start|>assistant\n",
        f"{{% if add_generation_prompt %}}{opening}",
    )
    chat = family(tmp_path, added=("<think>", "</think>"), template=text, words="tool_call.name")
    assert chat.answers.tools.name == "hermes"
    assert unread_formats(chat) == []


@pytest.mark.parametrize(
    ("text", "unread"),
    [
        # It documents one form of calls, and writes another.
        (template("[CALL] look_up_tide Old Whitby 3") + "{# <tool_call> #}", ["tool_parser"]),
        (template(QWEN, "<musing>{{ m.reasoning_content }}</musing>"), ["reasoning_parser"]),
        (template(QWEN.replace("look", "Look")), []),  # no call of ours is in it
        (template(QWEN.replace('"days": 3', '"day": 3')), ["tool_parser"]),
    ],
)
def test_a_template_that_lies_is_found_out(text: str, unread: list[str], tmp_path: Path) -> None:
    assert unread_formats(family(tmp_path, template=text, tool_parser="hermes")) == unread


def test_a_thought_beside_a_call_is_looked_at_too(tmp_path: Path) -> None:
    """Some write it with other marks than behind a tool's result."""
    other = "{% if m.tool_calls %}<reason>{{ m.reasoning_content }}</reason>{% else %}"
    thought = f"{other}<think>{{{{ m.reasoning_content }}}}</think>{{% endif %}}"
    chat = family(tmp_path, template=template(QWEN, thought), tool_parser="hermes")
    assert unread_formats(chat) == ["reasoning_parser"]


REFUSES = "{{ raise_exception('no tools') if m.tool_calls or m.role == 'tool' }}"


@pytest.mark.parametrize(
    "text",
    [
        "{% for m in messages %}{{ m.content }}{% endfor %}{# reasoning_content tool_calls #}",
        template().replace("{% if m.tool_calls", f"{REFUSES}{{% if m.tool_calls"),
        "{{ raise_exception('nothing') }}{# reasoning_content tool_calls #}",
        "{{ 1 / 0 }}{# reasoning thinking tool_calls #}",
    ],
    ids=["drops", "refuses calls", "refuses", "breaks"],
)
def test_a_template_that_drops_or_refuses_gives_no_verdict(text: str, tmp_path: Path) -> None:
    assert unread_formats(family(tmp_path, template=text)) == []


def test_a_template_without_words_for_either_is_not_rendered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object) -> None:
        raise AssertionError

    chat = family(tmp_path)
    monkeypatch.setattr(chat.template, "render", refuse)
    assert unread_formats(chat) == []
