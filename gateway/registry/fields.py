"""The types of values in models.yaml, and functions that read their short forms."""

import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    WithJsonSchema,
)

from gateway.registry.names import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    canonical_names,
    did_you_mean,
    nearest,
)
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
    """Return the text of the file that `file:x.jinja` names; other text is the template itself."""
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
    """Read true, false, a list of sizes, or text such as `256, 512`."""
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


def read_mode(value: object) -> object:
    # YAML reads an unquoted `off` as false.
    if value is True:
        return "auto"
    if value is False:
        return "off"
    return value


def read_thinking_budget(value: object) -> object:
    is_number = isinstance(value, int | str) and not isinstance(value, bool)
    return {"default": value} if is_number else value


def read_batching(value: object) -> object:
    value = read_mode(value)
    return {"mode": value} if isinstance(value, str) else value


SHORT_FORMS: Mapping[str, Callable[[object], object]] = MappingProxyType(
    {"batching": read_batching, "thinking_budget": read_thinking_budget}
)
"""The sections that may be written as a single value, each with the function that reads it."""


def split_names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def read_aliases(value: object) -> object:
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        return value
    aliases: list[object] = []
    for item in value:
        if isinstance(item, str):
            aliases += [{"name": name} for name in split_names(item)]
        else:
            aliases.append(item)
    return aliases
