"""Parses and checks the bodies of requests, with OpenAI's messages for errors."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar, get_args

import orjson
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from gateway.errors import BadRequest, GatewayError, UnknownParameter, UnsupportedParameter, shorten
from gateway.errors import Part as ErrorPart
from gateway.wire.bounds import DEFAULT, FAIL_FAST, NAME_CHARS, Bounds, Label, parse

# OpenTelemetry's names of the fields in traces. A field with a prompt or an answer is none of them.
_TRACED: Mapping[str, str] = {
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), "max_tokens"),
    **{name: name for name in ("model", "stream", "seed", "temperature", "top_k", "top_p")},
    **{name: name for name in ("frequency_penalty", "presence_penalty")},
    "n": "choice.count",
}


IMAGE_TYPES = frozenset({"image", "image_url", "input_image"})
FILE_TYPES = frozenset({"file", "input_file", "input_audio", "input_video", "video_url"})


class Request(BaseModel):
    """The body of a request."""

    # Strict validation never reads a string as a number.
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)
    # Known fields that are accepted without effect.
    harmless: ClassVar[frozenset[str]] = frozenset()
    # Known fields that are refused, each with the reason.
    refused: ClassVar[Mapping[str, str]] = {}
    # Values of refused fields that are accepted without effect.
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    kind: ClassVar[Literal["chat", "embedding", "rerank"]] = "chat"
    # The request's field for each part of a job that has another name.
    params: ClassVar[Mapping[ErrorPart, str]] = {}
    # An example for /openapi.json, without the model.
    example: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def served_fields(cls) -> list[str]:
        names = [info.alias or name for name, info in cls.model_fields.items()]
        return [name for name in names if name not in cls.harmless | cls.refused.keys()]

    def param_of(self, part: ErrorPart) -> str:
        return self.params.get(part, part)

    def locate(self, error: GatewayError) -> GatewayError:
        """Return the error with the name of the request's field that caused it."""
        if error.part is None:
            return error
        return error.named(self.param_of(error.part))

    def prompt_fields(self) -> dict[str, Any]:
        """Return the fields with the model's input, for the log of prompts."""
        prompts = {
            *("input", "inputs", "instructions", "messages", "prompt", "questions"),
            *("query", "documents", "texts", "text_1", "text_2", "instruction", "system"),
        }
        return self.model_dump(include=prompts, exclude_none=True)

    def traced_fields(self) -> dict[str, str | int | float]:
        """Return the values that a trace shows, by OpenTelemetry's names."""
        fields_set = {name: getattr(self, name) for name in _TRACED.keys() & self.model_fields_set}
        changed = {name: value for name, value in fields_set.items() if value not in (None, False)}
        return {_TRACED[name]: value for name, value in changed.items()}

    @property
    def thinking_budget(self) -> int | None:
        return None

    def unserved_tools(self) -> Sequence[str]:
        """Return the names of the tools that are skipped."""
        return ()


class Part(BaseModel):
    """An object inside a request."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)
    harmless: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, fields: object) -> object:
        # A null counts as absent.
        if isinstance(fields, dict):
            return {name: value for name, value in fields.items() if value is not None}
        return fields

    @property
    def unread(self) -> frozenset[str]:
        """Return the names of known fields that count as ignored."""
        return frozenset()

    @property
    def is_image(self) -> bool:
        """Return True for an image in any API's format."""
        # pydantic's `model_fields` takes seven times as long.
        has_text = "text" in type(self).__pydantic_fields__
        return has_text and getattr(self, "type", None) in IMAGE_TYPES


class Skipped(Part):
    """A part that the gateway does not read."""

    type: Label
    role: ClassVar = "assistant"  # a skipped part is never the user's newest message


KNOWN, OTHER = "known part", "other part"  # with spaces, by which `_steps` knows tags


def by_type(tags: Mapping[str, str]) -> Discriminator:
    """Return a discriminator that tags a part by its type, or else as OTHER."""

    def tag(part: object) -> str:
        # A part is a dict when pydantic reads it, and a model when pydantic writes it.
        kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
        # A part without a valid type counts as one of the first type.
        return tags.get(kind if isinstance(kind, str) else next(iter(tags)), OTHER)

    return Discriminator(tag)


