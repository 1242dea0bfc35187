"""Made-up functions, calls of them with arbitrary arguments, and how each family writes calls."""

import json
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from gateway.engine.answers.pairs import Pairs
from gateway.engine.answers.reasoning import REASONING_FORMATS
from gateway.engine.answers.tool_formats import TOOL_FORMATS
from gateway.jobs.chat import Function

Calls = Sequence[Mapping[str, Any]]
Write = Callable[[Calls], str]


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else dumped(value)


def as_elements(value: Any) -> str:
    """Write lists and objects as elements, as MiniMax M3's template does."""
    if isinstance(value, list):
        return "".join(as_elements({"item": each}) for each in value)
    if isinstance(value, dict):
        return "".join(f"{_NS}<{k}>{as_elements(v)}{_NS}</{k}>" for k, v in value.items())
    return as_text(value)


_NS = "]<]minimax[>["
KINDS: Mapping[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", list: "array",
    dict: "object", type(None): "null",
}  # fmt: skip


def writes(
    call: str,
    *,
    begin: str = "",
    gap: str = "",
    end: str = "",
    pair: str = "",
    pair_gap: str = "",
    value: Callable[[Any], str] = as_text,
) -> Write:
    """Return a writer of calls by the formats of one call and, if it has any, of its pairs."""

    def write(calls: Calls) -> str:
        texts = []
        for place, each in enumerate(calls):
            pairs = [
                pair.format(
                    key=key, value=value(one), kind=KINDS[type(one)],
                    is_text=str(isinstance(one, str)).lower(),
                )
                for key, one in each["arguments"].items()
            ]  # fmt: skip
            arguments = dumped(each["arguments"])
            filled = {"name": each["name"], "arguments": arguments, "pairs": pair_gap.join(pairs)}
            texts.append(call.format(**filled, place=place))
        return f"{begin}{gap.join(texts)}{end}"

    return write


_JSON = '{{"name": "{name}", "arguments": {arguments}}}'
_LLAMA = '{{"name": "{name}", "parameters": {arguments}}}'
_PYTHON: Mapping[str, Any] = {
    "call": "{name}({pairs})", "gap": ", ", "pair": "{key}={value}", "pair_gap": ", ", "value": repr
}  # fmt: skip
_DEEPSEEK = (
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
)  # fmt: skip
_HARMONY = (
    "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>", "<|return|>"
)  # fmt: skip


@dataclass(frozen=True)
class Form:
    """One form of calls in which a family's models write."""

    format: str  # its name in the table
    write: Write
    tokens: tuple[str, ...]  # special tokens of its checkpoints
    before: str = "{}"  # how text before the calls is written
    # What ends a text by the format itself: a text that holds it can't be written in this form,
    # except inside a whole call if those have a begin and an end of their own.
    ends: str = r"(?!)"
    may_quote: bool = True
    is_bare: bool = False  # has no mark, so it is a call only at an answer's beginning
    # Keys are identifiers of Python.
    is_python: bool = False
    # Its tokens are never written in a text: there they are other tokens with the same letters.
    is_split: bool = False
    is_nested: bool = False  # what lists and objects hold is text, too, which the schema types
    reasoning: str = "none"
    opens: str = ""  # how a thought begins and ends
    closes: str = ""

    @property
    def quoted(self) -> str:
        """Return a whole call, as the text of a file that shows the format."""
        return self.write([{"name": "shown", "arguments": {"first": "1", "then": "[2]"}}])

    def can_write(self, text: str) -> bool:
        """Return False for a text that no reader could tell from the marks around it."""
        if not self.may_quote:
            return re.search(self.ends, text) is None
        rest = text.replace(self.quoted, "\0")
        # A whole call and the beginning of a pair that has no end: the doubt makes the call a text.
        reader = TOOL_FORMATS[self.format].read
        opening = reader.pair.partition("{key}")[0] if isinstance(reader, Pairs) else ""
        is_doubtful = bool(opening) and "\0" in rest and opening in rest
        return re.search(self.ends, rest) is None and not is_doubtful


