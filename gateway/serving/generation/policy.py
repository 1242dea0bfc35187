"""How many rows run together, and who joins next, in what order: decisions alone."""

import bisect
import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from gateway.jobs import Tier
from gateway.serving.admission import NO_BOUND
from gateway.serving.generation.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationLimits:
    """How many rows run together, how many of them bound to a grammar, how many tokens and how
    long one pass may read prompts, how much sooner a priority request counts as come, and how long
    one waits for memory that only other models hold.
    """

    max_batch_size: int
    structured_rows: int = 1
    prefill_chunk_tokens: int
    pass_limit_s: float = 0.25
    queue_limit: int = NO_BOUND
    queue_max_tokens: int = NO_BOUND
    tier_head_start_s: float = 5.0
    memory_wait_s: float = 20.0


def rank(arrived: float, tier: Tier, head_start_s: float) -> float:
    """Return a request's place in the queue: lower goes first.

    A priority request counts as come so many seconds sooner, a flex one as come later: both
    overtake or give way, and neither starves or is starved for longer than that.
    """
    return arrived + {Tier.PRIORITY: -head_start_s, Tier.FLEX: head_start_s}.get(tier, 0.0)


def prefill_goes_first(soon: int, decoding: int, waited_s: float, bound_s: float) -> bool:
    """Return True if the rows that decode wait for those that will `soon`, once they are read.

    A decode step of a few rows costs nearly as much as one of all of them, so a burst is read
    before it is answered: while more will join than run, for `bound_s` between two steps. A long
    prompt joins too late to be worth a pause; one that is only scored, or is held, never does.
    """
    return soon > decoding and waited_s < bound_s


class Verdict(Enum):
    """What happens to a row whose turn it is."""

    JOINS = auto()
    IS_PASSED = auto()  # its request waits, and others are asked
    BARS = auto()  # nobody passes it


@dataclass(slots=True)
class _Line:
    """One request's rows, by rank. Those given up stay until they are met."""

    sequences: deque[Sequence] = field(default_factory=deque)

    @property
    def rank(self) -> float:
        """Return the rank of the first."""
        return self.sequences[0].rank

    def add(self, sequence: Sequence) -> None:
        """Put a row behind those that came first."""
        if self.sequences and sequence.rank < self.sequences[-1].rank:
            bisect.insort(self.sequences, sequence, key=lambda each: each.rank)
        else:
            self.sequences.append(sequence)

    def purge(self) -> bool:
        """Drop those at the head that were given up. Return True if any are left."""
        while self.sequences and self.sequences[0].is_over:
            self.sequences.popleft()
        return bool(self.sequences)


class Waiting:
    """The rows preempted first, by rank; then one of each request in turn.

    A request's turn is the sooner, the fewer rows it has inside; among equals goes who came first.
    So a request of a thousand rows keeps nobody else waiting, nor do others keep it from one row.
    """

    def __init__(self) -> None:
        self._preempted: list[Sequence] = []
        self._lines: dict[str, _Line] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over those that wait, in no particular order."""
        for sequences in (self._preempted, *(line.sequences for line in self._lines.values())):
            yield from (each for each in sequences if not each.is_over)

    def add(self, sequence: Sequence) -> None:
        """Add a row to those of its request."""
        self._lines.setdefault(sequence.request, _Line()).add(sequence)
        self._add_count(sequence, 1)

    def put_back(self, sequence: Sequence) -> None:
        """Queue a preempted row ahead of all that never joined."""
        bisect.insort(self._preempted, sequence, key=lambda each: each.rank)
        self._add_count(sequence, 1)

    def give_up(self, sequence: Sequence) -> None:
        """Take a row that has ended out of the count."""
        self._add_count(sequence, -1)
        if sequence.row is not None:
            self._preempted.remove(sequence)

    def clear(self) -> None:
        """Drop every row."""
        self._preempted.clear()
        self._lines.clear()
        self._count = 0

    def ask(
        self, inside: Mapping[str, int], verdict: Callable[[Sequence], Verdict]
    ) -> list[Sequence]:
        """Return those that join, in order: `verdict` is asked about each whose turn it is.

        `inside` counts the rows that each request has inside.
        """
        joining: list[Sequence] = []
        for sequence in self._preempted:
            match verdict(sequence):
                case Verdict.JOINS:
                    joining.append(sequence)
                case Verdict.BARS:
                    return joining
        for request in [each for each, line in self._lines.items() if not line.purge()]:
            del self._lines[request]
        turns = [
            (inside.get(request, 0), line.rank, number, iter(line.sequences))
            for number, (request, line) in enumerate(self._lines.items())
        ]
        heapq.heapify(turns)
        while turns:
            count, rank, number, sequences = heapq.heappop(turns)
            if (one := next((each for each in sequences if not each.is_over), None)) is None:
                continue
            match verdict(one):
                case Verdict.JOINS:
                    joining.append(one)
                    heapq.heappush(turns, (count + 1, rank, number, sequences))
                case Verdict.BARS:
                    return joining
        return joining

    def take(self, sequences: Iterable[Sequence]) -> None:
        """Take out those that `ask` has returned."""
        for sequence in sequences:
            self._add_count(sequence, -1)
            if sequence.row is not None:
                self._preempted.remove(sequence)
            else:
                line = self._lines[sequence.request]
                line.purge()
                first = line.sequences.popleft()
                assert first is sequence

    def _add_count(self, sequence: Sequence, by: int) -> None:
        sequence.is_in_line = by > 0
        self._count += by
