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

_TRACED: Mapping[str, str] = {
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), "max_tokens"),
    **{name: name for name in ("model", "stream", "seed", "temperature", "top_k", "top_p")},
    **{name: name for name in ("frequency_penalty", "presence_penalty")},
    "n": "choice.count",
}


class Request(BaseModel):
    """The body of a request. Values are never coerced: "1" is not a number.

    Unknown fields are ignored, and a header names them. Of the known fields that are not served,
    `harmless` ones do not change the answer and are accepted. `refused` ones would: each maps to
    the reason in its 400, unless it has one of its `neutral` values. `example` is a minimal request
    to a model of `kind`, without the model.
    """

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)
    harmless: ClassVar[frozenset[str]] = frozenset()
    refused: ClassVar[Mapping[str, str]] = {}
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    kind: ClassVar[Literal["chat", "embedding", "rerank"]] = "chat"
    example: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def served_fields(cls) -> list[str]:
        """Return the names of the fields that are served."""
        names = [info.alias or name for name, info in cls.model_fields.items()]
        return [name for name in names if name not in cls.harmless]

    def param_of(self, part: ErrorPart) -> str:
        """Return the field that a part of the job came from."""
        return part

    def locate(self, error: GatewayError) -> GatewayError:
        """Return an error about a part of the job as one about a field of this request."""
        return error if error.part is None else error.named(self.param_of(error.part))

    def prompt_fields(self) -> dict[str, Any]:
        """Return the fields with the model's input, for the log of prompts."""
        prompts = {
            *("input", "inputs", "instructions", "messages", "prompt", "questions"),
            *("query", "documents", "texts", "text_1", "text_2", "instruction", "system"),
        }
        return self.model_dump(include=prompts, exclude_none=True)

    def traced_fields(self) -> dict[str, str | int | float]:
        """Return what a trace has of the request, by GenAI's names: no content."""
        fields_set = {name: getattr(self, name) for name in _TRACED.keys() & self.model_fields_set}
        changed = {name: value for name, value in fields_set.items() if value not in (None, False)}
        return {_TRACED[name]: value for name, value in changed.items()}

    def unserved_tools(self) -> Sequence[str]:
        """Return the names of the tools that are skipped, as the header lists them."""
        return ()


class Part(BaseModel):
    """An object inside a request. Fields other than its own and the harmless ones are ignored, and
    a header names them, as it does the `unread` ones.
    """

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)
    harmless: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, fields: object) -> object:
        if isinstance(fields, dict):
            return {name: value for name, value in fields.items() if value is not None}
        return fields

    @property
    def unread(self) -> frozenset[str]:
        """Return the names of its own fields that do not go with its type."""
        return frozenset()


R = TypeVar("R", bound=Request)
V = TypeVar("V")
MAX_IGNORED_NAMES = 64  # of unknown fields inside a request's parts
MAX_FIELDS = 1024  # at the top level


@dataclass(frozen=True, slots=True)
class Parsed(Generic[R]):
    """A request, and the names of its fields and tools that are ignored."""

    request: R
    ignored: tuple[str, ...]


def read_request(
    body: bytes | bytearray,
    shape: type[R],
    *,
    strict: bool,
    bounds: Bounds = DEFAULT,
) -> Parsed[R]:
    """Parse and check a body. A field that is null counts as absent.

    Raises BadRequest with `param` for a malformed field, UnsupportedParameter for a refused one
    and, if `strict`, UnknownParameter for an ignored one.
    """
    body_fields = _parse(body, bounds.max_depth)
    fields = {name: value for name, value in body_fields.items() if value is not None}
    if len(fields) > MAX_FIELDS:
        raise BadRequest(f"Your request has more than {MAX_FIELDS} fields.")
    for name, reason in shape.refused.items():
        if name in fields and not _is_one_of(fields[name], shape.neutral.get(name, ())):
            raise UnsupportedParameter(f"Unsupported parameter: '{name}'. {reason}", param=name)
    for name in shape.harmless:  # a string among them is a name or an id
        if isinstance(text := fields.get(name), str) and len(text) > NAME_CHARS:
            raise _string_too_long(name, NAME_CHARS, len(text))
    try:
        request = shape.model_validate(fields, context=bounds)
    except ValidationError as error:
        raise _bad_request(error.errors(include_url=False)) from None
    known_fields = shape.harmless | shape.refused.keys()
    outer = sorted((request.model_extra or {}).keys() - known_fields)
    ignored = (
        *outer,
        *request.unserved_tools(),
        *islice(_unknown_fields(request, ""), MAX_IGNORED_NAMES),
    )
    if ignored and strict:
        raise UnknownParameter(
            f"Unrecognized request argument: {shorten(ignored[0])}", param=shorten(ignored[0])
        )
    return Parsed(request, ignored)


