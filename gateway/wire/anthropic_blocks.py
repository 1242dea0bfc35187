"""Converts the content blocks of a Messages request to turns for chat templates."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, takewhile
from operator import itemgetter
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, Tag

from gateway.errors import BadRequest
from gateway.wire.bounds import FAIL_FAST, ITEM_LIMIT, Label
from gateway.wire.images import REFUSING, ImageReader
from gateway.wire.messages import read_arguments
from gateway.wire.validation import IMAGE_TYPES, KNOWN, OTHER, Part, Skipped, by_type, require

# Claude Code's first system block begins with this text. The block changes with every session, so
# prompts with the block would share no prefix.
NOT_FOR_MODELS = "x-anthropic-billing-header:"
_HINTS = frozenset({"cache_control", "citations"})
_READABLE = ("text", "document", "search_result")
RESULT_PARTS = (*_READABLE, "tool_reference")
BLOCKS = (
    *(*_READABLE, "thinking", "redacted_thinking", "tool_use", "tool_result"),
    "compaction",  # a summary of earlier turns
)


class TextPart(Part):
    """A text in the system prompt, a document or a search result."""

    harmless = _HINTS

    type: Label = Field(json_schema_extra={"enum": ["text"]})
    text: str | None = None


Texts = Annotated[list[TextPart], FAIL_FAST, ITEM_LIMIT]


SourceType = Annotated[Label, Field(json_schema_extra={"enum": ["text", "content", "base64"]})]


class DocumentSource(Part):
    """The text of a document, in `data` or in `content`, or an image in base64."""

    harmless = frozenset({"media_type"})

    type: SourceType | None = None
    data: str | None = None
    content: str | Texts | None = None


class Readable(Part):
    """A text, a document of text, or a search result."""

    harmless = _HINTS

    type: Label = Field(json_schema_extra={"enum": list(_READABLE)})
    text: str | None = None
    title: str | None = None
    context: str | None = None
    source: str | DocumentSource | None = None  # a search result's source is an address


class ResultPart(Readable):
    """A piece of a tool's result."""

    type: Label = Field(json_schema_extra={"enum": [*RESULT_PARTS, "image"]})
    content: Texts | None = None
    tool_name: Label | None = None


class OtherPart(Skipped):
    """A piece of a tool's result that the gateway does not read."""

    type: Annotated[Label, Field(json_schema_extra={"not": {"enum": [*RESULT_PARTS, "image"]}})]


ResultParts = Annotated[
    list[
        Annotated[
            Annotated[ResultPart, Tag(KNOWN)] | Annotated[OtherPart, Tag(OTHER)],
            by_type(dict.fromkeys((*RESULT_PARTS, *IMAGE_TYPES), KNOWN)),
        ]
    ],
    FAIL_FAST,
    ITEM_LIMIT,
]


class InputBlock(Readable):
    """A piece of a message: text, thinking, a tool call, its result, or a summary."""

    harmless = _HINTS | {"caller", "data", "is_error", "signature"}

    type: Label = Field(json_schema_extra={"enum": [*BLOCKS, "image"]})
    thinking: str | None = None
    id: Label | None = None
    name: Label | None = None
    input: Annotated[Any, Field(json_schema_extra={"type": "object"})] = None
    tool_use_id: Label | None = None
    content: str | ResultParts | None = None

    @property
    def unread(self) -> frozenset[str]:
        """Return the ignored field: `input`, unless it is an object."""
        return frozenset(() if isinstance(self.input, dict) else {"input"})


class OtherBlock(Skipped):
    """A piece of a message that the gateway does not read."""

    type: Annotated[Label, Field(json_schema_extra={"not": {"enum": [*BLOCKS, "image"]}})]


Block = Annotated[
    Annotated[InputBlock, Tag(KNOWN)] | Annotated[OtherBlock, Tag(OTHER)],
    by_type(dict.fromkeys((*BLOCKS, *IMAGE_TYPES), KNOWN)),
]


class InputMessage(Part):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], FAIL_FAST, ITEM_LIMIT]


