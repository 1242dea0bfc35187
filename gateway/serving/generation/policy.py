"""Decides which sequences join, take turns, grow and are preempted."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gateway.serving.admission import NO_BOUND
from gateway.serving.generation.choice import Choice, lay_out
from gateway.serving.generation.memory import GROWTH, MARGIN, Layout, RowMemory
from gateway.serving.generation.queue import Joins, WaitingQueue
from gateway.serving.generation.widths import RUN, StepTimes, Width, choose_width

MAX_PREEMPTIONS = 2  # for one sequence, as long as another can be preempted instead
QUANTUM = 64  # tokens that a sequence with a grammar decodes before another takes its place
ANSWERS_SHARE = 0.25  # share of places reserved for sequences that write answers


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationLimits:
    """The limits of a chat model's batch, of its prefill passes and of its queue."""

    max_batch_size: int
    structured_rows: int = 1
    prefill_chunk_tokens: int
    pass_limit_s: float = 0.25
    queue_limit: int = NO_BOUND
    queue_max_tokens: int = NO_BOUND
    tier_head_start_s: float = 5.0  # seconds by which a priority request counts as earlier
    memory_wait_s: float = 20.0  # longest wait of a sequence for memory that other models hold


def prefill_goes_first(soon: int, decoding: int, waited_s: float, bound_s: float) -> bool:
    """Return True if decoding should wait for prefill.

    `decoding` sequences decode now, and `soon` sequences will decode after their prefill.
    """
    # A decode step takes nearly as long for few sequences as for many. Decoding therefore waits up
    # to `bound_s` if more sequences would join than decode now.
    return soon > decoding and waited_s < bound_s


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences in the batch, and the limits of decisions about them."""

    limits: GenerationLimits
    memory: RowMemory
    choices: Sequence[Choice]
    held: Sequence[Choice] = ()  # in the order in which they will resume
    reading: frozenset[int] = frozenset()  # ids of the sequences in prefill
    bearable: int | None = None  # most sequences allowed after the device ran out of memory
    step_s: StepTimes = ()

    @property
    def active(self) -> list[Choice]:
        return [choice for choice in self.choices if not choice.is_held]

    @property
    def constrained(self) -> list[Choice]:
        return [choice for choice in self.active if choice.is_constrained]

    @property
    def decoding(self) -> list[Choice]:
        return [choice for choice in self.active if choice.id not in self.reading]

    @property
    def free_places(self) -> int:
        taken = [
            choice for choice in self.choices if not (choice.is_held and choice.is_constrained)
        ]
        return self.limits.max_batch_size - len(taken)

    @property
    def width(self) -> Width:
        return self.width_of(choice for choice in self.choices if choice.id not in self.reading)

    def width_of(self, choices: Iterable[Choice]) -> Width:
        """Return how many of these sequences should decode together after prefill."""
        # Sequences that only score labels never decode.
        rows = [choice.is_constrained for choice in choices if choice.params.max_tokens > 1]
        beyond = max(0, sum(rows) - self.limits.structured_rows)
        return choose_width(self.step_s, min(self.limits.max_batch_size, len(rows) - beyond))


@dataclass(frozen=True, slots=True)
class Joiner:
    """A sequence that joins, and its reserved tokens."""

    choice: Choice
    length: int
    is_held: bool = False

    def lay_out(self, choices: Sequence[Choice], others: "Sequence[Joiner]" = ()) -> Layout:
        joiners = [*others, self]
        return lay_out(
            [*choices, *(joiner.choice for joiner in joiners)],
            {joiner.choice: joiner.length for joiner in joiners},
            parking={joiner.choice for joiner in joiners if joiner.is_held},
        )


class Joining:
    """Decides which waiting sequences join a batch, within its places and memory."""

    def __init__(self, batch: Batch, waiting: WaitingQueue) -> None:
        limits = batch.limits
        self.joiners: list[Joiner] = []
        self.blocked: Joiner | None = None  # the first sequence that lacks only memory
        # A sequence that will have memory once other sequences of this model end.
        self.waits_for_rows: Choice | None = None
        self.stuck: list[Choice] = []  # sequences that need memory held by other models
        self._batch = batch
        self._places = batch.free_places
        held = sum(choice.is_constrained for choice in batch.held)
        self._held_places = limits.max_batch_size - held
        # Held sequences with a grammar take their places before new ones join.
        self._free_constrained = limits.structured_rows - len(batch.constrained) - held
        self._joins_left = limits.max_batch_size * 2
        if batch.bearable is not None:
            self._joins_left = batch.bearable - len(batch.choices)
        has_places = max(self._places, self._held_places) > 0
        if has_places and waiting and not choose_rotation(batch).is_blocked:
            waiting.offer(Counter(choice.request for choice in batch.choices), self._decide)

    def _decide(self, choice: Choice) -> Joins:
        limits, memory = self._batch.limits, self._batch.memory
        is_held = choice.is_constrained and min(self._free_constrained, self._places) <= 0
        if choice.params.step is not None:
            reserved = int(limits.max_batch_size * ANSWERS_SHARE)
            if self._places <= reserved:
                return Joins.LATER
        places = self._held_places if is_held else self._places
        if min(self._joins_left, places) <= 0 or not self._can_finish(choice):
            return Joins.LATER
        if choice.params.max_tokens > 1:
            joined = [*self._batch.choices, *(joiner.choice for joiner in self.joiners), choice]
            is_held = is_held or self._batch.width_of(joined).alternates
            if is_held and choice.is_constrained and self._held_places <= 0:
                return Joins.LATER
        length = memory.grant_length(choice.used, choice.max_length, choice.preemptions)
        joiner = Joiner(choice, length, is_held)
        if memory.fits(joiner.lay_out(self._batch.choices, self.joiners)):
            self._join(joiner)
            return Joins.NOW
        self.blocked = self.blocked or joiner
        if memory.fits(joiner.lay_out(())):
            self.waits_for_rows = choice
            return Joins.NONE
        self.stuck.append(choice)
        return Joins.LATER

    def _join(self, joiner: Joiner) -> None:
        self.joiners.append(joiner)
        self._joins_left -= 1
        if joiner.is_held and joiner.choice.is_constrained:
            self._held_places -= 1
        else:
            self._places -= 1
            self._free_constrained -= joiner.choice.is_constrained

    def _can_finish(self, choice: Choice) -> bool:
        """Return True if the sequence may be preempted again or has memory to run to its end."""
        if choice.preemptions < MAX_PREEMPTIONS:
            return True
        choices = [*self._batch.choices, *(joiner.choice for joiner in self.joiners)]
        lasting = [other for other in choices if other.preemptions >= MAX_PREEMPTIONS]
        lengths = [choice.max_length, *(other.max_length for other in lasting)]
        return not lasting or self._batch.memory.fits(Layout(lengths))


@dataclass(slots=True)
class Rotation:
    """The sequences to park, and the held sequences that resume in their place."""

    parking: list[Choice] = field(default_factory=list)
    resuming: list[Choice] = field(default_factory=list)
    is_blocked: bool = False  # new sequences must wait because a held one lacks memory


def choose_rotation(batch: Batch) -> Rotation:
    """Choose which sequences are parked and which resume.

    Sequences with a grammar take turns of QUANTUM tokens. While `Width.alternates`, all sequences
    take turns of RUN tokens instead.
    """
    rotation, width, limits = Rotation(), batch.width, batch.limits
    ready = [choice for choice in batch.held if choice.id not in batch.reading]
    free = limits.max_batch_size - len(batch.active)
    free_constrained = limits.structured_rows - len(batch.constrained)
    # The sequence that has decoded the most tokens since it resumed is parked first.
    running = sorted(batch.decoding, key=lambda choice: -choice.run)
    spent = [choice for choice in running if choice.is_constrained and choice.run >= QUANTUM]
    if width.alternates:
        # Parking copies the whole batch's KV, so the running sequences are parked together.
        spent = running if running and running[-1].run >= RUN else []
        excess = max(0, len(running) - width.rows)
        free = max(0, width.rows - len(running))
        rotation.parking = spent[:excess] or running[len(running) - excess :]
        spent = spent[excess:]
        free_constrained += sum(choice.is_constrained for choice in rotation.parking)
    for choice in ready:
        is_barred = choice.is_constrained and free_constrained <= 0
        is_free = free > 0 and not is_barred
        stopping = [other for other in spent if other.is_constrained or not is_barred]
        if not (is_free or stopping):
            continue
        stopped = [] if is_free else stopping[:1]
        parking, resuming = [*rotation.parking, *stopped], [*rotation.resuming, choice]
        # If nothing runs, the first held sequence resumes: its memory is reserved already.
        is_alone = not batch.active and not rotation.resuming
        layout = lay_out(batch.choices, parking=parking, resuming=resuming)
        if not is_alone and not batch.memory.fits(layout, has_grown=True):
            rotation.is_blocked = is_free
            break
        rotation.parking, rotation.resuming = parking, resuming
        spent = [other for other in spent if other not in stopped]
        free -= is_free
        free_constrained += sum(other.is_constrained for other in stopped) - choice.is_constrained
    return rotation


@dataclass(slots=True)
class Growth:
    """The planned growth of running sequences, and the sequences preempted for it."""

    lengths: dict[Choice, int] = field(default_factory=dict)
    preempting: list[Choice] = field(default_factory=list)
    capped: Choice | None = None  # a sequence that cannot grow even alone, so it ends early
    needed: Layout | None = None  # other models should free memory for this layout


def plan_growth(batch: Batch) -> Growth:
    """Plan more memory for sequences, the oldest first. The youngest are preempted for it."""
    growth, choices, memory = Growth(), list(batch.choices), batch.memory

    def fits(layout: Layout) -> bool:
        return memory.fits(layout, has_grown=True)

    for choice in sorted(batch.active, key=lambda choice: choice.age):
        if choice not in choices or not choice.needs_more:
            continue
        before, lengths = choice.length, growth.lengths
        lengths[choice] = min(choice.max_length, choice.used + MARGIN + GROWTH)
        if fits(lay_out(choices, lengths)):
            continue
        if len(choices) == 1:
            growth.needed = lay_out(choices, lengths)
        lengths[choice] = min(choice.max_length, choice.used + MARGIN)
        while choice in choices and not fits(lay_out(choices, lengths)):
            if len(choices) == 1:
                growth.capped, lengths[choice] = choice, before
                break
            youngest = choose_youngest(choices)
            choices.remove(youngest)
            growth.preempting.append(youngest)
    return growth


def choose_youngest(choices: Sequence[Choice]) -> Choice:
    """Choose the youngest sequence. Prefer those that may be preempted again, then held ones."""
    preemptible = [choice for choice in choices if choice.preemptions < MAX_PREEMPTIONS]
    return max(preemptible or choices, key=lambda choice: (choice.is_held, *choice.age))
