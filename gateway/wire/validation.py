"""Bytes → a checked request, or the 400 that names the field, as OpenAI words it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any, ClassVar, Generic, Literal, TypeVar, get_args

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails

from gateway.errors import BadRequest, GatewayError, UnknownParameter, UnsupportedParameter, shorten
from gateway.errors import Part as ErrorPart
from gateway.wire.bounds import DEFAULT, NAME_CHARS, Bounds, parse


class Request(BaseModel):
    """What a client sends. Values are never coerced: "1" is no number.

    Unknown fields are kept aside: they are ignored, and the answer says so. Of the fields that are
    known and not served, `harmless` ones don't change the answer and are accepted; `refused` ones
    would, each with what the client should know. A refused field is let through with one of
    `neutral`'s values, which ask for nothing. `example` is the rest of a least request to a model
    of `kind`.
    """

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)
    harmless: ClassVar[frozenset[str]] = frozenset()
    refused: ClassVar[Mapping[str, str]] = {}
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    kind: ClassVar[Literal["chat", "embedding"]] = "chat"
    example: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def honoured(cls) -> list[str]:
        """Return the names of the fields that are served."""
        names = [info.alias or name for name, info in cls.model_fields.items()]
        return [name for name in names if name not in cls.harmless]

    def param_of(self, part: ErrorPart) -> str:
        """Return the field that a part of the job came from."""
        return part

    def locate(self, error: GatewayError) -> GatewayError:
        """Return an error of the floors below as one about a field of this request."""
        return error if error.part is None else error.named(self.param_of(error.part))

    def asked(self) -> dict[str, Any]:
        """Give what the model is to read, for those who want it logged."""
        prompts = {"input", "instructions", "messages", "prompt"}
        return self.model_dump(include=prompts, exclude_none=True)

    def skipped(self) -> Sequence[str]:
        """Name what was understood and is not served, yet changes nothing that is."""
        return ()


class Part(BaseModel):
    """A piece of a request. What it has beyond our fields and the harmless ones is ignored, and the
    answer says so.
    """

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)
    harmless: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, given: object) -> object:
        if isinstance(given, dict):
            return {name: value for name, value in given.items() if value is not None}
        return given


R = TypeVar("R", bound=Request)


MOST_NAMED = 64  # of what nobody knows in a request's parts
MOST_FIELDS = 1024  # beside each other, at the top


@dataclass(frozen=True, slots=True)
class Read(Generic[R]):
    """A request as understood, and the names of the fields that were not."""

    request: R
    ignored: tuple[str, ...]


def read_request(
    body: bytes | bytearray,
    shape: type[R],
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
    if len(given) > MOST_FIELDS:
        raise BadRequest(f"Your request has more than {MOST_FIELDS} fields.")
    for name, reason in shape.refused.items():
        if name in given and not _is_any(given[name], shape.neutral.get(name, ())):
            raise UnsupportedParameter(f"Unsupported parameter: '{name}'. {reason}", param=name)
    for name in shape.harmless:  # those that are texts name something
        if isinstance(text := given.get(name), str) and len(text) > NAME_CHARS:
            raise _too_long(name, NAME_CHARS, len(text))
    try:
        request = shape.model_validate(given, context=bounds)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False)) from None
    known = shape.harmless | shape.refused.keys()
    outer = sorted((request.model_extra or {}).keys() - known)
    ignored = (*outer, *request.skipped(), *islice(_unknown(request, ""), MOST_NAMED))
    if ignored and strict:
        raise UnknownParameter(
            f"Unrecognized request argument: {shorten(ignored[0])}", param=shorten(ignored[0])
        )
    return Read(request, ignored)


def _unknown(part: BaseModel, place: str) -> Iterator[str]:
    """Name the fields of a request's parts that nobody knows, by their places."""
    for name, shown_as in _with_parts(type(part)):
        value = getattr(part, name)
        if isinstance(value, Part):
            yield from _unknown_of(value, f"{place}{shown_as}")
        elif isinstance(value, list):
            for i, each in enumerate(value):
                if isinstance(each, Part):
                    yield from _unknown_of(each, f"{place}{shown_as}[{i}]")


