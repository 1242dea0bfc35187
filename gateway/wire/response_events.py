"""What a Responses answer writes: deltas → output items, and the events that tell them growing."""

import secrets
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

from gateway.errors import BadRequest, GatewayError, Overloaded
from gateway.jobs import CallDelta, Delta, Sampling, Usage
from gateway.wire.chat_answers import token_json
from gateway.wire.response_tools import Place

Event: TypeAlias = dict[str, Any]
Told: TypeAlias = tuple[str, dict[str, Any]]  # an event's type, and what it says of its item


class _Item(Protocol):
    """A piece of the output: opened, grown and closed."""

    id: str

    def opening(self) -> list[Told]:
        """Tell what follows its `output_item.added`."""

    def closing(self) -> list[Told]:
        """Tell what comes before its `output_item.done`."""

    def json(self, status: str) -> dict[str, Any]:
        """Give it as it is now."""


class _Prose:
    """The one part of a message or of a reasoning item: text."""

    def __init__(self, kind: str, **more: list[Any]) -> None:
        self._kind = kind
        self._texts: list[str] = []
        self._more = more
        self._is_open = False

    def add(self, text: str, **more: list[Any]) -> Told:
        self._texts.append(text)
        for name, values in more.items():
            self._more[name] += values
        return f"response.{self._kind}.delta", {"content_index": 0, "delta": text, **more}

    def opening(self) -> list[Told]:
        part = self.part()
        self._is_open = True
        return [("response.content_part.added", {"content_index": 0, "part": part})]

    def closing(self) -> list[Told]:
        part = self.part()
        done = {name: value for name, value in part.items() if name not in ("type", "annotations")}
        return [
            (f"response.{self._kind}.done", {"content_index": 0, **done}),
            ("response.content_part.done", {"content_index": 0, "part": part}),
        ]

    def part(self) -> dict[str, Any]:
        more = {name: list(values) for name, values in self._more.items()}
        return {"type": self._kind, "text": "".join(self._texts), **more}

    def parts(self) -> list[dict[str, Any]]:
        return [self.part()] if self._is_open else []


class _Message(_Prose):
    def __init__(self) -> None:
        super().__init__("output_text", annotations=[], logprobs=[])
        self.id = f"msg_{secrets.token_hex(16)}"

    def json(self, status: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": self.parts(),
        }


class _Reasoning(_Prose):
    def __init__(self) -> None:
        super().__init__("reasoning_text")
        self.id = f"rs_{secrets.token_hex(16)}"

    def json(self, status: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "reasoning",
            "status": status,
            "summary": [],
            "content": self.parts(),
        }


class _Call:
    def __init__(self, call: CallDelta, place: Place) -> None:
        self.index = call.index
        self.id = f"fc_{secrets.token_hex(16)}"
        self._call_id = call.id or f"call_{secrets.token_hex(16)}"
        self._namespace, self._name = place
        self._arguments: list[str] = []

    def add(self, arguments: str) -> Told:
        self._arguments.append(arguments)
        return "response.function_call_arguments.delta", {"delta": arguments}

    def opening(self) -> list[Told]:
        return []

    def closing(self) -> list[Told]:
        whole = {"name": self._name, "arguments": "".join(self._arguments)}
        return [("response.function_call_arguments.done", whole)]

    def json(self, status: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "call_id": self._call_id,
            "name": self._name,
            **({"namespace": self._namespace} if self._namespace else {}),
            "arguments": "".join(self._arguments),
        }


