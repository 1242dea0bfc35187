"""How each family of models marks its calls, and which of them a checkpoint is of.

The names are vLLM's (`--tool-call-parser`), and mlx-lm's (`tool_parser_type`) where it has others.
Sources: vllm/tool_parsers/*.py and its tests, mlx_lm/tool_parsers, and the families' own templates.
"""

from collections.abc import Container, Mapping, Sequence
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

# A call without marks, at the beginning of an answer: JSON that names one of the functions, or
# Python that calls one.
_BARE_JSON = r'\s*\[?\s*\{{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"(?:name|function)"\s*:\s*"(?:{})"'
_BARE_PYTHON = r"\s*\[\s*(?:{})\s*\("
_BARE_LLAMA = rf"(?:{_BARE_JSON})|(?:{_BARE_PYTHON})"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes calls."""

    read: Reader
    # Pairs around calls; the second is empty if the answer's end ends the call.
    marks: tuple[tuple[str, str], ...] = ()
    noise: tuple[str, ...] = ()  # marks around all calls together
    # A pattern of an answer that begins as a call without marks; {} is for the functions' names.
    bare: str | None = None
    new_id: NewId = openai_id
    is_json: bool = False  # between the marks is {"name", "arguments"}, which a grammar can hold
    is_separate: bool = False  # calls are messages of their own, separate from the answer

    @property
    def words(self) -> tuple[str, ...]:
        return (*(mark for pair in self.marks for mark in pair if mark), *self.noise)

    def begins(self, names: Sequence[str]) -> Any:
        """Return a pattern of the beginning of a bare call of one of the functions."""
        if self.bare is None or not names:
            return None
        alternatives = "|".join(map(regex.escape, sorted(names)))
        return regex.compile(self.bare.replace("{}", alternatives).replace("{{", "{"))


NO_TOOLS = ToolFormat(read_json)  # of a model whose calls, if any, are text
_TOOL_CALL = (("<tool_call>", "</tool_call>"),)
_LLAMA = ToolFormat(
    read_python,
    (("<|python_tag|>", ""), ("<|python_start|>", "<|python_end|>")),
    bare=_BARE_LLAMA,
)

TOOL_FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {
        "openai": ToolFormat(read_json, is_separate=True),
        "muse_spark": ToolFormat(
            read_atem,
            (("<atem:function_calls>", "</atem:function_calls>"),),
            is_separate=True,
        ),
        "hermes": ToolFormat(read_json, _TOOL_CALL, is_json=True),
        "qwen3_coder": ToolFormat(read_qwen, _TOOL_CALL),
        "glm47": ToolFormat(read_glm, _TOOL_CALL),
        "mistral": ToolFormat(read_mistral, (("[TOOL_CALLS]", ""),), new_id=mistral_id),
        "llama3_json": _LLAMA,
        "llama4_pythonic": _LLAMA,
        "deepseek_v3": ToolFormat(
            read_deepseek,
            (("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),),
            ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        ),
        "deepseek_v32": ToolFormat(
            read_dsml,
            (
                ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
                ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
            ),
        ),
        "minimax_m2": ToolFormat(read_minimax, (("<minimax:tool_call>", "</minimax:tool_call>"),)),
        "gemma4": ToolFormat(read_gemma, (("<|tool_call>", "<tool_call|>"),)),
        "functiongemma": ToolFormat(
            read_gemma, (("<start_function_call>", "<end_function_call>"),)
        ),
        "longcat": ToolFormat(read_longcat, (("<longcat_tool_call>", "</longcat_tool_call>"),)),
        "lfm2": ToolFormat(read_python, (("<|tool_call_start|>", "<|tool_call_end|>"),)),
        "seed_oss": ToolFormat(read_seed, (("<seed:tool_call>", "</seed:tool_call>"),)),
        "kimi_k2": ToolFormat(
            read_kimi,
            (("<|tool_call_begin|>", "<|tool_call_end|>"),),
            ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            new_id=kimi_id,
        ),
        "kimi_k3": ToolFormat(read_kimi_k3, (("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),)),
        "minicpm5": ToolFormat(read_minicpm, (("<function name=", "</function>"),)),
        "nemotron_nano_v2": ToolFormat(read_json, (("<TOOLCALL>", "</TOOLCALL>"),)),
        "hunyuan_a13b": ToolFormat(read_json, (("<tool_calls>", "</tool_calls>"),)),
        "granite": ToolFormat(read_json, (("<|tool_call|>", ""), ("<tool_call>", ""))),
        "phi4_mini_json": ToolFormat(
            read_json,
            (("<|tool_call|>", "<|/tool_call|>"), ("functools[", "")),
        ),
        "cohere_command3": ToolFormat(read_json, (("<|START_ACTION|>", "<|END_ACTION|>"),)),
        # Command-R of before tokens for it; its template has the words.
        "command_r": ToolFormat(read_json, (("Action:```json", "```"), ("Action: ```json", "```"))),
    }
)
# Other names of the same: vLLM's, and mlx-lm's.
ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "json_tools": "hermes", "granite4": "hermes", "qwen3_xml": "qwen3_coder",
        "step3p5": "qwen3_coder", "mimo": "qwen3_coder", "glm45": "glm47", "laguna": "glm47",
        "poolside_v1": "glm47", "llama4_json": "llama3_json", "deepseek_v31": "deepseek_v3",
        "deepseek_v4": "deepseek_v32", "function_gemma": "functiongemma",
        "cohere_command4": "cohere_command3",
    }
)  # fmt: skip
# mlx-lm's "pythonic" is LFM2's, with marks; vLLM's is Llama 3.2's, without.
_MLX_LM = {"pythonic": "lfm2"}
_VLLM = {"pythonic": "llama4_pythonic"}

# What a template writes, all of it, and the format that it is of; the first match counts.
_WRITTEN: Sequence[tuple[tuple[str, ...], str]] = (
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<|tool_call>", "<tool_call|>"), "gemma4"),
    (("<start_function_call>",), "functiongemma"),
    (("<longcat_tool_call>",), "longcat"),
    (("<arg_key>",), "glm47"),
    (("<|tool_list_start|>",), "lfm2"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<tool_call>\\n<function=",), "qwen3_coder"),
    (("<tool_call>\n<function=",), "qwen3_coder"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (('<function name="', '<param name="'), "minicpm5"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<atem:function_calls>",), "muse_spark"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v3"),
    (("｜DSML｜",), "deepseek_v32"),
    (("<|START_ACTION|>",), "cohere_command3"),
    (("Action:", "```json", "directly"), "command_r"),  # directly_answer, or directly-answer
    (("<TOOLCALL>",), "nemotron_nano_v2"),
    (("<tool_calls>",), "hunyuan_a13b"),
    (("<|tool|>", "<|/tool|>"), "phi4_mini_json"),
    (("<|/tool_call|>",), "phi4_mini_json"),
    (("functools[",), "phi4_mini_json"),
    (("<|tool_call|>",), "granite"),
    (("<|python_start|>",), "llama4_pythonic"),
    (("<|python_tag|>",), "llama3_json"),
    (("Environment: ipython",), "llama3_json"),
    (('{"name": function name, "parameters"',), "llama3_json"),
    (("<tool_call>",), "hermes"),
)
# Tokens of which no other family's vocabulary has one.
_BY_TOKEN: Mapping[str, str] = {
    "<｜tool▁calls▁begin｜>": "deepseek_v3",
    "<|START_ACTION|>": "cohere_command3",
}
# Where the template shows tools but names no mark.
_BY_TYPE: Mapping[str, str] = {
    "llama4": "llama4_pythonic",
    "llama4_text": "llama4_pythonic",
    "granite": "granite",
    "granitemoe": "granite",
    "phi3": "phi4_mini_json",
    "seed_oss": "seed_oss",
}


def known_tool_parser(name: str) -> str | None:
    """Return the table's name for one in models.yaml, vLLM's or mlx-lm's; None if unknown."""
    name = ALIASES.get(name, _VLLM.get(name, name))
    return name if name in TOOL_FORMATS or name == "none" else None


def infer_tools(
    vocabulary: Container[str], template: str, model_type: str, declared: str | None
) -> str | None:
    """Return the name of a checkpoint's format, None if no known one matches.

    `declared` is the format that the checkpoint, or else mlx-lm, names.
    """
    if model_type == "gpt_oss" or all(token in vocabulary for token in HARMONY_TOKENS):
        return "openai"
    if declared is not None:
        declared = ALIASES.get(declared, _MLX_LM.get(declared, declared))
        if declared in TOOL_FORMATS and declared != "hermes":
            return declared
    for words, name in _WRITTEN:
        if all(word in template for word in words):
            # Granite's mark is another's too; IBM's Granite 4 writes Hermes' form.
            if name == "hermes" and model_type == "granite" and "tool_call.name" not in template:
                return "granite"
            return name
    if declared is not None and declared in TOOL_FORMATS:
        return declared
    for token, name in _BY_TOKEN.items():
        if token in vocabulary:
            return name
    return _BY_TYPE.get(model_type) if "tools" in template else None
