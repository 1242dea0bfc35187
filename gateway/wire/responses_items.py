"""Reads, converts and stores the input items of a Responses request."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple, cast

import orjson
from pydantic import BeforeValidator, Field, JsonValue, Tag, TypeAdapter
from typing_extensions import TypedDict

from gateway.errors import BadRequest, ResponseNotFound
from gateway.ids import new_id
from gateway.wire.bounds import FAIL_FAST, ITEM_LIMIT, Label
from gateway.wire.images import REFUSING, ImageReader
from gateway.wire.messages import (
    ContentPart,
    Function,
    Message,
    ToolCall,
    join_texts,
    parse_object,
    read_arguments,
)
from gateway.wire.tools import QualifiedName
from gateway.wire.validation import (
    FILE_TYPES,
    IMAGE_TYPES,
    KNOWN,
    OTHER,
    Part,
    Skipped,
    by_type,
    find_place,
    missing_parameter,
    read_limit,
    require,
)

_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}
REFERENCE = "item_reference"
# The field with a call's arguments and the call's default name, by type of call.
_CALLS: Final[Mapping[str, tuple[str, str | None]]] = {
    "function_call": ("arguments", None),
    "custom_tool_call": ("input", None),
    "local_shell_call": ("action", "local_shell"),
    "apply_patch_call": ("operation", "apply_patch"),
}
_OUTPUTS = tuple(f"{call}_output" for call in _CALLS)
KINDS = ("message", "reasoning", *_CALLS, *_OUTPUTS, REFERENCE)
TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


_TYPES: list[JsonValue] = [*TEXTS, "refusal", "input_image"]


class InputPart(ContentPart):
    """A piece of an item's content: text or an image."""

    harmless = frozenset({"annotations", "logprobs", "prompt_cache_breakpoint"})
    fields: ClassVar[Mapping[str, str]] = {**dict.fromkeys(TEXTS, "text"), "refusal": "refusal"}

    type: Label = Field(json_schema_extra={"enum": _TYPES})


def as_parts(value: object) -> object:
    """Wrap each text in a part, and return other values unchanged."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        return value
    return [
        {"type": "input_text", "text": each} if isinstance(each, str) else each for each in value
    ]


class OtherInputPart(Skipped):
    """A piece of an item's content that the gateway does not read."""

    type: Annotated[Label, Field(json_schema_extra={"not": {"enum": _TYPES}})]


Parts = Annotated[
    list[
        Annotated[
            Annotated[InputPart, Tag(KNOWN)] | Annotated[OtherInputPart, Tag(OTHER)],
            by_type(dict.fromkeys((*InputPart.fields, *IMAGE_TYPES, *FILE_TYPES), KNOWN)),
        ]
    ],
    FAIL_FAST,
    BeforeValidator(as_parts, json_schema_input_type=str | list[InputPart] | None),
]


class Item(Part):
    """A message, a call, a call's output, or the reasoning of an earlier turn."""

    harmless = frozenset({"encrypted_content", "phase", "status"})

    # An item that has only an id refers to an item of an earlier response.
    id: Label | None = None
    type: Label = Field("message", json_schema_extra={"enum": list(KINDS)})
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Parts = Field(default_factory=list)
    call_id: Label | None = None
    name: Label | None = None
    namespace: Label | None = None
    arguments: Annotated[Any, Field(json_schema_extra={"type": "string"})] = None
    input: Annotated[Any, Field(json_schema_extra={"type": "string"})] = None
    action: Annotated[Any, Field(json_schema_extra={"type": "object"})] = None
    operation: Annotated[Any, Field(json_schema_extra={"type": "object"})] = None
    output: Parts = Field(default_factory=list)
    summary: Parts = Field(default_factory=list)

    @property
    def unread(self) -> frozenset[str]:
        """Count `arguments` as ignored unless they are an object."""
        is_object = parse_object(self.arguments or "") is not None
        return frozenset(() if is_object else {"arguments"})

    @property
    def is_reference(self) -> bool:
        """Return True if the item only refers to an earlier item by id."""
        return self.type == REFERENCE or self.model_fields_set <= {"id"}


class OtherItem(Skipped):
    """An item that the gateway does not read."""

    id: Label | None = None
    type: Annotated[Label, Field(json_schema_extra={"not": {"enum": list(KINDS)}})]


