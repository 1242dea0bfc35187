"""What a Responses answer writes: deltas → output items, and the events in which they grow."""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from itertools import count
from types import MappingProxyType
from typing import Literal

from typing_extensions import TypeAliasType, TypedDict

from gateway.errors import BadRequest, GatewayError, Overloaded
from gateway.jobs import CallDelta, Delta, Sampling, Usage
from gateway.wire.generation import ChatTokenLogprob, SchemaVerdict, token_dict
from gateway.wire.responses import (
    FunctionCallItem,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Response,
    ResponseUsage,
)
from gateway.wire.responses_tools import Place


class ResponseStatusEvent(TypedDict):
    """The response as it is when it begins, and when it ends."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    sequence_number: int
    response: Response


class OutputItemEvent(TypedDict):
    """An item of the output as it is when it begins, and when it ends."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    sequence_number: int
    output_index: int
    item: OutputItem


class _OfItem(TypedDict):
    sequence_number: int
    item_id: str
    output_index: int


class _OfPart(_OfItem):
    content_index: int


class ContentPartEvent(_OfPart):
    """The one part of a message or of a reasoning item, when it begins, and when it ends."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    part: OutputText | ReasoningText


class OutputTextDelta(_OfPart):
    """New text of a message."""

    type: Literal["response.output_text.delta"]
    delta: str
    logprobs: list[ChatTokenLogprob]


class OutputTextDone(_OfPart):
    """The whole text of a message."""

    type: Literal["response.output_text.done"]
    text: str
    logprobs: list[ChatTokenLogprob]


class ReasoningTextDelta(_OfPart):
    """New reasoning."""

    type: Literal["response.reasoning_text.delta"]
    delta: str


class ReasoningTextDone(_OfPart):
    """All reasoning of an item."""

    type: Literal["response.reasoning_text.done"]
    text: str


class ArgumentsDelta(_OfItem):
    """A piece of a call's arguments."""

    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDone(_OfItem):
    """All arguments of a call, as JSON inside a string."""

    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


class ErrorEvent(TypedDict):
    """What went wrong after the stream had begun."""

    type: Literal["error"]
    sequence_number: int
    code: str | None
    message: str
    param: str | None


ResponseEvent = TypeAliasType(
    "ResponseEvent",
    ResponseStatusEvent
    | OutputItemEvent
    | ContentPartEvent
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | ArgumentsDelta
    | ArgumentsDone
    | ErrorEvent,
)


class _ItemWriter(ABC):
    """A piece of the output: opened, grown and closed. Its events are numbered as they are made."""

    prefix: str

    def __init__(self, numbers: Iterator[int], index: int) -> None:
        self.id = f"{self.prefix}_{secrets.token_hex(16)}"
        self._numbers = numbers
        self._index = index
        self._texts: list[str] = []

    @abstractmethod
    def open(self) -> list[ResponseEvent]:
        """Return what follows its `output_item.added`."""

    @abstractmethod
    def close(self) -> list[ResponseEvent]:
        """Return what comes before its `output_item.done`."""

    @abstractmethod
    def to_dict(self, status: ItemStatus) -> OutputItem:
        """Return the item as it is now."""

    def _place(self) -> _OfItem:
        """Return what every event of the item has; each call gives it the next number."""
        return {
            "sequence_number": next(self._numbers),
            "item_id": self.id,
            "output_index": self._index,
        }


class _PartWriter(_ItemWriter):
    """An item with one part: text."""

    is_open = False

    @abstractmethod
    def _part(self) -> OutputText | ReasoningText:
        """Return the part as it is now."""

    def _part_place(self) -> _OfPart:
        return {**self._place(), "content_index": 0}

    def open(self) -> list[ResponseEvent]:
        self.is_open = True
        added: ContentPartEvent = {
            "type": "response.content_part.added",
            **self._part_place(),
            "part": self._part(),
        }
        return [added]

    def close(self) -> list[ResponseEvent]:
        done: ContentPartEvent = {
            "type": "response.content_part.done",
            **self._part_place(),
            "part": self._part(),
        }
        return [done]


