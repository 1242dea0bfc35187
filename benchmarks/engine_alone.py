"""The same texts in this process, on the engine itself: the gateway's overhead is the difference.

Imports mlx. Everything runs on the thread that opens the engine.
"""

import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import count

from benchmarks.workloads import Wording
from gateway.app.engines import MlxEngines
from gateway.registry import Catalog, EmbeddingSpec, RerankSpec
from gateway.serving.ports import EmbeddingEngine, RerankEngine
from gateway.settings import Settings

BATCHES = (1, 2, 4, 8, 16, 32, 64)
now = time.perf_counter


@dataclass(frozen=True, slots=True)
class Best:
    """The batch size with the highest rate, and that rate in units a second."""

    batch: int
    rate: float


class TextsReference:
    """Encodes and computes batch after batch of texts."""

    def __init__(self, wording: Wording) -> None:
        self._wording = wording
        self._numbers = count()

    def run(self, requests: int) -> int:
        """Do the work of that many requests in one pass; return the number of texts."""
        raise NotImplementedError

    def rate(self, clients: int, seconds: float) -> float:
        """Return texts a second at the batch that that many clients make."""
        self.run(clients)  # the first pass of a shape allocates
        texts, started = 0, now()
        while (spent := now() - started) < seconds:
            texts += self.run(clients)
        return texts / spent

    def best(self, seconds: float) -> Best:
        """Measure each of BATCHES for an equal share of the time; return the best."""
        requests = [max(1, batch // self._wording.texts_per_request) for batch in BATCHES]
        requests = list(dict.fromkeys(requests))
        measured = [
            Best(size * self._wording.texts_per_request, self.rate(size, seconds / len(requests)))
            for size in requests
        ]
        return max(measured, key=lambda best: best.rate)

    def _next(self) -> int:
        return next(self._numbers)


class EmbeddingReference(TextsReference):
    """Embeds the texts."""

    def __init__(self, engine: EmbeddingEngine, wording: Wording, *, truncate: bool) -> None:
        super().__init__(wording)
        self._engine = engine
        self._truncate = truncate

    def run(self, requests: int) -> int:
        """Embed the texts of that many requests in one pass; return their number."""
        numbers = [self._next() for _ in range(requests)]
        rows = self._engine.encode(
            [text for number in numbers for text in self._wording.inputs(number)]
        )
        if self._truncate:
            rows = [self._engine.truncate(row) for row in rows]
        return len(self._engine.embed(rows))


class RerankReference(TextsReference):
    """Scores the texts of each request by its query."""

    def __init__(self, engine: RerankEngine, wording: Wording) -> None:
        super().__init__(wording)
        self._engine = engine

    def run(self, requests: int) -> int:
        """Score the pairs of that many requests in one pass; return their number."""
        pairs = []
        for number in [self._next() for _ in range(requests)]:
            query, texts = self._wording.prompts[number], self._wording.inputs(number)
            pairs += self._engine.encode_pairs(query, texts)
        return len(self._engine.score(pairs))


@asynccontextmanager
async def open_reference(
    settings: Settings, catalog: Catalog, wording: Wording
) -> AsyncIterator[TextsReference]:
    """Load the model that the requests name on this thread, and close it at exit.

    Raises ModelNotFound for a name that is not in models.yaml, and the errors of loading.
    """
    spec = catalog.resolve(wording.model).spec
    engines = MlxEngines(settings)
    files = await engines.files(spec)
    with ExitStack() as stack:
        engines.begin()
        stack.callback(engines.close_sandboxes)  # not `end`: this thread goes on
        if isinstance(spec, EmbeddingSpec):
            embedder = next(filter(None, engines.embedding(spec, files)))
            stack.callback(embedder.close)
            yield EmbeddingReference(embedder, wording, truncate=spec.overflow == "truncate")
        else:
            assert isinstance(spec, RerankSpec)
            reranker = next(filter(None, engines.cross_encoder(spec, files)))
            stack.callback(reranker.close)
            yield RerankReference(reranker, wording)