AnyItem = Annotated[
    Annotated[Item, Tag(KNOWN)] | Annotated[OtherItem, Tag(OTHER)],
    by_type(dict.fromkeys(KINDS, KNOWN)),
]
# A byte that never occurs in JSON, in place of an image's text in a stored item.
_MARK = b"\0"
PAGE_BYTES = 1 << 25  # the most JSON in a page of several items
_STORED: Final[TypeAdapter[Item | OtherItem]] = TypeAdapter(AnyItem)


def as_items(value: object) -> object:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    return value


Items = Annotated[
    list[AnyItem],
    FAIL_FAST,
    ITEM_LIMIT,
    BeforeValidator(as_items, json_schema_input_type=str | list[AnyItem]),
    Field(min_length=1),
]


def resolve_references(
    items: Sequence[AnyItem], find: Callable[[str], AnyItem | None]
) -> list[AnyItem]:
    """Replace each reference by the item that has its id.

    Raises BadRequest for a reference without an id, ResponseNotFound for an unknown id.
    """
    whole_items = []
    for i, item in enumerate(items):
        if isinstance(item, Item) and item.is_reference:
            item_id = require(item.id or None, f"input[{i}].id")
            found = find(item_id)
            if found is None:
                raise ResponseNotFound(
                    f"Item with id '{item_id}' not found.",
                    param=f"input[{i}].id",
                    code="item_not_found",
                )
            item = found
        whole_items.append(item)
    return whole_items


class DumpedItem(NamedTuple):
    """An item as JSON, with the texts of its images kept apart."""

    id: str
    body: bytes
    images: Sequence[str] = ()

    @property
    def nbytes(self) -> int:
        """Return the approximate size of the whole JSON."""
        return len(self.body) + sum(map(len, self.images))

    def to_json(self) -> bytes:
        first, *rest = self.body.split(_MARK)
        pairs = zip(map(orjson.dumps, self.images), rest, strict=True)
        return b"".join((first, *chain.from_iterable(pairs)))