P = TypeVar("P", bound=Part)
R = TypeVar("R", bound=Request)
V = TypeVar("V")
MAX_IGNORED_NAMES = 64  # the most names of unknown fields inside a request's parts
MAX_FIELDS = 1024  # the most fields at the top level


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
    """Parse and check a body.

    Raises BadRequest for a malformed field, UnsupportedParameter for a refused one and, if
    `strict`, UnknownParameter for an ignored one.
    """
    body_fields = _parse(body, bounds.max_depth)
    fields = {name: value for name, value in body_fields.items() if value is not None}
    if len(fields) > MAX_FIELDS:
        raise BadRequest(f"Your request has more than {MAX_FIELDS} fields.")
    for name, reason in shape.refused.items():
        if name in fields and not _is_one_of(fields[name], shape.neutral.get(name, ())):
            raise UnsupportedParameter(f"Unsupported parameter: '{name}'. {reason}", param=name)
    for name in shape.harmless:
        text = fields.get(name)
        if isinstance(text, str) and len(text) > NAME_CHARS:
            raise BadRequest(
                f"Invalid '{name}': it should have at most {NAME_CHARS} characters.",
                param=name,
                code="string_above_max_length",
            )
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
    for name, alias in part_fields(type(part)):
        value = getattr(part, name)
        if isinstance(value, Part):
            yield from _unknown_fields_of(value, f"{place}{alias}")
        elif isinstance(value, list):
            for i, item in enumerate(value):
                if isinstance(item, Part):
                    yield from _unknown_fields_of(item, f"{place}{alias}[{i}]")


@cache
def part_fields(shape: type[BaseModel]) -> tuple[tuple[str, str], ...]:
    """Return the names and the aliases of a model's fields that may hold parts."""
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
    if part.is_image:  # an image is refused or left out as a whole
        return
    if isinstance(part, Skipped):
        yield f"{place}.{part.type[:64]}"
        return
    unknown = (part.model_extra or {}).keys() - part.harmless
    ignored = unknown | (part.unread & part.model_fields_set)
    yield from (f"{place}.{name}" for name in sorted(ignored))
    yield from _unknown_fields(part, f"{place}.")


def _is_one_of(value: object, others: Iterable[object]) -> bool:
    # In Python, 1 equals True.
    return any(type(value) is type(other) and value == other for other in others)


def _parse(body: bytes | bytearray, max_depth: int) -> dict[str, Any]:
    try:
        value = parse(body, max_depth)
    except ValueError as error:
        # Clients that send a form by mistake get a clearer message than the parser's.
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


