"""Chat templates are rendered as transformers renders them, whatever they cost."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from gateway.engine.prompting.chat_template import ChatTemplate
from gateway.errors import BadRequest, ModelLoadFailed, Overloaded
from gateway.jobs.chat import GenerateJob, Sampling
from gateway.serving.sandbox import Sandbox
from tests.engine.chat_formats import DEMO, family, open_tokenizer
from tests.fakes import caller
from tests.sandboxes import SLOW, sandbox

TOOL = {
    "type": "function",
    "function": {"name": "f", "description": None, "parameters": {"type": "object", "a": [1.5]}},
}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"é": "<&>'\""}}}
TURNS: list[dict[str, Any]] = [
    {"role": "system", "content": "Be \u2028 kind."},
    {"role": "user", "content": [{"type": "text", "text": "hi <b>"}], "name": None},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "so"},
    {"role": "tool", "content": "7", "tool_call_id": "1"},
    {"role": "assistant", "content": " yes \n"},
    {"role": "user", "content": "and then?"},
]
QWEN = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}{% set ns.last = loop.index0 %}{% break %}{% endfor %}
{%- for message in messages %}
<|im_start|>{{ message.role }}
{% if message.tool_calls %}{% for call in message.tool_calls -%}
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
{% endfor %}{% elif message.content is string %}{{ message.content.strip() }}
{% else %}{{ message.content[0].text }}{% endif %}
{{- message.reasoning_content }}{{ message.reasoning }}{{ ns.last }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
LLAMA = """{{- bos_token }}{% set date = strftime_now("%d %b %Y") if strftime_now is defined %}
{%- macro said(text) %}{{ text | string | trim }}<|eot_id|>{% endmacro %}
{{ "Today: " + date }}{{ documents | length if documents else "none" }}
{% for m in messages %}<|{{ m['role'] }}|>{% generation %}{{ said(m['content']) }}
{% endgeneration %}{% endfor %}{{ tools | tojson(indent=4) if tools is not none }}
{{ dict(a=1).items() | list }} {{ xtc_marker }} {{ eos_token }}"""
MISTRAL = """{{ bos_token }}{% if messages[0].role == 'system' %}
{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}
{% for m in rest %}{% if m.role == 'user' %}{{ '[INST] ' ~ m.content ~ ' [/INST]' }}
{% elif m.role == 'tool' %}{{ raise_exception('tools must alternate') }}
{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"""
DEMO_TEMPLATE = (DEMO / "chat_template.jinja").read_text()
TEMPLATES = {"demo": DEMO_TEMPLATE, "qwen": QWEN, "llama": LLAMA, "mistral": MISTRAL}
ASKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "asking": {"add_generation_prompt": True},
    "not thinking": {"add_generation_prompt": True, "enable_thinking": False},
    "marked": {"xtc_marker": [1, {"a": None}], "bos_token": "<over>"},
    "documents": {"documents": [{"title": "t", "text": "x"}]},
    "continued": {"continue_final_message": True},
}


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    with sandbox("template", 60, quick_s=1.0) as box:
        yield box


@pytest.fixture(scope="module")
def brief() -> Iterator[Sandbox]:
    with sandbox("template", 0.5) as brief:
        yield brief


def both(template: ChatTemplate, turns: Any, tools: Any, arguments: Any) -> tuple[str, str]:
    """Render ours beside transformers' own text; a refusal gives its message."""
    try:
        theirs = template._wrapper._tokenizer.apply_chat_template(
            [dict(turn) for turn in turns], tools=tools or None, tokenize=False, **arguments
        )
    except Exception as error:
        theirs = f"The model's chat template refuses these messages: {str(error)[:500]}"
    try:
        ours = template.render(turns, tools, arguments)
    except BadRequest as error:
        ours = error.message
    return ours, theirs


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_those_that_transformers_renders(
    name: str, asked: str, box: Sandbox, tmp_path: Path
) -> None:
    chat = family(tmp_path, template=TEMPLATES[name], template_sandbox=box)
    for turns in (TURNS, TURNS[:2], TURNS[4:]):
        for tools in ([], [TOOL]):
            ours, theirs = both(chat.template, turns, tools, ASKED[asked])
            assert ours == theirs


def test_of_several_templates_the_one_for_tools_is_rendered(box: Sandbox, tmp_path: Path) -> None:
    chat = family(tmp_path, template_sandbox=box)
    chat.tokenizer.chat_template = {"default": "plain", "tool_use": "with tools"}
    assert both(chat.template, TURNS, [], {}) == ("plain", "plain")
    assert both(chat.template, TURNS, [TOOL], {}) == ("with tools", "with tools")


BAD = {
    "endless": (SLOW, "took over"),
    "long": ("{{ 'a' * 5000000 }}", "characters"),
    "huge": ("{{ 'é' * 900000000 }}", "memory"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_template_that_costs_too_much_is_refused_at_load(
    name: str, box: Sandbox, brief: Sandbox, tmp_path: Path
) -> None:
    box = brief if name == "endless" else box
    text, why = BAD[name]
    with pytest.raises(ModelLoadFailed, match=f"its chat template cannot be rendered.*{why}"):
        family(tmp_path, template=text, template_sandbox=box)


def test_a_template_that_wants_more_than_a_greeting_is_loaded(box: Sandbox, tmp_path: Path) -> None:
    chat = family(tmp_path, template="{{ raise_exception('no') }}", template_sandbox=box)
    with pytest.raises(BadRequest, match="refuses these messages: no"):
        chat.template.render(TURNS, [], {})


@pytest.mark.parametrize("name", BAD)
def test_messages_that_make_a_template_cost_too_much_are_refused(
    name: str, box: Sandbox, brief: Sandbox, tmp_path: Path
) -> None:
    box = brief if name == "endless" else box
    text, why = BAD[name]
    mild = "{% if messages[0].content == 'x' %}" + text + "{% else %}fine{% endif %}"
    chat = family(tmp_path, template=mild, template_sandbox=box)
    with pytest.raises(BadRequest, match=f"could not render these messages: .*{why}") as caught:
        chat.prompt(_job("x"))
    assert caught.value.part == "prompt"
    assert chat.template.render([{"role": "user", "content": "y"}], [], {}) == "fine"


def test_a_request_behind_a_slow_template_is_told_to_come_back(tmp_path: Path) -> None:
    chat = family(tmp_path)
    busy = ChatTemplate(chat._wrapper, lambda request, key: ("busy", "another"))
    with pytest.raises(Overloaded):
        busy.render(TURNS, [], {})


def _job(content: str) -> GenerateJob:
    turns = [{"role": "user", "content": content}]
    return GenerateJob(caller=caller(), messages=turns, max_tokens=1, sampling=Sampling())


LATE = [
    {"role": role, "content": content}
    for role, content in [
        ("system", "Be kind."), ("user", "hi"), ("system", "Be brief."), ("assistant", "hello"),
        ("system", "Be bold."), ("user", "bye"),
    ]
]  # fmt: skip
EACH = "[{{ m.role }}]{{ m.content }}"
LATE_ONE = "m.role == 'system' and not loop.first"
ANYWHERE = f"{{% for m in messages %}}{EACH}{{% endfor %}}"
FIRST_ONLY = (
    f"{{% for m in messages %}}{{% if {LATE_ONE} %}}{{{{ raise_exception('not first') }}}}"
    f"{{% endif %}}{EACH}{{% endfor %}}"
)
WHOLE = "[system]Be kind.[user]hi[system]Be brief.[assistant]hello[system]Be bold.[user]bye"
MOVED = "[user]hi\n\nBe brief.[assistant]hello[user]Be bold.\n\nbye"
DROPS = f"{{% for m in messages %}}{{% if m.role != 'system' %}}{EACH}{{% endif %}}{{% endfor %}}"


@pytest.mark.parametrize(
    ("template", "text"),
    [(ANYWHERE, WHOLE), (FIRST_ONLY, f"[system]Be kind.{MOVED}"), (DROPS, MOVED)],
    ids=["takes them", "refuses them", "drops them"],
)
def test_system_turns_stay_in_place(template: str, text: str, box: Sandbox, tmp_path: Path) -> None:
    chat = family(tmp_path, template=template, template_sandbox=box)
    assert chat.template.render(LATE, (), {"add_generation_prompt": True}) == text
    assert [turn["role"] for turn in LATE].count("system") == 3


class Batched:
    """A tokenizer that refuses the calls which keep the GIL: tokenizers' batch calls release it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, *_: Any, **__: Any) -> None:
        pytest.fail("the event loop waits for it: a megabyte takes seconds")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@pytest.mark.parametrize(
    "given",
    [
        {"prompt": "hello"},
        {"messages": [{"role": "user", "content": "hi"}]},
        {"messages": [{"role": "assistant", "content": "hi"}], "continues": True},
    ],
)
def test_other_threads_run_while_a_prompt_is_encoded(given: dict[str, Any]) -> None:
    chat = open_tokenizer(DEMO, eos_ids=2)
    backend: Any = Batched(chat.backend)
    chat.backend = chat.controls._tokenizer = backend
    assert chat.prompt(GenerateJob(caller=caller(), sampling=Sampling(), **given)).ids
