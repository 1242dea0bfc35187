"""Plans for each turn which sequences join, decode, are parked, are preempted and leave."""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gateway import logs, metrics
from gateway.errors import GatewayError
from gateway.jobs.steps import SequenceParams, StepPlan
from gateway.serving.generation.choice import Choice, lay_out
from gateway.serving.generation.memory import RowMemory
from gateway.serving.generation.policy import (
    Batch,
    GenerationLimits,
    Joiner,
    Joining,
    choose_rotation,
    choose_youngest,
    plan_growth,
)
from gateway.serving.generation.queue import WaitingQueue
from gateway.serving.generation.widths import RUN, StepTimes
from gateway.serving.lane import Pace, Turn

log = logs.get("generation")

# While no other model needs the device, several short prompts may share a longer prefill pass.
ALONE_S = 10.0  # seconds without another model's turn before a longer pass
ALONE_LIMIT = 4  # factor by which such a pass may exceed the time limit of a pass
ALONE_WITH = ("load", "tidy")  # kinds of turns that don't count, since no answer waits for them
STEPS_PER_TURN = 16  # decode steps in one call of the lane's thread, which costs 0.1 ms
POLL_S = 0.25  # seconds between checks whether a model can be evicted


@dataclass
class PlanChanges:
    """The changes of a StepPlan."""

    leaving: list[int] = field(default_factory=list)
    preempting: list[int] = field(default_factory=list)
    capped: list[tuple[int, int]] = field(default_factory=list)
    joining: list[tuple[int, SequenceParams]] = field(default_factory=list)
    parking: list[int] = field(default_factory=list)
    resuming: list[int] = field(default_factory=list)


