"""A chat model's queue: its jobs' tokens and choices are bounded, and jobs may wait for a place."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from gateway.errors import Overloaded
from gateway.jobs import Caller, SequenceParams, Stage
from gateway.serving.admission import Admission, Noun, until_deadline
from gateway.serving.generation.policy import GenerationLimits


class JobQueue:
    """Places for one model's jobs, waiting and running, bounded in tokens and in choices."""

    def __init__(self, model: str, limits: GenerationLimits) -> None:
        self._tokens = Admission(model, Noun.TOKENS, limits.queue_max_tokens)
        self._choices = Admission(model, Noun.CHOICES, limits.queue_limit)
        self._jobs: Counter[int] = Counter()  # by request
        self._changed = asyncio.Event()

    def adopt(self, limits: GenerationLimits) -> None:
        """Apply new limits, also to jobs that wait for a place."""
        self._tokens.limit = limits.queue_max_tokens
        self._choices.limit = limits.queue_limit
        self._notify()

    @contextlib.asynccontextmanager
    async def place(
        self,
        caller: Caller,
        sequences: Sequence[SequenceParams],
        on_full: Callable[[], None] | None = None,
    ) -> AsyncIterator[None]:
        """Hold a place for a job while entered.

        Raises Overloaded if there is none or, with `on_full`, calls that and waits for one until
        the caller's deadline.
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
        # The steps into a question's labels read its prompt once, and are one choice.
        counted = [each for each in sequences if each.step is None or each.step.is_first]
        tokens = sum(len(each.prompt) for each in counted) + len(sequences) - len(counted)
        is_more = self._jobs[request] > 0
        with contextlib.ExitStack() as held:
            held.enter_context(self._tokens.admit(tokens))
            held.enter_context(self._choices.admit(len(counted), is_more=is_more))
            self._jobs[request] += 1
            try:
                yield
            finally:
                self._jobs[request] -= 1
                self._jobs += Counter()  # drops requests without jobs
                held.close()
                self._notify()

    def _notify(self) -> None:
        """Wake all jobs that wait for a place."""
        self._changed.set()
        self._changed = asyncio.Event()
