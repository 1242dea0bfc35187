"""Rows that wait to join a batch: requests take turns, and the preempted go first."""

import bisect
import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from gateway.serving.generation.choice import Choice


class Decision(Enum):
    """What happens to the row that is next."""

    JOIN = auto()
    SKIP = auto()  # its request waits, and the others' rows are next
    STOP = auto()  # no row joins before it


@dataclass(slots=True)
class _RequestQueue:
    """One request's rows, by rank. Ended ones are dropped when they reach the head."""

    choices: deque[Choice] = field(default_factory=deque)

    @property
    def rank(self) -> float:
        """Return the rank of the first row."""
        return self.choices[0].rank

    def add(self, choice: Choice) -> None:
        """Insert a row by rank."""
        if self.choices and choice.rank < self.choices[-1].rank:
            bisect.insort(self.choices, choice, key=lambda each: each.rank)
        else:
            self.choices.append(choice)

    def purge(self) -> bool:
        """Drop ended rows at the head. Return True if any rows are left."""
        while self.choices and self.choices[0].is_over:
            self.choices.popleft()
        return bool(self.choices)


class WaitingQueue:
    """Preempted rows first, by rank; then one row of each request in turn.

    The request with the fewest rows in the batch is next, and of equals the one with the lowest
    rank. So a request of a thousand rows does not delay others, nor do they keep it from one row.
    """

    def __init__(self) -> None:
        self._preempted: list[Choice] = []
        self._requests: dict[str, _RequestQueue] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Choice]:
        """Iterate over the waiting rows, in no particular order."""
        queues = (each.choices for each in self._requests.values())
        for choices in (self._preempted, *queues):
            yield from (each for each in choices if not each.is_over)

    def add(self, choice: Choice) -> None:
        """Queue a row that has not joined before."""
        self._requests.setdefault(choice.request, _RequestQueue()).add(choice)
        self._add_count(choice, 1)

    def add_preempted(self, choice: Choice) -> None:
        """Queue a preempted row, ahead of all that have not joined before."""
        bisect.insort(self._preempted, choice, key=lambda each: each.rank)
        self._add_count(choice, 1)

    def discard(self, choice: Choice) -> None:
        """Remove a row that has ended from the count."""
        self._add_count(choice, -1)
        if choice.row is not None:
            self._preempted.remove(choice)

    def clear(self) -> None:
        """Drop every row."""
        self._preempted.clear()
        self._requests.clear()
        self._count = 0

    def offer(self, running: Mapping[str, int], decide: Callable[[Choice], Decision]) -> None:
        """Call `decide` for each row that is next, until it says STOP. None is removed: see `take`.

        `running` counts the rows that each request has in the batch.
        """
        for choice in self._preempted:
            if decide(choice) is Decision.STOP:
                return
        for request in [name for name, queue in self._requests.items() if not queue.purge()]:
            del self._requests[request]
        turns = [
            (running.get(request, 0), queue.rank, number, iter(queue.choices))
            for number, (request, queue) in enumerate(self._requests.items())
        ]
        heapq.heapify(turns)
        while turns:
            count, rank, number, choices = heapq.heappop(turns)
            first = next((choice for choice in choices if not choice.is_over), None)
            if first is None:
                continue
            decision = decide(first)
            if decision is Decision.STOP:
                return
            if decision is Decision.JOIN:
                heapq.heappush(turns, (count + 1, rank, number, choices))

    def take(self, choices: Iterable[Choice]) -> None:
        """Remove rows that join, in the order in which they were offered."""
        for choice in choices:
            self._add_count(choice, -1)
            if choice.row is not None:
                self._preempted.remove(choice)
            else:
                queue = self._requests[choice.request]
                queue.purge()
                first = queue.choices.popleft()
                assert first is choice

    def _add_count(self, choice: Choice, by: int) -> None:
        choice.is_queued = by > 0
        self._count += by
