"""Rows on their way: a ticket for each, and who of those that wait joins next."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.errors import EngineFailed, GatewayError
from gateway.jobs import Delta, RowDelta, RowJob


@dataclass(slots=True, eq=False)
class Ticket:
    """One row of a job: waiting, running or ended. Its deltas go to the job's one inbox."""

    job: RowJob
    index: int
    inbox: asyncio.Queue[Delta | GatewayError]
    row: int | None = None
    is_over: bool = False

    @property
    def is_bound(self) -> bool:
        """Tell whether the row is held to a grammar."""
        return self.job.grammar is not None

    def deliver(self, delta: RowDelta, model: str) -> None:
        """Pass on what a step gave the row; `model` names it in an error."""
        if delta.error is not None:
            self.end(EngineFailed(model, delta.error))
            return
        self.is_over = delta.finish_reason is not None
        self.inbox.put_nowait(
            Delta(
                self.index,
                delta.text,
                delta.tokens,
                delta.finish_reason,
                reasoning=delta.reasoning,
                call=delta.call,
                logprobs=delta.logprobs,
                reasoning_tokens=delta.reasoning_tokens,
            )
        )

    def end(self, error: GatewayError) -> None:
        """End the row, unless it has ended, with an error."""
        if not self.is_over:
            self.is_over = True
            self.inbox.put_nowait(error)


@dataclass(slots=True)
class Moves:
    """What changed since the last turn: rows to let in, rows to drop."""

    joining: list[Ticket] = field(default_factory=list)
    leaving: list[int] = field(default_factory=list)


def take_rows(waiting: Sequence[bool], *, room: int, bound_room: int) -> list[int]:
    """Choose which waiting rows join, by place: the oldest first, while there is room.

    `waiting` tells which rows are bound to a grammar. Those have room of their own; free rows
    pass them, and they keep their order among themselves.
    """
    chosen: list[int] = []
    for place, is_bound in enumerate(waiting):
        if len(chosen) >= room:
            break
        if not is_bound or bound_room > 0:
            chosen.append(place)
            bound_room -= is_bound
    return chosen
