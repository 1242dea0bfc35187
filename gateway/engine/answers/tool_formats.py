"""How each family of models writes calls, and which family a checkpoint belongs to.

Sources: vllm/tool_parsers/*.py and its tests, mlx_lm/tool_parsers, and the families' own templates.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import regex  # type: ignore[import-untyped]

from gateway.engine.answers.call_bodies import (
    Bodies,
    read_deepseek,
    read_json,
    read_kimi,
    read_mistral,
    read_python,
)
from gateway.engine.answers.call_values import Call, as_cdata, write_elements, write_gemma_value
from gateway.engine.answers.gemma_calls import read_gemma
from gateway.engine.answers.harmony import HARMONY_TOKENS
from gateway.engine.answers.minimax_calls import MARK, read_minimax
from gateway.engine.answers.output_parts import NewId, kimi_id, mistral_id, openai_id
from gateway.engine.answers.pairs import Pairs
from gateway.registry.names import TOOL_PARSERS, canonical_names

# Patterns of calls without marks, in which {} stands for the names of the functions.
_BARE_JSON = (
    r"\s*+(?:```(?:json)?\s*+)?\[?\s*+\{{\s*+"
    r'(?:"type"\s*+:\s*+"function"\s*+,\s*+)?"(?:name|function)"\s*+:\s*+"(?:{})"'
)
_BARE_PYTHON = r"\s*+\[\s*+(?:{})\s*+\("
_BARE_LLAMA = rf"(?:{_BARE_JSON})|(?:{_BARE_PYTHON})"
_BARE_GEMMA = r"\s*+call:\s*+(?:{})\s*+[{{(]"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes calls, and how its checkpoints are recognized."""

    name: str
    models: str  # the family in words, for docs/tools.md
    read: Pairs | Bodies
    noise: tuple[str, str] | tuple[()] = ()  # marks around all calls together
    bare: str | None = None  # the pattern of a call without marks, which may begin an answer
    new_id: NewId = openai_id
    is_json: bool = False  # calls are JSON between marks, so that a grammar can describe calls
    is_separate: bool = False  # calls are separate messages
    # Sets of words, one of which a template of the family contains; None means the first mark.
    written: tuple[tuple[str, ...], ...] | None = None
    tokens: tuple[str, ...] = ()  # tokens in no other family's vocabulary
    model_types: tuple[str, ...] = ()  # model types whose templates have tools but no marks

    @property
    def marks(self) -> Sequence[tuple[str, str]]:
        return self.read.marks

    @property
    def words(self) -> tuple[str, ...]:
        return (*(mark for pair in self.marks for mark in pair if mark), *self.noise)

    @property
    def words_of_calls(self) -> tuple[str, ...]:
        """Return opening marks that may also stand in other text."""
        if isinstance(self.read, Bodies):
            return ()
        return tuple(start for start, end in self.marks if not end)

    def write(self, calls: Sequence[Call]) -> str:
        first, last = self.noise or ("", "")
        return f"{first}{self.read.write(calls)}{last}"

    def begins(self, names: Sequence[str]) -> Any:
        """Return a pattern of calls without marks to these functions, or None."""
        if self.bare is None or not names:
            return None
        alternatives = "|".join(map(regex.escape, sorted(names)))
        return regex.compile(self.bare.replace("{}", alternatives).replace("{{", "{"))

    def is_in(self, template: str) -> bool:
        written = self.written
        if written is None:
            written = tuple((start,) for start, _ in self.marks[:1])
        return any(all(word in template for word in words) for words in written)


_TOOL_CALL = (("<tool_call>", "</tool_call>"),)
_JSON = '{{"name": "{name}", "arguments": {arguments}}}'
_PARAMETERS = '{{"name": "{name}", "parameters": {arguments}}}'
_LLAMA_MARKS = (("<|python_tag|>", ""), ("<|python_start|>", "<|python_end|>"))
_PYTHON: Mapping[str, Any] = {
    "call": "{name}({pairs})", "pair": "{key}={value}", "write_value": repr,
}  # fmt: skip
_LISTED: Mapping[str, Any] = {**_PYTHON, "is_list": True}
_COHERE = '{{"tool_name": "{name}", "parameters": {arguments}}}'


def _argument_pairs(prefix: str) -> Pairs:
    """Return GLM's format, which LongCat writes with a prefix in its marks."""
    key, value = f"<{prefix}arg_key>", f"<{prefix}arg_value>"
    return Pairs(
        "{name}\n{pairs}",
        f"{key}{{key}}</{prefix}arg_key>\n{value}{{value}}</{prefix}arg_value>\n",
        ((f"<{prefix}tool_call>", f"</{prefix}tool_call>"),),
    )


def _dsml(gap: str, *blocks: str) -> Pairs:
    """Return DeepSeek's format, whose tags have a space in V4.1."""
    mark = f"｜DSML｜{gap}"
    return Pairs(
        f'<{mark}invoke name="{{name}}">\n{{pairs}}</{mark}invoke>\n',
        f'<{mark}parameter name="{{key}}" string="{{is_text}}">{{value}}</{mark}parameter>\n',
        tuple((f"<{mark}{block}>", f"</{mark}{block}>") for block in blocks), joins=True,
    )  # fmt: skip


