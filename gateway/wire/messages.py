"""Converts chat messages and tool calls to the form that chat templates read."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import ConfigDict, Field, JsonValue, Tag, model_validator
from pydantic_core import from_json

from gateway.errors import BadRequest
from gateway.wire.bounds import FAIL_FAST, ITEM_LIMIT, MAX_PARTS, Label, parse
from gateway.wire.images import REFUSING, ImageReader, show_image_fields
from gateway.wire.validation import (
    FILE_TYPES,
    IMAGE_TYPES,
    KNOWN,
    OTHER,
    Part,
    Skipped,
    by_type,
    require,
)

Role = Literal["developer", "system", "user", "assistant", "tool", "function"]


_TYPES: list[JsonValue] = ["text", "refusal", "image_url", "input_image"]


class ContentPart(Part):
    """A piece of a message's content: text or an image."""

    model_config = ConfigDict(json_schema_extra=show_image_fields)
    harmless = frozenset({"annotations", "cache_control", "logprobs", "prompt_cache_breakpoint"})

    # The name of the text's field, by type of part.
    fields: ClassVar[Mapping[str, str]] = {"text": "text", "refusal": "refusal"}

    type: Label = Field(json_schema_extra={"enum": _TYPES})
    text: str | None = None
    refusal: str | None = None


class OtherContentPart(Skipped):
    """A piece of a message that the gateway does not read."""

    type: Annotated[Label, Field(json_schema_extra={"not": {"enum": _TYPES}})]


Contents = Annotated[
    list[
        Annotated[
            Annotated[ContentPart, Tag(KNOWN)] | Annotated[OtherContentPart, Tag(OTHER)],
            by_type(dict.fromkeys((*ContentPart.fields, *IMAGE_TYPES, *FILE_TYPES), KNOWN)),
        ]
    ],
    FAIL_FAST,
    ITEM_LIMIT,
]


class Function(Part):
    """A function's name and its arguments, as a JSON string or as an object."""

    name: Label
    arguments: Annotated[Any, Field(json_schema_extra={"type": "string"})] = ""

    @property
    def unread(self) -> frozenset[str]:
        """Return the ignored field: `arguments`, unless they are an object."""
        return frozenset({"arguments"} if parse_object(self.arguments) is None else ())


class ToolCall(Part):
    """A call that the assistant made in an earlier turn."""

    harmless = frozenset({"custom", "index"})

    id: Label | None = None
    type: Label = "function"
    function: Function

    @model_validator(mode="before")
    @classmethod
    def _read_custom(cls, call: Any) -> Any:
        custom = call.get("custom") if isinstance(call, dict) else None
        if not isinstance(custom, dict) or call.get("function") is not None:
            return call
        arguments = {"input": custom.get("input")}
        return {**call, "function": {"name": custom.get("name"), "arguments": arguments}}


Thoughts = Annotated[Any, Field(json_schema_extra={"type": "string"})]


class Message(Part):
    """One message of a conversation, as a client sends it."""

    harmless = frozenset({"annotations", "refusal"})

    role: Role
    content: str | Contents | None = None
    name: Label | None = None
    tool_calls: Annotated[list[ToolCall], FAIL_FAST, ITEM_LIMIT] | None = None
    tool_call_id: Label | None = None
    prefix: bool | None = None  # Mistral's and DeepSeek's field: continue this message
    reasoning_content: Thoughts = None
    reasoning: Thoughts = None  # vLLM's and OpenRouter's name of `reasoning_content`

    @property
    def has_text(self) -> bool:
        if self.content is None or isinstance(self.content, str):
            return bool(self.content)
        texts = (part for part in self.content if isinstance(part, ContentPart))
        return any(part.text or part.refusal for part in texts)

    @property
    def thoughts(self) -> str:
        texts = (self.reasoning_content, self.reasoning) if self.role == "assistant" else ()
        given = [text for text in texts if text and isinstance(text, str)]
        return next(filter(str.strip, given), "".join(given[:1]))

    @property
    def unread(self) -> frozenset[str]:
        fields = {"reasoning_content": self.reasoning_content, "reasoning": self.reasoning}
        return frozenset(name for name, value in fields.items() if value and value != self.thoughts)


