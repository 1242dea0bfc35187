"""The answer of a Messages request: deltas → content blocks, and the events that carry them."""

import base64
import hashlib
import secrets
from abc import ABC, abstractmethod
from typing import Any, Literal, NotRequired

import orjson
from typing_extensions import TypeAliasType, TypedDict

from gateway.errors import GatewayError
from gateway.jobs import CallDelta, Delta, FinishReason, Usage
from gateway.wire.answers import Answer, AnswerWriter
from gateway.wire.anthropic import (
    AnthropicMessage,
    ContentBlock,
    MessageUsage,
    StopReason,
    TextBlock,
    ThinkingBlock,
    Thoughts,
    ToolUseBlock,
    usage_dict,
)
from gateway.wire.anthropic_errors import AnthropicErrorBody, error_body
from gateway.wire.generation import SchemaVerdict


class MessageStart(TypedDict):
    """The message before its first block."""

    type: Literal["message_start"]
    message: AnthropicMessage


class ContentBlockStart(TypedDict):
    """A block before its first piece."""

    type: Literal["content_block_start"]
    index: int
    content_block: ContentBlock


class TextDelta(TypedDict):
    """New text."""

    type: Literal["text_delta"]
    text: str


class ThinkingDelta(TypedDict):
    """New thinking."""

    type: Literal["thinking_delta"]
    thinking: str


class SignatureDelta(TypedDict):
    """The signature of a block of thinking, at its end."""

    type: Literal["signature_delta"]
    signature: str


class InputJsonDelta(TypedDict):
    """A piece of a call's input, as JSON."""

    type: Literal["input_json_delta"]
    partial_json: str


BlockDelta = TypeAliasType(
    "BlockDelta", TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta
)


class ContentBlockDelta(TypedDict):
    """What is new in a block."""

    type: Literal["content_block_delta"]
    index: int
    delta: BlockDelta


class ContentBlockStop(TypedDict):
    """The end of a block."""

    type: Literal["content_block_stop"]
    index: int


class MessageEnd(TypedDict):
    """Why the message ended."""

    container: None
    stop_reason: StopReason
    stop_sequence: str | None
    stop_details: None


class MessageDelta(TypedDict):
    """The end of the message, with all its tokens."""

    type: Literal["message_delta"]
    delta: MessageEnd
    usage: MessageUsage
    gateway: NotRequired[SchemaVerdict]


class MessageStop(TypedDict):
    """The last event."""

    type: Literal["message_stop"]


class Ping(TypedDict):
    """A sign that the stream is alive."""

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


class _BlockWriter(ABC):
    """Writes one block of the content."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def add(self, text: str) -> BlockDelta:
        self._texts.append(text)
        return self._delta(text)

    @property
    def _whole(self) -> str:
        return "".join(self._texts)

    @abstractmethod
    def _delta(self, text: str) -> BlockDelta:
        """Return the delta of a new piece."""

    @abstractmethod
    def to_dict(self) -> ContentBlock:
        """Return the block as it is now."""

    @abstractmethod
    def empty(self) -> ContentBlock:
        """Return the block as it is when it starts."""

    def close(self) -> list[BlockDelta]:
        """Return the deltas before its end."""
        return []


class _TextWriter(_BlockWriter):
    def _delta(self, text: str) -> TextDelta:
        return {"type": "text_delta", "text": text}

    def to_dict(self) -> TextBlock:
        return {"type": "text", "text": self._whole}

    def empty(self) -> TextBlock:
        return {"type": "text", "text": ""}


class _ThinkingWriter(_BlockWriter):
    def __init__(self, *, is_shown: bool) -> None:
        super().__init__()
        self.is_shown = is_shown

    def _delta(self, text: str) -> ThinkingDelta:
        return {"type": "thinking_delta", "thinking": text}

    def to_dict(self) -> ThinkingBlock:
        text = self._whole if self.is_shown else ""
        return {"type": "thinking", "thinking": text, "signature": self._signature()}

    def empty(self) -> ThinkingBlock:
        return {"type": "thinking", "thinking": "", "signature": ""}

    def close(self) -> list[BlockDelta]:
        return [{"type": "signature_delta", "signature": self._signature()}]

    def _signature(self) -> str:
        return base64.b64encode(hashlib.sha256(self._whole.encode()).digest()).decode()


class _CallWriter(_BlockWriter):
    def __init__(self, call: CallDelta) -> None:
        super().__init__()
        assert call.id is not None
        self.call_index = call.index
        self._id = call.id
        self._name = call.name or ""

    def _delta(self, text: str) -> InputJsonDelta:
        return {"type": "input_json_delta", "partial_json": text}

    def to_dict(self) -> ToolUseBlock:
        return {**self.empty(), "input": _read_input(self._whole)}

    def empty(self) -> ToolUseBlock:
        return {
            "type": "tool_use",
            "caller": {"type": "direct"},
            "id": self._id,
            "name": self._name,
            "input": {},
        }


def _read_input(arguments: str) -> dict[str, Any]:
    """Return a call's input; an empty one if the answer was cut inside it, or nested too deep."""
    try:
        value = orjson.loads(arguments)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