def _gemma_calls(delimiter: str, marks: tuple[str, str]) -> Bodies:
    write_value = partial(write_gemma_value, delimiter)
    return Bodies(read_gemma, (marks,), "call:{name}{{{pairs}}}", "{key}:{value}", write_value)


NO_TOOLS = ToolFormat("none", "calls, if any, are text", Bodies(read_json))
# The search takes the first row that matches.
_ROWS = (
    ToolFormat("minimax_m2", "MiniMax M2",
        Pairs(
            '<invoke name="{name}">\n{pairs}</invoke>\n',
            '<parameter name="{key}">{value}</parameter>\n',
            (("<minimax:tool_call>", "</minimax:tool_call>"),), joins=True,
        )),
    ToolFormat("minimax_m3", "MiniMax M3",
        Bodies(
            read_minimax, ((f"{MARK}<tool_call>", f"{MARK}</tool_call>"),),
            f'\n{MARK}<invoke name="{{name}}">{{pairs}}{MARK}</invoke>\n',
            f"{MARK}<{{key}}>{{value}}{MARK}</{{key}}>", partial(write_elements, MARK),
        ), written=((MARK,),)),
    ToolFormat("gemma4", "Gemma 4", _gemma_calls('<|"|>', ("<|tool_call>", "<tool_call|>")),
        bare=_BARE_GEMMA, written=(("<|tool_call>", "<tool_call|>"),)),
    ToolFormat("functiongemma", "FunctionGemma",
        _gemma_calls("<escape>", ("<start_function_call>", "<end_function_call>"))),
    ToolFormat("longcat", "LongCat", _argument_pairs("longcat_")),
    ToolFormat("glm47", "GLM 4.5 and later, Laguna", _argument_pairs(""),
        written=(("<arg_key>",),)),
    ToolFormat("lfm2", "LFM2",
        Bodies(read_python, (("<|tool_call_start|>", "<|tool_call_end|>"),), **_LISTED),
        written=(("<|tool_list_start|>",), ("<|tool_call_start|>",))),
    ToolFormat("seed_oss", "Seed-OSS",
        Pairs(
            "<function={name}>\n{pairs}</function>\n", "<parameter={key}>{value}</parameter>\n",
            (("<seed:tool_call>", "</seed:tool_call>"),),
        ),
        model_types=("seed_oss",)),
    ToolFormat("qwen3_coder", "Qwen3-Coder, Qwen 3.5, Nemotron 3, Step 3.5, MiMo",
        Pairs(
            "<function={name}>\n{pairs}</function>\n",
            "<parameter={key}>\n{value}\n</parameter>\n", _TOOL_CALL,
        ),
        written=(("<tool_call>\\n<function=",), ("<tool_call>\n<function=",))),
    ToolFormat("kimi_k2", "Kimi K2",
        Bodies(
            read_kimi, (("<|tool_call_begin|>", "<|tool_call_end|>"),),
            "functions.{name}:{place}<|tool_call_argument_begin|>{arguments}",
        ),
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"), new_id=kimi_id,
        written=(("<|tool_calls_section_begin|>",),)),
    ToolFormat("minicpm5", "MiniCPM5",
        Pairs(
            '<function name="{name}">{pairs}</function>', '<param name="{key}">{value}</param>',
            write_value=as_cdata,
        ),
        written=(('<function name="', '<param name="'),)),
    ToolFormat("mistral", "Mistral, Magistral, Devstral, Ministral: before v11 and since",
        Bodies(read_mistral, (("[TOOL_CALLS]", ""),), "{name}[ARGS]{arguments}"),
        new_id=mistral_id),
    ToolFormat("muse_spark", "Muse Spark and Glimmer",
        Pairs(
            '<atem:invoke name="{name}">\n{pairs}</atem:invoke>\n',
            '<atem:parameter name="{key}">{value}</atem:parameter>\n',
            (("<atem:function_calls>", "</atem:function_calls>"),),
        ),
        is_separate=True),
    ToolFormat("deepseek_v3", "DeepSeek V3, R1, V3.1",
        Bodies(
            read_deepseek, (("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),),
            "{name}<｜tool▁sep｜>{arguments}",
        ),
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        written=(("<｜tool▁calls▁begin｜>",),), tokens=("<｜tool▁calls▁begin｜>",)),
    ToolFormat("deepseek_v41", "DeepSeek V4.1", _dsml(" ", "calls"),
        written=(("｜DSML｜ calls",), ("｜DSML｜", " calls>"), ("｜DSML｜", "' calls'"),
            ("｜DSML｜", '" calls"'))),
    ToolFormat("deepseek_v32", "DeepSeek V3.2, V4", _dsml("", "function_calls", "tool_calls"),
        written=(("｜DSML｜",),), tokens=("｜DSML｜",)),
    ToolFormat("cohere_command3", "Command A and R7B",
        Bodies(read_json, (("<|START_ACTION|>", "<|END_ACTION|>"),), _COHERE, is_list=True),
        tokens=("<|START_ACTION|>",)),
    # The template of the first Command-R has "directly_answer" or "directly-answer".
    ToolFormat("command_r", "Command-R",
        Bodies(
            read_json, (("Action:```json", "```"), ("Action: ```json", "```")), _COHERE,
            is_list=True,
        ),
        written=(("Action:", "```json", "directly"),)),
    ToolFormat("nemotron_nano_v2", "Nemotron Nano 2",
        Bodies(read_json, (("<TOOLCALL>", "</TOOLCALL>"),), is_list=True)),
    ToolFormat("hunyuan_a13b", "Hunyuan A13B",
        Bodies(read_json, (("<tool_calls>", "</tool_calls>"),), is_list=True)),
    ToolFormat("phi4_mini_json", "Phi-4-mini",
        Bodies(
            read_json, (("<|tool_call|>", "<|/tool_call|>"), ("functools[", "")), is_list=True
        ),
        written=(("<|tool|>", "<|/tool|>"), ("<|/tool_call|>",), ("functools[",)),
        model_types=("phi3",)),
    ToolFormat("granite", "Granite 3",
        Bodies(read_json, (("<|tool_call|>", ""), ("<tool_call>", "")), is_list=True),
        written=(("<|tool_call|>",),), model_types=("granite", "granitemoe")),
    ToolFormat("llama4_pythonic", "Llama 3.2 and 4: Python or JSON, with or without marks",
        Bodies(read_python, _LLAMA_MARKS[::-1], **_LISTED),
        bare=_BARE_LLAMA, written=(("<|python_start|>",),), model_types=("llama4", "llama4_text")),
    ToolFormat("llama3_json", "Llama 3.x: JSON or Python, with or without marks",
        Bodies(read_python, _LLAMA_MARKS, _PARAMETERS),
        bare=_BARE_LLAMA,
        written=(
            ("<|python_tag|>",), ("Environment: ipython",),
            ('{"name": function name, "parameters"',),
        )),
    ToolFormat("hermes", "Qwen 2.5 and 3, Hermes 2 Pro and 3, Granite 4",
        Bodies(read_json, _TOOL_CALL, f"\n{_JSON}\n"), is_json=True),
    ToolFormat("olmo3", "Olmo 3",
        Bodies(read_python, (("<function_calls>", "</function_calls>"),), **_PYTHON)),
    ToolFormat("apertus", "Apertus",
        Bodies(
            partial(read_json, is_named=True), (("<|tools_prefix|>", "<|tools_suffix|>"),),
            '{{"{name}": {arguments}}}', is_list=True,
        )),
    ToolFormat("internlm", "InternLM 2, 2.5 and 3",
        Bodies(read_json, tuple(
            (f"<|action_start|>{gap}<|plugin|>", "<|action_end|>") for gap in ("", " ")
        ), _PARAMETERS)),
    ToolFormat("openai", "gpt-oss (harmony)",
        Bodies(
            read_json, call="<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
            "{arguments}<|call|>",
        ),
        is_separate=True),
    ToolFormat("kimi_k3", "Kimi K3",
        Pairs(
            '<|open|>call tool="{name}" index="{place}"<|sep|>{pairs}<|close|>call<|sep|>',
            '<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>',
            (("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),), joins=True,
            whole=('<|open|>json type="object"<|sep|>', "<|close|>json<|sep|>"),
        ),
        written=()),
    NO_TOOLS,
)  # fmt: skip
TOOL_FORMATS: Mapping[str, ToolFormat] = MappingProxyType({form.name: form for form in _ROWS})
_NAMES = canonical_names(TOOL_PARSERS)


def tool_format(name: str) -> ToolFormat:
    """Return the format of this name, canonical or not. Raises KeyError."""
    return TOOL_FORMATS[_NAMES[name]]


def infer_tools(
    vocabulary: Container[str], template: str, model_type: str, declared: str | None
) -> str | None:
    """Return the name of a checkpoint's format, or None if no known format matches.

    `declared` is the format that the checkpoint names, or else mlx-lm.
    """
    has_channels = all(token in vocabulary for token in HARMONY_TOKENS)
    if model_type == "gpt_oss" or (has_channels and "<atem:function_calls>" not in template):
        return "openai"
    # "pythonic" means LFM2's format in mlx-lm, and Llama's format in vLLM.
    named = "lfm2" if declared == "pythonic" else _NAMES.get(declared or "none")
    if named not in (None, "none", "hermes"):
        return named

    def first(is_it: Callable[[ToolFormat], bool]) -> str | None:
        return next((form.name for form in _ROWS if is_it(form)), None)

    written = first(lambda form: form.is_in(template))
    # Granite 3 and Granite 4 share a mark, but only Granite 4's templates have `tool_call.name`.
    if written == "hermes" and model_type == "granite" and "tool_call.name" not in template:
        return "granite"
    if written is not None or named == "hermes":
        return written or named
    return first(lambda form: any(token in vocabulary for token in form.tokens)) or first(
        lambda form: model_type in form.model_types and "tools" in template
    )
