"""What a Responses request reads: its input items → chat messages, and → items to be kept."""

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal, cast

import orjson
from pydantic import BeforeValidator, Field, field_validator
from typing_extensions import TypedDict

from gateway.errors import BadRequest, ResponseNotFound
from gateway.wire.bounds import FAST, FEW, Label, parse
from gateway.wire.messages import Function, Message, ToolCall
from gateway.wire.responses_tools import Place
from gateway.wire.validation import Part, missing

_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}
REFERENCE = "item_reference"
KINDS = (*_PREFIXES, REFERENCE)
TEXTS = ("input_text", "output_text", "text")


class InputPart(Part):
    """A piece of an item's content. Only text is served."""

    harmless = frozenset({"annotations", "logprobs", "prompt_cache_breakpoint"})

    type: Label = Field(json_schema_extra={"enum": [*TEXTS, "refusal"]})
    text: str | None = None
    refusal: str | None = None


def _as_parts(given: object) -> object:
    if given is None:
        return []
    return [{"type": "input_text", "text": given}] if isinstance(given, str) else given


Parts = Annotated[
    list[InputPart],
    FAST,
    BeforeValidator(_as_parts, json_schema_input_type=str | list[InputPart] | None),
]


class Item(Part):
    """A message, a call, a call's output, the reasoning of an earlier turn, or any of these by the
    id that an earlier answer gave it.
    """

    harmless = frozenset({"encrypted_content", "phase", "status", "summary"})

    id: Label | None = None
    type: Label = Field("message", json_schema_extra={"enum": list(KINDS)})
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Parts = Field(default_factory=list)
    call_id: Label | None = None
    name: Label | None = None
    namespace: Label | None = None
    arguments: str | None = None
    output: Parts = Field(default_factory=list)

    @field_validator("type")
    @classmethod
    def _kind_is_served(cls, given: str) -> str:
        if given not in KINDS:
            raise ValueError(f"items of type '{given}' are not served")
        return given

    @property
    def is_reference(self) -> bool:
        """Return True if the item stands for another; its type may be left out then."""
        return self.type == REFERENCE or self.model_fields_set <= {"id"}


def _as_items(given: object) -> object:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


Items = Annotated[
    list[Item],
    FAST,
    FEW,
    BeforeValidator(_as_items, json_schema_input_type=str | list[Item]),
    Field(min_length=1),
]


def resolved(items: Sequence[Item], find: Callable[[str], bytes | None]) -> list[Item]:
    """Return the items with each reference replaced by the item it names.

    Raises BadRequest for a reference without an id, ResponseNotFound for one that finds nothing.
    """
    whole = []
    for i, item in enumerate(items):
        if item.is_reference:
            name = _given(item.id, f"input[{i}].id")
            if (found := find(name)) is None:
                raise ResponseNotFound(
                    f"Item with id '{name}' not found.",
                    param=f"input[{i}].id",
                    code="item_not_found",
                )
            item = read_item(found)
        whole.append(item)
    return whole


def read_item(body: bytes) -> Item:
    """Read an item that was written before, by `written` or as part of an answer."""
    return Item.model_validate_json(body)


def written(items: Sequence[Item], taken: Iterable[str]) -> list[tuple[str, bytes]]:
    """Return each item's id and its JSON.

    An item gets an id here where the client gave none, or one that an earlier item or one of
    `taken` has: a page begins behind the item that its id names.
    """
    seen, pairs = set(taken), []
    for item in items:
        item_id = item.id
        if not item_id or item_id in seen:
            item_id = f"{_PREFIXES[item.type]}_{secrets.token_hex(16)}"
        seen.add(item_id)
        fields = item.model_dump(exclude_unset=True, exclude={"id"})
        pairs.append((item_id, orjson.dumps({"id": item_id, "type": item.type, **fields})))
    return pairs


class InputItem(TypedDict):
    """A piece of the conversation that a response answers, as it was sent."""

    id: str
    type: Literal["message", "function_call", "function_call_output", "reasoning"]


