"""A chat model's queue, which bounds jobs and orders the sequences that wait to join."""

import asyncio
import bisect
import contextlib
import heapq
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum, auto

from gateway.clock import Stage
from gateway.errors import Overloaded
from gateway.jobs import Caller, Tier
from gateway.jobs.steps import SequenceParams
from gateway.serving.admission import Admission, Noun, until_deadline
from gateway.serving.generation.choice import Choice


def rank(arrived: float, tier: Tier, head_start_s: float) -> float:
    """Return a request's rank in the queue; lower ranks go first."""
    # The head start is fixed, so that no request waits forever behind higher tiers.
    return arrived + {Tier.PRIORITY: -head_start_s, Tier.FLEX: head_start_s}.get(tier, 0.0)


class JobQueue:
    """Bounds the tokens and the choices of one model's jobs, waiting and running."""

    def __init__(self, model: str, *, max_tokens: int, max_choices: int) -> None:
        self._tokens = Admission(model, Noun.TOKENS, max_tokens)
        self._choices = Admission(model, Noun.CHOICES, max_choices)
        self._jobs: Counter[int] = Counter()
        self._changed = asyncio.Event()

    def adopt(self, *, max_tokens: int, max_choices: int) -> None:
        self._tokens.limit = max_tokens
        self._choices.limit = max_choices
        self._notify()

    @contextlib.asynccontextmanager
    async def place(
        self,
        caller: Caller,
        sequences: Sequence[SequenceParams],
        on_full: Callable[[], None] | None = None,
    ) -> AsyncIterator[None]:
        """Hold a place for a job while entered. Raises Overloaded if the queue is full.

        With `on_full`, a full queue makes the job wait until the caller's deadline. `on_full` is
        called before each wait.
        """
        with contextlib.ExitStack() as stack:
            while True:
                try:
                    stack.enter_context(self._admit(caller.number, sequences))
                    break
                except Overloaded:
                    if on_full is None:
                        raise
                on_full()
                caller.timings.stage = Stage.QUEUE
                async with until_deadline(caller):
                    await self._changed.wait()
            yield

    @contextlib.contextmanager
    def _admit(self, request: int, sequences: Sequence[SequenceParams]) -> Iterator[None]:
        # The steps that score a question's labels share a prompt. The first step counts all tokens
        # of the prompt, and each later step counts as one token.
        counted = [each for each in sequences if each.step is None or each.step.is_first]
        tokens = sum(len(each.prompt) for each in counted) + len(sequences) - len(counted)
        is_more = self._jobs[request] > 0
        with contextlib.ExitStack() as places:
            places.enter_context(self._tokens.admit(tokens))
            places.enter_context(self._choices.admit(len(counted), is_more=is_more))
            self._jobs[request] += 1
            try:
                yield
            finally:
                self._jobs[request] -= 1
                self._jobs += Counter()  # drops requests without jobs
                places.close()
                self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Joins(Enum):
    """The decision whether a waiting sequence joins the batch."""

    NOW = auto()
    LATER = auto()  # sequences of other requests may overtake this one
    NONE = auto()  # no sequence may overtake this one


class WaitingQueue:
    """The waiting sequences: first the preempted ones by rank, then requests in turn."""

    def __init__(self) -> None:
        self._preempted: list[Choice] = []
        self._requests: dict[str, dict[Choice, None]] = {}

    def __len__(self) -> int:
        return len(self._preempted) + sum(map(len, self._requests.values()))

    def __iter__(self) -> Iterator[Choice]:
        for choices in (self._preempted, *self._requests.values()):
            yield from choices

    def add(self, choice: Choice) -> None:
        choice.is_queued = True
        self._requests.setdefault(choice.request, {})[choice] = None

    def add_preempted(self, choice: Choice) -> None:
        choice.is_queued = True
        bisect.insort(self._preempted, choice, key=lambda choice: choice.rank)

    def remove(self, choices: Iterable[Choice]) -> None:
        for choice in choices:
            choice.is_queued = False
            if choice.id:
                self._preempted.remove(choice)
                continue
            waiting = self._requests[choice.request]
            del waiting[choice]
            if not waiting:
                del self._requests[choice.request]

    def offer(self, running: Mapping[str, int], decide: Callable[[Choice], Joins]) -> None:
        """Call `decide` for the waiting sequences in order, until it returns NONE.

        `running` has the number of running sequences by request. The caller must remove the
        sequences that join.
        """
        for choice in self._preempted:
            if decide(choice) is Joins.NONE:
                return
        # The request with the fewest sequences in the batch is next, so that a large request does
        # not delay others. Among equal requests, the lowest rank is next.
        turns = [
            (running.get(request, 0), next(iter(choices)).rank, number, iter(choices))
            for number, (request, choices) in enumerate(self._requests.items())
        ]
        heapq.heapify(turns)
        while turns:
            count, rank, number, choices = heapq.heappop(turns)
            first = next(choices, None)
            if first is None:
                continue
            decision = decide(first)
            if decision is Joins.NONE:
                return
            if decision is Joins.NOW:
                heapq.heappush(turns, (count + 1, rank, number, choices))
