"""Base classes that write an answer, streamed or whole."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from gateway.clock import Timings
from gateway.errors import GatewayError
from gateway.jobs.chat import CallDelta, Delta, Sampling, Usage
from gateway.wire.generation import Heading, SchemaVerdict, usage_dict

Event = Mapping[str, Any]


@dataclass(slots=True)
class Answer:
    """A complete answer to one request."""

    choices: Sequence[Sequence[Delta]]  # the deltas of each choice
    usage: Usage
    verdicts: Sequence[SchemaVerdict | None] = (None,)


class AnswerWriter(ABC):
    """Writes one answer, either as the events of a stream or as a whole."""

    # Whether events are named after their types; otherwise, `[DONE]` ends the stream.
    names_events: ClassVar[bool] = False
    # The event that keeps a silent stream alive, or None for a comment.
    ping: ClassVar[Event | None] = None

    def accept(self, sampling: Sampling) -> None:  # noqa: B027, most answers do not report it
        """Take the sampling of the admitted job, with the model's defaults filled in."""

    @abstractmethod
    def begin(self, usage: Usage) -> Sequence[Event]:
        """Return the events that precede the first delta."""

    @abstractmethod
    def add(self, delta: Delta, verdict: SchemaVerdict | None = None) -> Sequence[Event]:
        """Return the events of a delta; `verdict` comes with a choice's last delta."""

    @abstractmethod
    def end(self, usage: Usage) -> Sequence[Event]:
        """Return the events after the last delta."""

    def fail(self, error: GatewayError) -> Sequence[Event]:
        """Return the events that end a stream after an error."""
        return [error.body()]

    @abstractmethod
    def whole(self, answer: Answer) -> object:
        """Return the answer as one JSON value."""


class ChunkWriter(AnswerWriter):
    """Writes an answer of OpenAI's chat completions or text completions."""

    chunk_object: ClassVar[str]

    def __init__(self, heading: Heading, timings: Timings, *, has_usage: bool) -> None:
        self._heading = heading
        self._timings = timings
        self._has_usage = has_usage

    def begin(self, usage: Usage) -> Sequence[Event]:
        return []

    def end(self, usage: Usage) -> Sequence[Event]:
        if not self._has_usage:
            return []
        timings = {f"{stage}_ms": ms for stage, ms in self._timings.milliseconds.items()}
        return [{**self._chunk([]), "usage": usage_dict(usage), "timings": timings}]

    def _chunk(self, choices: Sequence[object]) -> dict[str, Any]:
        return {**self._heading, "object": self.chunk_object, "choices": choices}


BlockKind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class Block:
    """A part of an answer: reasoning, text, or one tool call."""

    kind: BlockKind
    index: int
    call: CallDelta | None = None  # the first piece of a call
    id: str = ""  # empty if the API gives blocks no ids
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Return the text so far; for a call, the JSON of its arguments."""
        return "".join(self.pieces)

    def continues(self, kind: BlockKind, call: CallDelta | None) -> bool:
        if self.call is None or call is None:
            return self.kind == kind
        return self.call.index == call.index


class BlockWriter(AnswerWriter):
    """Writes an answer as blocks, one after the other."""

    def __init__(self) -> None:
        self._open: Block | None = None
        self._done: list[Any] = []

    def _extend(self, kind: BlockKind, text: str, call: CallDelta | None = None) -> list[Event]:
        """Add a piece to the open block or to a new one, and return the events."""
        events: list[Event] = []
        block = self._open
        if block is None or not block.continues(kind, call):
            events += self._close()
            block = Block(kind, len(self._done), call)
            self._open = block
            events += self._start(block)
        if text:  # the first piece of a call may have no arguments yet
            block.pieces.append(text)
            events += self._piece(block, text)
        return events

    def _close(self) -> list[Event]:
        block, self._open = self._open, None
        return [] if block is None else self._stop(block)

    @abstractmethod
    def _start(self, block: Block) -> list[Event]:
        """Return the events that begin a block."""

    @abstractmethod
    def _piece(self, block: Block, text: str) -> list[Event]:
        """Return the events of new text in a block."""

    @abstractmethod
    def _stop(self, block: Block) -> list[Event]:
        """Append an ended block to `_done`, and return its last events."""
