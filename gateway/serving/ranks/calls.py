"""A call of an engine as bytes, for the other ranks, and what came of it as a digest.

The bytes are JSON and name only the dataclasses that a call's arguments may hold: unlike a pickle
they cannot run code.
"""

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final, get_args, get_type_hints

from gateway.jobs import StepPlan, StepResult, Verdict


def _dataclasses_in(hint: Any) -> Iterator[type]:
    """Yield the dataclasses that a value of this type may hold, itself included."""
    if is_dataclass(hint) and isinstance(hint, type):
        yield hint
        parts: Sequence[Any] = list(get_type_hints(hint).values())
    else:
        parts = get_args(hint)
    for part in parts:
        yield from _dataclasses_in(part)


_TYPES: Final[Mapping[str, Any]] = {
    each.__name__: each for root in (StepPlan, Verdict) for each in _dataclasses_in(root)
}


@dataclass(frozen=True, slots=True)
class Call:
    """What rank 0 is about to do with one model: the name of the method, and its arguments."""

    model: str
    method: str
    arguments: Sequence[Any] = ()


def encode(call: Call) -> bytes:
    arguments = [_encode(each) for each in call.arguments]
    return json.dumps([call.model, call.method, arguments]).encode()


def decode(data: bytes) -> Call:
    """Raises ValueError for bytes that are no call."""
    try:
        model, method, arguments = json.loads(data)
        return Call(model, method, [_decode(each) for each in arguments])
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a call: {error!r}") from error


def _encode(value: Any) -> Any:
    """Return a value as JSON has it; all but plain values and lists as an object of one key."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case bytes():
            return {"bytes": value.hex()}
        case frozenset():
            return {"frozenset": [_encode(each) for each in sorted(value)]}
        case Mapping():
            return {"dict": [[_encode(key), _encode(each)] for key, each in value.items()]}
        case tuple():
            return {"tuple": [_encode(each) for each in value]}
        case Sequence():  # also a prompt in parts, which arrives as a list
            items = list(value)
            if set(map(type, items)) <= {int}:
                return items  # a prompt, of many tokens
            return [_encode(each) for each in items]
        case _ if type(value) is _TYPES.get(type(value).__name__):
            own = {each.name: _encode(getattr(value, each.name)) for each in fields(value)}
            return {type(value).__name__: own}
    raise TypeError(f"{type(value).__name__} is not sent to other ranks")


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return value if set(map(type, value)) <= {int} else [_decode(each) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    match kind:
        case "bytes":
            return bytes.fromhex(content)
        case "frozenset":
            return frozenset(_decode(each) for each in content)
        case "tuple":
            return tuple(_decode(each) for each in content)
        case "dict":
            return {_decode(key): _decode(each) for key, each in content}
    return _TYPES[kind](**{name: _decode(each) for name, each in content.items()})


def digest(result: StepResult) -> str:
    """Return a digest of what a step did. Ranks whose digests differ are no longer alike.

    A call's id is random and a logprob may be rounded otherwise, so neither counts.
    """
    said = [
        (delta.row, delta.tokens, delta.finish_reason, delta.text, delta.reasoning, delta.error)
        for delta in result.deltas
    ]
    state = (result.size, sorted(result.reading), result.decoding, len(result.faults))
    return f"{zlib.crc32(repr((said, state)).encode()):08x}"
