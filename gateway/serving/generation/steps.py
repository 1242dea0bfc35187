"""A chat model's turn on the lane's thread: it moves rows as scheduled, then runs passes."""

import threading
from collections import abc
from collections.abc import Callable

from gateway import clock, logs
from gateway.errors import EngineFailed, PassFault
from gateway.jobs import Pass, SequenceDelta
from gateway.serving.faults import DeviceHealth
from gateway.serving.generation.sequence import SchedulerOutput, Sequence
from gateway.serving.lane import Turn
from gateway.serving.pace import Pace
from gateway.serving.ports import GenerationEngine

log = logs.get("generation")

LEAVE_TRIES = 3
# While no other model needs the device, several short prompts share a pass that takes longer: on
# a CPU, one of 50 tokens takes a fourth of the time that eight take together.
ALONE_S = 10.0  # without a turn of another's
ALONE_LIMIT = 4  # times the limit of a pass
ALONE_WITH = ("load", "tidy")  # which nobody waits for as for an answer
STEPS_PER_TURN = 16  # if no other turn waits: a hop to the lane's thread costs 0.1 ms

Deliver = Callable[[Pass, str, abc.Sequence[SequenceDelta], float], None]


class Steps:
    """Runs turns on the lane's thread. Setting `interrupt` ends one after its pass.

    `on_join`, `deliver`, `on_fault` (with what a pass has raised) and `on_end` (with the bytes of
    the prefix cache, and the rows in prefill) are called on the loop. A turn raises DeviceLost if
    `health` does.
    """

    def __init__(
        self,
        name: str,
        engine: GenerationEngine,
        interrupt: threading.Event,
        health: DeviceHealth,
        *,
        chunk_tokens: int,
        pass_limit_s: float,
        on_join: Callable[[Sequence, int], None],
        deliver: Deliver,
        on_end: Callable[[int, frozenset[int]], None],
        on_fault: Callable[[PassFault], None],
    ) -> None:
        self._name = name
        self._engine = engine
        self._interrupt = interrupt
        self._health = health
        self._chunk_tokens = chunk_tokens
        self._pace = Pace(pass_limit_s)
        self._pace_alone = Pace(ALONE_LIMIT * pass_limit_s)
        self._on_join = on_join
        self._deliver = deliver
        self._on_end = on_end
        self._on_fault = on_fault
        self._failed_leaves: dict[int, int] = {}  # by row: how often leaving has failed

    def adopt(self, chunk_tokens: int, pass_limit_s: float) -> None:
        """Apply new limits of a pass."""
        self._chunk_tokens = chunk_tokens
        self._pace.limit_s = pass_limit_s
        self._pace_alone.limit_s = ALONE_LIMIT * pass_limit_s

    @property
    def pass_tokens(self) -> int:
        """Return the most prompt tokens of the next pass beside other work."""
        return min(self._chunk_tokens, self._pace.tokens)

    def _choose_pace(self, plan: SchedulerOutput, turn: Turn) -> Pace:
        """Choose how long the next pass over prompts may take.

        Where answers are under way, it is longer for two prompts that it reads whole: a single one,
        or parts of longer ones, would only keep those answers waiting.
        """
        if turn.seconds_alone(ALONE_WITH) < ALONE_S:
            return self._pace
        most = min(self._chunk_tokens, self._pace_alone.tokens) // 2
        is_burst = sum(length <= most for length in plan.reading) > 1
        is_decoding = self._engine.rows > len(self._engine.prefilling)
        return self._pace_alone if is_burst or not is_decoding else self._pace

    def prefill(self, plan: SchedulerOutput, turn: Turn) -> None:
        """Prefill a chunk; if others wait for the lane, more chunks until this turn is up."""
        engine = self._engine
        self._apply(plan)
        while engine.is_prefilling:
            started = clock.now()
            pace = self._choose_pace(plan, turn)
            deltas = engine.prefill(min(self._chunk_tokens, pace.tokens))
            tokens, seconds = engine.last_pass.padded_tokens, clock.now() - started
            for each in (self._pace, self._pace_alone):
                each.note(tokens, seconds)
            self._report(plan, turn, "prefill", deltas, started)
            if self._interrupt.is_set() or turn.is_up or not turn.is_contended:
                break
        self._end(plan, turn)

    def decode(self, plan: SchedulerOutput, turn: Turn) -> None:
        """Decode STEPS_PER_TURN tokens a row, or until another turn is due or rows leave."""
        engine = self._engine
        self._apply(plan)
        tokens = 0
        while engine.is_decoding and tokens < STEPS_PER_TURN:
            started = clock.now()
            deltas = engine.decode()
            size = engine.last_pass
            tokens += max(1, size.padded_tokens // max(1, size.rows))
            self._report(plan, turn, "decode", deltas, started)
            if self._interrupt.is_set() or turn.is_up:
                break
        self._end(plan, turn)

    def _apply(self, plan: SchedulerOutput) -> None:
        self._health.check()
        for row in (*self._failed_leaves, *plan.leaving):
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
        if plan.clears_prefixes:
            engine.clear_prefixes()
        for sequence in plan.rejoining:
            assert sequence.row is not None
            engine.resume(sequence.row)
            self._park_if_held(sequence, sequence.row)
        for sequence in plan.joining:
            try:
                row = engine.join(sequence.params)
                self._park_if_held(sequence, row)
            except Exception as error:  # this row fails alone
                plan.post(sequence.end, EngineFailed(self._name, str(error)))
            else:
                plan.post(self._on_join, sequence, row)

    def _park_if_held(self, sequence: Sequence, row: int) -> None:
        """Park a row after its prefill if other rows decode first."""
        if sequence.is_held:
            self._engine.park(row)

    def _leave(self, row: int) -> None:
        """Drop a row. A failure is retried LEAVE_TRIES times and never affects other rows."""
        try:
            self._engine.leave(row)
        except Exception as error:
            log.error("row_cannot_leave", model=self._name, row=row, error=str(error))
            failures = self._failed_leaves.pop(row, 0) + 1
            if failures < LEAVE_TRIES:
                self._failed_leaves[row] = failures
        else:
            self._failed_leaves.pop(row, None)

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
            if fault.is_pressure:
                self._interrupt.set()  # rows have to be preempted before the next pass
                self._health.shed()
            self._health.note(fault.fault, fault.message, self._engine.probe)
        plan.post(self._deliver, self._engine.last_pass, kind, deltas, clock.now() - started)

    def _end(self, plan: SchedulerOutput, turn: Turn) -> None:
        """Wait for the device's launched work if others wait: it must not run in their turn."""
        plan.post(self._on_end, self._engine.prefix_bytes, self._engine.prefilling)
        if turn.is_contended:
            self._engine.synchronize()
        else:
            turn.leave_under_way(self._engine.synchronize)
