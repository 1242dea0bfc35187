"""Bytes → a checked request, or the 400 that names the field, as OpenAI words it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails

from gateway.errors import BadRequest, UnknownParameter, UnsupportedParameter
from gateway.wire.bounds import DEFAULT, Bounds, parse


class Request(BaseModel):
    """What a client sends. Values are never coerced: "1" is no number.

    Unknown fields are kept aside: they are ignored, and the answer says so.
    """

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    def asked(self) -> dict[str, Any]:
        """Give what the model is to read, for those who want it logged."""
        prompts = {"input", "instructions", "messages", "prompt"}
        return self.model_dump(include=prompts, exclude_none=True)


class Part(BaseModel):
    """A piece of a request; what it has beyond our fields is the client's own affair."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, given: object) -> object:
        if isinstance(given, dict):
            return {name: value for name, value in given.items() if value is not None}
        return given


R = TypeVar("R", bound=Request)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """What an endpoint knows beyond the fields it serves.

    `harmless` ones don't change the answer and are accepted; `refused` ones would, and are not
    served: each with what the client should know. A refused field is let through with one of
    `neutral`'s values, which ask for nothing.
    """

    harmless: frozenset[str]
    refused: Mapping[str, str]
    neutral: Mapping[str, tuple[object, ...]]


@dataclass(frozen=True, slots=True)
class Read(Generic[R]):
    """A request as understood, and the names of the fields that were not."""

    request: R
    ignored: tuple[str, ...]


def read_request(
    body: bytes,
    shape: type[R],
    fields: Fields,
    *,
    strict: bool,
    bounds: Bounds = DEFAULT,
) -> Read[R]:
    """Parse and check a body. A null is as good as absent.

    Raises BadRequest with `param` for what is malformed, UnsupportedParameter for what is known
    and refused, and, when `strict`, UnknownParameter for the rest.
    """
    given = {
        name: value for name, value in _parse(body, bounds.max_depth).items() if value is not None
    }
    for name, reason in fields.refused.items():
        if name in given and not _is_any(given[name], fields.neutral.get(name, ())):
            raise UnsupportedParameter(f"Unsupported parameter: '{name}'. {reason}", param=name)
    try:
        request = shape.model_validate(given, context=bounds)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False)[0]) from None
    known = fields.harmless | fields.refused.keys()
    ignored = tuple(sorted((request.model_extra or {}).keys() - known))
    if ignored and strict:
        raise UnknownParameter(f"Unrecognized request argument: {ignored[0]}", param=ignored[0])
    return Read(request, ignored)


def _is_any(value: object, others: Iterable[object]) -> bool:
    """Tell whether it is one of them as JSON has it: to Python 0.0 is False, and true is 1."""
    return any(type(value) is type(each) and value == each for each in others)


def _parse(body: bytes, max_depth: int) -> dict[str, Any]:
    try:
        parsed = parse(body, max_depth)
    except ValueError as error:
        raise BadRequest(
            f"We could not parse the JSON body of your request: {error}. "
            "The request body must be a JSON object."
        ) from None
    if not isinstance(parsed, dict):
        raise BadRequest("The request body must be a JSON object.")
    return parsed


_BOUNDS = {
    "less_than_equal": ("above_max_value", "above maximum value", "<=", "le"),
    "less_than": ("above_max_value", "above maximum value", "<", "lt"),
    "greater_than_equal": ("below_min_value", "below minimum value", ">=", "ge"),
    "greater_than": ("below_min_value", "below minimum value", ">", "gt"),
}
_LENGTHS = {
    "too_long": ("above_max_length", "too long", "at most", "max_length"),
    "too_short": ("below_min_length", "too short", "at least", "min_length"),
}


def _refusal(error: ErrorDetails) -> BadRequest:
    """Word pydantic's first finding as OpenAI does, with its code."""
    param = _path(error["loc"])
    kind, context, given = error["type"], error.get("ctx", {}), error["input"]
    if kind == "missing":
        return BadRequest(
            f"Missing required parameter: '{param}'.",
            param=param,
            code="missing_required_parameter",
        )
    if kind in _BOUNDS:
        code, phrase, sign, key = _BOUNDS[kind]
        noun = "integer" if isinstance(given, int) else "decimal"
        return BadRequest(
            f"Invalid '{param}': {noun} {phrase}. Expected a value {sign} {context[key]}, "
            f"but got {given} instead.",
            param=param,
            code=f"{noun}_{code}",
        )
    if kind in _LENGTHS:
        code, phrase, bound, key = _LENGTHS[kind]
        return BadRequest(
            f"Invalid '{param}': array {phrase}. Expected an array with {bound} length "
            f"{context[key]}, but got an array with length {context['actual_length']} instead.",
            param=param,
            code=f"array_{code}",
        )
    if kind == "string_too_long":
        return BadRequest(
            f"Invalid '{param}': string too long. Expected a string with maximum length "
            f"{context['max_length']}, but got a string with length {len(given)} instead.",
            param=param,
            code="string_above_max_length",
        )
    message = error["msg"].removeprefix("Value error, ")
    return BadRequest(
        f"Invalid '{param}': {message[0].lower()}{message[1:]}." if param else message,
        param=param,
        code="invalid_type" if kind.endswith("_type") else "invalid_value",
    )


def _path(location: tuple[int | str, ...]) -> str:
    """Write a place as OpenAI does: messages[0].role. A union's branches are no place."""
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step.isidentifier() and step not in _BRANCHES:
            path += f".{step}" if path else step
    return path


_BRANCHES = frozenset({"str", "int", "float", "bool", "list", "dict"})


def check_length(parts: Sequence[Any], max_chars: int, *, param: str) -> None:
    """Refuse what is too long to be worth tokenising, written as JSON."""
    written = orjson.dumps(parts, default=lambda part: part.model_dump())
    if len(written) > 4 * max_chars or len(written.decode()) > max_chars + 256 * len(parts):
        raise BadRequest(f"'{param}' is longer than {max_chars} characters.", param=param)