@cache
def _with_parts(shape: type[BaseModel]) -> tuple[tuple[str, str], ...]:
    """Return the fields of a shape that may hold parts, each with the name that clients use."""
    return tuple(
        (name, field.alias or name)
        for name, field in shape.model_fields.items()
        if _may_hold_parts(field.annotation)
    )


def _may_hold_parts(annotation: Any) -> bool:
    if isinstance(annotation, type) and issubclass(annotation, Part):
        return True
    return any(map(_may_hold_parts, get_args(annotation)))


def _unknown_of(part: Part, place: str) -> Iterator[str]:
    if part.model_extra:
        yield from (f"{place}.{name}" for name in sorted(part.model_extra.keys() - part.harmless))
    yield from _unknown(part, f"{place}.")


def _is_any(value: object, others: Iterable[object]) -> bool:
    """Tell whether it is one of them as JSON has it: to Python 0.0 is False, and true is 1."""
    return any(type(value) is type(each) and value == each for each in others)


def _parse(body: bytes | bytearray, max_depth: int) -> dict[str, Any]:
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


_TYPES = {
    "model_type": "an object",
    "model_attributes_type": "an object",
    "dict_type": "an object",
    "list_type": "an array",
    "string_type": "a string",
    "bool_type": "a boolean",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
}