class InputItems(TypedDict):
    """A page of them, newest first unless asked otherwise."""

    object: Literal["list"]
    data: list[InputItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


def page(items: Sequence[tuple[str, bytes]], asked: Mapping[str, str]) -> InputItems:
    """Return one page of items, oldest last, as OpenAI lists them.

    `asked` may have `limit` (1 to 100, 20 by default), `order` (asc or desc) and `after`, the id of
    the item that the page begins behind. Raises BadRequest for anything else in these.
    """
    limit, order = asked.get("limit", "20"), asked.get("order", "desc")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:4]) <= 100):
        raise BadRequest("Invalid 'limit': it should be 1 to 100.", param="limit")
    if order not in ("asc", "desc"):
        raise BadRequest("Invalid 'order': it should be 'asc' or 'desc'.", param="order")
    ordered = list(items) if order == "asc" else list(reversed(items))
    start = 0
    if "after" in asked:
        ids = [item_id for item_id, _ in ordered]
        if asked["after"] not in ids:
            raise BadRequest("Invalid 'after': there is no such item.", param="after")
        start = ids.index(asked["after"]) + 1
    shown = ordered[start : start + int(limit)]
    return {
        "object": "list",
        "data": [cast(InputItem, orjson.Fragment(body)) for _, body in shown],
        "first_id": shown[0][0] if shown else None,
        "last_id": shown[-1][0] if shown else None,
        "has_more": len(ordered) > start + len(shown),
    }


def to_messages(
    instructions: str | None,
    items: Sequence[Item],
    *,
    earlier: int = 0,
    names: Mapping[Place, str] = MappingProxyType({}),
) -> list[Message]:
    """Give the conversation as chat messages, instructions first.

    The first `earlier` items are an earlier request's. `names` are those by which the model knows
    functions, where they are not their own. Calls join the assistant's turn they
    follow; earlier reasoning is left out, as templates leave it out. Raises BadRequest for what is
    missing or is not text.
    """
    messages = [Message(role="system", content=instructions)] if instructions else []
    called: dict[str, str] = {}
    for i, item in enumerate(items, -earlier):
        place = f"input[{i}]"
        match item.type:
            case "message":
                role: Any = _given(item.role, f"{place}.role")
                if role == "user" and "content" not in item.model_fields_set:
                    _given(None, f"{place}.content")
                messages.append(Message(role=role, content=_text(item.content, place)))
            case "function_call":
                call = _call(item, place, names)
                called[call.id or ""] = call.function.name
                _join(messages, call)
            case "function_call_output":
                call_id = _given(item.call_id, f"{place}.call_id")
                messages.append(
                    Message(
                        role="tool",
                        content=_text(item.output, place, "output"),
                        tool_call_id=call_id,
                        name=called.get(call_id, item.name),
                    )
                )
    if not messages:
        raise BadRequest("Invalid 'input': it has no messages.", param="input")
    return messages


def _call(item: Item, place: str, names: Mapping[Place, str]) -> ToolCall:
    call_id = _given(item.call_id, f"{place}.call_id")
    own = _given(item.name, f"{place}.name")
    name = names.get((item.namespace, own), own)
    arguments = item.arguments or "{}"
    try:
        parse(arguments.encode())
    except ValueError:
        raise BadRequest(
            f"Invalid '{place}.arguments': the arguments of '{name}' are not JSON.",
            param=f"{place}.arguments",
        ) from None
    return ToolCall(id=call_id, function=Function(name=name, arguments=arguments))


def _join(messages: list[Message], call: ToolCall) -> None:
    if not messages or messages[-1].role != "assistant":
        messages.append(Message(role="assistant", tool_calls=[call]))
    elif (calls := messages[-1].tool_calls) is not None:
        calls.append(call)
    else:
        messages[-1] = messages[-1].model_copy(update={"tool_calls": [call]})


def _given(value: str | None, param: str) -> str:
    if not value:
        raise missing(param)
    return value


def _text(parts: list[InputPart], place: str, name: str = "content") -> str:
    texts = []
    for i, part in enumerate(parts):
        if part.type not in (*TEXTS, "refusal"):
            raise BadRequest(
                f"Invalid '{place}.{name}': a part of type '{part.type}' is not served; "
                "this gateway reads text.",
                param=f"{place}.{name}",
            )
        field = "refusal" if part.type == "refusal" else "text"
        text = part.refusal if field == "refusal" else part.text
        if text is None:
            raise missing(f"{place}.{name}[{i}].{field}")
        texts.append(text)
    return "".join(texts)