# OpenAI's codes, without `integer_` or `decimal_`, by pydantic's kind of error.
_VALUE_CODES = {
    "less_than_equal": "above_max_value",
    "less_than": "above_max_value",
    "greater_than_equal": "below_min_value",
    "greater_than": "below_min_value",
}
_LENGTH_CODES = {"too_long": "array_above_max_length", "too_short": "array_below_min_length"}
_EXPECTED = {
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
_GOT = {
    type(None): "null",
    bool: "a boolean",
    int: "an integer",
    float: "a decimal",
    str: "a string",
    list: "an array",
    dict: "an object",
}


def _bad_request(errors: Sequence[ErrorDetails]) -> BadRequest:
    param = _path(errors[0]["loc"])
    # A union has an error for each branch. The deepest error says most, and of two equally deep
    # errors the one that is not about a type.
    of_one_field = [error for error in errors if _path(error["loc"]).startswith(param)]
    error = max(
        of_one_field, key=lambda each: (len(_steps(each["loc"])), each["type"] not in _EXPECTED)
    )
    param = _path(error["loc"])
    kind, context, value = error["type"], error.get("ctx", {}), error["input"]
    if kind in _EXPECTED:
        here = [error["type"] for error in of_one_field if _path(error["loc"]) == param]
        expected = dict.fromkeys(_EXPECTED[kind] for kind in here if kind in _EXPECTED)
        return _wrong_type(param, value, list(expected))
    if kind == "missing":
        return missing_parameter(param)
    if kind == "extra_forbidden":
        return UnknownParameter(f"Unrecognized request argument: {param}", param=param)
    message, code = error["msg"].removeprefix("Value error, "), "invalid_value"
    if kind == "no_items":
        code = _LENGTH_CODES["too_short"]
    elif kind in _VALUE_CODES:
        code = f"integer_{_VALUE_CODES[kind]}"
        if any(isinstance(bound, float) for bound in context.values()):
            code = f"decimal_{_VALUE_CODES[kind]}"
    elif kind in _LENGTH_CODES:
        code = _LENGTH_CODES[kind]
        limit = f"at most {context.get('max_length')}"
        if kind == "too_short":
            limit = f"at least {context['min_length']}"
        message = f"it should have {limit} items, and has {context['actual_length']}"
    elif kind == "string_too_long":
        code = "string_above_max_length"
    # pydantic calls the value "Input" or "String".
    for start in ("Input should", "String should"):
        message = message.replace(start, "it should")
    if param:
        message = f"Invalid '{param}': {message[0].lower()}{message[1:]}."
    return BadRequest(message, param=param, code=code)


def _wrong_type(param: str, value: Any, expected: Sequence[str]) -> BadRequest:
    if isinstance(value, float) and abs(value) >= 2**63 and expected == ["an integer"]:
        # orjson reads an integer of more than 64 bits as a float.
        code = "integer_below_min_value" if value < 0 else "integer_above_max_value"
        return BadRequest(f"Invalid '{param}': it has more than 64 bits.", param=param, code=code)
    return BadRequest(
        f"Invalid type for '{param}': expected {' or '.join(expected)}, but got "
        f"{_GOT[type(value)]} instead.",
        param=param,
        code="invalid_type",
    )


def missing_parameter(param: str) -> BadRequest:
    return BadRequest(
        f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter"
    )


def require(value: V | None, param: str) -> V:
    """Return a field's value, or raise BadRequest if it is missing."""
    if value is None:
        raise missing_parameter(param)
    return value


def read_limit(query: Mapping[str, str], most: int) -> int:
    """Return the query's `limit`, 20 by default, or raise BadRequest."""
    text = query.get("limit", "20")
    if not (text.isascii() and text.isdigit() and len(text) < 6 and 1 <= int(text) <= most):
        raise BadRequest(f"Invalid 'limit': it should be 1 to {most}.", param="limit")
    return int(text)


def find_place(ids: Sequence[str], query: Mapping[str, str], name: str, noun: str) -> int:
    """Return the index in `ids` of the query's id, or raise BadRequest."""
    if query[name] not in ids:
        raise BadRequest(f"Invalid '{name}': there is no such {noun}.", param=name)
    return ids.index(query[name])


def _path(location: tuple[int | str, ...]) -> str:
    """Return a field's path as OpenAI writes it, such as messages[0].role."""
    path = ""
    for step in _steps(location):
        path += f"[{step}]" if isinstance(step, int) else f".{step}"
    return shorten(path.removeprefix("."))


def _steps(location: tuple[int | str, ...]) -> list[int | str]:
    """Return an error's location without the names of a union's branches."""
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
        lengths = [len(text) for text in texts]
        if any(length > self.text for length in lengths):
            raise BadRequest(f"{noun} is longer than {self.text} characters.", param=param)
        if sum(lengths) > self.request:
            raise BadRequest(
                f"'{param}' has more than {self.request} characters in all: send fewer at once.",
                param=param,
            )


def check_length(parts: Sequence[Any], max_chars: int, *, param: str) -> None:
    """Raise BadRequest if the text in the parts is too long."""
    # Each part may have 256 characters of braces and names, which do not count.
    body = orjson.dumps(parts, default=lambda part: part.model_dump())
    escapes = body.count(b"\\n") + body.count(b'\\"')  # each escape adds one character
    most = max_chars + 256 * len(parts) + escapes
    if len(body) > 4 * max_chars + escapes or len(body.decode()) > most:
        raise BadRequest(f"'{param}' is longer than {max_chars} characters.", param=param)


MAX_INPUTS = 2048  # OpenAI's limit
_Text = Annotated[str, Field(min_length=1)]
_Ids = Annotated[list[Annotated[int, Field(ge=0)]], FAIL_FAST, Field(min_length=1)]


def _read_inputs(value: object, read: ValidatorFunctionWrapHandler) -> list[Any]:
    try:
        inputs = read(value)
    except ValidationError:
        count = f", and has {len(value)} entries" if isinstance(value, list) else ""
        message = (
            f"it should be a string, an array of 1 to {MAX_INPUTS} non-empty strings, an array of "
            f"token ids, or an array of such arrays{count}"
        )
        if value == []:
            raise PydanticCustomError("no_items", "{message}", {"message": message}) from None
        raise ValueError(message) from None
    if isinstance(inputs, str) or isinstance(inputs[0], int):
        return [inputs]
    return list(inputs)


# One or more texts, or rows of token ids, as a list.
Inputs = Annotated[
    _Text
    | Annotated[list[_Text], FAIL_FAST, Field(min_length=1, max_length=MAX_INPUTS)]
    | _Ids
    | Annotated[list[_Ids], FAIL_FAST, Field(min_length=1, max_length=MAX_INPUTS)],
    WrapValidator(_read_inputs),
]