class Answer:
    """A response as it grows. Each method gives the events to tell, in order.

    What is whole at the end is what the events told: a stream and an unstreamed answer are one.
    `places` tell where functions stand that the model knows by another name.
    """

    def __init__(
        self, described: dict[str, Any], places: Mapping[str, Place] = MappingProxyType({})
    ) -> None:
        self._described = dict(described)
        self._places = places
        self._told = 0
        self._done: list[dict[str, Any]] = []
        self._open: _Item | None = None
        self._finish: str | None = None
        self._logprobs: list[dict[str, Any]] = []

    def begin(self) -> list[Event]:
        """Tell that it was accepted: these come first."""
        return [
            self._event(kind, response=self.whole())
            for kind in ("response.created", "response.in_progress")
        ]

    def describe(self, sampling: Sampling) -> None:
        """Take in how the answer is sampled, which the model's own files may have a say in."""
        self._described |= {"temperature": sampling.temperature, "top_p": sampling.top_p}

    def judge(self, verdict: Mapping[str, Any]) -> None:
        """Take in whether the answer fits its schema, where no grammar held all of that."""
        self._described |= {"gateway": dict(verdict)}

    def add(self, delta: Delta) -> list[Event]:
        """Take the next delta."""
        events: list[Event] = []
        if delta.reasoning:
            if not isinstance(self._open, _Reasoning):
                events += self._next(_Reasoning())
            assert isinstance(self._open, _Reasoning)
            events.append(self._grown(self._open.add(delta.reasoning)))
        elif delta.call is None:
            self._logprobs += map(token_json, delta.logprobs)
        if delta.text:
            events += self._texted(delta.text)
        if delta.call is not None:
            if not (isinstance(self._open, _Call) and self._open.index == delta.call.index):
                name = delta.call.name or ""
                events += self._next(_Call(delta.call, self._places.get(name, (None, name))))
            assert isinstance(self._open, _Call)
            if delta.call.arguments:
                events.append(self._grown(self._open.add(delta.call.arguments)))
        self._finish = delta.finish_reason
        return events

    def end(self, usage: Usage, at: int) -> list[Event]:
        """Close it: completed, or incomplete where `max_output_tokens` cut it. `at`, Unix time."""
        is_cut = self._finish == "length"
        status = "incomplete" if is_cut else "completed"
        events: list[Event] = []
        if self._logprobs and isinstance(self._open, _Message):  # of tokens that have no text
            events += self._texted("")
        if not (self._done or self._open):
            events += self._next(_Message())
        events += self._closed(status)
        self._described |= {
            "status": status,
            "completed_at": None if is_cut else at,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": _usage(usage),
        }
        return [*events, self._event(f"response.{status}", response=self.whole())]

    def fail(self, error: GatewayError) -> list[Event]:
        """Close it as failed, after it had begun."""
        code = {Overloaded: "rate_limit_exceeded", BadRequest: "invalid_prompt"}
        name = next((code[kind] for kind in code if isinstance(error, kind)), "server_error")
        told = error.body()["error"]
        self._described |= {
            "status": "failed",
            "error": {"code": name, "message": error.message},
        }
        return [
            self._event("error", code=told["code"], message=told["message"], param=told["param"]),
            self._event("response.failed", response=self.whole()),
        ]

    def whole(self) -> dict[str, Any]:
        """Give the response as it is now."""
        growing = [self._open.json("incomplete")] if self._open is not None else []
        return {**self._described, "output": [*self._done, *growing]}

    def _texted(self, text: str) -> list[Event]:
        events = [] if isinstance(self._open, _Message) else self._next(_Message())
        assert isinstance(self._open, _Message)
        logprobs, self._logprobs = self._logprobs, []
        return [*events, self._grown(self._open.add(text, logprobs=logprobs))]

    def _next(self, item: _Item) -> list[Event]:
        events = self._closed("completed")
        self._open = item
        added = item.json("in_progress")
        place = len(self._done)
        events.append(self._event("response.output_item.added", output_index=place, item=added))
        return events + [self._grown(told) for told in item.opening()]

    def _closed(self, status: str) -> list[Event]:
        if (item := self._open) is None:
            return []
        events = [self._grown(told) for told in item.closing()]
        done, place = item.json(status), len(self._done)
        self._done.append(done)
        self._open = None
        return [*events, self._event("response.output_item.done", output_index=place, item=done)]

    def _grown(self, told: Told) -> Event:
        assert self._open is not None
        kind, more = told
        return self._event(kind, item_id=self._open.id, output_index=len(self._done), **more)

    def _event(self, kind: str, **more: Any) -> Event:
        event = {"type": kind, "sequence_number": self._told, **more}
        self._told += 1
        return event


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
