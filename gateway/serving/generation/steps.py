"""A turn of a chat model, as it is worked on the lane's thread: in steps, while it may."""

import threading
from collections.abc import Callable, Sequence

from gateway import logs, metrics
from gateway.errors import EngineFailed
from gateway.jobs import Pass, SequenceDelta
from gateway.serving.generation.sequence import Moves, Ticket
from gateway.serving.lane import Turn
from gateway.serving.pace import Pace
from gateway.serving.ports import GenerationEngine

log = logs.get("generation")

LEAVE_TRIES = 3
STEPS_PER_TURN = 16  # when nobody else waits: one hop to the lane's thread costs 0.1 ms

Deliver = Callable[[Pass, str, Sequence[SequenceDelta], float], None]


class Steps:
    """What one turn does. `joined`, `deliver`, `faulted`, with what a pass has thrown, and
    `settled`, with the bytes kept of prompts and the rows being read, are called on the loop;
    `news` ends a turn.
    """

    def __init__(
        self,
        name: str,
        engine: GenerationEngine,
        news: threading.Event,
        *,
        chunk_tokens: int,
        pass_limit_s: float,
        joined: Callable[[Ticket, int], None],
        deliver: Deliver,
        settled: Callable[[int, frozenset[int]], None],
        faulted: Callable[[str], None],
    ) -> None:
        self._name = name
        self._engine = engine
        self._news = news
        self.chunk_tokens = chunk_tokens
        self.pace = Pace(pass_limit_s)
        self._joined = joined
        self._deliver = deliver
        self._settled = settled
        self._faulted = faulted
        self._stuck: dict[int, int] = {}  # how often rows that could not leave have tried

    def read(self, moves: Moves, turn: Turn) -> None:
        """Read a chunk of the prompts, or more while others wait for the lane and our share is
        not used up.
        """
        engine = self._engine
        self._move(moves)
        while engine.is_prefilling:
            started = metrics.now()
            deltas = engine.prefill(min(self.chunk_tokens, self.pace.tokens))
            self.pace.note(engine.last_pass.padded_tokens, metrics.now() - started)
            self._told(moves, turn, "prefill", deltas, started)
            if self._news.is_set() or turn.is_up or not turn.is_contended:
                break
        self._settle(moves, turn)

    def write(self, moves: Moves, turn: Turn) -> None:
        """Give the running rows some tokens, until another's turn is due or rows leave."""
        engine = self._engine
        self._move(moves)
        for _ in range(STEPS_PER_TURN):
            if not engine.is_decoding:
                break
            started = metrics.now()
            deltas = engine.decode()
            self._told(moves, turn, "decode", deltas, started)
            if self._news.is_set() or turn.is_up:
                break
        self._settle(moves, turn)

    def _move(self, moves: Moves) -> None:
        for row in (*self._stuck, *moves.leaving):
            self._leave(row)
        engine = self._engine
        for row in moves.parked:
            engine.park(row)
        for row in moves.resumed:
            engine.resume(row)
        for row in moves.preempted:
            engine.preempt(row)
        for row, max_tokens in moves.curtailed:
            if ends := engine.cap_tokens(row, max_tokens):
                moves.tell(self._deliver, Pass(), "end", ends, 0.0)
        if moves.forgets:
            engine.forget()
        for ticket in moves.rejoining:
            assert ticket.row is not None
            engine.resume(ticket.row)
            self._hold(ticket, ticket.row)
        for ticket in moves.joining:
            try:
                row = engine.join(ticket.job)
                self._hold(ticket, row)
            except Exception as error:  # its own: the others have done nothing
                moves.tell(ticket.end, EngineFailed(self._name, str(error)))
            else:
                moves.tell(self._joined, ticket, row)

    def _hold(self, ticket: Ticket, row: int) -> None:
        """Have a row stop once it is read, where others' turn comes first."""
        if ticket.is_held:
            self._engine.park(row)

    def _leave(self, row: int) -> None:
        """Have a row leave, which is nobody else's trouble. One that cannot tries so many times;
        then it stays until it has said its last.
        """
        try:
            self._engine.leave(row)
        except Exception as error:
            log.error("row_cannot_leave", model=self._name, row=row, error=str(error))
            tries = self._stuck.pop(row, 0) + 1
            if tries < LEAVE_TRIES:
                self._stuck[row] = tries
        else:
            self._stuck.pop(row, None)

    def _told(
        self, moves: Moves, turn: Turn, kind: str, deltas: Sequence[SequenceDelta], started: float
    ) -> None:
        turn.beat()
        for fault in self._engine.take_faults():
            moves.tell(self._faulted, fault)
        moves.tell(self._deliver, self._engine.last_pass, kind, deltas, metrics.now() - started)

    def _settle(self, moves: Moves, turn: Turn) -> None:
        """What was begun is ours: it must not run in another's turn."""
        moves.tell(self._settled, self._engine.kept_bytes, self._engine.reading)
        if turn.is_contended:
            self._engine.settle()
