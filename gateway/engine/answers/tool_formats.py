"""How each family of models writes calls, and which of them a checkpoint is of.

Sources: vllm/tool_parsers/*.py and its tests, mlx_lm/tool_parsers, and the families' own templates.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import regex  # type: ignore[import-untyped]

from gateway.engine.answers.harmony import HARMONY_TOKENS
from gateway.engine.answers.output_parts import NewId, kimi_id, mistral_id, openai_id
from gateway.engine.answers.tool_parsers import (
    Reader,
    read_atem,
    read_deepseek,
    read_dsml,
    read_gemma,
    read_glm,
    read_json,
    read_kimi,
    read_kimi_k3,
    read_longcat,
    read_minicpm,
    read_minimax,
    read_mistral,
    read_python,
    read_qwen,
    read_seed,
)
from gateway.registry.parsers import TOOL_PARSERS, canonical_names

# A call without marks, at the beginning of an answer: JSON that names one of the functions, or
# Python that calls one.
_BARE_JSON = r'\s*\[?\s*\{{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"(?:name|function)"\s*:\s*"(?:{})"'
_BARE_PYTHON = r"\s*\[\s*(?:{})\s*\("
_BARE_LLAMA = rf"(?:{_BARE_JSON})|(?:{_BARE_PYTHON})"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes calls, and how its checkpoints are known."""

    name: str  # the canonical one (registry/parsers.py)
    models: str  # the family in words, for docs/tools.md
    read: Reader
    # Pairs around calls; the second is empty if the answer's end ends the call.
    marks: tuple[tuple[str, str], ...] = ()
    noise: tuple[str, ...] = ()  # marks around all calls together
    # A pattern of an answer that begins as a call without marks; {} is for the functions' names.
    bare: str | None = None
    new_id: NewId = openai_id
    is_json: bool = False  # between the marks is {"name", "arguments"}, which a grammar can hold
    is_separate: bool = False  # calls are messages of their own, separate from the answer
    # Alternatives of words that stand together in a template of the family; None: an opening mark.
    written: tuple[tuple[str, ...], ...] | None = None
    tokens: tuple[str, ...] = ()  # no other family's vocabulary has one of them
    model_types: tuple[str, ...] = ()  # of checkpoints whose template shows tools but no mark

    @property
    def words(self) -> tuple[str, ...]:
        return (*(mark for pair in self.marks for mark in pair if mark), *self.noise)

    def begins(self, names: Sequence[str]) -> Any:
        """Return a pattern of the beginning of a bare call of one of the functions."""
        if self.bare is None or not names:
            return None
        alternatives = "|".join(map(regex.escape, sorted(names)))
        return regex.compile(self.bare.replace("{}", alternatives).replace("{{", "{"))

    def is_in(self, template: str) -> bool:
        """Return True if a template writes calls in this format."""
        written = [(start,) for start, _ in self.marks] if self.written is None else self.written
        return any(all(word in template for word in words) for words in written)


