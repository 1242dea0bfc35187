"""The same work in this process, on the engine itself: the gateway's overhead is the difference.

Imports mlx. Everything runs on the thread that opens the reference.
"""

import math
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Protocol

from gateway.api.exchange import template_args
from gateway.app.engines import mlx_engines
from gateway.app.limits import settings_of
from gateway.bench.kinds import USUAL, Kind
from gateway.bench.workloads import Ask, Wording, Workload
from gateway.errors import EngineFailed
from gateway.jobs import Caller, Compiled, Grammar, Sampling, SequenceParams
from gateway.registry import Catalog, ChatSpec, EmbeddingSpec, RerankSpec, Resolved
from gateway.serving.ports import EmbeddingEngine, GenerationEngine, RerankEngine
from gateway.settings import Settings
from gateway.wire import chat as wire
from gateway.wire.validation import read_request

BATCHES = (1, 2, 4, 8, 16, 32, 64)
_CALLER = Caller(request_id="bench", deadline=math.inf, allowed_s=math.inf)
now = time.perf_counter


@dataclass(frozen=True, slots=True)
class Best:
    """The batch size with the highest rate, and that rate in units a second."""

    batch: int
    rate: float


class Reference(Protocol):
    """An engine that can be measured with the work of N clients."""

    def rate(self, clients: int, seconds: float) -> float:
        """Return units a second, with the work of that many clients in one batch."""

    def best(self, seconds: float) -> Best | None:
        """Return the best batch; None if the number of clients alone decides it."""


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
        found = [
            Best(each * self._wording.texts_per_request, self.rate(each, seconds / len(requests)))
            for each in requests
        ]
        return max(found, key=lambda best: best.rate)

    def _next(self) -> int:
        return next(self._numbers)


class EmbeddingReference(TextsReference):
    """Embeds the texts or, if they are reranked, each request's query too."""

    def __init__(
        self, engine: EmbeddingEngine, wording: Wording, *, truncate: bool, has_query: bool = False
    ) -> None:
        super().__init__(wording)
        self._engine = engine
        self._truncate = truncate
        self._has_query = has_query

    def run(self, requests: int) -> int:
        """Embed the texts of that many requests in one pass; return their number."""
        numbers = [self._next() for _ in range(requests)]
        texts = [text for number in numbers for text in self._wording.inputs(number)]
        queries = [self._wording.prompts[number] for number in numbers] if self._has_query else []
        rows = self._engine.encode(texts + queries)
        if self._truncate:
            rows = [self._engine.truncate(row) for row in rows]
        return len(self._engine.embed(rows)) - len(queries)


class RerankReference(TextsReference):
    """Scores the texts of each request by its query."""

    def __init__(self, engine: RerankEngine, wording: Wording) -> None:
        super().__init__(wording)
        self._engine = engine

    def run(self, requests: int) -> int:
        """Score the pairs of that many requests in one pass; return their number."""
        numbers = [self._next() for _ in range(requests)]
        return len(
            self._engine.score(
                [
                    pair
                    for number in numbers
                    for pair in self._engine.encode_pairs(
                        self._wording.prompts[number], self._wording.inputs(number)
                    )
                ]
            )
        )


class GenerationReference:
    """Joins, prefills and decodes batch after batch, with the gateway's own engine."""

    def __init__(
        self,
        engine: GenerationEngine,
        workload: Workload,
        resolved: Resolved,
        *,
        prefill_chunk_tokens: int,
    ) -> None:
        self._engine = engine
        self._workload = workload
        self._template_args = _template_args(resolved)
        self._prefill_chunk_tokens = prefill_chunk_tokens
        self._compiled: dict[Grammar, Compiled] = {}

    def answer(self, rows: int) -> int:
        """Answer that many requests in one batch; return the number of tokens."""
        engine = self._engine
        for job in [self._row(self._workload.next()) for _ in range(rows)]:
            engine.join(job)
        tokens = 0
        while engine.is_prefilling or engine.is_decoding:
            read = engine.prefill(self._prefill_chunk_tokens) if engine.is_prefilling else ()
            for delta in (*read, *engine.decode()):
                if delta.error is not None:
                    raise EngineFailed("the model", delta.error)
                tokens += delta.tokens
        return tokens

    def rate(self, clients: int, seconds: float) -> float:
        """Return tokens a second with that many rows."""
        self.answer(clients)  # the first pass of a shape allocates, a schema is compiled
        tokens, started = 0, now()
        while (spent := now() - started) < seconds:
            tokens += self.answer(clients)
        return tokens / spent

    def best(self, seconds: float) -> Best | None:
        """Return None: more rows are always more tokens, so the clients decide."""
        return None

    def _row(self, ask: Ask) -> SequenceParams:
        request = read_request(ask.body, wire.ChatRequest, strict=False).request
        job = wire.to_job(
            request,
            _CALLER,
            Sampling(),  # each request has its own
            max_tokens=None,
            template_args=self._template_args,
            max_chars=len(ask.body),
        )
        [row] = self._engine.prepare(job)
        if (grammar := row.grammar) is None:
            return row
        if grammar not in self._compiled:
            self._compiled[grammar] = self._engine.compile(grammar)
        return replace(row, compiled=self._compiled[grammar])


def _template_args(resolved: Resolved) -> dict[str, object]:
    assert isinstance(resolved.spec, ChatSpec)
    return template_args(resolved, resolved.spec)


@asynccontextmanager
async def open_reference(
    settings: Settings, catalog: Catalog, wording: Wording, workload: Workload
) -> AsyncIterator[Reference]:
    """Load the model that the requests name, or its base, on this thread, and close it at exit.

    Raises ModelNotFound for a name that is not in models.yaml, and what loading raises.
    """
    resolved = catalog.resolve(wording.model)
    spec = resolved.spec
    if isinstance(spec, ChatSpec) and spec.base_spec is not None:
        spec = spec.base_spec
    engines = mlx_engines(settings)
    files = await engines.files(spec)
    with ExitStack() as stack:
        engines.begin()
        stack.callback(engines.close_sandboxes)  # not `end`: this thread goes on
        engine: EmbeddingEngine | RerankEngine | GenerationEngine
        if isinstance(spec, EmbeddingSpec):
            engine = next(filter(None, engines.embedding(spec, files)))
            has_query = workload.unit == USUAL[Kind.RERANK].unit
            truncate = has_query or spec.overflow == "truncate"
            reference: Reference = EmbeddingReference(
                engine, wording, truncate=truncate, has_query=has_query
            )
        elif isinstance(spec, RerankSpec):
            engine = next(filter(None, engines.cross_encoder(spec, files)))
            reference = RerankReference(engine, wording)
        else:
            engine = next(filter(None, await engines.generation(spec, files)))
            chunk = settings_of(spec, settings).prefill_chunk_tokens
            reference = GenerationReference(engine, workload, resolved, prefill_chunk_tokens=chunk)
        stack.callback(engine.close)
        yield reference
