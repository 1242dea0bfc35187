"""Writers of answers, in every protocol: the events of a stream, or the whole answer."""

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
    """A whole answer: all deltas of each choice, and each choice's verdict, if it has one."""

    choices: Sequence[Sequence[Delta]]
    usage: Usage
    verdicts: Sequence[SchemaVerdict | None] = (None,)


class AnswerWriter(ABC):
    """Writes one answer: as the events of a stream, or whole."""

    # Each event has its type as its name. Without names, `[DONE]` follows the last event.
    names_events: ClassVar[bool] = False
    # The event that breaks a silence. None means a comment.
    ping: ClassVar[Event | None] = None

    def accept(self, sampling: Sampling) -> None:  # noqa: B027, most answers do not say it
        """Note the sampling in effect when the job is admitted: the model may set defaults."""

    @abstractmethod
    def begin(self, usage: Usage) -> Sequence[Event]:
        """Return the events before those of the first delta, whose tokens are counted already."""

    @abstractmethod
    def add(self, delta: Delta, verdict: SchemaVerdict | None = None) -> Sequence[Event]:
        """Return a delta's events. The last delta of a choice may come with its verdict."""

    @abstractmethod
    def end(self, usage: Usage) -> Sequence[Event]:
        """Return the events after those of the last delta."""

    def fail(self, error: GatewayError) -> Sequence[Event]:
        """Return the events that end a stream early."""
        return [error.body()]

    @abstractmethod
    def whole(self, answer: Answer) -> object:
        """Return the JSON of an answer that is not streamed."""


class ChunkWriter(AnswerWriter):
    """Writes an answer of one of OpenAI's older endpoints: every chunk repeats the heading."""

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
    """A part of an answer: thinking, text, or one call."""

    kind: BlockKind
    index: int  # the block's place in the answer
    call: CallDelta | None = None  # the first piece of a call
    id: str = ""  # the block's id, if the protocol has one
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Return the text so far; a call's text is its arguments, as JSON."""
        return "".join(self.pieces)

    def continues(self, kind: BlockKind, call: CallDelta | None) -> bool:
        """Return True if a piece of this kind, of this call, belongs to the block."""
        if self.call is None or call is None:
            return self.kind == kind
        return self.call.index == call.index


class BlockWriter(AnswerWriter):
    """Writes one answer as a list of blocks: each has ended when the next one begins."""

    # A protocol says how a block begins, grows and ends: `_start`, `_piece` and `_stop`.

    def __init__(self) -> None:
        self._open: Block | None = None
        self._done: list[Any] = []

    def _extend(self, kind: BlockKind, text: str, call: CallDelta | None = None) -> list[Event]:
        """Return the events of a piece, which continues the open block or begins another."""
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
        """End the open block, if there is one, and return the events of its end."""
        block, self._open = self._open, None
        return [] if block is None else self._stop(block)

    @abstractmethod
    def _start(self, block: Block) -> list[Event]:
        """Return the events of a block that begins."""

    @abstractmethod
    def _piece(self, block: Block, text: str) -> list[Event]:
        """Return the events of new text."""

    @abstractmethod
    def _stop(self, block: Block) -> list[Event]:
        """Add a block that has ended to those done, and return the events of its end."""
