"""A turn of a chat model, as it is worked on the lane's thread: in steps, while it may."""

import threading
from collections import abc
from collections.abc import Callable

from gateway import clock, logs
from gateway.errors import EngineFailed
from gateway.jobs import Pass, SequenceDelta
from gateway.serving.generation.sequence import SchedulerOutput, Sequence
from gateway.serving.lane import Turn
from gateway.serving.pace import Pace
from gateway.serving.ports import GenerationEngine

log = logs.get("generation")

LEAVE_TRIES = 3
STEPS_PER_TURN = 16  # when nobody else waits: one hop to the lane's thread costs 0.1 ms

Deliver = Callable[[Pass, str, abc.Sequence[SequenceDelta], float], None]


class Steps:
    """Works a turn, on the lane's thread. `news` ends it after its pass.

    `on_join`, `deliver`, `on_fault` (an exception of a pass) and `on_settle` (the bytes of kept
    prefixes, and the rows still being read) are called on the loop.
    """

    def __init__(
        self,
        name: str,
        engine: GenerationEngine,
        news: threading.Event,
        *,
        chunk_tokens: int,
        pass_limit_s: float,
        on_join: Callable[[Sequence, int], None],
        deliver: Deliver,
        on_settle: Callable[[int, frozenset[int]], None],
        on_fault: Callable[[str], None],
    ) -> None:
        self._name = name
        self._engine = engine
        self._news = news
        self.chunk_tokens = chunk_tokens
        self.pace = Pace(pass_limit_s)
        self._on_join = on_join
        self._deliver = deliver
        self._on_settle = on_settle
        self._on_fault = on_fault
        self._stuck: dict[int, int] = {}  # how often rows that could not leave have tried

    @property
    def pass_tokens(self) -> int:
        """Return how many prompt tokens the next pass may read."""
        return min(self.chunk_tokens, self.pace.tokens)

    def prefill(self, plan: SchedulerOutput, turn: Turn) -> None:
        """Read a chunk of the prompts, or more while others wait for the lane and this turn
        lasts.
        """
        engine = self._engine
        self._apply(plan)
        while engine.is_prefilling:
            started = clock.now()
            deltas = engine.prefill(self.pass_tokens)
            self.pace.note(engine.last_pass.padded_tokens, clock.now() - started)
            self._report(plan, turn, "prefill", deltas, started)
            if self._news.is_set() or turn.is_up or not turn.is_contended:
                break
        self._settle(plan, turn)

    def decode(self, plan: SchedulerOutput, turn: Turn) -> None:
        """Decode some tokens of the running rows, until another turn is due or rows leave."""
        engine = self._engine
        self._apply(plan)
        for _ in range(STEPS_PER_TURN):
            if not engine.is_decoding:
                break
            started = clock.now()
            deltas = engine.decode()
            self._report(plan, turn, "decode", deltas, started)
            if self._news.is_set() or turn.is_up:
                break
        self._settle(plan, turn)

    def _apply(self, plan: SchedulerOutput) -> None:
        for row in (*self._stuck, *plan.leaving):
            self._leave(row)
        engine = self._engine
        for row in plan.parked:
            engine.park(row)
        for row in plan.resumed:
            engine.resume(row)
        for row in plan.preempted:
            engine.preempt(row)
        for row, max_tokens in plan.capped:
            if ends := engine.cap_tokens(row, max_tokens):
                plan.post(self._deliver, Pass(), "end", ends, 0.0)
        if plan.forgets:
            engine.forget()
        for sequence in plan.rejoining:
            assert sequence.row is not None
            engine.resume(sequence.row)
            self._hold(sequence, sequence.row)
        for sequence in plan.joining:
            try:
                row = engine.join(sequence.params)
                self._hold(sequence, row)
            except Exception as error:  # its own: the others have done nothing
                plan.post(sequence.end, EngineFailed(self._name, str(error)))
            else:
                plan.post(self._on_join, sequence, row)

    def _hold(self, sequence: Sequence, row: int) -> None:
        """Park a row once it is read, if others have their turn first."""
        if sequence.is_held:
            self._engine.park(row)

    def _leave(self, row: int) -> None:
        """Drop a row. A failure is retried LEAVE_TRIES times and never affects other rows."""
        try:
            self._engine.leave(row)
        except Exception as error:
            log.error("row_cannot_leave", model=self._name, row=row, error=str(error))
            tries = self._stuck.pop(row, 0) + 1
            if tries < LEAVE_TRIES:
                self._stuck[row] = tries
        else:
            self._stuck.pop(row, None)

    def _report(
        self,
        plan: SchedulerOutput,
        turn: Turn,
        kind: str,
        deltas: abc.Sequence[SequenceDelta],
        started: float,
    ) -> None:
        turn.beat()
        for fault in self._engine.take_faults():
            plan.post(self._on_fault, fault)
        plan.post(self._deliver, self._engine.last_pass, kind, deltas, clock.now() - started)

    def _settle(self, plan: SchedulerOutput, turn: Turn) -> None:
        """Wait for what the device has begun: it must not run in another turn."""
        plan.post(self._on_settle, self._engine.kept_bytes, self._engine.reading)
        if turn.is_contended:
            self._engine.settle()
