"""Limits, ranks, and which sequences join next: decisions without side effects."""

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
    """The bounds of a batch, of a pass and of the queue.

    `structured_rows` is the most rows with a grammar that run at once, `prefill_chunk_tokens` and
    `pass_limit_s` bound a prefill pass, `tier_head_start_s` is how much earlier a priority request
    counts as arrived, and `memory_wait_s` the longest wait for memory that only other models hold.
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

    A priority request counts as arrived `head_start_s` earlier, a flex one later, so no tier
    delays another for longer than that.
    """
    return arrived + {Tier.PRIORITY: -head_start_s, Tier.FLEX: head_start_s}.get(tier, 0.0)


def prefill_goes_first(soon: int, decoding: int, waited_s: float, bound_s: float) -> bool:
    """Return True if decoding rows wait for the prefill of `soon` rows, which will then decode.

    A decode step of a few rows costs nearly as much as one of all of them, so the prompts of a
    burst are read first: while more rows will join than decode, for `bound_s` between two steps.
    """
    return soon > decoding and waited_s < bound_s


class Decision(Enum):
    """What happens to the row that is next."""

    JOIN = auto()
    SKIP = auto()  # its request waits, and the others' rows are next
    STOP = auto()  # no row joins before it


@dataclass(slots=True)
class _RequestQueue:
    """One request's rows, by rank. Ended ones are dropped when they reach the head."""

    sequences: deque[Sequence] = field(default_factory=deque)

    @property
    def rank(self) -> float:
        """Return the rank of the first row."""
        return self.sequences[0].rank

    def add(self, sequence: Sequence) -> None:
        """Insert a row by rank."""
        if self.sequences and sequence.rank < self.sequences[-1].rank:
            bisect.insort(self.sequences, sequence, key=lambda each: each.rank)
        else:
            self.sequences.append(sequence)

    def purge(self) -> bool:
        """Drop ended rows at the head. Return True if any rows are left."""
        while self.sequences and self.sequences[0].is_over:
            self.sequences.popleft()
        return bool(self.sequences)


class WaitingQueue:
    """Preempted rows first, by rank; then one row of each request in turn.

    The request with the fewest rows in the batch is next, and of equals the one with the lowest
    rank. So a request of a thousand rows does not delay others, nor do they keep it from one row.
    """

    def __init__(self) -> None:
        self._preempted: list[Sequence] = []
        self._requests: dict[str, _RequestQueue] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over the waiting rows, in no particular order."""
        queues = (each.sequences for each in self._requests.values())
        for sequences in (self._preempted, *queues):
            yield from (each for each in sequences if not each.is_over)

    def add(self, sequence: Sequence) -> None:
        """Queue a row that has not joined before."""
        self._requests.setdefault(sequence.request, _RequestQueue()).add(sequence)
        self._add_count(sequence, 1)

    def add_preempted(self, sequence: Sequence) -> None:
        """Queue a preempted row, ahead of all that have not joined before."""
        bisect.insort(self._preempted, sequence, key=lambda each: each.rank)
        self._add_count(sequence, 1)

    def discard(self, sequence: Sequence) -> None:
        """Remove a row that has ended from the count."""
        self._add_count(sequence, -1)
        if sequence.row is not None:
            self._preempted.remove(sequence)

    def clear(self) -> None:
        """Drop every row."""
        self._preempted.clear()
        self._requests.clear()
        self._count = 0

    def choose(
        self, running: Mapping[str, int], decide: Callable[[Sequence], Decision]
    ) -> list[Sequence]:
        """Return the rows that join, in order, without removing them: see `take`.

        `decide` is called for each row that is next; `running` counts the rows that each request
        has in the batch.
        """
        joining: list[Sequence] = []
        for sequence in self._preempted:
            match decide(sequence):
                case Decision.JOIN:
                    joining.append(sequence)
                case Decision.STOP:
                    return joining
        for request in [each for each, queue in self._requests.items() if not queue.purge()]:
            del self._requests[request]
        turns = [
            (running.get(request, 0), queue.rank, number, iter(queue.sequences))
            for number, (request, queue) in enumerate(self._requests.items())
        ]
        heapq.heapify(turns)
        while turns:
            count, rank, number, sequences = heapq.heappop(turns)
            if (one := next((each for each in sequences if not each.is_over), None)) is None:
                continue
            match decide(one):
                case Decision.JOIN:
                    joining.append(one)
                    heapq.heappush(turns, (count + 1, rank, number, sequences))
                case Decision.STOP:
                    return joining
        return joining

    def take(self, sequences: Iterable[Sequence]) -> None:
        """Remove the rows that `choose` returned."""
        for sequence in sequences:
            self._add_count(sequence, -1)
            if sequence.row is not None:
                self._preempted.remove(sequence)
            else:
                queue = self._requests[sequence.request]
                queue.purge()
                first = queue.sequences.popleft()
                assert first is sequence

    def _add_count(self, sequence: Sequence, by: int) -> None:
        sequence.is_queued = by > 0
        self._count += by
