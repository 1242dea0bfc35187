"""Schedules a chat model's sequences: which wait, run, are parked, leave and are preempted."""

import asyncio
from collections import Counter, abc, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from gateway import metrics
from gateway.errors import GatewayError
from gateway.serving.generation.memory import GROWTH, MARGIN, Layout, RowMemory
from gateway.serving.generation.policy import Decision, GenerationLimits, WaitingQueue
from gateway.serving.generation.sequence import SchedulerOutput, Sequence
from gateway.serving.lane import Turn

MAX_PREEMPTIONS = 2  # of a row; then it keeps its memory, and younger rows are preempted
QUANTUM = 64  # tokens that a constrained row decodes before another's turn
ANSWERS_SHARE = 0.25  # of the places, which rows that only judge leave free: they may be thousands
POLL_S = 0.25  # for a model that has been idle long enough to be evicted


class Scheduler:
    """One model's sequences and the memory of their KV. Its methods run on the loop's thread.

    Rows in the batch are active or held. A held row is parked, or will be after its prefill, since
    only so many rows with a grammar decode at once. Those take turns of a quantum of tokens, so
    that the wait for one is in proportion to the quantum and not to the longest answer before it:
    which answer is the shortest is unknown.
    """

    def __init__(self, model: str, limits: GenerationLimits, memory: RowMemory) -> None:
        self.memory = memory
        self.leaving: list[int] = []
        self._model = model
        self.limits = limits
        self._waiting = WaitingQueue()
        self._batch: dict[int, Sequence] = {}
        self._held: deque[Sequence] = deque()  # in the order of their turns
        self._prefilling: frozenset[int] = frozenset()
        self._ending: dict[int, Sequence] = {}  # preempted, to end with the tokens they have
        self._blocked: Sequence | None = None  # the first that would join if there were memory
        self._stuck: list[Sequence] = []  # those that lack memory only other models hold
        self.bearable: int | None = None  # rows that the device has memory for, if it ran out
        metrics.of(metrics.PREEMPTIONS, model)  # at 0, so that a rate sees the first

    @property
    def waiting(self) -> int:
        """Return the number of rows that wait to join, or to join again."""
        return len(self._waiting)

    @property
    def parked(self) -> int:
        """Return the number of rows that have their KV and wait to decode."""
        return sum(each.row not in self._prefilling for each in self._held)

    def count_soon_decoding(self, most_tokens: int) -> int:
        """Return how many rows in prefill, of prompts up to `most_tokens`, will decode."""
        return sum(
            each.row in self._prefilling
            and each.will_decode
            and not each.is_held
            and len(each.params.prompt) <= most_tokens
            for each in self
        )

    @property
    def decoding(self) -> int:
        """Return the number of rows that decode."""
        return sum(not each.is_held and each.row not in self._prefilling for each in self)

    @property
    def is_short_of_memory(self) -> bool:
        """Return True if, when last tried, a row did not join for want of memory."""
        return self._blocked is not None

    @property
    def may_join(self) -> bool:
        """Return True if a row joins now, or the prefix cache has to be freed."""
        if self.memory.must_clear_prefixes or self._choose():
            return True
        return self.memory.prefix_bytes > 0 and self.is_short_of_memory

    @property
    def must_move(self) -> bool:
        """Return True if rows have to leave, end or take turns, even if none decodes."""
        return bool(self.leaving or self._ending or self._turns().resuming)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over the rows in the batch."""
        return iter(self._batch.values())

    def get(self, row: int) -> Sequence | None:
        """Return the sequence of a row if it is in the batch."""
        return self._batch.get(row) or self._ending.get(row)

    def wait(self, sequences: Iterable[Sequence]) -> None:
        """Add sequences to the queue."""
        for sequence in sequences:
            self._waiting.add(sequence)

    def note_join(self, sequence: Sequence, row: int) -> bool:
        """Record that a row joined. Return False if it was dropped meanwhile, and has to leave."""
        sequence.row = row
        if sequence.is_over:
            self.leaving.append(row)
        else:
            self._enter(sequence, row)
        return not sequence.is_over

    def note_end(self, row: int) -> None:
        """Record that a row has ended."""
        if self._ending.pop(row, None) is None:
            self._exit(self._batch[row], row)
            self._bear_more()

    def note_prefilling(self, rows: frozenset[int]) -> None:
        """Record which rows are in prefill after a turn."""
        self._prefilling = rows

    def shed(self) -> None:
        """Keep half of the rows in the batch: the device had no memory for all. The others join
        again as these leave it, and with each one that does one row more may run.
        """
        self.bearable = max(1, len(self._batch) // 2)

    def drop(self, sequences: abc.Sequence[Sequence]) -> bool:
        """Drop every row of a job. Return True if any has to leave the engine.

        A row that is joining at this moment is dropped by `note_join`.
        """
        for sequence in sequences:
            if sequence.is_over:
                continue
            sequence.is_over = True
            if sequence.is_queued:
                self._waiting.discard(sequence)
            if sequence.row is not None:
                self.leaving.append(sequence.row)
                if self._batch.get(sequence.row) is sequence:
                    self._exit(sequence, sequence.row)
                    self._bear_more()
                self._ending.pop(sequence.row, None)
        return bool(self.leaving)

    def end_running(self, error: GatewayError) -> None:
        """End all rows that the engine has, with an error."""
        preempted = [sequence for sequence in self._waiting if sequence.row is not None]
        joined = [*self._batch.values(), *self._ending.values(), *preempted]
        for sequence in joined:
            sequence.end(error)
        for sequence in preempted:
            self._waiting.discard(sequence)
        self.leaving += [sequence.row for sequence in joined if sequence.row is not None]
        self._batch.clear()
        self._bear_more()
        self._ending.clear()
        self._held.clear()

    def end_stuck(self, error: GatewayError) -> None:
        """End rows that have waited too long for memory that only other models hold.

        A row that has tokens already ends with them, and finish reason `length`.
        """
        now = asyncio.get_running_loop().time()
        for sequence in self._stuck:
            is_due = sequence.stuck_since is not None and now >= self._gives_up_at(sequence)
            if sequence.is_over or not is_due:
                continue
            if sequence.row is not None and sequence.tokens:
                self._waiting.take([sequence])
                self._ending[sequence.row] = sequence
            else:
                sequence.end(error)
                self._waiting.discard(sequence)
                if sequence.row is not None:
                    self.leaving.append(sequence.row)

    def end_all(self, error: GatewayError) -> None:
        """End every row with an error."""
        self.end_running(error)
        for sequence in self._waiting:
            sequence.end(error)
        self._waiting.clear()

    def next_poll_at(self) -> float | None:
        """Return when, on the loop's clock, to try again to find memory, or to end stuck rows;
        None if no row lacks memory.
        """
        self._choose()
        if not self.is_short_of_memory:
            return None
        soon = asyncio.get_running_loop().time() + POLL_S
        return min([soon, *map(self._gives_up_at, self._stuck)])

    def schedule(self, turn: Turn, *, may_join: bool) -> SchedulerOutput:
        """Decide, once the lane is held, which rows are preempted, resumed and join.

        Afterwards running rows have memory for the turn's steps and the pass launched ahead.
        """
        plan = SchedulerOutput(asyncio.get_running_loop(), leaving=self.leaving)
        self.leaving = []
        plan.capped = [(row, sequence.tokens) for row, sequence in self._ending.items()]
        self._take_turns(plan)
        while self.bearable is not None and len(self._batch) > self.bearable:
            self._preempt(self._youngest(), plan)
        self._grow(plan)
        if may_join:
            if self.memory.must_clear_prefixes:
                self._clear_prefixes(plan)
            chosen = self._choose()
            if not chosen and self.is_short_of_memory and self.memory.prefix_bytes:
                self._clear_prefixes(plan)
                chosen = self._choose()
            self._join(plan, chosen, turn)
            reading = [each for each in self if each.row in self._prefilling] + plan.joining
            plan.reading = [len(each.params.prompt) for each in reading]
        self.hold(plan.joining)
        return plan

    def hold(self, joining: abc.Sequence[Sequence] = ()) -> None:
        """Reserve the memory of the rows in the batch and of those that join."""
        self.memory.hold(_layout([*self, *joining]))

    def make_room(self) -> None:
        """Evict idle models for the next row to join."""
        if self._blocked is not None and not self._blocked.is_over:
            self.memory.make_room(_layout([*self, self._blocked]), is_pressing=not self._batch)

    def _enter(self, sequence: Sequence, row: int) -> None:
        self._batch[row] = sequence
        sequence.turn_began = sequence.tokens
        if sequence.is_held:
            self._held.append(sequence)

    def _exit(self, sequence: Sequence, row: int) -> None:
        del self._batch[row]
        if sequence.is_held:
            self._held.remove(sequence)

    def _bear_more(self) -> None:
        """Let one row more run, since one has left; any number once none is left, or as many as
        may run at all.
        """
        if self.bearable is not None:
            self.bearable += 1
            if not self._batch or self.bearable >= self.limits.max_batch_size:
                self.bearable = None

    def _active(self, *, constrained: bool = False) -> list[Sequence]:
        """List the rows that are not held, or those of them that have a grammar."""
        active = (each for each in self if not each.is_held)
        return [each for each in active if each.is_constrained or not constrained]

    def _choose(self) -> list[Sequence]:
        """Choose the rows that join: as many as there are places and memory for."""
        joining: list[Sequence] = []
        self._blocked, self._stuck = None, []
        places = self.limits.max_batch_size - len(self._active())
        held_places = self.limits.max_batch_size - len(self._held)
        free_constrained = self._free_constrained()
        reserved = int(self.limits.max_batch_size * ANSWERS_SHARE)
        now = asyncio.get_running_loop().time()
        room = self.limits.max_batch_size * 2  # those active, and those held
        if self.bearable is not None:
            room = self.bearable - len(self._batch)
        if max(places, held_places) <= 0 or not self._waiting or self._turns().is_blocked:
            return joining

        def decide(sequence: Sequence) -> Decision:
            nonlocal places, held_places, free_constrained, room
            is_held = sequence.is_constrained and (free_constrained <= 0 or places <= 0)
            if sequence.params.step is not None and places <= reserved:
                return Decision.SKIP
            if min(room, held_places if is_held else places) <= 0:
                return Decision.SKIP
            sequence.is_held = is_held
            sequence.length = self.memory.grant_length(
                sequence.used, sequence.max_length, sequence.preemptions
            )
            if not self._can_finish(sequence, joining):
                return Decision.SKIP
            if self.memory.fits(_layout([*self, *joining, sequence])):
                joining.append(sequence)
                sequence.stuck_since = None
                places -= not is_held
                room -= 1
                held_places -= is_held
                free_constrained -= sequence.is_constrained and not is_held
                return Decision.JOIN
            self._blocked = self._blocked or sequence
            if self.memory.fits(_layout([sequence])):
                sequence.stuck_since = None
                return Decision.STOP  # until rows of this model free what it needs
            if sequence.stuck_since is None:
                sequence.stuck_since = now
            self._stuck.append(sequence)
            return Decision.SKIP

        return self._waiting.choose(Counter(each.request for each in self), decide)

    def _can_finish(self, sequence: Sequence, joining: abc.Sequence[Sequence]) -> bool:
        """Return True if a row may be preempted again, or else could run to its end together with
        the others that may not.
        """
        if sequence.preemptions < MAX_PREEMPTIONS:
            return True
        others = [each for each in (*self, *joining) if each.preemptions >= MAX_PREEMPTIONS]
        lengths = [each.max_length for each in (*others, sequence)]
        return not others or self.memory.fits(Layout(lengths))

    def _join(self, plan: SchedulerOutput, chosen: abc.Sequence[Sequence], turn: Turn) -> None:
        self._waiting.take(chosen)
        for sequence in chosen:
            if sequence.row is None:
                sequence.join(turn)
                plan.joining.append(sequence)
            else:
                self._enter(sequence, sequence.row)
                plan.rejoining.append(sequence)

    def _clear_prefixes(self, plan: SchedulerOutput) -> None:
        plan.clears_prefixes = True
        self.memory.clear_prefixes()

    def _gives_up_at(self, sequence: Sequence) -> float:
        """Return when, on the loop's clock, a stuck row ends."""
        since = sequence.stuck_since
        assert since is not None
        return since + self.limits.memory_wait_s

    def _free_constrained(self) -> int:
        """Return how many more constrained rows may decode at once; 0 or less if any are held."""
        active = len(self._active(constrained=True))
        return self.limits.structured_rows - active - len(self._held)

    def _turns(self) -> "_Turns":
        """Choose which constrained rows are parked, and which held ones resume in their place."""
        turns = _Turns()
        ready = deque(each for each in self._held if each.row not in self._prefilling)
        if not ready:
            return turns
        active = self._active(constrained=True)
        places = self.limits.max_batch_size - len(self._active())
        free = min(self.limits.structured_rows - len(active), places)
        spent = [each for each in active if each.tokens - each.turn_began >= QUANTUM]
        while ready and (free > 0 or spent):
            parked = [] if free > 0 else [spent[0]]
            resuming, parking = [*turns.resuming, ready[0]], [*turns.parking, *parked]
            # A row has its own memory already, so it may always resume if no other runs.
            is_alone = not self._active() and not turns.resuming
            if not is_alone and not self.memory.fits(
                _layout(self, resuming, parking), has_grown=True
            ):
                turns.is_blocked = free > 0
                break
            turns.resuming, turns.parking = resuming, parking
            ready.popleft()
            free -= not parked
            del spent[: len(parked)]
        return turns

    def _take_turns(self, plan: SchedulerOutput) -> None:
        turns = self._turns()
        for sequence in turns.parking:
            assert sequence.row is not None
            sequence.is_held = True
            self._held.append(sequence)
            plan.parked.append(sequence.row)
        for sequence in turns.resuming:
            assert sequence.row is not None
            sequence.is_held = False
            self._held.remove(sequence)
            sequence.turn_began = sequence.tokens
            plan.resumed.append(sequence.row)

    def _grow(self, plan: SchedulerOutput) -> None:
        """Reserve memory before rows need it, the oldest first. If there is none the youngest rows
        are preempted; one that is alone ends there.
        """
        for sequence in sorted(self._active(), key=_age):
            if sequence.row in self._batch and sequence.needs_more:
                self._grow_one(sequence, plan)

    def _grow_one(self, sequence: Sequence, plan: SchedulerOutput) -> None:
        assert sequence.row is not None
        least = min(sequence.max_length, sequence.used + MARGIN)
        before, sequence.length = (
            sequence.length,
            min(sequence.max_length, sequence.used + MARGIN + GROWTH),
        )
        if self._fits_all():
            return
        if len(self._batch) == 1:
            # Perhaps in time for its next turn.
            self.memory.make_room(_layout(self), is_pressing=True)
        sequence.length = least
        while not self._fits_all():
            if self.memory.prefix_bytes:
                self._clear_prefixes(plan)
            elif len(self._batch) == 1:
                sequence.length = before
                plan.capped.append((sequence.row, sequence.cap_tokens()))
                return
            else:
                self._preempt(self._youngest(), plan)
                if sequence.row not in self._batch:
                    return

    def _fits_all(self) -> bool:
        return self.memory.fits(_layout(self), has_grown=True)

    def _youngest(self) -> Sequence:
        """Choose the row to preempt: of those that may be, held rows before others."""
        preemptible = [each for each in self if each.preemptions < MAX_PREEMPTIONS]
        # There is none only if other models took memory that these rows had counted on.
        return max(preemptible or self, key=lambda each: (each.is_held, *_age(each)))

    def _preempt(self, sequence: Sequence, plan: SchedulerOutput) -> None:
        assert sequence.row is not None
        self._exit(sequence, sequence.row)
        plan.preempted.append(sequence.row)
        sequence.preempt()
        self._waiting.add_preempted(sequence)
        metrics.of(metrics.PREEMPTIONS, self._model).inc()


@dataclass(slots=True)
class _Turns:
    """Constrained rows to park and to resume. `is_blocked`: one could resume if it had memory, so
    that no row may join and take it.
    """

    parking: list[Sequence] = field(default_factory=list)
    resuming: list[Sequence] = field(default_factory=list)
    is_blocked: bool = False


def _age(sequence: Sequence) -> tuple[float, int]:
    """Return a key that sorts the oldest row first."""
    return sequence.rank, sequence.index


def _layout(
    sequences: Iterable[Sequence],
    resuming: abc.Sequence[Sequence] = (),
    parking: abc.Sequence[Sequence] = (),
) -> Layout:
    """Return the layout of rows, or as it would be if some resumed and others were parked."""
    batched: list[int] = []
    single: list[int] = []
    for sequence in sequences:
        is_held = (sequence.is_held or sequence in parking) and sequence not in resuming
        (single if is_held or not sequence.will_decode else batched).append(sequence.length)
    return Layout(batched, single)