def _unknown_fields(part: BaseModel, place: str) -> Iterator[str]:
    """Yield the paths of unknown fields in a request's parts."""
    for name, alias in _part_fields(type(part)):
        value = getattr(part, name)
        if isinstance(value, Part):
            yield from _unknown_fields_of(value, f"{place}{alias}")
        elif isinstance(value, list):
            for i, item in enumerate(value):
                if isinstance(item, Part):
                    yield from _unknown_fields_of(item, f"{place}{alias}[{i}]")


@cache
def _part_fields(shape: type[BaseModel]) -> tuple[tuple[str, str], ...]:
    """Return the fields of a model that may hold parts, each with the name that clients use."""
    return tuple(
        (name, field.alias or name)
        for name, field in shape.model_fields.items()
        if _may_hold_parts(field.annotation)
    )


def _may_hold_parts(annotation: Any) -> bool:
    if isinstance(annotation, type) and issubclass(annotation, Part):
        return True
    return any(map(_may_hold_parts, get_args(annotation)))


def _unknown_fields_of(part: Part, place: str) -> Iterator[str]:
    unknown = (part.model_extra or {}).keys() - part.harmless
    if ignored := unknown | (part.unread & part.model_fields_set):
        yield from (f"{place}.{name}" for name in sorted(ignored))
    yield from _unknown_fields(part, f"{place}.")


def _is_one_of(value: object, others: Iterable[object]) -> bool:
    """Return True if a value equals another of its own type: in Python 0.0 == False, 1 == True."""
    return any(type(value) is type(other) and value == other for other in others)


def _parse(body: bytes | bytearray, max_depth: int) -> dict[str, Any]:
    try:
        value = parse(body, max_depth)
    except ValueError as error:
        if body.startswith(b"--"):
            raise BadRequest(
                "The request body is multipart/form-data. It must be a JSON object."
            ) from None
        raise BadRequest(
            f"We could not parse the JSON body of your request: {error}. "
            "The request body must be a JSON object."
        ) from None
    if not isinstance(value, dict):
        raise BadRequest("The request body must be a JSON object.")
    return value


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