class MessageWriter(AnswerWriter):
    """Builds a message from deltas. An error names the request that it is of."""

    names_events = True
    ping = PING

    def __init__(self, model: str, *, max_tokens: int, thoughts: Thoughts, request_id: str) -> None:
        self._request_id = request_id
        self._id = f"msg_{secrets.token_hex(12)}"
        self._model = model
        self._max_tokens = max_tokens
        self._thoughts = thoughts
        self._done: list[ContentBlock] = []
        self._open: _BlockWriter | None = None
        self._has_pinged = False
        self._tokens = 0
        self._finish: FinishReason | None = None
        self._stop: str | None = None
        self._verdict: SchemaVerdict | None = None

    def begin(self, usage: Usage) -> list[MessageEvent]:
        return [{"type": "message_start", "message": self._message(usage)}]

    def add(self, delta: Delta, verdict: SchemaVerdict | None = None) -> list[MessageEvent]:
        events: list[MessageEvent] = []
        if delta.reasoning and self._thoughts != "none":
            if not isinstance(self._open, _ThinkingWriter):
                events += self._start(_ThinkingWriter(is_shown=self._thoughts == "whole"))
            events += self._write(delta.reasoning)
        if delta.text:
            if not isinstance(self._open, _TextWriter):
                events += self._start(_TextWriter())
            events += self._write(delta.text)
        if (call := delta.call) is not None:
            if not (isinstance(self._open, _CallWriter) and self._open.call_index == call.index):
                events += self._start(_CallWriter(call))
            if call.arguments:
                events += self._write(call.arguments)
        self._tokens += delta.tokens
        self._finish, self._stop = delta.finish_reason, delta.stop
        self._verdict = verdict
        return events

    def end(self, usage: Usage) -> list[MessageEvent]:
        """End the message: its last block, the reason, and all its tokens."""
        events = self._stop_block()
        delta: MessageDelta = {
            "type": "message_delta",
            "delta": {"container": None, "stop_details": None, **self._ending()},
            "usage": usage_dict(usage),
        }
        if self._verdict is not None:
            delta["gateway"] = self._verdict
        return [*events, delta, {"type": "message_stop"}]

    def fail(self, error: GatewayError) -> list[MessageEvent]:
        return [error_body(error, self._request_id)]

    def whole(self, answer: Answer) -> AnthropicMessage:
        for delta in answer.choices[0]:
            self.add(delta)
        self._verdict = answer.verdicts[0]
        self._stop_block()
        message = self._message(answer.usage)
        ending = self._ending()
        message |= {
            "content": self._done,
            "stop_reason": ending["stop_reason"],
            "stop_sequence": ending["stop_sequence"],
        }
        if self._verdict is not None:
            message["gateway"] = self._verdict
        return message

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
        is_full = self._tokens < self._max_tokens
        reason = stop_reason(self._finish, self._stop, is_full=is_full)
        return {
            "stop_reason": reason,
            "stop_sequence": self._stop if reason == "stop_sequence" else None,
        }

    def _start(self, block: _BlockWriter) -> list[MessageEvent]:
        """Start a block, after the end of the one before; a ping follows the first, as Anthropic
        sends it.
        """
        events = self._stop_block()
        self._open = block
        start: ContentBlockStart = {
            "type": "content_block_start",
            "index": len(self._done),
            "content_block": block.empty(),
        }
        pings = [] if self._has_pinged else [PING]
        self._has_pinged = True
        return [*events, start, *pings]

    def _write(self, text: str) -> list[MessageEvent]:
        """Add a piece to the open block. Of thinking that is not shown there is no event."""
        assert self._open is not None
        delta = self._open.add(text)
        is_hidden = isinstance(self._open, _ThinkingWriter) and not self._open.is_shown
        return [] if is_hidden else [self._delta(delta)]

    def _delta(self, delta: BlockDelta) -> ContentBlockDelta:
        return {"type": "content_block_delta", "index": len(self._done), "delta": delta}

    def _stop_block(self) -> list[MessageEvent]:
        if (block := self._open) is None:
            return []
        events: list[MessageEvent] = [self._delta(delta) for delta in block.close()]
        events.append({"type": "content_block_stop", "index": len(self._done)})
        self._done.append(block.to_dict())
        self._open = None
        return events


class _Ending(TypedDict):
    stop_reason: StopReason
    stop_sequence: str | None


def stop_reason(finish: FinishReason, stop: str | None, *, is_full: bool) -> StopReason:
    """Return why an answer ended, in Anthropic's words.

    `is_full`: it has less than its `max_tokens`, so if it was cut, the model's context is full.
    """
    if finish == "tool_calls":
        return "tool_use"
    if finish == "length":
        return "model_context_window_exceeded" if is_full else "max_tokens"
    return "stop_sequence" if stop is not None else "end_turn"
