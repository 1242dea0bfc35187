"""Limits on the size of a request.

Pydantic models check them only if the validation context is a `Bounds`.
"""

import codecs
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import orjson
from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo
from pydantic_core import PydanticKnownError

T = TypeVar("T")

ORJSON_DEPTH = 254  # the most levels that orjson writes
INNER_DEPTH = 64  # the most levels of JSON by default
# The most opening brackets: 16 MB of empty arrays blocked every other thread for 3 seconds.
MAX_BRACKETS = 1_000_000
# The most names and texts: 32 MiB of short names took 2.6 seconds to parse.
MAX_STRINGS = 1_500_000
# The most arrays, objects and fields: 4,096 messages have 40,000.
MAX_PARTS = 200_000
NAME_CHARS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The limits that settings may change."""

    max_depth: int = INNER_DEPTH
    max_messages: int = 4096
    max_schema_bytes: int = 256 * 1024
    max_regex_chars: int = 8192


DEFAULT = Bounds()


class TooDeep(ValueError):
    """JSON nested deeper than the limit."""


def parse(json: bytes | bytearray, max_depth: int = INNER_DEPTH) -> Any:
    """Parse JSON. Raises ValueError if it is invalid or too large, TooDeep if too deep."""
    if json.startswith(codecs.BOM_UTF8):
        json = json.removeprefix(codecs.BOM_UTF8)
    brackets = json.count(b"[") + json.count(b"{")
    if brackets > MAX_BRACKETS:
        raise ValueError(f"it opens more than {MAX_BRACKETS} arrays and objects")
    if json.count(b'"') - json.count(b'\\"') > 2 * MAX_STRINGS:
        raise ValueError(f"it has more than {MAX_STRINGS} names and texts")
    value = orjson.loads(json)  # orjson itself refuses more than 1024 levels
    # Most bodies have too few brackets to need these slower checks.
    if brackets > max_depth and _is_deeper(value, max_depth):
        raise TooDeep(f"nested more than {max_depth} levels deep")
    if brackets + json.count(b":") > MAX_PARTS and _has_more_parts(value, MAX_PARTS):
        raise ValueError(f"it has more than {MAX_PARTS} arrays, objects and fields")
    return value


def _has_more_parts(value: Any, limit: int) -> bool:
    count, level = 0, [value]
    while level:
        below = []
        for node in level:
            children = node
            count += 1
            if type(node) is dict:
                children = node.values()
                count += len(node)
            if count > limit:
                return True
            below += [child for child in children if type(child) is dict or type(child) is list]
        level = below
    return False


def _is_deeper(value: Any, limit: int) -> bool:
    # The added lists make orjson's own depth limit apply: a walk in Python is many times slower.
    for _ in range(ORJSON_DEPTH - limit):
        value = [value]
    try:
        orjson.dumps(value)
    except TypeError:
        return True
    return False


def _check_count(value: object, limit: int) -> None:
    if isinstance(value, dict) and len(value) > limit:
        raise ValueError(f"it should have at most {limit} entries, and has {len(value)}")
    if isinstance(value, list) and len(value) > limit:
        lengths = {"max_length": limit, "actual_length": len(value)}
        raise PydanticKnownError("too_long", {"field_type": "List", **lengths})


def _limit_items(value: T, info: ValidationInfo) -> T:
    if isinstance(info.context, Bounds):
        _check_count(value, info.context.max_messages)
    return value


def at_most(limit: int) -> BeforeValidator:
    """Return a validator that counts a list or an object before its items are validated."""

    def check(value: T) -> T:
        _check_count(value, limit)
        return value

    return BeforeValidator(check)


def _limit_schema(value: T, info: ValidationInfo) -> T:
    if isinstance(info.context, Bounds):
        limit = info.context.max_schema_bytes
        size = len(orjson.dumps(value))
        if size > limit:
            raise ValueError(f"it should be at most {limit} bytes of JSON, and is {size}")
    return value


def _limit_regex(value: str, info: ValidationInfo) -> str:
    bounds = info.context
    if isinstance(bounds, Bounds) and len(value) > bounds.max_regex_chars:
        raise PydanticKnownError("string_too_long", {"max_length": bounds.max_regex_chars})
    return value


Label = Annotated[str, Field(max_length=NAME_CHARS)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
# Stop at a list's first error, since a megabyte can hold half a million errors.
FAIL_FAST = Field(fail_fast=True)
ITEM_LIMIT = BeforeValidator(_limit_items)
Schema = Annotated[dict[str, Any], AfterValidator(_limit_schema)]
SchemaOrText = Annotated[dict[str, Any] | str, AfterValidator(_limit_schema)]
GrammarText = Annotated[str, Field(min_length=1), AfterValidator(_limit_schema)]
ChoiceTexts = Annotated[list[str], Field(min_length=1), FAIL_FAST, AfterValidator(_limit_schema)]
Regex = Annotated[str, Field(min_length=1), AfterValidator(_limit_regex)]
