"""The types of models.yaml's values: what may be written, and what it is read as."""

import os
import re
from pathlib import Path
from typing import Annotated, Final

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    WithJsonSchema,
)

from gateway.registry.names import did_you_mean, nearest
from gateway.registry.sources import SOURCE_PATTERN, Source, parse_source

Name = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\s,]+$")]


def read_source(value: object, info: ValidationInfo) -> Source:
    if isinstance(value, Source):
        return value
    return parse_source(str(value), (info.context or {})["folder"])


SourceOf = Annotated[
    Source,
    BeforeValidator(read_source),
    WithJsonSchema({"type": "string", "pattern": SOURCE_PATTERN}),
]


AdapterOf = Annotated[
    Source | None,
    BeforeValidator(read_source),
    WithJsonSchema({"type": "string", "pattern": SOURCE_PATTERN}),
]


def _template(value: object, info: ValidationInfo) -> object:
    """Read the file that `file:` names, or return any other text as the template itself."""
    if not isinstance(value, str) or not value.startswith("file:"):
        return value
    path: Path = (info.context or {})["folder"] / os.path.expanduser(value.removeprefix("file:"))
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None


Template = Annotated[str | None, BeforeValidator(_template)]


_SIZES = r"^\d+( *, *\d+)*$"
Size = Annotated[int, Field(ge=1)]
_SizesText = Annotated[str, Field(pattern=_SIZES)]


def _sizes(value: object) -> object:
    """Read true, false, a list of sizes or `256, 512`, which a variable can hold."""
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if isinstance(value, str) and re.fullmatch(_SIZES, value):
        value = [int(size) for size in value.split(",")]
    if isinstance(value, bool):
        return value
    if not isinstance(value, list | tuple):
        value = [value]
    if value and all(type(size) is int and size > 0 for size in value):
        return value
    raise ValueError("write true, false or sizes such as [256, 512]")


Sizes = Annotated[
    bool | tuple[Size, ...],
    BeforeValidator(_sizes, json_schema_input_type=bool | list[Size] | _SizesText),
]

# vLLM's names, and mlx-lm's where it has others. With `none` no text is read as either.
TOOL_PARSERS: Final = frozenset(
    {
        "cohere_command3", "cohere_command4", "command_r", "deepseek_v3", "deepseek_v31",
        "deepseek_v32", "deepseek_v4", "function_gemma", "functiongemma", "gemma4", "glm45",
        "glm47", "granite", "granite4", "hermes", "hunyuan_a13b", "json_tools", "kimi_k2",
        "kimi_k3", "laguna", "lfm2", "llama3_json", "llama4_json", "llama4_pythonic", "longcat",
        "mimo", "minicpm5", "minimax_m2", "mistral", "muse_spark", "nemotron_nano_v2", "none",
        "openai", "phi4_mini_json", "poolside_v1", "pythonic", "qwen3_coder", "qwen3_xml",
        "seed_oss", "step3p5",
    }
)  # fmt: skip
REASONING_PARSERS: Final = frozenset(
    {
        "cohere_command3", "cohere_command4", "deepseek_r1", "deepseek_v3", "deepseek_v4",
        "ernie45", "exaone4", "exaone_deep", "gemma4", "glm45", "glm47", "granite",
        "granite_response", "holo2", "hunyuan_a13b", "kimi_k2", "kimi_k3", "longcat", "mimo",
        "minimax_m2", "mistral", "muse_spark", "nemotron_v3", "none", "olmo3", "openai_gptoss",
        "poolside_v1", "qwen3", "seed_oss", "step3", "step3p5", "think_tokens",
    }
)  # fmt: skip


def _check_name(value: str, names: frozenset[str]) -> str:
    if value not in names:
        raise ValueError(f"no parser is named {value!r}{did_you_mean(nearest(value, names))}")
    return value


ToolParser = Annotated[
    str,
    AfterValidator(lambda value: _check_name(value, TOOL_PARSERS)),
    WithJsonSchema({"type": "string", "enum": sorted(TOOL_PARSERS)}),
]
ReasoningParser = Annotated[
    str,
    AfterValidator(lambda value: _check_name(value, REASONING_PARSERS)),
    WithJsonSchema({"type": "string", "enum": sorted(REASONING_PARSERS)}),
]
