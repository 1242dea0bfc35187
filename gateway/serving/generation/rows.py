"""One chat model's rows: who waits, who runs, who leaves, and who joins next."""

import asyncio
import bisect
from collections.abc import Iterable, Iterator, Sequence

from gateway.errors import GatewayError
from gateway.serving.generation.batches import GenerationLimits, take_rows
from gateway.serving.generation.memory import RowMemory
from gateway.serving.generation.tickets import Moves, Ticket
from gateway.serving.lane import Turn


class Rows:
    """Their tickets, and the memory that their KV may take. All of it on the loop."""

    def __init__(self, limits: GenerationLimits, memory: RowMemory) -> None:
        self.memory = memory
        self.leaving: list[int] = []
        self._limits = limits
        self._waiting: list[Ticket] = []  # by rank
        self._running: dict[int, Ticket] = {}
        self._stuck_since: float | None = None

    @property
    def is_wanting(self) -> bool:
        """Tell whether one could join, if there were memory."""
        return bool(self._next()) and not self.chosen()

    @property
    def may_forget(self) -> bool:
        """Tell whether what is kept of prompts has to go, for one that could join or for others."""
        return self.memory.must_forget or (self.memory.kept > 0 and self.is_wanting)

    @property
    def waiting(self) -> int:
        """Count those that have yet to join."""
        return len(self._waiting)

    def __iter__(self) -> Iterator[Ticket]:
        """Give those that run."""
        return iter(self._running.values())

    def get(self, row: int) -> Ticket | None:
        """Give the ticket of a row, if it runs."""
        return self._running.get(row)

    def wait(self, tickets: Iterable[Ticket]) -> None:
        """Let them stand in line."""
        for ticket in tickets:
            bisect.insort(self._waiting, ticket, key=lambda each: each.rank)

    def joined(self, ticket: Ticket, row: int) -> bool:
        """Note that it runs; False where it was given up meanwhile, and leaves again."""
        ticket.row = row
        if ticket.is_over:
            self.leaving.append(row)
        else:
            self._running[row] = ticket
        return not ticket.is_over

    def ended(self, row: int) -> None:
        """Note that it has said its last."""
        del self._running[row]

    def drop(self, tickets: Sequence[Ticket]) -> bool:
        """Let every row of a job go; tell whether one that runs has to leave.

        One that is joining this very moment is sent away by `joined`.
        """
        for ticket in tickets:
            if ticket.is_over:
                continue
            ticket.is_over = True
            if ticket in self._waiting:
                self._waiting.remove(ticket)
            elif ticket.row is not None:
                del self._running[ticket.row]
                self.leaving.append(ticket.row)
        return bool(self.leaving)

    def end_running(self, error: GatewayError) -> None:
        """End those that run, with an error."""
        for ticket in self._running.values():
            ticket.end(error)
        self.leaving += self._running
        self._running.clear()

    def end_stuck(self, error: GatewayError) -> None:
        """End those that wait and, even if they were alone, would not fit as things are."""
        stuck = [each for each in self._waiting if not self.memory.fitting([], [each.length])]
        for ticket in stuck:
            self._waiting.remove(ticket)
            ticket.end(error)

    def end_all(self, error: GatewayError) -> None:
        """End every one, with an error."""
        for ticket in self._waiting:
            ticket.end(error)
        self._waiting.clear()
        self.end_running(error)

    def chosen(self) -> list[int]:
        """Choose who joins, by place in the line."""
        following = self._next()
        lengths = [self._waiting[place].length for place in following]
        return following[: self.memory.fitting(self._lengths(), lengths)]

    def give_up_at(self) -> float | None:
        """Note how things are, and give when, by the loop's clock, who waits for memory that only
        others hold is to be told so; None while nobody does: rows that run give theirs back.
        """
        if self._running or not self.is_wanting:
            self._stuck_since = None
            return None
        if self._stuck_since is None:
            self._stuck_since = asyncio.get_running_loop().time()
        return self._stuck_since + self._limits.memory_wait_s

    def moves(self, turn: Turn, *, may_join: bool) -> Moves:
        """Choose only now, holding the lane, who joins."""
        moves = Moves(asyncio.get_running_loop(), leaving=self.leaving)
        self.leaving = []
        self._grow(moves)
        if may_join:
            moves.forgets = self.may_forget
            if moves.forgets:
                self.memory.forget()
            chosen = self.chosen()
            moves.joining = [self._waiting[place] for place in chosen]
            for place in reversed(chosen):
                self._waiting.pop(place).join(turn)
        self.hold(moves.joining)
        return moves

    def hold(self, joining: Sequence[Ticket] = ()) -> None:
        """Hold the memory of those that run or join, and no more."""
        self.memory.hold([*self._lengths(), *(each.length for each in joining)])

    def make_room(self) -> None:
        """Let idle models go for the next to join."""
        if following := self._next():
            self.memory.make_room([*self._lengths(), self._waiting[following[0]].length])

    def _next(self) -> list[int]:
        """Choose whose turn it is to join, if there is memory."""
        bound = [ticket.is_bound for ticket in self._running.values()]
        return take_rows(
            [ticket.is_bound for ticket in self._waiting],
            room=self._limits.max_batch_size - len(bound),
            bound_room=self._limits.structured_rows - sum(bound),
        )

    def _lengths(self) -> list[int]:
        return [ticket.length for ticket in self._running.values()]

    def _grow(self, moves: Moves) -> None:
        """Give open rows memory before they need it; where there is none, they end there."""
        for row, ticket in self._running.items():
            if not ticket.needs_more:
                continue
            others = [each.length for each in self._running.values() if each is not ticket]
            if (length := self.memory.grown(ticket.length, others, ticket.whole)) > ticket.length:
                ticket.length = length
                self.hold()
            else:
                moves.curtailed.append((row, ticket.curtail()))