class _MessageWriter(_PartWriter):
    prefix = "msg"

    def __init__(self, numbers: Iterator[int], index: int) -> None:
        super().__init__(numbers, index)
        self._logprobs: list[ChatTokenLogprob] = []

    def add(self, text: str, logprobs: list[ChatTokenLogprob]) -> OutputTextDelta:
        self._texts.append(text)
        self._logprobs += logprobs
        return {
            "type": "response.output_text.delta",
            **self._part_place(),
            "delta": text,
            "logprobs": logprobs,
        }

    def close(self) -> list[ResponseEvent]:
        part = self._part()
        done: OutputTextDone = {
            "type": "response.output_text.done",
            **self._part_place(),
            "text": part["text"],
            "logprobs": part["logprobs"],
        }
        return [done, *super().close()]

    def _part(self) -> OutputText:
        return {
            "type": "output_text",
            "text": "".join(self._texts),
            "annotations": [],
            "logprobs": list(self._logprobs),
        }

    def to_dict(self, status: ItemStatus) -> OutputMessage:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [self._part()] if self.is_open else [],
        }


class _ReasoningWriter(_PartWriter):
    prefix = "rs"

    def add(self, text: str) -> ReasoningTextDelta:
        self._texts.append(text)
        return {"type": "response.reasoning_text.delta", **self._part_place(), "delta": text}

    def close(self) -> list[ResponseEvent]:
        done: ReasoningTextDone = {
            "type": "response.reasoning_text.done",
            **self._part_place(),
            "text": "".join(self._texts),
        }
        return [done, *super().close()]

    def _part(self) -> ReasoningText:
        return {"type": "reasoning_text", "text": "".join(self._texts)}

    def to_dict(self, status: ItemStatus) -> ReasoningItem:
        return {
            "id": self.id,
            "type": "reasoning",
            "status": status,
            "summary": [],
            "content": [self._part()] if self.is_open else [],
        }


class _CallWriter(_ItemWriter):
    prefix = "fc"

    def __init__(self, numbers: Iterator[int], index: int, call: CallDelta, place: Place) -> None:
        super().__init__(numbers, index)
        self.call_index = call.index
        self._call_id = call.id or f"call_{secrets.token_hex(16)}"
        self._namespace, self._name = place

    def add(self, arguments: str) -> ArgumentsDelta:
        self._texts.append(arguments)
        return {
            "type": "response.function_call_arguments.delta",
            **self._place(),
            "delta": arguments,
        }

    def open(self) -> list[ResponseEvent]:
        return []

    def close(self) -> list[ResponseEvent]:
        done: ArgumentsDone = {
            "type": "response.function_call_arguments.done",
            **self._place(),
            "name": self._name,
            "arguments": "".join(self._texts),
        }
        return [done]

    def to_dict(self, status: ItemStatus) -> FunctionCallItem:
        item: FunctionCallItem = {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "call_id": self._call_id,
            "name": self._name,
            "namespace": self._namespace or "",
            "arguments": "".join(self._texts),
        }
        if not self._namespace:
            del item["namespace"]
        return item