class Scheduler:
    """One model's sequences and the memory of their KV. All methods run on the event loop."""

    # A held sequence is parked, or will be after prefill, because only a few sequences with a
    # grammar decode at once, or because smaller steps are faster. Held and active sequences take
    # turns, so that a short answer need not wait for long ones.
    def __init__(self, model: str, limits: GenerationLimits, memory: RowMemory) -> None:
        self.memory = memory
        self.limits = limits
        self.bearable: int | None = None
        self.leaving: list[int] = []
        self.step_s: StepTimes = ()
        self.most_steps = STEPS_PER_TURN
        self._has_alternated = False
        self._model = model
        self._last_id = 0
        self._waiting = WaitingQueue()
        self._batch: dict[int, Choice] = {}
        self._held: deque[Choice] = deque()
        self._reading: frozenset[int] = frozenset()
        self._ending: dict[int, Choice] = {}  # preempted sequences that end with their tokens
        self._blocked: Joiner | None = None  # the sequence that lacked memory at the last try
        self._stuck: Sequence[Choice] = ()  # sequences that need memory which other models hold
        metrics.of(metrics.PREEMPTIONS, model)  # the series starts at 0: rates see the first event

    @property
    def batch(self) -> Batch:
        return Batch(
            self.limits,
            self.memory,
            list(self._batch.values()),
            list(self._held),
            self._reading,
            self.bearable,
            self.step_s,
        )

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def parked(self) -> int:
        return sum(choice.id not in self._reading for choice in self._held)

    @property
    def running(self) -> int:
        return len(self._batch) - self.parked

    @property
    def decoding(self) -> int:
        return sum(choice.id not in self._reading for choice in self.batch.active)

    @property
    def prompts_in_prefill(self) -> list[int]:
        choices = self._batch.values()
        return [len(choice.params.prompt) for choice in choices if choice.id in self._reading]

    def count_soon_decoding(self, most_tokens: int) -> int:
        """Return how many sequences with prompts up to `most_tokens` will decode after prefill."""
        return sum(
            choice.id in self._reading
            and choice.will_decode
            and len(choice.params.prompt) <= most_tokens
            for choice in self.batch.active
        )

    @property
    def is_short_of_memory(self) -> bool:
        return self._blocked is not None

    @property
    def may_join(self) -> bool:
        """Return True if a turn can let a sequence join, or has to shrink the prefix cache."""
        return self.memory.must_shrink_prefixes or bool(Joining(self.batch, self._waiting).joiners)

    @property
    def must_move(self) -> bool:
        """Return True if a turn must make sequences leave, end or resume."""
        return bool(self.leaving or self._ending or choose_rotation(self.batch).resuming)

    def get(self, sequence_id: int) -> Choice | None:
        return self._batch.get(sequence_id) or self._ending.get(sequence_id)

    def wait(self, choices: Iterable[Choice]) -> None:
        for choice in choices:
            self._waiting.add(choice)

    def note_reading(self, ids: frozenset[int]) -> None:
        self._reading = ids

    def note_end(self, sequence_id: int) -> None:
        if self._ending.pop(sequence_id, None) is None:
            self._exit(self._batch[sequence_id])
            self._bear_more()

    def shed(self) -> None:
        """Halve the batch in the next turn, after the device ran out of memory."""
        self.bearable = max(1, len(self._batch) // 2)

    def drop(self, choices: Sequence[Choice]) -> bool:
        """Drop these choices; return True if sequences have to leave the engine."""
        for choice in choices:
            if choice.is_over:
                continue
            choice.is_over = True
            if choice.is_queued:
                self._waiting.remove([choice])
            if choice.id:
                self.leaving.append(choice.id)
                if self._batch.get(choice.id) is choice:
                    self._exit(choice)
                    self._bear_more()
                self._ending.pop(choice.id, None)
        return bool(self.leaving)

    def end_running(self, error: GatewayError) -> None:
        """End with an error all sequences that the engine knows, preempted ones included."""
        preempted = [choice for choice in self._waiting if choice.id]
        joined = [*self._batch.values(), *self._ending.values(), *preempted]
        for choice in joined:
            choice.end(error)
        self._waiting.remove(preempted)
        self.leaving += [choice.id for choice in joined if choice.id]
        self._batch.clear()
        self._bear_more()
        self._ending.clear()
        self._held.clear()

    def end_stuck(self, error: GatewayError) -> None:
        """End sequences that have waited too long for memory that other models hold."""
        now = asyncio.get_running_loop().time()
        for choice in self._stuck:
            has_joined = choice.stuck_since is None
            if choice.is_over or has_joined or now < self._gives_up_at(choice):
                continue
            if choice.id and choice.tokens:
                self._waiting.remove([choice])
                self._ending[choice.id] = choice
            else:
                choice.end(error)
                self._waiting.remove([choice])
                if choice.id:
                    self.leaving.append(choice.id)

    def end_all(self, error: GatewayError) -> None:
        self.end_running(error)
        for choice in self._waiting:
            choice.end(error)
        self._waiting = WaitingQueue()

    def look_for_memory(self) -> float | None:
        """Record which sequences lack memory; return when, on the loop's clock, to look again."""
        self._choose_joining()
        if not self.is_short_of_memory:
            return None
        soon = asyncio.get_running_loop().time() + POLL_S
        return min([soon, *map(self._gives_up_at, self._stuck)])

    def make_room(self) -> None:
        if self._blocked is not None and not self._blocked.choice.is_over:
            choices = list(self._batch.values())
            self.memory.make_room(self._blocked.lay_out(choices), is_pressing=not choices)

    def schedule(self, turn: Turn, *, may_join: bool) -> StepPlan:
        """Return the plan of a turn's first pass, and record its changes as made.

        Memory is reserved for all steps of the turn.
        """
        changes = PlanChanges(leaving=self.leaving)
        self.leaving = []
        changes.capped += [(number, choice.tokens) for number, choice in self._ending.items()]
        self._rotate(changes)
        while self.bearable is not None and len(self._batch) > self.bearable:
            self._preempt(choose_youngest(list(self._batch.values())), changes)
        self._grow(changes)
        if may_join:
            self._join(self._choose_joining(), changes, turn)
        self.hold()
        self._note_width()
        return StepPlan(
            kind="prefill" if may_join else "decode",
            prefix_limit=self.memory.limit_prefixes(),
            **vars(changes),
        )

    def hold(self) -> None:
        self.memory.hold(lay_out(self._batch.values()))

    def _enter(self, choice: Choice) -> None:
        self._batch[choice.id] = choice
        self._reading |= {choice.id}
        choice.rotated_at = choice.tokens
        if choice.is_held:
            self._held.append(choice)

    def _exit(self, choice: Choice) -> None:
        del self._batch[choice.id]
        if choice.is_held:
            self._held.remove(choice)

    def _bear_more(self) -> None:
        """Raise the limit of sequences by one, or remove it when it has no effect."""
        if self.bearable is not None:
            self.bearable += 1
            if not self._batch or self.bearable >= self.limits.max_batch_size:
                self.bearable = None

    def _choose_joining(self) -> Sequence[Joiner]:
        now = asyncio.get_running_loop().time()
        joining = Joining(self.batch, self._waiting)
        self._blocked, self._stuck = joining.blocked, joining.stuck
        for choice in joining.stuck:
            choice.stuck_since = choice.stuck_since or now
        if joining.waits_for_rows is not None:
            joining.waits_for_rows.stuck_since = None
        return joining.joiners

    def _join(self, joiners: Sequence[Joiner], changes: PlanChanges, turn: Turn) -> None:
        self._waiting.remove(joiner.choice for joiner in joiners)
        for joiner in joiners:
            choice = joiner.choice
            choice.is_held, choice.length = joiner.is_held, joiner.length
            choice.stuck_since = None
            if not choice.id:
                self._last_id += 1
                choice.join(self._last_id, turn)
                changes.joining.append((self._last_id, choice.params))
            else:
                changes.resuming.append(choice.id)
            self._enter(choice)
            if choice.is_held:
                changes.parking.append(choice.id)

    def _rotate(self, changes: PlanChanges) -> None:
        rotation = choose_rotation(self.batch)
        for choice in rotation.parking:
            choice.is_held = True
            self._held.append(choice)
            changes.parking.append(choice.id)
        for choice in rotation.resuming:
            choice.is_held = False
            self._held.remove(choice)
            self._batch[choice.id] = self._batch.pop(
                choice.id
            )  # now the last in the batch, so the last to be parked among equals
            choice.rotated_at = choice.tokens
            changes.resuming.append(choice.id)

    def _note_width(self) -> None:
        """Let this turn end with the current run, if sequences take turns in runs."""
        batch, self.most_steps = self.batch, STEPS_PER_TURN
        rows, gain = width = batch.width
        metrics.of(metrics.WIDTH_GAIN, self._model).set(gain)
        left = RUN - min((choice.run for choice in batch.decoding), default=RUN)
        if width.alternates and self.parked and left > 0:
            self.most_steps = left
        if width.alternates and not self._has_alternated:
            self._has_alternated = True
            log.info("rows_alternate", model=self._model, width=rows, gain=round(gain, 2))

    def _grow(self, changes: PlanChanges) -> None:
        growth = plan_growth(self.batch)
        for choice in growth.preempting:
            self._preempt(choice, changes)
        for choice, length in growth.lengths.items():
            choice.length = length
        if growth.needed is not None:
            self.memory.make_room(growth.needed, is_pressing=True)
        if growth.capped is not None:
            changes.capped.append((growth.capped.id, growth.capped.cap_at_memory()))

    def _preempt(self, choice: Choice, changes: PlanChanges) -> None:
        self._exit(choice)
        for ids in (changes.parking, changes.resuming):  # undoes earlier decisions of this turn
            if choice.id in ids:
                ids.remove(choice.id)
        changes.preempting.append(choice.id)
        choice.preempt()
        self._waiting.add_preempted(choice)
        metrics.of(metrics.PREEMPTIONS, self._model).inc()

    def _gives_up_at(self, choice: Choice) -> float:
        assert choice.stuck_since is not None
        return choice.stuck_since + self.limits.memory_wait_s


class PrefillPace:
    """The most tokens of a prefill pass, which may be longer while no other model has work."""

    def __init__(self, limits: GenerationLimits) -> None:
        self._pace = Pace(limits.pass_limit_s)
        self._pace_alone = Pace(ALONE_LIMIT * limits.pass_limit_s)
        self._prompts: Sequence[int] = ()
        self.adopt(limits)

    def adopt(self, limits: GenerationLimits) -> None:
        self._chunk_tokens = limits.prefill_chunk_tokens
        self._pace.limit_s = limits.pass_limit_s
        self._pace_alone.limit_s = ALONE_LIMIT * limits.pass_limit_s

    @property
    def tokens(self) -> int:
        """Return the most tokens of the next pass while other models have work too."""
        return min(self._chunk_tokens, self._pace.tokens)

    def begin(self, turn: Turn, prompts: Sequence[int]) -> None:
        self._turn, self._prompts = turn, prompts

    def choose(self, *, is_decoding: bool) -> int:
        """Return the most tokens of the next pass, more if no other model has work."""
        # A longer pass makes decoding answers wait, so it must then prefill two whole prompts.
        if self._turn.seconds_alone(ALONE_WITH) < ALONE_S:
            return self.tokens
        longer = min(self._chunk_tokens, self._pace_alone.tokens)
        is_burst = sum(length <= longer // 2 for length in self._prompts) > 1
        return longer if is_burst or not is_decoding else self.tokens

    def note(self, tokens: int, seconds: float) -> None:
        for pace in (self._pace, self._pace_alone):
            pace.note(tokens, seconds)
