"""Embedding requests on their way: the inputs of each that still wait, and its vectors so far."""

import asyncio
from collections.abc import Sequence

import numpy as np

from gateway import metrics
from gateway.errors import GatewayError
from gateway.jobs import Stage, Timings, TokenIds, Vectors
from gateway.serving.lane import Turn


class EmbedTicket:
    """One request's inputs, taken shortest first, so that each batch pads little."""

    def __init__(self, rows: Sequence[TokenIds], timings: Timings) -> None:
        self.arrived = metrics.now()
        self.answered: asyncio.Future[Vectors] = asyncio.get_running_loop().create_future()
        self._rows = rows
        self._timings = timings
        self._order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
        self._taken = 0
        self._left = len(rows)
        self._vectors: Vectors | None = None
        self._inferred_s = 0.0
        self._lane_s = 0.0
        self._turn: Turn | None = None  # the last one that had inputs of it

    @property
    def is_over(self) -> bool:
        """Tell whether it is answered, refused, or its caller gone."""
        return self.answered.done()

    @property
    def is_waiting(self) -> bool:
        """Tell whether inputs of it wait for a batch."""
        return not self.is_over and self._taken < len(self._order)

    @property
    def waiting(self) -> int:
        """Count the inputs that wait."""
        return len(self._order) - self._taken

    def lengths(self, most: int) -> list[int]:
        """Give the tokens of the next inputs, at most so many."""
        return [len(self._rows[i]) for i in self._order[self._taken : self._taken + most]]

    def take(self, count: int) -> "list[Input]":
        """Give the next inputs to a batch."""
        taken = self._order[self._taken : self._taken + count]
        self._taken += count
        return [Input(self, index, self._rows[index]) for index in taken]

    def passed(self, seconds: float, turn: Turn) -> None:
        """Count a pass that had inputs of it, and, once a turn, the wait for the lane before.

        The turn may have been asked for before the ticket came.
        """
        self._inferred_s += seconds
        if turn is not self._turn:
            self._turn = turn
            self._lane_s += max(0.0, min(turn.waited_s, turn.gained - self.arrived))

    def answer(self, index: int, vector: Vectors) -> None:
        """Take one input's vector, (dimensions,); the last one answers the request."""
        if self._vectors is None:
            self._vectors = np.empty((len(self._rows), len(vector)), dtype=np.float32)
        self._vectors[index] = vector
        self._left -= 1
        if self._left == 0 and not self.is_over:
            self.answered.set_result(self._vectors)

    def over(self) -> None:
        """Note where it stands, for when its caller has left, and be in no further pass."""
        self._timings.stage = Stage.INFERENCE if self._taken else Stage.QUEUE
        self.answered.cancel()

    def told(self) -> None:
        """Write down where the time went since it arrived: what was no pass was the queue."""
        waited = metrics.now() - self.arrived
        add = self._timings.add
        add(Stage.QUEUE, max(0.0, waited - self._inferred_s - self._lane_s))
        add(Stage.LANE, self._lane_s)
        add(Stage.INFERENCE, self._inferred_s)

    def refuse(self, error: GatewayError) -> None:
        """End it with an error, unless it is over."""
        if not self.is_over:
            self.answered.set_exception(error)


class Input:
    """One input inside a batch."""

    __slots__ = ("index", "ticket", "tokens")

    def __init__(self, ticket: EmbedTicket, index: int, tokens: TokenIds) -> None:
        self.ticket = ticket
        self.index = index
        self.tokens = tokens
