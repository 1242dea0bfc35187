"""The types of models.yaml's values: what may be written, and what it is read as."""

import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    WithJsonSchema,
)

from gateway.registry.names import did_you_mean, nearest
from gateway.registry.parsers import REASONING_PARSERS, TOOL_PARSERS, canonical_names
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


def _check_name(value: str, names: Collection[str]) -> str:
    if value not in names:
        raise ValueError(f"no parser is named {value!r}{did_you_mean(nearest(value, names))}")
    return value


_TOOL_NAMES = sorted(canonical_names(TOOL_PARSERS))
_REASONING_NAMES = sorted(canonical_names(REASONING_PARSERS))
ToolParser = Annotated[
    str,
    AfterValidator(lambda value: _check_name(value, _TOOL_NAMES)),
    WithJsonSchema({"type": "string", "enum": _TOOL_NAMES}),
]
ReasoningParser = Annotated[
    str,
    AfterValidator(lambda value: _check_name(value, _REASONING_NAMES)),
    WithJsonSchema({"type": "string", "enum": _REASONING_NAMES}),
]