def _find_images(fields: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the dict and the key that hold the text of each image."""
    lists = [fields.get(name) for name in ("content", "output")]
    for part in chain.from_iterable(each for each in lists if isinstance(each, list)):
        if isinstance(part, dict) and part.get("type") in [*IMAGE_TYPES]:
            url = part.get("image_url")
            holder, key = (url, "url") if isinstance(url, dict) else (part, "image_url")
            if isinstance(holder.get(key), str):
                yield holder, key


def read_item(body: bytes, images: Sequence[str] = ()) -> AnyItem:
    fields = orjson.loads(body.replace(_MARK, b'""'))
    for (holder, key), image in zip(_find_images(fields), images, strict=bool(images)):
        holder[key] = image
    return _STORED.validate_python(fields)


def dump_items(items: Sequence[AnyItem], used_ids: Iterable[str]) -> list[DumpedItem]:
    # Ids have to be unique, since a page starts after an id.
    seen_ids, dumped = set(used_ids), []
    for item in items:
        item_id = item.id
        if not item_id or item_id in seen_ids:
            item_id = new_id(_PREFIXES.get(item.type, "item"), 16)
        seen_ids.add(item_id)
        fields = item.model_dump(exclude_unset=True, exclude={"id"})
        # Some clients refer to a call by its item's id, which may have been replaced above.
        if item.type in (*_CALLS, *_OUTPUTS):
            fields["call_id"] = fields.get("call_id") or item.id
        images = []
        for holder, key in _find_images(fields):
            images.append(holder[key])
            holder[key] = orjson.Fragment(_MARK)
        body = orjson.dumps({"id": item_id, "type": item.type, **fields})
        dumped.append(DumpedItem(item_id, body, images))
    return dumped


class InputItem(TypedDict):
    """An input item, as it was sent."""

    id: str
    type: str


class InputItems(TypedDict):
    """A page of input items, newest first by default."""

    object: Literal["list"]
    data: list[InputItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


def page(items: Sequence[DumpedItem], query: Mapping[str, str]) -> InputItems:
    """Return one page of items, newest first by default.

    Raises BadRequest for a bad `limit` (1 to 100), `order` (asc or desc) or `after` (an id).
    """
    limit, order = read_limit(query, 100), query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise BadRequest("Invalid 'order': it should be 'asc' or 'desc'.", param="order")
    ordered_items = list(items) if order == "asc" else list(reversed(items))
    start = 0
    if "after" in query:
        ids = [item.id for item in ordered_items]
        start = find_place(ids, query, "after", "item") + 1
    page_items = ordered_items[start : start + limit]
    # Items may share one large image, which the page repeats for each item.
    sizes = accumulate(item.nbytes for item in page_items)
    page_items = page_items[: max(1, sum(size <= PAGE_BYTES for size in sizes))]
    return {
        "object": "list",
        "data": [cast(InputItem, orjson.Fragment(item.to_json())) for item in page_items],
        "first_id": page_items[0].id if page_items else None,
        "last_id": page_items[-1].id if page_items else None,
        "has_more": len(ordered_items) > start + len(page_items),
    }


def to_messages(
    instructions: str | None,
    items: Sequence[AnyItem],
    *,
    earlier: int = 0,
    names: Mapping[QualifiedName, str] = MappingProxyType({}),
    images: ImageReader = REFUSING,
) -> list[Message]:
    """Return the conversation as chat messages, instructions first.

    The first `earlier` items come from an earlier response; `names` has the model's names of
    functions. Raises BadRequest for missing fields and for content that is not read.
    """
    messages = [Message(role="system", content=instructions)] if instructions else []
    read = partial(join_texts, images=images)
    call_names: dict[str, str] = {}
    call_ids: dict[str, str | None] = {}
    # Errors number the request's own items from 0.
    for i, item in enumerate(items, -earlier):
        place = f"input[{i}]"
        if isinstance(item, OtherItem):
            continue
        match item.type:
            case "reasoning":
                thoughts = read(item.content, f"{place}.content", "assistant", skips=True)
                thoughts = thoughts or read(
                    item.summary, f"{place}.summary", "assistant", skips=True
                )
                if thoughts:
                    messages.append(Message(role="assistant", reasoning_content=thoughts))
            case "message":
                role: Any = require(item.role, f"{place}.role")
                if role == "user" and "content" not in item.model_fields_set:
                    raise missing_parameter(f"{place}.content")
                is_earlier = role == "assistant"
                content = read(item.content, f"{place}.content", role, skips=is_earlier)
                messages.append(Message(role=role, content=content))
            case call_type if call_type in _CALLS:
                call = _call(item, place, names)
                call_ids |= dict.fromkeys(filter(None, (item.id, item.call_id)), call.id)
                call_names[call.id or ""] = call.function.name
                messages.append(Message(role="assistant", tool_calls=[call]))
            case output_type if output_type in _OUTPUTS:
                given = require(item.call_id or item.id or None, f"{place}.call_id")
                call_id = call_ids.get(given) or given  # some clients send the item's id instead
                messages.append(
                    Message(
                        role="tool",
                        content=read(item.output, f"{place}.output", "tool", skips=True),
                        tool_call_id=call_id,
                        name=call_names.get(call_id, item.name),
                    )
                )
    if not messages:
        raise BadRequest("Invalid 'input': it has no messages.", param="input")
    turns: list[list[Message]] = []
    has_text = False  # whether any part of the last turn has one
    for message in messages:
        turn = turns[-1] if turns else []
        is_part = bool(turn) and turn[-1].role == message.role == "assistant"
        # A text right after a text begins another message, and so does a thought after any text.
        is_next = has_text and (message.thoughts or (message.content and turn[-1].content))
        if is_part and not is_next:
            turn.append(message)
            has_text = has_text or bool(message.content)
        else:
            turns.append([message])
            has_text = bool(message.content)
    return [_joined(turn) if len(turn) > 1 else turn[0] for turn in turns]


def _call(item: Item, place: str, names: Mapping[QualifiedName, str]) -> ToolCall:
    call_id = require(item.call_id or item.id or None, f"{place}.call_id")
    field, own_name = _CALLS[item.type]
    function = require(item.name or own_name, f"{place}.name")
    given = getattr(item, field)
    arguments = {"input": given or ""} if field == "input" else read_arguments(given)
    json = orjson.dumps(arguments).decode()
    name = names.get((item.namespace, function), function)
    return ToolCall(id=call_id, function=Function(name=name, arguments=json))


def _joined(said: Sequence[Message]) -> Message:
    return Message(
        role="assistant",
        content="".join(each.content for each in said if isinstance(each.content, str)),
        reasoning_content="".join(each.thoughts for each in said),
        tool_calls=[call for each in said for call in each.tool_calls or ()] or None,
    )
