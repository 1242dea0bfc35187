"""The answer of a Responses request: deltas → output items, and the events that carry them."""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from itertools import count
from types import MappingProxyType
from typing import Literal

from typing_extensions import TypeAliasType, TypedDict

from gateway.errors import BadRequest, GatewayError, Overloaded
from gateway.ids import new_id
from gateway.jobs import CallDelta, Delta, Sampling, Usage
from gateway.wire.answers import Answer, AnswerWriter
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
    usage_dict,
)
from gateway.wire.responses_tools import QualifiedName


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


class _ItemFields(TypedDict):
    sequence_number: int
    item_id: str
    output_index: int


class _PartFields(_ItemFields):
    content_index: int


class ContentPartEvent(_PartFields):
    """The one part of a message or of a reasoning item, when it begins, and when it ends."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    part: OutputText | ReasoningText


class OutputTextDelta(_PartFields):
    """New text of a message."""

    type: Literal["response.output_text.delta"]
    delta: str
    logprobs: list[ChatTokenLogprob]


class OutputTextDone(_PartFields):
    """The whole text of a message."""

    type: Literal["response.output_text.done"]
    text: str
    logprobs: list[ChatTokenLogprob]


class ReasoningTextDelta(_PartFields):
    """New reasoning."""

    type: Literal["response.reasoning_text.delta"]
    delta: str


class ReasoningTextDone(_PartFields):
    """All reasoning of an item."""

    type: Literal["response.reasoning_text.done"]
    text: str


class ArgumentsDelta(_ItemFields):
    """A piece of a call's arguments."""

    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDone(_ItemFields):
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
    """Writes one item of the output. `numbers`, shared by all items, numbers the events."""

    prefix: str

    def __init__(self, numbers: Iterator[int], index: int) -> None:
        self.id = new_id(self.prefix, 16)
        self._numbers = numbers
        self._index = index
        self._texts: list[str] = []

    @abstractmethod
    def open(self) -> list[ResponseEvent]:
        """Return the events that follow its `output_item.added`."""

    @abstractmethod
    def close(self) -> list[ResponseEvent]:
        """Return the events that precede its `output_item.done`."""

    @abstractmethod
    def to_dict(self, status: ItemStatus) -> OutputItem:
        """Return the item as it is now."""

    def _item_fields(self) -> _ItemFields:
        """Return the fields of every event of the item, with the next sequence number."""
        return {
            "sequence_number": next(self._numbers),
            "item_id": self.id,
            "output_index": self._index,
        }


