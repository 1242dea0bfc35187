"""A chat model that is an adapter: its requests are rows of its base's batch."""

from collections import abc
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import TypeAlias

from gateway.errors import GatewayError
from gateway.jobs import Adapter, GenerateJob, Verdict
from gateway.serving.generation.batcher import Generation, GenerationBatcher


class AdaptedBatcher:
    """The batcher of a base, for the requests of one of its adapters.

    It has no workers, queue or limits of its own, and counts no rows: those are the base's.
    """

    def __init__(self, base: GenerationBatcher, adapter: Adapter) -> None:
        self._base = base
        self._adapter = adapter

    @property
    def tickets(self) -> int:
        """Return 0: its rows wait among the base's."""
        return 0

    @property
    def is_batched(self) -> bool:
        """Return True while rows run together, False once they run one at a time."""
        return self._base.is_batched

    @property
    def verdict(self) -> Verdict | None:
        """Return that of the base's self-test."""
        return self._base.verdict

    @property
    def prefix_names(self) -> abc.Sequence[bytes]:
        """Return a router's names of the prefixes that are kept of this adapter."""
        return self._base.engine.prefix_names(self._adapter.number)

    def generate(
        self, job: GenerateJob, on_full: Callable[[], None] | None = None
    ) -> AbstractAsyncContextManager[Generation]:
        return self._base.generate(self._adapt(job), on_full)

    async def count_tokens(self, job: GenerateJob) -> int:
        return await self._base.count_tokens(self._adapt(job))

    def end(self, error: GatewayError) -> None:
        """Do nothing: its rows end with the base's."""

    def _adapt(self, job: GenerateJob) -> GenerateJob:
        return replace(job, adapter=self._adapter)


ChatBatcher: TypeAlias = GenerationBatcher | AdaptedBatcher