_TOOL_CALL = ("<tool_call>", "</tool_call>", "<think>", "</think>")
_THINK: Mapping[str, Any] = {"reasoning": "qwen3", "opens": "<think>", "closes": "</think>"}
# A pair's text ends where its end mark is followed by the next pair or the call's end.
_QWEN_ENDS = r"</parameter>\s*(<parameter=|</function>)"
_ARG_ENDS = r"</{0}arg_value>\s*(<{0}arg_key>|</{0}tool_call>)"
_KIMI = (
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<think>", "</think>",
)  # fmt: skip
FORMS: Mapping[str, Form] = {
    "hermes": Form(
        "hermes", TOOL_FORMATS["hermes"].write, _TOOL_CALL, **_THINK
    ),
    "qwen3_coder": Form(
        "qwen3_coder",
        TOOL_FORMATS["qwen3_coder"].write,
        _TOOL_CALL,
        ends=_QWEN_ENDS,
        **_THINK,
    ),
    "glm45": Form(
        "glm47",
        TOOL_FORMATS["glm47"].write,
        (*_TOOL_CALL, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        ends=_ARG_ENDS.format(""),
        **_THINK,
    ),
    "glm47": Form(
        "glm47",
        writes(
            "<tool_call>{name}{pairs}</tool_call>",
            pair="<arg_key>{key}</arg_key><arg_value>{value}</arg_value>",
        ),
        (*_TOOL_CALL, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        ends=_ARG_ENDS.format(""),
        **_THINK,
    ),
    "mistral": Form(
        "mistral",
        writes(_JSON, begin="[TOOL_CALLS][", gap=", ", end="]"),
        ("[TOOL_CALLS]", "[THINK]", "[/THINK]"),
        reasoning="mistral", opens="[THINK]", closes="[/THINK]",
    ),
    "mistral_v11": Form(
        "mistral",
        TOOL_FORMATS["mistral"].write,
        ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]"),
        reasoning="mistral", opens="[THINK]", closes="[/THINK]",
    ),
    "llama3_json": Form(
        "llama3_json", writes(_LLAMA, begin="<|python_tag|>", gap="; "), ("<|python_tag|>",)
    ),
    "llama3_json_bare": Form(
        "llama3_json", writes(_LLAMA, gap="; "), ("<|python_tag|>",), is_bare=True
    ),
    "llama4_pythonic": Form(
        "llama4_pythonic",
        writes(**_PYTHON, begin="<|python_start|>[", end="]<|python_end|>"),
        ("<|python_start|>", "<|python_end|>"),
        is_python=True,
    ),
    "llama4_pythonic_bare": Form(
        "llama4_pythonic",
        writes(**_PYTHON, begin="[", end="]"),
        ("<|python_start|>", "<|python_end|>"),
        is_bare=True, is_python=True,
    ),
    "deepseek_v3": Form(
        "deepseek_v3",
        writes(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n"
            "```json\n{arguments}\n```<｜tool▁call▁end｜>",
            begin="<｜tool▁calls▁begin｜>", gap="\n", end="<｜tool▁calls▁end｜>",
        ),
        _DEEPSEEK,
        **_THINK,
    ),
    "deepseek_v31": Form(
        "deepseek_v3",
        TOOL_FORMATS["deepseek_v3"].write,
        (*_DEEPSEEK, "<think>", "</think>"),
        **_THINK,
    ),
    "deepseek_v32": Form(
        "deepseek_v32",
        TOOL_FORMATS["deepseek_v32"].write,
        ("｜DSML｜", "<think>", "</think>"),
        ends=r"</｜DSML｜parameter>\s*(<｜DSML｜parameter name=|</｜DSML｜invoke>)",
        **_THINK,
    ),
    "deepseek_v41": Form(
        "deepseek_v41",
        TOOL_FORMATS["deepseek_v41"].write,
        ("｜DSML｜", "<think>", "</think>"),
        ends=r"</｜DSML｜ parameter>\s*(<｜DSML｜ parameter name=|</｜DSML｜ invoke>)",
        **_THINK,
    ),
    "minimax_m2": Form(
        "minimax_m2",
        TOOL_FORMATS["minimax_m2"].write,
        ("<minimax:tool_call>", "</minimax:tool_call>", "<think>", "</think>"),
        ends=r"</parameter>\s*(<parameter name=|</invoke>)",
        **_THINK,
    ),
    "minimax_m3": Form(
        "minimax_m3",
        writes(
            f'{_NS}<invoke name="{{name}}">{{pairs}}{_NS}</invoke>',
            begin=f"{_NS}<tool_call>\n", gap="\n", end=f"\n{_NS}</tool_call>",
            pair=f"{_NS}<{{key}}>{{value}}{_NS}</{{key}}>", value=as_elements,
        ),
        (_NS, "<mm:think>", "</mm:think>"),
        ends=re.escape(_NS),
        is_nested=True,
        reasoning="minimax_m3", opens="<mm:think>", closes="</mm:think>",
    ),
    "gemma4": Form(
        "gemma4",
        TOOL_FORMATS["gemma4"].write,
        ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
        ends=r'<\|"\|>',  # a text's delimiter means a quote
        may_quote=False,
        reasoning="gemma4", opens="<|channel>thought\n", closes="<channel|>",
    ),
    "functiongemma": Form(
        "functiongemma",
        TOOL_FORMATS["functiongemma"].write,
        ("<start_function_call>", "<end_function_call>", "<escape>"),
        ends="<escape>",
        may_quote=False,
    ),
    "longcat": Form(
        "longcat",
        TOOL_FORMATS["longcat"].write,
        ("<longcat_tool_call>", "</longcat_tool_call>", "<longcat_think>", "</longcat_think>"),
        ends=_ARG_ENDS.format("longcat_"),
        reasoning="longcat", opens="<longcat_think>", closes="</longcat_think>",
    ),
    "lfm2": Form(
        "lfm2",
        TOOL_FORMATS["lfm2"].write,
        ("<|tool_call_start|>", "<|tool_call_end|>", "<think>", "</think>"),
        is_python=True,
        **_THINK,
    ),
    "seed_oss": Form(
        "seed_oss",
        TOOL_FORMATS["seed_oss"].write,
        ("<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>"),
        ends=_QWEN_ENDS,
        reasoning="seed_oss", opens="<seed:think>", closes="</seed:think>",
    ),
    "kimi_k2": Form(
        "kimi_k2",
        TOOL_FORMATS["kimi_k2"].write,
        _KIMI,
        **_THINK,
    ),
    "kimi_k3": Form(
        "kimi_k3",
        TOOL_FORMATS["kimi_k3"].write,
        ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
        ends=r"<\|close\|>argument<\|sep\|>\s*(<\|open\|>argument |<\|close\|>call<\|sep\|>)",
        reasoning="kimi_k3", opens="<|open|>think<|sep|>", closes="<|close|>think<|sep|>",
    ),
    "minicpm5": Form(
        "minicpm5",
        TOOL_FORMATS["minicpm5"].write,
        ("<think>", "</think>"),
        # The end of CDATA can't be written inside of it.
        ends=r"\]\]>\s*</param>|</param>\s*(<param name=|</function>)",
        **_THINK,
    ),
    "nemotron_nano_v2": Form(
        "nemotron_nano_v2",
        TOOL_FORMATS["nemotron_nano_v2"].write,
        ("<TOOLCALL>", "</TOOLCALL>", "<think>", "</think>"),
        **_THINK,
    ),
    "hunyuan_a13b": Form(
        "hunyuan_a13b",
        TOOL_FORMATS["hunyuan_a13b"].write,
        ("<tool_calls>", "</tool_calls>", "<think>", "</think>"),
        **_THINK,
    ),
    "granite": Form(
        "granite", TOOL_FORMATS["granite"].write, ("<|tool_call|>",)
    ),
    "granite_letters": Form("granite", writes(_JSON, begin="<tool_call>[", gap=", ", end="]"), ()),
    "phi4_mini_json": Form(
        "phi4_mini_json",
        TOOL_FORMATS["phi4_mini_json"].write,
        ("<|tool_call|>", "<|/tool_call|>"),
    ),
    "phi4_functools": Form(
        "phi4_mini_json",
        writes(_JSON, begin="functools[", gap=", ", end="]"),
        ("<|tool_call|>", "<|/tool_call|>"),
    ),
    "cohere_command3": Form(
        "cohere_command3",
        TOOL_FORMATS["cohere_command3"].write,
        ("<|START_ACTION|>", "<|END_ACTION|>", "<|START_THINKING|>", "<|END_THINKING|>"),
        reasoning="cohere_command3", opens="<|START_THINKING|>", closes="<|END_THINKING|>",
    ),
    "command_r": Form(
        "command_r",
        TOOL_FORMATS["command_r"].write,
        (),
    ),
    "muse_spark": Form(
        "muse_spark",
        writes(
            ' to={name}<|message|><atem:function_calls>\n<atem:invoke name="{name}">\n'
            "{pairs}</atem:invoke>\n</atem:function_calls>",
            gap="<|eom|><|start|>assistant", end="<|eom|>",
            pair='<atem:parameter name="{key}">{value}</atem:parameter>\n',
        ),
        ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>"),
        before=" to=user<|message|>{}<|eom|><|start|>assistant",
        ends=r"</atem:parameter>\s*(<atem:parameter |</atem:invoke>)",
        is_split=True, reasoning="muse_spark",
    ),
    "olmo3": Form(
        "olmo3",
        writes(**{**_PYTHON, "gap": "\n"}, begin="<function_calls>\n", end="\n</function_calls>"),
        ("<think>", "</think>"),
        is_python=True,
        **_THINK,
    ),
    "apertus": Form(
        "apertus",
        TOOL_FORMATS["apertus"].write,
        ("<|tools_prefix|>", "<|tools_suffix|>", "<|inner_prefix|>", "<|inner_suffix|>"),
        reasoning="apertus", opens="<|inner_prefix|>", closes="<|inner_suffix|>",
    ),
    "internlm": Form(
        "internlm",
        TOOL_FORMATS["internlm"].write,
        ("<|action_start|>", "<|plugin|>", "<|action_end|>"),
    ),
    "openai": Form(
        "openai",
        writes(
            "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
            "{arguments}<|call|>",
            gap="<|start|>assistant",
        ),
        _HARMONY,
        before="<|channel|>commentary<|message|>{}<|end|><|start|>assistant",
        is_split=True, reasoning="openai_gptoss",
    ),
}  # fmt: skip

MARKS = sorted(
    {
        *(mark for form in REASONING_FORMATS.values() for mark in form.marks),
        *(mark for form in TOOL_FORMATS.values() for pair in form.marks for mark in pair),
        *(mark for form in TOOL_FORMATS.values() for mark in form.noise),
        *(mark for form in FORMS.values() for mark in form.tokens),
        "<function=shown>", "</function>", "<parameter=first>", "</parameter>", "<parameter=",
        "<arg_key>first</arg_key>", "<arg_value>", "</arg_value>",
        "<longcat_arg_key>first</longcat_arg_key>", "<longcat_arg_value>", "</longcat_arg_value>",
        '<invoke name="shown">', "</invoke>", '<parameter name="first">',
        '<｜DSML｜invoke name="shown">', "</｜DSML｜invoke>",
        '<｜DSML｜parameter name="first" string="true">', "</｜DSML｜parameter>",
        '<｜DSML｜ invoke name="shown">', "</｜DSML｜ invoke>",
        '<｜DSML｜ parameter name="first" string="true">', "</｜DSML｜ parameter>",
        f'{_NS}<invoke name="shown">', f"{_NS}</invoke>", f"{_NS}<first>", f"{_NS}</first>",
        '<atem:invoke name="shown">', "</atem:invoke>",
        '<atem:parameter name="first">', "</atem:parameter>",
        '<function name="shown">', '<param name="first">', "</param>", "<![CDATA[", "]]>",
        '<|open|>argument key="first" type="string"<|sep|>', "<|close|>argument<|sep|>",
        "call:shown{", "shown(first='1')", "functions.shown:0", "```", "```json\n",
        '{"name": "shown", "arguments": {}}', '", "', "', '", "}}", "}]", ")]",
    }
    - {""}
)  # fmt: skip
"""Whatever a family writes around calls, thoughts and their parts."""
ODD = [
    "", " ", "\n", "\n\n", "\t", "\r\n", "\\", "\\n", '\\"', '"', "'", '"""', "'''", "`",
    "007", "1e5", "null", "true", "None", "3", "[1]", "{}", "é", "日本", "🙂", "\u2028", "\0",
    "&lt;", "#", "$x",
]  # fmt: skip
# Divides a mark in a text, so that its letters become other tokens than the mark's own.
DIVIDER = "ꙮ"
_LETTERS = st.text(st.characters(exclude_characters=DIVIDER, codec="utf-8"), max_size=6)


def texts(form: Form) -> st.SearchStrategy[str]:
    """Draw texts full of marks, among them whole calls, that can be written in this form."""
    pieces = st.sampled_from(MARKS) | st.sampled_from(ODD) | _LETTERS | st.just(form.quoted)
    return st.lists(pieces, max_size=5).map("".join).filter(form.can_write)


def _names(pattern: str) -> st.SearchStrategy[str]:
    return st.from_regex(pattern, fullmatch=True)


KNOWN_NAMES = ["write_file", "get-weather", "mcp__fs__read", "fs.read", "Bash", "fetch_url"]
FUNCTION_NAMES = st.sampled_from(KNOWN_NAMES) | _names("[A-Za-z_][A-Za-z0-9_-]{0,9}")
KEYS = st.sampled_from(["path", "content", "old_str", "from", "max-results", "a.b", "x", "name"])
PYTHON_KEYS = st.sampled_from(["path", "content", "old_str", "x", "name"])


def keys(form: Form) -> st.SearchStrategy[str]:
    if form.is_python:
        return PYTHON_KEYS | _names("[a-z]{1,3}_[a-z0-9]{0,3}")
    return KEYS | _names("[A-Za-z_][A-Za-z0-9_-]{0,5}")


@st.composite
def arguments(draw: st.DrawFn, form: Form) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draw arguments and the schema that declares their types."""
    text, key = texts(form), keys(form)
    number = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    leaves = st.none() | st.booleans() | number | text

    def lists(each: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        if not form.is_nested:
            return st.lists(each, max_size=3)
        alike = text, st.integers(), st.dictionaries(key, text, max_size=3)
        return st.one_of([st.lists(one, max_size=3) for one in alike])

    nested = st.recursive(
        leaves,
        lambda each: lists(each) | st.dictionaries(key, each, max_size=3),
        max_leaves=4,
    )
    of_kind = {
        "string": text,
        "integer": st.integers(),
        "number": st.floats(allow_nan=False, allow_infinity=False),
        "boolean": st.booleans(),
        "null": st.none(),
        "array": lists(nested),
        "object": st.dictionaries(key, nested, max_size=3),
    }
    kinds = st.sampled_from(["string"] * 4 + list(of_kind))
    typed = draw(st.dictionaries(key, kinds, max_size=4))
    given = {name: draw(of_kind[kind]) for name, kind in typed.items()}
    if form.is_nested:
        return given, schema_of(given)
    schema = {
        "type": "object",
        "properties": {name: {"type": kind} for name, kind in typed.items()},
    }
    return given, schema


def schema_of(value: Any) -> dict[str, Any]:
    """Return a schema that states the types of a value and of all that it holds."""
    schema: dict[str, Any] = {"type": KINDS[type(value)]}
    if isinstance(value, dict):
        schema["properties"] = {key: schema_of(each) for key, each in value.items()}
    elif value and isinstance(value, list):
        schema["items"] = schema_of(value[0])
        if isinstance(value[0], dict):
            schema["items"] = {"type": "object", "additionalProperties": {"type": "string"}}
    return schema


@dataclass(frozen=True)
class Made:
    """Functions, and calls of them."""

    functions: Sequence[Function]
    calls: Calls


@st.composite
def made(draw: st.DrawFn, form: Form) -> Made:
    """Draw one to three calls, each of a function of its own."""
    names = draw(st.lists(FUNCTION_NAMES, min_size=1, max_size=3, unique=True))
    functions, calls = [], []
    for name in names:
        given, schema = draw(arguments(form))
        functions.append(Function(name, schema))
        calls.append({"name": name, "arguments": given})
    return Made(functions, calls)


def divided(value: Any) -> Any:
    """Return a value whose texts hold marks as other tokens with the same letters."""
    if isinstance(value, str):
        return re.sub(r"(?<=[<\[｜])", DIVIDER, value)
    if isinstance(value, list):
        return [divided(each) for each in value]
    if isinstance(value, dict):
        return {key: divided(each) for key, each in value.items()}
    return value


# Prose, in which no mark is whole.
_PROSE = string.ascii_letters + " \n.,:;'\"()<>/é🙂世"
PROSE = st.text(_PROSE, max_size=20).filter(lambda text: not any(mark in text for mark in MARKS))
