"""What a writer of answers does in every protocol: the events of a stream, or the whole answer."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from gateway.errors import GatewayError
from gateway.jobs import Delta, Sampling, Usage
from gateway.wire.generation import SchemaVerdict

Event = Mapping[str, Any]


@dataclass(slots=True)
class Answer:
    """A whole answer: all deltas of each choice, and of each the verdict, if there is one."""

    choices: Sequence[Sequence[Delta]]
    usage: Usage
    verdicts: Sequence[SchemaVerdict | None] = (None,)


class AnswerWriter(ABC):
    """Writes one answer. The whole one says what the events of a stream add up to."""

    # Each event has its type as its name. Without names, `[DONE]` follows the last event.
    names_events: ClassVar[bool] = False
    # The event that breaks a silence; without one it is a comment.
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