NO_TOOLS = ToolFormat("none", "calls, if any, are text", read_json)
_TOOL_CALL = (("<tool_call>", "</tool_call>"),)
_LLAMA = (("<|python_tag|>", ""), ("<|python_start|>", "<|python_end|>"))
# In the order in which they are looked for in a template.
_ROWS = (
    ToolFormat(
        "minimax_m2", "MiniMax M2", read_minimax, (("<minimax:tool_call>", "</minimax:tool_call>"),)
    ),
    ToolFormat(
        "gemma4", "Gemma 4", read_gemma, (("<|tool_call>", "<tool_call|>"),),
        written=(("<|tool_call>", "<tool_call|>"),),
    ),
    ToolFormat(
        "functiongemma", "FunctionGemma", read_gemma,
        (("<start_function_call>", "<end_function_call>"),),
    ),
    ToolFormat(
        "longcat", "LongCat", read_longcat, (("<longcat_tool_call>", "</longcat_tool_call>"),)
    ),
    ToolFormat(
        "glm47", "GLM 4.5 and later, Laguna", read_glm, _TOOL_CALL, written=(("<arg_key>",),)
    ),
    ToolFormat(
        "lfm2", "LFM2", read_python, (("<|tool_call_start|>", "<|tool_call_end|>"),),
        written=(("<|tool_list_start|>",), ("<|tool_call_start|>",)),
    ),
    ToolFormat(
        "seed_oss", "Seed-OSS", read_seed, (("<seed:tool_call>", "</seed:tool_call>"),),
        model_types=("seed_oss",),
    ),
    ToolFormat(
        "qwen3_coder", "Qwen3-Coder, Qwen 3.5, Nemotron 3, Step 3.5, MiMo", read_qwen, _TOOL_CALL,
        written=(("<tool_call>\\n<function=",), ("<tool_call>\n<function=",)),
    ),
    ToolFormat(
        "kimi_k2", "Kimi K2", read_kimi, (("<|tool_call_begin|>", "<|tool_call_end|>"),),
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"), new_id=kimi_id,
        written=(("<|tool_calls_section_begin|>",),),
    ),
    ToolFormat(
        "minicpm5", "MiniCPM5", read_minicpm, (("<function name=", "</function>"),),
        written=(('<function name="', '<param name="'),),
    ),
    ToolFormat(
        "mistral", "Mistral, Magistral, Devstral, Ministral: before v11 and since", read_mistral,
        (("[TOOL_CALLS]", ""),), new_id=mistral_id,
    ),
    ToolFormat(
        "muse_spark", "Muse Spark", read_atem,
        (("<atem:function_calls>", "</atem:function_calls>"),), is_separate=True,
    ),
    ToolFormat(
        "deepseek_v3", "DeepSeek V3, R1, V3.1", read_deepseek,
        (("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),),
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        written=(("<｜tool▁calls▁begin｜>",),), tokens=("<｜tool▁calls▁begin｜>",),
    ),
    ToolFormat(
        "deepseek_v32", "DeepSeek V3.2, V4", read_dsml,
        (
            ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
            ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
        ),
        written=(("｜DSML｜",),),
    ),
    ToolFormat(
        "cohere_command3", "Command A and R7B", read_json,
        (("<|START_ACTION|>", "<|END_ACTION|>"),), tokens=("<|START_ACTION|>",),
    ),
    # Command-R from before there were tokens for it; the template has the words, and
    # "directly_answer" or "directly-answer".
    ToolFormat(
        "command_r", "Command-R", read_json,
        (("Action:```json", "```"), ("Action: ```json", "```")),
        written=(("Action:", "```json", "directly"),),
    ),
    ToolFormat(
        "nemotron_nano_v2", "Nemotron Nano 2", read_json, (("<TOOLCALL>", "</TOOLCALL>"),)
    ),
    ToolFormat("hunyuan_a13b", "Hunyuan A13B", read_json, (("<tool_calls>", "</tool_calls>"),)),
    ToolFormat(
        "phi4_mini_json", "Phi-4-mini", read_json,
        (("<|tool_call|>", "<|/tool_call|>"), ("functools[", "")),
        written=(("<|tool|>", "<|/tool|>"), ("<|/tool_call|>",), ("functools[",)),
        model_types=("phi3",),
    ),
    ToolFormat(
        "granite", "Granite 3", read_json, (("<|tool_call|>", ""), ("<tool_call>", "")),
        written=(("<|tool_call|>",),), model_types=("granite", "granitemoe"),
    ),
    ToolFormat(
        "llama4_pythonic", "Llama 3.2 and 4: Python or JSON, with or without marks", read_python,
        _LLAMA, bare=_BARE_LLAMA, written=(("<|python_start|>",),),
        model_types=("llama4", "llama4_text"),
    ),
    ToolFormat(
        "llama3_json", "Llama 3.x: JSON or Python, with or without marks", read_python, _LLAMA,
        bare=_BARE_LLAMA,
        written=(
            ("<|python_tag|>",), ("Environment: ipython",),
            ('{"name": function name, "parameters"',),
        ),
    ),
    ToolFormat(
        "hermes", "Qwen 2.5 and 3, Hermes 2 Pro and 3, Granite 4", read_json, _TOOL_CALL,
        is_json=True,
    ),
    # No word of a template tells these two.
    ToolFormat("openai", "gpt-oss (harmony)", read_json, is_separate=True),
    ToolFormat(
        "kimi_k3", "Kimi K3", read_kimi_k3,
        (("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),), written=(),
    ),
    NO_TOOLS,
)  # fmt: skip
TOOL_FORMATS: Mapping[str, ToolFormat] = MappingProxyType({form.name: form for form in _ROWS})
_NAMES = canonical_names(TOOL_PARSERS)


def tool_format(name: str) -> ToolFormat:
    """Return the format of that name, canonical or not. Raises KeyError if there is none."""
    return TOOL_FORMATS[_NAMES[name]]


def infer_tools(
    vocabulary: Container[str], template: str, model_type: str, declared: str | None
) -> str | None:
    """Return the name of a checkpoint's format, None if no known one matches.

    `declared` is the format that the checkpoint, or else mlx-lm, names.
    """
    if model_type == "gpt_oss" or all(token in vocabulary for token in HARMONY_TOKENS):
        return "openai"
    # mlx-lm's "pythonic" is LFM2's, with marks; vLLM's is Llama's, without.
    named = "lfm2" if declared == "pythonic" else _NAMES.get(declared or "none")
    if named not in (None, "none", "hermes"):
        return named

    def first(is_it: Callable[[ToolFormat], bool]) -> str | None:
        return next((form.name for form in _ROWS if is_it(form)), None)

    written = first(lambda form: form.is_in(template))
    # Granite's mark is another's too; IBM's Granite 4 writes Hermes' form.
    if written == "hermes" and model_type == "granite" and "tool_call.name" not in template:
        return "granite"
    if written is not None or named == "hermes":
        return written or named
    return first(lambda form: any(token in vocabulary for token in form.tokens)) or first(
        lambda form: model_type in form.model_types and "tools" in template
    )