def is_continuation(messages: Sequence[Message], *, requested: bool) -> bool:
    """Return True if the answer continues the last message.

    Raises BadRequest if that message cannot be continued.
    """
    *earlier, last = messages
    for i, message in enumerate(earlier):
        if message.prefix:
            place = f"messages[{i}].prefix"
            raise BadRequest(
                f"Invalid '{place}': only the last message can begin the answer.", param=place
            )
    if not (requested or last.prefix):
        return False
    place = f"messages[{len(earlier)}]"
    if last.role != "assistant" or last.tool_calls or not last.has_text:
        raise BadRequest(
            f"Invalid '{place}': an answer is continued from an assistant's message that has text "
            "and no 'tool_calls'.",
            param=place,
        )
    return True


def to_template(messages: list[Message], images: ImageReader = REFUSING) -> list[dict[str, Any]]:
    """Return one or more turns for chat templates, with a placeholder word for each image.

    Raises BadRequest for content that is not served.
    """
    # Many templates allow only one system turn, at the start, and no two user turns in a row.
    turns = [_turn(message, f"messages[{i}]", images) for i, message in enumerate(messages)]
    system = "\n\n".join(turn["content"] for turn in turns if turn["role"] == "system")
    template_turns: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    rest_turns = (turn for turn in turns if turn["role"] != "system")
    for role, turns_of_role in groupby(rest_turns, key=itemgetter("role")):
        if role != "user":
            template_turns += turns_of_role
            continue
        first, *rest = turns_of_role
        if rest:
            first["content"] = "\n\n".join(turn["content"] for turn in (first, *rest))
        template_turns.append(first)
    return template_turns or [{"role": "system", "content": ""}]


def _turn(message: Message, place: str, images: ImageReader) -> dict[str, Any]:
    role = {"developer": "system", "function": "tool"}.get(message.role, message.role)
    if message.role == "user":
        require(message.content, f"{place}.content")
    turn: dict[str, Any] = {"role": role, "content": _text(message, place, images)}
    if message.thoughts:
        turn["reasoning_content"] = message.thoughts
    if message.name is not None:
        turn["name"] = message.name
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": read_arguments(call.function.arguments),
                },
            }
            for call in message.tool_calls
        ]
    return turn


def _text(message: Message, place: str, images: ImageReader) -> str:
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    is_earlier = message.role in ("assistant", "tool", "function")
    parts, role = message.content, message.role
    return join_texts(parts, f"{place}.content", role, skips=is_earlier, images=images)


def join_texts(
    parts: Sequence[ContentPart | Skipped],
    place: str,
    role: str = "user",
    *,
    skips: bool = False,
    images: ImageReader = REFUSING,
) -> str:
    """Return the text of all parts, with a placeholder word for each image.

    Raises BadRequest for other parts. With `skips`, parts of unknown types are left out instead.
    """
    texts = []
    for i, part in enumerate(parts):
        if part.is_image:
            texts.append(images.word(part, f"{place}[{i}]", role, param=place))
            continue
        if isinstance(part, Skipped) and skips:
            continue
        if isinstance(part, Skipped) or part.type not in part.fields:
            raise BadRequest(
                f"Invalid '{place}[{i}]': a part of type '{part.type}' is not served; "
                "text and images are.",
                param=f"{place}[{i}]",
            )
        field = part.fields[part.type]
        value = require(getattr(part, field), f"{place}[{i}].{field}")
        texts.append(value if isinstance(value, str) else orjson.dumps(value).decode())
    return "".join(texts)


def parse_object(given: object) -> dict[str, Any] | None:
    """Return an object that is given as a dict or as JSON, or None for any other value."""
    if isinstance(given, str):
        try:
            given = parse(given.encode() or b"{}")
        except ValueError:
            return None
    return given if isinstance(given, dict) else None


def read_arguments(given: object) -> dict[str, Any]:
    """Return the arguments of an earlier call, by name.

    JSON that was cut off is completed. A value that is no object becomes the argument `input`.
    """
    value = given
    if isinstance(given, str):
        value = parse_object(given)
        if value is None:
            value = _repair(given)
    if isinstance(value, str):  # the JSON may be encoded twice
        inner = parse_object(value)
        value = value if inner is None else inner
    if isinstance(value, dict):
        return value
    return {} if value in (None, "", []) else {"input": value}


def _repair(json: str) -> Any:
    """Parse JSON that may be cut off, or return a text that is not JSON."""
    is_partial = json.lstrip().startswith("{")
    if json.count(":") + json.count("[") + json.count("{") > MAX_PARTS:
        return json
    try:
        value = from_json(json, allow_partial="trailing-strings" if is_partial else False)
        return parse(orjson.dumps(value))
    except (ValueError, TypeError):
        return json