class _PartWriter(_ItemWriter):
    """Writes an item with one part, of text."""

    is_open = False

    @abstractmethod
    def _part(self) -> OutputText | ReasoningText:
        """Return the part as it is now."""

    def _part_fields(self) -> _PartFields:
        return {**self._item_fields(), "content_index": 0}

    def open(self) -> list[ResponseEvent]:
        self.is_open = True
        added: ContentPartEvent = {
            "type": "response.content_part.added",
            **self._part_fields(),
            "part": self._part(),
        }
        return [added]

    def close(self) -> list[ResponseEvent]:
        done: ContentPartEvent = {
            "type": "response.content_part.done",
            **self._part_fields(),
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
            **self._part_fields(),
            "delta": text,
            "logprobs": logprobs,
        }

    def close(self) -> list[ResponseEvent]:
        part = self._part()
        done: OutputTextDone = {
            "type": "response.output_text.done",
            **self._part_fields(),
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
        return {"type": "response.reasoning_text.delta", **self._part_fields(), "delta": text}

    def close(self) -> list[ResponseEvent]:
        done: ReasoningTextDone = {
            "type": "response.reasoning_text.done",
            **self._part_fields(),
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

    def __init__(
        self, numbers: Iterator[int], index: int, call: CallDelta, qualified_name: QualifiedName
    ) -> None:
        super().__init__(numbers, index)
        self.call_index = call.index
        self._call_id = call.id or f"call_{secrets.token_hex(16)}"
        self._namespace, self._name = qualified_name

    def add(self, arguments: str) -> ArgumentsDelta:
        self._texts.append(arguments)
        return {
            "type": "response.function_call_arguments.delta",
            **self._item_fields(),
            "delta": arguments,
        }

    def open(self) -> list[ResponseEvent]:
        return []

    def close(self) -> list[ResponseEvent]:
        done: ArgumentsDone = {
            "type": "response.function_call_arguments.done",
            **self._item_fields(),
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


class ResponseWriter(AnswerWriter):
    """Builds a response from deltas.

    `qualified_names` maps the function names that the model knows to those of the request.
    """

    names_events = True

    def __init__(
        self,
        response: Response,
        qualified_names: Mapping[str, QualifiedName] = MappingProxyType({}),
    ) -> None:
        self._response: Response = {**response}
        self._qualified_names = qualified_names
        self._numbers = count()
        self._has_begun = False
        self._done: list[OutputItem] = []
        self._open: _ItemWriter | None = None
        self._finish: str | None = None
        self._logprobs: list[ChatTokenLogprob] = []

    def accept(self, sampling: Sampling) -> None:
        self._response |= {"temperature": sampling.temperature, "top_p": sampling.top_p}

    def begin(self, usage: Usage) -> list[ResponseEvent]:
        self._has_begun = True
        return [self._event("response.created"), self._event("response.in_progress")]

    def add(self, delta: Delta, verdict: SchemaVerdict | None = None) -> list[ResponseEvent]:
        events: list[ResponseEvent] = []
        if verdict is not None:
            self._response |= {"gateway": verdict}
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
                qualified_name = self._qualified_names.get(name, (None, name))
                events += self._close("completed")
                call = _CallWriter(self._numbers, len(self._done), delta.call, qualified_name)
                events += self._begin(call)
            if delta.call.arguments:
                events.append(call.add(delta.call.arguments))
        self._finish = delta.finish_reason
        return events

    def end(self, usage: Usage) -> list[ResponseEvent]:
        """Complete the response, or mark it incomplete if `max_output_tokens` cut it."""
        is_cut = self._finish == "length"
        events: list[ResponseEvent] = []
        if self._logprobs and isinstance(self._open, _MessageWriter):  # of tokens without text
            events += self._write("")
        if not (self._done or self._open):
            events += self._begin(_MessageWriter(self._numbers, 0))
        events += self._close("incomplete" if is_cut else "completed")
        self._response |= {
            "status": "incomplete" if is_cut else "completed",
            "completed_at": None if is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": usage_dict(usage),
        }
        return [*events, self._event("response.incomplete" if is_cut else "response.completed")]

    def fail(self, error: GatewayError) -> list[ResponseEvent]:
        """Mark the response as failed; its first events come first, if they have not come yet."""
        first_events = [] if self._has_begun else self.begin(Usage(0))
        codes = {Overloaded: "rate_limit_exceeded", BadRequest: "invalid_prompt"}
        code = next((codes[kind] for kind in codes if isinstance(error, kind)), "server_error")
        details = error.body()["error"]
        self._response |= {
            "status": "failed",
            "error": {"code": code, "message": error.message},
        }
        event: ErrorEvent = {
            "type": "error",
            "sequence_number": next(self._numbers),
            "code": details["code"],
            "message": details["message"],
            "param": details["param"],
        }
        return [*first_events, event, self._event("response.failed")]

    def whole(self, answer: Answer) -> Response:
        for delta in answer.choices[0]:
            self.add(delta)
        if answer.verdicts[0] is not None:
            self._response |= {"gateway": answer.verdicts[0]}
        self.end(answer.usage)
        return self.to_dict()

    def to_dict(self) -> Response:
        unfinished = [self._open.to_dict("incomplete")] if self._open is not None else []
        return {**self._response, "output": [*self._done, *unfinished]}

    def _write(self, text: str) -> list[ResponseEvent]:
        """Add text to the open message, or to a new one."""
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
