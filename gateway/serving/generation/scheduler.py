"""Which sequences of a chat model wait, run, leave, join next, and are preempted."""

import asyncio
from collections import Counter, abc, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from gateway import metrics
from gateway.errors import GatewayError
from gateway.serving.generation.memory import GROWTH, MARGIN, Layout, RowMemory
from gateway.serving.generation.policy import GenerationLimits, Verdict, Waiting
from gateway.serving.generation.sequence import SchedulerOutput, Sequence
from gateway.serving.lane import Turn

PREEMPTIONS = 2  # of a row at the most; then it keeps its memory, and younger ones yield
QUANTUM = 64  # tokens that a bound row says before another's turn
LOOK_AGAIN_S = 0.25  # for a model that has been idle long enough to leave


class Scheduler:
    """Their sequences, and the memory that their KV may take. All of it on the loop.

    Rows inside are active or held. A held one has its KV, or is being read, and does not run: more
    rows are bound to grammars than may run at once. Those take turns, a quantum of tokens each, so
    that an answer waits in proportion to the quantum and not to the longest answer before it; the
    shortest cannot go first, for nobody knows which that is.
    """

    def __init__(self, model: str, limits: GenerationLimits, memory: RowMemory) -> None:
        self.memory = memory
        self.leaving: list[int] = []
        self._model = model
        self.limits = limits
        self._waiting = Waiting()
        self._inside: dict[int, Sequence] = {}
        self._held: deque[Sequence] = deque()  # in the order of their turns
        self._reading: frozenset[int] = frozenset()
        self._ending: dict[int, Sequence] = {}  # preempted, to end with what they have said
        self._wanting: Sequence | None = None  # the first that joins once there is memory
        self._stuck: list[Sequence] = []

    @property
    def waiting(self) -> int:
        """Return how many have yet to join, or to join again."""
        return len(self._waiting)

    @property
    def parked(self) -> int:
        """Return how many have their KV and wait for their turn."""
        return sum(each.row not in self._reading for each in self._held)

    def count_soon_decoding(self, most_tokens: int) -> int:
        """Return how many are being read that will decode then, of at most so long a prompt."""
        return sum(
            each.row in self._reading
            and each.will_decode
            and not each.is_held
            and len(each.params.prompt) <= most_tokens
            for each in self
        )

    @property
    def decoding(self) -> int:
        """Return how many are decoding."""
        return sum(not each.is_held and each.row not in self._reading for each in self)

    @property
    def is_wanting(self) -> bool:
        """Return True if one could have joined at the last look, had there been memory."""
        return self._wanting is not None

    @property
    def may_join(self) -> bool:
        """Return True if one joins now, or kept prefixes have to be freed."""
        if self.memory.must_forget or self._choose():
            return True
        return self.memory.kept > 0 and self.is_wanting

    @property
    def must_move(self) -> bool:
        """Return True if some have to leave, end or take turns, even if none decodes."""
        return bool(self.leaving or self._ending or self._turns().going)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over those inside."""
        return iter(self._inside.values())

    def get(self, row: int) -> Sequence | None:
        """Return the sequence of a row if it is inside."""
        return self._inside.get(row) or self._ending.get(row)

    def wait(self, sequences: Iterable[Sequence]) -> None:
        """Add sequences to the queue."""
        for sequence in sequences:
            self._waiting.add(sequence)

    def note_join(self, sequence: Sequence, row: int) -> bool:
        """Note that it joined. Return False if it was dropped meanwhile, and leaves again."""
        sequence.row = row
        if sequence.is_over:
            self.leaving.append(row)
        else:
            self._enter(sequence, row)
        return not sequence.is_over

    def note_end(self, row: int) -> None:
        """Note that it has ended."""
        if self._ending.pop(row, None) is None:
            self._exit(self._inside[row], row)

    def note_reading(self, reading: frozenset[int]) -> None:
        """Note which rows are being read still, after a turn."""
        self._reading = reading

    def drop(self, sequences: abc.Sequence[Sequence]) -> bool:
        """Drop every row of a job. Return True if one that runs has to leave.

        One that is joining this very moment is dropped by `note_join`.
        """
        for sequence in sequences:
            if sequence.is_over:
                continue
            sequence.is_over = True
            if sequence.is_in_line:
                self._waiting.give_up(sequence)
            if sequence.row is not None:
                self.leaving.append(sequence.row)
                if self._inside.get(sequence.row) is sequence:
                    self._exit(sequence, sequence.row)
                self._ending.pop(sequence.row, None)
        return bool(self.leaving)

    def end_running(self, error: GatewayError) -> None:
        """End those that the engine knows, with an error."""
        preempted = [sequence for sequence in self._waiting if sequence.row is not None]
        known = [*self._inside.values(), *self._ending.values(), *preempted]
        for sequence in known:
            sequence.end(error)
        for sequence in preempted:
            self._waiting.give_up(sequence)
        self.leaving += [sequence.row for sequence in known if sequence.row is not None]
        self._inside.clear()
        self._ending.clear()
        self._held.clear()

    def end_stuck(self, error: GatewayError) -> None:
        """End those that have waited long enough for memory that only others hold.

        One that has said something already ends there, with `length`.
        """
        now = asyncio.get_running_loop().time()
        for sequence in self._stuck:
            is_due = sequence.stuck_since is not None and now >= self._patience(sequence)
            if sequence.is_over or not is_due:
                continue
            if sequence.row is not None and sequence.tokens:
                self._waiting.take([sequence])
                self._ending[sequence.row] = sequence
            else:
                sequence.end(error)
                self._waiting.give_up(sequence)
                if sequence.row is not None:
                    self.leaving.append(sequence.row)

    def end_all(self, error: GatewayError) -> None:
        """End every one, with an error."""
        self.end_running(error)
        for sequence in self._waiting:
            sequence.end(error)
        self._waiting.clear()

    def look_again_at(self) -> float | None:
        """Return when, by the loop's clock, to look again for those who want memory, or to end
        those who want it too long; None while nobody does.
        """
        self._choose()
        if not self.is_wanting:
            return None
        soon = asyncio.get_running_loop().time() + LOOK_AGAIN_S
        return min([soon, *map(self._patience, self._stuck)])

    def schedule(self, turn: Turn, *, may_join: bool) -> SchedulerOutput:
        """Decide, once the lane is held, what is preempted, goes on and joins.

        What runs has room by then for the turn's steps and the pass launched ahead of the last.
        """
        plan = SchedulerOutput(asyncio.get_running_loop(), leaving=self.leaving)
        self.leaving = []
        plan.capped = [(row, sequence.tokens) for row, sequence in self._ending.items()]
        self._take_turns(plan)
        self._grow(plan)
        if may_join:
            if self.memory.must_forget:
                self._forget(plan)
            chosen = self._choose()
            if not chosen and self.is_wanting and self.memory.kept:
                self._forget(plan)
                chosen = self._choose()
            self._join(plan, chosen, turn)
        self.hold(plan.joining)
        return plan

    def hold(self, joining: abc.Sequence[Sequence] = ()) -> None:
        """Hold the memory of those that are inside or join, and no more."""
        self.memory.hold(_layout([*self, *joining]))

    def make_room(self) -> None:
        """Evict idle models for the next to join."""
        if self._wanting is not None and not self._wanting.is_over:
            self.memory.make_room(_layout([*self, self._wanting]), is_pressing=not self._inside)

    def _enter(self, sequence: Sequence, row: int) -> None:
        self._inside[row] = sequence
        sequence.turn_began = sequence.tokens
        if sequence.is_held:
            self._held.append(sequence)

    def _exit(self, sequence: Sequence, row: int) -> None:
        del self._inside[row]
        if sequence.is_held:
            self._held.remove(sequence)

    def _active(self, *, bound: bool = False) -> list[Sequence]:
        """List those that run or are read to run, or the bound ones among them."""
        return [each for each in self if not each.is_held and (each.is_bound or not bound)]

    def _choose(self) -> list[Sequence]:
        """Choose who joins: as many as there are places, and memory, for."""
        joining: list[Sequence] = []
        self._wanting, self._stuck = None, []
        places = self.limits.max_batch_size - len(self._active())
        held_places = self.limits.max_batch_size - len(self._held)
        free_bound = self._free_bound()
        now = asyncio.get_running_loop().time()
        if max(places, held_places) <= 0 or not self._waiting or self._turns().is_barred:
            return joining

        def verdict(sequence: Sequence) -> Verdict:
            nonlocal places, held_places, free_bound
            is_held = sequence.is_bound and (free_bound <= 0 or places <= 0)
            if (held_places if is_held else places) <= 0:
                return Verdict.IS_PASSED
            sequence.is_held = is_held
            sequence.length = self.memory.grant_length(
                sequence.used, sequence.whole, sequence.preemptions
            )
            if not self._may_stay(sequence, joining):
                return Verdict.IS_PASSED
            if self.memory.fits(_layout([*self, *joining, sequence])):
                joining.append(sequence)
                sequence.stuck_since = None
                places -= not is_held
                held_places -= is_held
                free_bound -= sequence.is_bound and not is_held
                return Verdict.JOINS
            self._wanting = self._wanting or sequence
            if self.memory.fits(_layout([sequence])):
                sequence.stuck_since = None
                return Verdict.BARS  # until rows of this model give back what it needs
            if sequence.stuck_since is None:
                sequence.stuck_since = now
            self._stuck.append(sequence)
            return Verdict.IS_PASSED

        return self._waiting.ask(Counter(each.request for each in self), verdict)

    def _may_stay(self, sequence: Sequence, joining: abc.Sequence[Sequence]) -> bool:
        """Return True if one that may not be preempted again could run to its end beside the
        others of that kind.
        """
        if sequence.preemptions < PREEMPTIONS:
            return True
        others = [each for each in (*self, *joining) if each.preemptions >= PREEMPTIONS]
        wholes = [each.whole for each in (*others, sequence)]
        return not others or self.memory.fits(Layout(wholes))

    def _join(self, plan: SchedulerOutput, chosen: abc.Sequence[Sequence], turn: Turn) -> None:
        self._waiting.take(chosen)
        for sequence in chosen:
            if sequence.row is None:
                sequence.join(turn)
                plan.joining.append(sequence)
            else:
                self._enter(sequence, sequence.row)
                plan.rejoining.append(sequence)

    def _forget(self, plan: SchedulerOutput) -> None:
        plan.forgets = True
        self.memory.forget()

    def _patience(self, sequence: Sequence) -> float:
        """Return until when one that is stuck is waited with."""
        since = sequence.stuck_since
        assert since is not None
        return since + self.limits.memory_wait_s

    def _free_bound(self) -> int:
        """Return how many more bound rows may run, or have their turn in a moment."""
        return self.limits.structured_rows - len(self._active(bound=True)) - len(self._held)

    def _turns(self) -> "_Turns":
        """Choose which bound rows stop for others, and which of those that were held go on."""
        turns = _Turns()
        ready = deque(each for each in self._held if each.row not in self._reading)
        if not ready:
            return turns
        bound = self._active(bound=True)
        places = self.limits.max_batch_size - len(self._active())
        free = min(self.limits.structured_rows - len(bound), places)
        spent = [each for each in bound if each.tokens - each.turn_began >= QUANTUM]
        while ready and (free > 0 or spent):
            stops = [] if free > 0 else [spent[0]]
            going, stopping = [*turns.going, ready[0]], [*turns.stopping, *stops]
            # What has its memory already may always go on where nothing else runs.
            is_alone = not self._active() and not turns.going
            if not is_alone and not self.memory.fits(_layout(self, going, stopping), grown=True):
                turns.is_barred = free > 0
                break
            turns.going, turns.stopping = going, stopping
            ready.popleft()
            free -= not stops
            del spent[: len(stops)]
        return turns

    def _take_turns(self, plan: SchedulerOutput) -> None:
        turns = self._turns()
        for sequence in turns.stopping:
            assert sequence.row is not None
            sequence.is_held = True
            self._held.append(sequence)
            plan.parked.append(sequence.row)
        for sequence in turns.going:
            assert sequence.row is not None
            sequence.is_held = False
            self._held.remove(sequence)
            sequence.turn_began = sequence.tokens
            plan.resumed.append(sequence.row)

    def _grow(self, plan: SchedulerOutput) -> None:
        """Give rows memory before they need it, the oldest first. Where there is none the youngest
        give theirs back; one that is alone ends there.
        """
        for sequence in sorted(self._active(), key=_age):
            if sequence.row in self._inside and sequence.needs_more:
                self._grow_one(sequence, plan)

    def _grow_one(self, sequence: Sequence, plan: SchedulerOutput) -> None:
        assert sequence.row is not None
        least = min(sequence.whole, sequence.used + MARGIN)
        before, sequence.length = (
            sequence.length,
            min(sequence.whole, sequence.used + MARGIN + GROWTH),
        )
        if self._fits_all():
            return
        if len(self._inside) == 1:
            # In time, perhaps, for its next.
            self.memory.make_room(_layout(self), is_pressing=True)
        sequence.length = least
        while not self._fits_all():
            if self.memory.kept:
                self._forget(plan)
            elif len(self._inside) == 1:
                sequence.length = before
                plan.capped.append((sequence.row, sequence.cap_tokens()))
                return
            else:
                self._preempt(self._youngest(), plan)
                if sequence.row not in self._inside:
                    return

    def _fits_all(self) -> bool:
        return self.memory.fits(_layout(self), grown=True)

    def _youngest(self) -> Sequence:
        """Choose who gives way: of those that may, one that is held before one that runs."""
        able = [each for each in self if each.preemptions < PREEMPTIONS]
        # None is able only where others took memory that these had been sure of.
        return max(able or self, key=lambda each: (each.is_held, *_age(each)))

    def _preempt(self, sequence: Sequence, plan: SchedulerOutput) -> None:
        assert sequence.row is not None
        self._exit(sequence, sequence.row)
        plan.preempted.append(sequence.row)
        sequence.preempt()
        self._waiting.put_back(sequence)
        metrics.of(metrics.PREEMPTIONS, self._model).inc()


@dataclass(slots=True)
class _Turns:
    """Bound rows that stop and go on; `is_barred` where one could go on, had it memory: then nobody
    joins, who might take it.
    """

    stopping: list[Sequence] = field(default_factory=list)
    going: list[Sequence] = field(default_factory=list)
    is_barred: bool = False


def _age(sequence: Sequence) -> tuple[float, int]:
    """Order rows from the oldest on."""
    return sequence.rank, sequence.index


def _layout(
    sequences: Iterable[Sequence],
    going: abc.Sequence[Sequence] = (),
    stopping: abc.Sequence[Sequence] = (),
) -> Layout:
    """Lay rows out as they are, or as they would be if some went on and others stopped."""
    together: list[int] = []
    apart: list[int] = []
    for sequence in sequences:
        is_held = (sequence.is_held or sequence in stopping) and sequence not in going
        (apart if is_held or not sequence.will_decode else together).append(sequence.length)
    return Layout(together, apart)