SystemPrompt = str | Texts


class _Placed(NamedTuple):
    role: str
    place: str
    block: InputBlock


def is_continuation(messages: Sequence[InputMessage], images: ImageReader = REFUSING) -> bool:
    """Return True if the last turn is an assistant's text, which the answer continues.

    Raises BadRequest if the assistant's last turn has calls, or neither text nor thinking.
    """
    placed = list(_placed(messages, images))
    if not placed or placed[-1].role != "assistant":
        return False
    last = takewhile(lambda each: each.role == "assistant", reversed(placed))
    blocks = [placed_block.block for placed_block in last]
    place = placed[-1].place.partition(".")[0]
    if any(block.type == "tool_use" for block in blocks):
        raise BadRequest(
            f"Invalid '{place}': the results of its calls have to follow.", param=place
        )
    if any(block.type == "text" and block.text for block in blocks):
        return True
    if not any("thinking" in block.type for block in blocks):
        raise BadRequest(f"Invalid '{place}': it has no text to continue from.", param=place)
    return False  # thinking alone is not continued


def to_turns(
    system: SystemPrompt | None, messages: Sequence[InputMessage], images: ImageReader = REFUSING
) -> list[dict[str, Any]]:
    """Return the turns that chat templates read, with a placeholder word for each image.

    Raises BadRequest for a block that is not served, and for a conversation without content.
    """
    # Consecutive messages of one role become one turn, but each call's result is a separate turn.
    turns: list[dict[str, Any]] = []
    prompt = _system_text(system, images)
    if prompt:
        turns.append({"role": "system", "content": prompt})
    names: dict[str, str] = {}  # function names by call id
    for role, placed in groupby(_placed(messages, images), key=lambda each: each.role):
        if role == "assistant":
            turns.append(_assistant_turn(list(placed), names))
        elif role == "user":
            turns += _user_turns(list(placed), names, images)
        else:
            text = _join(_require(block, "text") for block in placed)
            if turns and turns[-1]["role"] == "system":
                text = _join((turns.pop()["content"], text))
            turns.append({"role": "system", "content": text})
    if not turns:
        raise BadRequest("Invalid 'messages': they have no content.", param="messages")
    return turns


def _blocks(content: str | list[Block]) -> list[Block]:
    return [InputBlock(type="text", text=content)] if isinstance(content, str) else content


def _placed(messages: Sequence[InputMessage], images: ImageReader) -> Iterator[_Placed]:
    allowed = {
        "user": (*_READABLE, "tool_result"),
        "assistant": ("text", "thinking", "redacted_thinking", "tool_use", "compaction"),
        "system": ("text",),
    }
    for i, message in enumerate(messages):
        for j, block in enumerate(_blocks(message.content)):
            place = f"messages[{i}].content[{j}]"
            if isinstance(block, OtherBlock):
                continue
            if block.type == "image":
                images.check(block.type, place, message.role)
            elif block.type not in allowed[message.role]:
                raise _not_served(block.type, place, f"in a message of the {message.role}")
            # A summary becomes a user's text, like the summaries that clients write themselves.
            if block.type != "compaction":
                yield _Placed(message.role, place, block)
            elif block.content:
                yield _Placed("user", place, block)


def _not_served(kind: str, place: str, where: str) -> BadRequest:
    return BadRequest(
        f"Invalid '{place}': a block of type '{kind[:64]}' is not served {where}; "
        "text and images are.",
        param=place,
    )


def _system_text(system: SystemPrompt | None, images: ImageReader) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    texts = _texts(system, "system", images)
    return _join(text for text in texts if not text.startswith(NOT_FOR_MODELS))