def _refusal(errors: Sequence[ErrorDetails]) -> BadRequest:
    """Word pydantic's first finding as OpenAI does, with its code.

    Of a union's branches, the finding is that of the one that got furthest: at the same place, one
    of the right type.
    """
    param = _path(errors[0]["loc"])
    of_one_field = [each for each in errors if _path(each["loc"]).startswith(param)]
    error = max(
        of_one_field, key=lambda each: (len(_steps(each["loc"])), each["type"] not in _TYPES)
    )
    param = _path(error["loc"])
    if error["type"] in _TYPES:
        here = (each["type"] for each in of_one_field if _path(each["loc"]) == param)
        wanted = dict.fromkeys(_TYPES[kind] for kind in here if kind in _TYPES)
        if list(wanted) == ["an integer"] and _is_beyond_64_bits(error["input"]):
            return _out_of_64_bits(param, error["input"])
        return BadRequest(
            f"Invalid type for '{param}': expected {' or '.join(wanted)}, but got "
            f"{_noun(error['input'])} instead.",
            param=param,
            code="invalid_type",
        )
    kind, context, given = error["type"], error.get("ctx", {}), error["input"]
    if kind == "missing":
        return missing(param)
    if kind in _BOUNDS:
        code, phrase, sign, key = _BOUNDS[kind]
        noun = "decimal" if isinstance(context[key], float) else "integer"
        bound = f"{context[key]:g}" if noun == "decimal" else context[key]
        return BadRequest(
            f"Invalid '{param}': {noun} {phrase}. Expected a value {sign} {bound}, "
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
        return _too_long(param, context["max_length"], len(given))
    if kind == "extra_forbidden":
        return UnknownParameter(f"Unrecognized request argument: {param}", param=param)
    message = error["msg"].removeprefix("Value error, ")
    for start in ("Input should", "String should"):
        message = message.replace(start, "it should")
    return BadRequest(
        f"Invalid '{param}': {message[0].lower()}{message[1:]}." if param else message,
        param=param,
        code="invalid_value",
    )


def missing(param: str) -> BadRequest:
    """Return the refusal of a request that lacks a field."""
    return BadRequest(
        f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter"
    )


def _is_beyond_64_bits(given: object) -> bool:
    """Return True for an integer that orjson, which reads none so large, has made a float of."""
    return isinstance(given, float) and given.is_integer() and abs(given) >= 2**63


def _out_of_64_bits(param: str, given: float) -> BadRequest:
    code, phrase, sign, bound = (
        ("above_max_value", "above maximum value", "<=", 2**63 - 1)
        if given > 0
        else ("below_min_value", "below minimum value", ">=", -(2**63))
    )
    return BadRequest(
        f"Invalid '{param}': integer {phrase}. Expected a value {sign} {bound}, "
        f"but got {given:g} instead.",
        param=param,
        code=f"integer_{code}",
    )


def _noun(given: object) -> str:
    """Return what JSON calls a value."""
    match given:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int():
            return "an integer"
        case float():
            return "a decimal"
        case str():
            return "a string"
        case list():
            return "an array"
    return "an object"


def _too_long(param: str, most: int, length: int) -> BadRequest:
    return BadRequest(
        f"Invalid '{param}': string too long. Expected a string with maximum length {most}, "
        f"but got a string with length {length} instead.",
        param=param,
        code="string_above_max_length",
    )


def _path(location: tuple[int | str, ...]) -> str:
    """Write a place as OpenAI does: messages[0].role."""
    path = ""
    for step in _steps(location):
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return shorten(path)


def _steps(location: tuple[int | str, ...]) -> list[int | str]:
    """Leave a union's branches out: they are types, and no place."""
    return [
        step
        for step in location
        if isinstance(step, int)
        or (step.isidentifier() and step not in _BRANCHES and not step[0].isupper())
    ]


_BRANCHES = frozenset({"str", "int", "float", "bool", "list", "dict"})


@dataclass(frozen=True, slots=True)
class CharBounds:
    """The most characters of a text, and of a request's texts together."""

    text: int
    request: int

    def check(self, texts: Sequence[str], *, param: str, noun: str) -> None:
        """Refuse texts of which one, or all, are too long to be worth tokenising."""
        lengths = [len(text) for text in texts]
        if any(length > self.text for length in lengths):
            raise BadRequest(f"{noun} is longer than {self.text} characters.", param=param)
        if sum(lengths) > self.request:
            raise BadRequest(
                f"'{param}' has more than {self.request} characters in all: send fewer at once.",
                param=param,
            )


def check_length(parts: Sequence[Any], max_chars: int, *, param: str) -> None:
    """Refuse what is too long to be worth tokenising, written as JSON."""
    written = orjson.dumps(parts, default=lambda part: part.model_dump())
    if len(written) > 4 * max_chars or len(written.decode()) > max_chars + 256 * len(parts):
        raise BadRequest(f"'{param}' is longer than {max_chars} characters.", param=param)


MAX_INPUTS = 2048  # as OpenAI's
_TEXT = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
INPUTS_SCHEMA: dict[str, Any] = {
    "anyOf": [
        _TEXT,
        {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_INPUTS},
        _IDS,
        {"type": "array", "items": _IDS, "minItems": 1, "maxItems": MAX_INPUTS},
    ]
}


def read_inputs(given: object) -> list[Any]:
    """Give the inputs as an array, all texts or all rows of ids.

    Raises ValueError, saying how many there are where that is what is wrong.
    """
    if isinstance(given, str):
        given = [given]
    if not isinstance(given, list) or not given:
        raise ValueError("it is neither a text nor an array of some")
    found = [given] if all(map(_is_id, given)) else given
    if len(found) > MAX_INPUTS:
        raise ValueError(f"it has {len(found)} entries")
    if not (all(map(_is_text, found)) or all(map(_is_ids, found))):
        raise ValueError("its entries are not all texts, or all token ids, and none of them empty")
    return found


def _is_text(item: object) -> bool:
    return isinstance(item, str) and item != ""


def _is_id(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool) and item >= 0


def _is_ids(item: object) -> bool:
    return isinstance(item, list) and bool(item) and all(map(_is_id, item))
