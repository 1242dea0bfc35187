"""How much a request may hold. Shapes are told through pydantic's context, and refuse what is
beyond it where it stands; a shape made without one is of our own making.
"""

from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import orjson
from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo
from pydantic_core import PydanticKnownError

T = TypeVar("T")

WRITTEN = 254  # levels that orjson writes, and no more
INNER_DEPTH = 64  # of JSON inside a string
# Arrays and objects, and brackets in texts, that are counted before anything is parsed: 16 MB of
# empty arrays took 3 seconds, in which the garbage collector let nobody else have a turn.
MAX_OPENED = 1_000_000
# Arrays, objects and fields of objects that a request may have: 4,096 messages have 40,000. Each
# costs Python some microseconds, and the garbage collector, which stops everybody, one more.
MAX_PARTS = 200_000
NAME_CHARS = 256  # of what names something: a model, a function, a call, a user


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The most of each, where settings say nothing else; a schema's size is that of its JSON."""

    max_depth: int = INNER_DEPTH
    max_messages: int = 4096
    max_schema_bytes: int = 256 * 1024
    max_regex_chars: int = 8192


DEFAULT = Bounds()


class TooDeep(ValueError):
    """JSON nested deeper than it may be."""


def parse(json: bytes | bytearray, max_depth: int = INNER_DEPTH) -> Any:
    """Parse JSON. Raises ValueError for what is none, TooDeep for what is nested too deep.

    orjson itself reads no deeper than 1024 levels, without harm.
    """
    opened = json.count(b"[") + json.count(b"{")
    if opened > MAX_OPENED:
        raise ValueError(f"it opens more than {MAX_OPENED} arrays and objects")
    value = orjson.loads(json)
    # Most are known to be shallow without looking further: they open less than they might.
    if opened > max_depth and _is_deeper(value, max_depth):
        raise TooDeep(f"nested more than {max_depth} levels deep")
    if opened + json.count(b":") > MAX_PARTS and _has_more(value, MAX_PARTS):
        raise ValueError(f"it has more than {MAX_PARTS} arrays, objects and fields")
    return value


def _has_more(value: Any, most: int) -> bool:
    """Return True if there are more arrays, objects and fields of objects in what orjson read."""
    count, level = 0, [value]
    while level:
        below = []
        for node in level:
            is_object = type(node) is dict
            count += 1 + len(node) if is_object else 1
            if count > most:
                return True
            children = node.values() if is_object else node
            below += [each for each in children if type(each) is dict or type(each) is list]
        level = below
    return False


def _is_deeper(value: Any, most: int) -> bool:
    """Tell whether what orjson read is nested more than `most` levels deep, 253 at most.

    It is wrapped until orjson refuses to write what is deeper: a walk of our own would take many
    times as long.
    """
    for _ in range(WRITTEN - most):
        value = [value]
    try:
        orjson.dumps(value)
    except TypeError:
        return True
    return False


def _few_enough(given: T, info: ValidationInfo) -> T:
    bounds = info.context
    if isinstance(bounds, Bounds) and isinstance(given, list) and len(given) > bounds.max_messages:
        context = {
            "field_type": "List",
            "max_length": bounds.max_messages,
            "actual_length": len(given),
        }
        raise PydanticKnownError("too_long", context)
    return given


def _small_enough(given: T, info: ValidationInfo) -> T:
    if isinstance(info.context, Bounds):
        most = info.context.max_schema_bytes
        size = len(given.encode() if isinstance(given, str) else orjson.dumps(given))
        if size > most:
            raise ValueError(f"it should be at most {most} bytes of JSON, and is {size}")
    return given


def _short_enough(given: str, info: ValidationInfo) -> str:
    bounds = info.context
    if isinstance(bounds, Bounds) and len(given) > bounds.max_regex_chars:
        raise PydanticKnownError("string_too_long", {"max_length": bounds.max_regex_chars})
    return given


Label = Annotated[str, Field(max_length=NAME_CHARS)]
# Of a list that is wrong the first error is enough: a megabyte can hold half a million of them,
# and each costs as much as a message.
FAST = Field(fail_fast=True)
# A list is counted before any of it is read.
FEW = BeforeValidator(_few_enough)
Schema = Annotated[dict[str, Any], AfterValidator(_small_enough)]
SchemaOrText = Annotated[dict[str, Any] | str, AfterValidator(_small_enough)]
GrammarText = Annotated[str, Field(min_length=1), AfterValidator(_small_enough)]
Choices = Annotated[list[str], Field(min_length=1), FAST, AfterValidator(_small_enough)]
Regex = Annotated[str, Field(min_length=1), AfterValidator(_short_enough)]