def _bad_request(errors: Sequence[ErrorDetails]) -> BadRequest:
    """Return pydantic's first error in OpenAI's words, with its code.

    Of a union's errors it is the one of the branch that got furthest; at the same path, one that is
    not about the type.
    """
    param = _path(errors[0]["loc"])
    of_one_field = [error for error in errors if _path(error["loc"]).startswith(param)]
    error = max(
        of_one_field, key=lambda each: (len(_steps(each["loc"])), each["type"] not in _TYPES)
    )
    param = _path(error["loc"])
    if error["type"] in _TYPES:
        here = (error["type"] for error in of_one_field if _path(error["loc"]) == param)
        type_names = dict.fromkeys(_TYPES[kind] for kind in here if kind in _TYPES)
        if list(type_names) == ["an integer"] and _is_beyond_64_bits(error["input"]):
            return _out_of_64_bits(param, error["input"])
        return BadRequest(
            f"Invalid type for '{param}': expected {' or '.join(type_names)}, but got "
            f"{_json_type(error['input'])} instead.",
            param=param,
            code="invalid_type",
        )
    kind, context, value = error["type"], error.get("ctx", {}), error["input"]
    if kind == "missing":
        return missing_parameter(param)
    if kind in _BOUNDS:
        code, phrase, sign, key = _BOUNDS[kind]
        noun = "decimal" if isinstance(context[key], float) else "integer"
        bound = f"{context[key]:g}" if noun == "decimal" else context[key]
        return BadRequest(
            f"Invalid '{param}': {noun} {phrase}. Expected a value {sign} {bound}, "
            f"but got {value} instead.",
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
        return _string_too_long(param, context["max_length"], len(value))
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


def missing_parameter(param: str) -> BadRequest:
    """Return the error for a request that lacks a field."""
    return BadRequest(
        f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter"
    )


def require(value: V | None, param: str) -> V:
    """Return a field's value. Raises BadRequest if it is missing."""
    if value is None:
        raise missing_parameter(param)
    return value


def read_limit(query: Mapping[str, str], most: int) -> int:
    """Return the `limit` of a page: 20 unless the query has another. Raises BadRequest."""
    text = query.get("limit", "20")
    if not (text.isascii() and text.isdigit() and len(text) < 6 and 1 <= int(text) <= most):
        raise BadRequest(f"Invalid 'limit': it should be 1 to {most}.", param="limit")
    return int(text)


def find_place(ids: Sequence[str], query: Mapping[str, str], name: str, noun: str) -> int:
    """Return the place of the id that a query names. Raises BadRequest if it is not there."""
    if query[name] not in ids:
        raise BadRequest(f"Invalid '{name}': there is no such {noun}.", param=name)
    return ids.index(query[name])


def _is_beyond_64_bits(value: object) -> bool:
    """Return True for an integer beyond 64 bits, which orjson reads as a float."""
    return isinstance(value, float) and value.is_integer() and abs(value) >= 2**63


def _out_of_64_bits(param: str, value: float) -> BadRequest:
    code, phrase, sign, bound = (
        ("above_max_value", "above maximum value", "<=", 2**63 - 1)
        if value > 0
        else ("below_min_value", "below minimum value", ">=", -(2**63))
    )
    return BadRequest(
        f"Invalid '{param}': integer {phrase}. Expected a value {sign} {bound}, "
        f"but got {value:g} instead.",
        param=param,
        code=f"integer_{code}",
    )


def _json_type(value: object) -> str:
    """Return the JSON type of a value, with its article."""
    match value:
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


def _string_too_long(param: str, limit: int, length: int) -> BadRequest:
    return BadRequest(
        f"Invalid '{param}': string too long. Expected a string with maximum length {limit}, "
        f"but got a string with length {length} instead.",
        param=param,
        code="string_above_max_length",
    )


def _path(location: tuple[int | str, ...]) -> str:
    """Return a field's path as OpenAI writes it: messages[0].role."""
    path = ""
    for step in _steps(location):
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return shorten(path)


def _steps(location: tuple[int | str, ...]) -> list[int | str]:
    """Return the field names and indices of an error's location, without a union's branches."""
    return [
        step
        for step in location
        if isinstance(step, int)
        or (step.isidentifier() and step not in _BRANCHES and not step[0].isupper())
    ]


_BRANCHES = frozenset({"str", "int", "float", "bool", "list", "dict"})


@dataclass(frozen=True, slots=True)
class CharBounds:
    """The most characters in one text, and in all texts of a request."""

    text: int
    request: int

    def check(self, texts: Sequence[str], *, param: str, noun: str) -> None:
        """Raise BadRequest if one text, or all together, are too long to tokenise."""
        lengths = [len(text) for text in texts]
        if any(length > self.text for length in lengths):
            raise BadRequest(f"{noun} is longer than {self.text} characters.", param=param)
        if sum(lengths) > self.request:
            raise BadRequest(
                f"'{param}' has more than {self.request} characters in all: send fewer at once.",
                param=param,
            )


def check_length(parts: Sequence[Any], max_chars: int, *, param: str) -> None:
    """Raise BadRequest if the parts, written as JSON, are too long to tokenise."""
    body = orjson.dumps(parts, default=lambda part: part.model_dump())
    if len(body) > 4 * max_chars or len(body.decode()) > max_chars + 256 * len(parts):
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


def read_inputs(value: object) -> list[Any]:
    """Return the inputs as a list, either of texts or of lists of token ids.

    Raises ValueError for anything else; for too many, its message has their number.
    """
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not value:
        raise ValueError("it is neither a text nor an array of some")
    inputs = [value] if all(map(_is_id, value)) else value
    if len(inputs) > MAX_INPUTS:
        raise ValueError(f"it has {len(inputs)} entries")
    if not (all(map(_is_text, inputs)) or all(map(_is_ids, inputs))):
        raise ValueError("its entries are not all texts, or all token ids, and none of them empty")
    return inputs


def _is_text(item: object) -> bool:
    return isinstance(item, str) and item != ""


def _is_id(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool) and item >= 0


def _is_ids(item: object) -> bool:
    return isinstance(item, list) and bool(item) and all(map(_is_id, item))
