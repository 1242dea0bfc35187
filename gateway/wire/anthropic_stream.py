"""Writes the answer of a Messages request as content blocks, streamed or whole."""

import base64
import hashlib
import secrets
from typing import Any, Literal, NotRequired, cast

import orjson
from typing_extensions import TypeAliasType, TypedDict

from gateway.errors import GatewayError
from gateway.jobs.chat import Delta, FinishReason, Usage
from gateway.wire.answers import Answer, Block, BlockKind, BlockWriter, Event
from gateway.wire.anthropic import (
    AnthropicErrorBody,
    AnthropicMessage,
    ContentBlock,
    MessageUsage,
    StopReason,
    Thoughts,
    error_body,
    usage_dict,
)
from gateway.wire.generation import SchemaVerdict


class MessageStart(TypedDict):
    """The first event, which has the message without content."""

    type: Literal["message_start"]
    message: AnthropicMessage


class ContentBlockStart(TypedDict):
    """The start of a content block, before its content."""

    type: Literal["content_block_start"]
    index: int
    content_block: ContentBlock


class TextDelta(TypedDict):
    """New text of a block."""

    type: Literal["text_delta"]
    text: str


class ThinkingDelta(TypedDict):
    """New thinking of a block."""

    type: Literal["thinking_delta"]
    thinking: str


class SignatureDelta(TypedDict):
    """The signature of a thinking block, sent at its end."""

    type: Literal["signature_delta"]
    signature: str


class InputJsonDelta(TypedDict):
    """A piece of the JSON text of a tool call's input."""

    type: Literal["input_json_delta"]
    partial_json: str


BlockDelta = TypeAliasType(
    "BlockDelta", TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta
)


class ContentBlockDelta(TypedDict):
    """A new piece of a content block."""

    type: Literal["content_block_delta"]
    index: int
    delta: BlockDelta


class ContentBlockStop(TypedDict):
    """The end of a content block."""

    type: Literal["content_block_stop"]
    index: int


class MessageEnd(TypedDict):
    """The reason why the message ended."""

    container: None
    stop_reason: StopReason
    stop_sequence: str | None
    stop_details: None


class MessageDelta(TypedDict):
    """The end of the message, with its final usage."""

    type: Literal["message_delta"]
    delta: MessageEnd
    usage: MessageUsage
    gateway: NotRequired[SchemaVerdict]


class MessageStop(TypedDict):
    """The last event."""

    type: Literal["message_stop"]


class Ping(TypedDict):
    """A keep-alive event."""

    type: Literal["ping"]


PING: Ping = {"type": "ping"}
MessageEvent = TypeAliasType(
    "MessageEvent",
    MessageStart
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageDelta
    | MessageStop
    | Ping
    | AnthropicErrorBody,
)


# The type of a block's deltas, and the field that has a delta's text.
_DELTAS: dict[BlockKind, tuple[str, str]] = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


class MessageWriter(BlockWriter):
    """Writes an answer of the Messages API."""

    names_events = True
    ping = PING

    def __init__(self, model: str, *, max_tokens: int, thoughts: Thoughts, request_id: str) -> None:
        super().__init__()
        self._request_id = request_id
        self._id = f"msg_{secrets.token_hex(12)}"
        self._model = model
        self._max_tokens = max_tokens
        self._thoughts = thoughts
        self._tokens = 0
        self._finish: FinishReason | None = None
        self._stop_string: str | None = None
        self._verdict: SchemaVerdict | None = None

    def begin(self, usage: Usage) -> list[Event]:
        return [{"type": "message_start", "message": self._message(usage)}]

    def add(self, delta: Delta, verdict: SchemaVerdict | None = None) -> list[Event]:
        events: list[Event] = []
        if delta.reasoning and self._thoughts != "none":
            events += self._extend("reasoning", delta.reasoning)
        if delta.text:
            events += self._extend("text", delta.text)
        if delta.call is not None:
            events += self._extend("call", delta.call.arguments, delta.call)
        self._tokens += delta.tokens
        self._finish, self._stop_string = delta.finish_reason, delta.stop
        self._verdict = verdict
        return events

    def end(self, usage: Usage) -> list[Event]:
        events = self._close()
        delta: MessageDelta = {
            "type": "message_delta",
            "delta": {"container": None, "stop_details": None, **self._ending()},
            "usage": usage_dict(usage),
        }
        if self._verdict is not None:
            delta["gateway"] = self._verdict
        return [*events, delta, {"type": "message_stop"}]

    def fail(self, error: GatewayError) -> list[Event]:
        return [error_body(error, self._request_id)]

    def whole(self, answer: Answer) -> AnthropicMessage:
        for delta in answer.choices[0]:
            self.add(delta)
        self._close()
        message = {**self._message(answer.usage), **self._ending(), "content": self._done}
        if answer.verdicts[0] is not None:
            message["gateway"] = answer.verdicts[0]
        return cast(AnthropicMessage, message)

    def _message(self, usage: Usage) -> AnthropicMessage:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "container": None,
            "diagnostics": None,
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "usage": usage_dict(usage),
        }

    def _ending(self) -> "_Ending":
        assert self._finish is not None
        match self._finish:
            case "tool_calls":
                return {"stop_reason": "tool_use", "stop_sequence": None}
            case "length" if self._tokens < self._max_tokens:
                return {"stop_reason": "model_context_window_exceeded", "stop_sequence": None}
            case "length":
                return {"stop_reason": "max_tokens", "stop_sequence": None}
            case "stop" if self._stop_string is not None:
                return {"stop_reason": "stop_sequence", "stop_sequence": self._stop_string}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def _start(self, block: Block) -> list[Event]:
        start: ContentBlockStart = {
            "type": "content_block_start",
            "index": block.index,
            "content_block": _content(block, "", ""),
        }
        return [start, PING] if block.index == 0 else [start]  # Anthropic's API also pings here

    def _piece(self, block: Block, text: str) -> list[Event]:
        if block.kind == "reasoning" and self._thoughts == "signed":
            return []
        kind, field = _DELTAS[block.kind]
        delta = {"type": kind, field: text}
        return [{"type": "content_block_delta", "index": block.index, "delta": delta}]

    def _stop(self, block: Block) -> list[Event]:
        text, signature = block.text, ""
        events: list[Event] = []
        if block.kind == "reasoning":
            signature = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            delta: SignatureDelta = {"type": "signature_delta", "signature": signature}
            events.append({"type": "content_block_delta", "index": block.index, "delta": delta})
            if self._thoughts == "signed":
                text = ""
        self._done.append(_content(block, text, signature))
        return [*events, {"type": "content_block_stop", "index": block.index}]


def _content(block: Block, text: str, signature: str) -> ContentBlock:
    if block.kind == "text":
        return {"type": "text", "text": text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": signature}
    assert block.call is not None
    assert block.call.id is not None
    return {
        "type": "tool_use",
        "caller": {"type": "direct"},
        "id": block.call.id,
        "name": block.call.name or "",
        "input": _read_input(text),
    }


def _read_input(arguments: str) -> dict[str, Any]:
    """Return a call's input, or {} if the JSON is cut short, too deep, or no object."""
    try:
        value = orjson.loads(arguments)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


class _Ending(TypedDict):
    stop_reason: StopReason
    stop_sequence: str | None
