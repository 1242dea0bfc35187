"""Writes the answer of a Responses request as output items, streamed or whole."""

import time
from collections.abc import Mapping
from itertools import count
from types import MappingProxyType
from typing import Any, Literal, cast

from typing_extensions import TypeAliasType, TypedDict

from gateway.errors import BadRequest, GatewayError, Overloaded
from gateway.ids import new_id
from gateway.jobs.chat import Delta, Sampling, Usage
from gateway.wire.answers import Answer, Block, BlockKind, BlockWriter, Event
from gateway.wire.generation import ChatTokenLogprob, SchemaVerdict, token_dict
from gateway.wire.responses import (
    ItemStatus,
    OutputItem,
    OutputText,
    ReasoningText,
    Response,
    usage_dict,
)
from gateway.wire.tools import QualifiedName


class ResponseStatusEvent(TypedDict):
    """The whole response, sent when it begins and when it ends."""

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
    """An item of the output, sent when it begins and when it ends."""

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
    """The content part of an item, sent when it begins and when it ends."""

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
    """New text of a reasoning item."""

    type: Literal["response.reasoning_text.delta"]
    delta: str


class ReasoningTextDone(_PartFields):
    """The whole text of a reasoning item."""

    type: Literal["response.reasoning_text.done"]
    text: str


class ArgumentsDelta(_ItemFields):
    """A piece of the JSON text of a function call's arguments."""

    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDone(_ItemFields):
    """All arguments of a function call, as a string of JSON."""

    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


class ErrorEvent(TypedDict):
    """An error that occurred after the stream had begun."""

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


_NAMES: dict[BlockKind, str] = {
    "reasoning": "response.reasoning_text",
    "text": "response.output_text",
    "call": "response.function_call_arguments",
}
_PREFIXES: dict[BlockKind, str] = {"reasoning": "rs", "text": "msg", "call": "fc"}


class ResponseWriter(BlockWriter):
    """Writes an answer of the Responses API.

    `qualified_names` maps the model's names of functions to those of the request.
    """

    names_events = True

    def __init__(
        self,
        response: Response,
        qualified_names: Mapping[str, QualifiedName] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self._response: Response = {**response}
        self._qualified_names = qualified_names
        self._numbers = count()
        self._has_begun = False
        self._finish: str | None = None
        self._status: ItemStatus = "completed"
        self._new_logprobs: list[ChatTokenLogprob] = []  # logprobs that no event has had yet
        self._logprobs: list[ChatTokenLogprob] = []  # logprobs of the open message so far

    def accept(self, sampling: Sampling) -> None:
        self._response |= {"temperature": sampling.temperature, "top_p": sampling.top_p}

    def begin(self, usage: Usage) -> list[Event]:
        self._has_begun = True
        return [self._event("response.created"), self._event("response.in_progress")]

    def add(self, delta: Delta, verdict: SchemaVerdict | None = None) -> list[Event]:
        events: list[Event] = []
        if verdict is not None:
            self._response |= {"gateway": verdict}
        if delta.reasoning:
            events += self._extend("reasoning", delta.reasoning)
        elif delta.call is None:
            self._new_logprobs += map(token_dict, delta.logprobs)
        if delta.text:
            events += self._extend("text", delta.text)
        if delta.call is not None:
            events += self._extend("call", delta.call.arguments, delta.call)
        self._finish = delta.finish_reason
        return events

    def end(self, usage: Usage) -> list[Event]:
        events: list[Event] = []
        if self._new_logprobs and self._open is not None and self._open.kind == "text":
            events += self._piece(self._open, "")  # the logprobs of tokens without text
        if self._open is None and not self._done:  # clients expect a message
            events += self._extend("text", "")
        self._response |= {
            "status": "completed",
            "completed_at": int(time.time()),
            "usage": usage_dict(usage),
        }
        if self._finish == "length":
            self._status = "incomplete"
            self._response |= {
                "status": "incomplete",
                "completed_at": None,
                "incomplete_details": {"reason": "max_output_tokens"},
            }
        return [*events, *self._close(), self._event(f"response.{self._status}")]

    def fail(self, error: GatewayError) -> list[Event]:
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
        output: list[OutputItem] = [*self._done]
        if self._open is not None:
            output.append(self._item(self._open, "incomplete"))
        return {**self._response, "output": output}

    def _start(self, block: Block) -> list[Event]:
        self._logprobs = []
        block.id = new_id(_PREFIXES[block.kind], 16)
        item = self._item(block, "in_progress")
        added = self._item_event("response.output_item.added", block, item)
        if block.kind == "call":
            return [added]
        return [added, self._part_event("response.content_part.added", block)]

    def _piece(self, block: Block, text: str) -> list[Event]:
        event = {**self._fields(f"{_NAMES[block.kind]}.delta", block), "delta": text}
        if block.kind == "text":
            event["logprobs"] = self._new_logprobs
            self._logprobs += self._new_logprobs
            self._new_logprobs = []
        return [event]

    def _stop(self, block: Block) -> list[Event]:
        done = self._fields(f"{_NAMES[block.kind]}.done", block)
        events: list[Event] = [done]
        if block.kind == "call":
            done |= {"name": self._qualified_name(block)[1], "arguments": block.text}
        else:
            done["text"] = block.text
            events.append(self._part_event("response.content_part.done", block))
        if block.kind == "text":
            done["logprobs"] = self._logprobs
        item = self._item(block, self._status)
        self._done.append(item)
        return [*events, self._item_event("response.output_item.done", block, item)]

    def _item(self, block: Block, status: ItemStatus) -> OutputItem:
        parts = [] if status == "in_progress" else [self._part(block)]
        fields: dict[str, Any]
        if block.kind == "text":
            fields = {"type": "message", "role": "assistant", "content": parts}
        elif block.kind == "reasoning":
            fields = {"type": "reasoning", "summary": [], "content": parts}
        else:
            assert block.call is not None
            namespace, name = self._qualified_name(block)
            fields = {"type": "function_call", "call_id": block.call.id, "name": name}
            fields["arguments"] = block.text
            if namespace is not None:
                fields["namespace"] = namespace
        return cast(OutputItem, {"id": block.id, "status": status, **fields})

    def _part(self, block: Block) -> OutputText | ReasoningText:
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": block.text}
        logprobs = list(self._logprobs)
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": logprobs}

    def _qualified_name(self, block: Block) -> QualifiedName:
        assert block.call is not None
        name = block.call.name or ""
        return self._qualified_names.get(name, (None, name))

    def _fields(self, kind: str, block: Block) -> dict[str, Any]:
        fields = {
            "type": kind,
            "sequence_number": next(self._numbers),
            "item_id": block.id,
            "output_index": block.index,
        }
        if block.kind != "call":
            fields["content_index"] = 0
        return fields

    def _part_event(self, kind: str, block: Block) -> Event:
        return {**self._fields(kind, block), "part": self._part(block)}

    def _item_event(self, kind: str, block: Block, item: OutputItem) -> Event:
        number = next(self._numbers)
        index = block.index
        return {"type": kind, "sequence_number": number, "output_index": index, "item": item}

    def _event(self, kind: str) -> Event:
        number = next(self._numbers)
        return {"type": kind, "sequence_number": number, "response": self.to_dict()}