def _text_of(block: InputBlock | ResultPart, place: str, role: str, images: ImageReader) -> str:
    if block.type == "image":
        return images.word(block, place, role)
    if block.type == "text":
        return require(block.text, f"{place}.text")
    if block.type == "compaction":
        return _content_text(block.content, place, "assistant", images)
    source = block.source
    if block.type == "search_result":
        address = source if isinstance(source, str) else None
        content, field = block.content, f"{place}.content"
    elif isinstance(source, DocumentSource) and source.type in ("text", "content"):
        address, field = block.context, f"{place}.source.data"
        content = source.data
        if source.type == "content":
            content, field = source.content, f"{place}.source.content"
    else:
        raise _not_served(block.type, place, "unless its source is text")
    texts = (
        [content] if isinstance(content, str) else _texts(require(content, field), field, images)
    )
    return "\n".join(filter(None, (block.title, address, _join(texts))))


def _texts(
    parts: Sequence[TextPart | ResultPart | OtherPart], place: str, images: ImageReader
) -> list[str]:
    texts = []
    for i, part in enumerate(parts):
        if part.type == "image":
            images.check(part.type, f"{place}[{i}]", "document")
        if isinstance(part, OtherPart) or part.type != "text":
            raise _not_served(part.type, f"{place}[{i}]", "there")
        texts.append(require(part.text, f"{place}[{i}].text"))
    return texts


def _join(texts: Iterator[str] | Sequence[str]) -> str:
    return "\n\n".join(text for text in texts if text)


def _join_content(content: Iterable[tuple[bool, str]]) -> str:
    """Join pairs of (is an image, text), with an empty line only between two texts."""
    runs = groupby(content, key=itemgetter(0))
    return "".join(
        ("" if is_image else "\n\n").join(text for _, text in run if text) for is_image, run in runs
    )


def _require(placed: _Placed, field: Literal["text", "id", "name"]) -> str:
    value: str | None = getattr(placed.block, field)
    return require(value, f"{placed.place}.{field}")


def _assistant_turn(placed: Sequence[_Placed], names: dict[str, str]) -> dict[str, Any]:
    """Return an assistant's turn, and add the names of its calls to `names`."""
    texts, thinking, calls = [], [], []
    for placed_block in placed:
        block = placed_block.block
        if block.type == "text":
            texts.append(_require(placed_block, "text"))
        elif block.type == "thinking":
            thinking.append(block.thinking or "")
        elif block.type == "tool_use":
            call_id, name = _require(placed_block, "id"), _require(placed_block, "name")
            names[call_id] = name
            function = {"name": name, "arguments": read_arguments(block.input)}
            calls.append({"id": call_id, "type": "function", "function": function})
    turn: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    # The chat template decides which thinking the model reads again.
    if any(thinking):
        turn["reasoning_content"] = "".join(thinking)
    if calls:
        turn["tool_calls"] = calls
    return turn


def _user_turns(
    placed: Sequence[_Placed], names: dict[str, str], images: ImageReader
) -> Iterator[dict[str, Any]]:
    for is_result, run in groupby(placed, key=lambda each: each.block.type == "tool_result"):
        if is_result:
            for result in run:
                yield _result_turn(result, names, images)
        else:
            content = [
                (each.block.is_image, _text_of(each.block, each.place, "user", images))
                for each in run
            ]
            yield {"role": "user", "content": _join_content(content)}


def _result_turn(placed: _Placed, names: dict[str, str], images: ImageReader) -> dict[str, Any]:
    block, place = placed.block, placed.place
    call_id = require(block.tool_use_id, f"{place}.tool_use_id")
    text = _content_text(block.content, place, "tool", images)
    turn = {"role": "tool", "content": text, "tool_call_id": call_id}
    # A result's call may be missing, since some clients shorten their history.
    return {**turn, "name": names[call_id]} if call_id in names else turn


def _content_text(
    content: str | Sequence[TextPart | ResultPart | OtherPart] | None,
    place: str,
    role: str,
    images: ImageReader,
) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for i, part in enumerate(content):
        if part.type in IMAGE_TYPES - {"image"}:
            raise _not_served(part.type, f"{place}.content[{i}]", "there")
        if part.type == "tool_reference":
            texts.append((False, getattr(part, "tool_name", None) or ""))
        elif isinstance(part, ResultPart):
            text = _text_of(part, f"{place}.content[{i}]", role, images)
            texts.append((part.is_image, text))
    return _join_content(texts)