class ResponseWriter:
    """Writes a response as it grows. Each method returns the events to send, in order.

    The whole response at the end is what the events added up to: a stream and an unstreamed answer
    are one. `places` are where functions stand that the model knows by another name.
    """

    def __init__(
        self, described: Response, places: Mapping[str, Place] = MappingProxyType({})
    ) -> None:
        self._response: Response = {**described}
        self._places = places
        self._numbers = count()
        self._done: list[OutputItem] = []
        self._open: _ItemWriter | None = None
        self._finish: str | None = None
        self._logprobs: list[ChatTokenLogprob] = []

    def begin(self) -> list[ResponseEvent]:
        """Return the first events: the request was accepted."""
        return [self._event("response.created"), self._event("response.in_progress")]

    def describe(self, sampling: Sampling) -> None:
        """Take in how the answer is sampled, which the model's own files may have a say in."""
        self._response |= {"temperature": sampling.temperature, "top_p": sampling.top_p}

    def judge(self, verdict: SchemaVerdict) -> None:
        """Take in whether the answer fits its schema, where no grammar held all of that."""
        self._response |= {"gateway": verdict}

    def add(self, delta: Delta) -> list[ResponseEvent]:
        """Take the next delta."""
        events: list[ResponseEvent] = []
        if delta.reasoning:
            reasoning = self._open
            if not isinstance(reasoning, _ReasoningWriter):
                events += self._close("completed")
                reasoning = _ReasoningWriter(self._numbers, len(self._done))
                events += self._begin(reasoning)
            events.append(reasoning.add(delta.reasoning))
        elif delta.call is None:
            self._logprobs += map(token_dict, delta.logprobs)
        if delta.text:
            events += self._write(delta.text)
        if delta.call is not None:
            call = self._open
            if not (isinstance(call, _CallWriter) and call.call_index == delta.call.index):
                name = delta.call.name or ""
                place = self._places.get(name, (None, name))
                events += self._close("completed")
                call = _CallWriter(self._numbers, len(self._done), delta.call, place)
                events += self._begin(call)
            if delta.call.arguments:
                events.append(call.add(delta.call.arguments))
        self._finish = delta.finish_reason
        return events

    def end(self, usage: Usage, at: int) -> list[ResponseEvent]:
        """Close it: completed, or incomplete where `max_output_tokens` cut it. `at`, Unix time."""
        is_cut = self._finish == "length"
        events: list[ResponseEvent] = []
        if self._logprobs and isinstance(self._open, _MessageWriter):  # of tokens without text
            events += self._write("")
        if not (self._done or self._open):
            events += self._begin(_MessageWriter(self._numbers, 0))
        events += self._close("incomplete" if is_cut else "completed")
        self._response |= {
            "status": "incomplete" if is_cut else "completed",
            "completed_at": None if is_cut else at,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": _usage(usage),
        }
        return [*events, self._event("response.incomplete" if is_cut else "response.completed")]

    def fail(self, error: GatewayError) -> list[ResponseEvent]:
        """Close it as failed, after it had begun."""
        code = {Overloaded: "rate_limit_exceeded", BadRequest: "invalid_prompt"}
        name = next((code[kind] for kind in code if isinstance(error, kind)), "server_error")
        details = error.body()["error"]
        self._response |= {
            "status": "failed",
            "error": {"code": name, "message": error.message},
        }
        event: ErrorEvent = {
            "type": "error",
            "sequence_number": next(self._numbers),
            "code": details["code"],
            "message": details["message"],
            "param": details["param"],
        }
        return [event, self._event("response.failed")]

    def to_dict(self) -> Response:
        """Return the response as it is now."""
        growing = [self._open.to_dict("incomplete")] if self._open is not None else []
        return {**self._response, "output": [*self._done, *growing]}

    def _write(self, text: str) -> list[ResponseEvent]:
        """Add text to a message, a new one where none is open."""
        events: list[ResponseEvent] = []
        message = self._open
        if not isinstance(message, _MessageWriter):
            events += self._close("completed")
            message = _MessageWriter(self._numbers, len(self._done))
            events += self._begin(message)
        logprobs, self._logprobs = self._logprobs, []
        return [*events, message.add(text, logprobs)]

    def _begin(self, item: _ItemWriter) -> list[ResponseEvent]:
        self._open = item
        added = self._item_event(
            "response.output_item.added", len(self._done), item.to_dict("in_progress")
        )
        return [added, *item.open()]

    def _close(self, status: ItemStatus) -> list[ResponseEvent]:
        if (item := self._open) is None:
            return []
        events = item.close()
        done, place = item.to_dict(status), len(self._done)
        self._done.append(done)
        self._open = None
        return [*events, self._item_event("response.output_item.done", place, done)]

    def _item_event(
        self,
        kind: Literal["response.output_item.added", "response.output_item.done"],
        index: int,
        item: OutputItem,
    ) -> OutputItemEvent:
        number = next(self._numbers)
        return {"type": kind, "sequence_number": number, "output_index": index, "item": item}

    def _event(
        self,
        kind: Literal[
            "response.created",
            "response.in_progress",
            "response.completed",
            "response.incomplete",
            "response.failed",
        ],
    ) -> ResponseStatusEvent:
        number = next(self._numbers)
        return {"type": kind, "sequence_number": number, "response": self.to_dict()}


def _usage(usage: Usage) -> ResponseUsage:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
