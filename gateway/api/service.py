"""What every handler is given: the catalog, the models, and how requests are to be read."""

import contextlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, TypeVar, cast
from urllib.parse import quote

from starlette.requests import Request

from gateway import logs, metrics
from gateway.api.limits import read_body
from gateway.errors import BadRequest
from gateway.jobs import Caller, Stage, Tier
from gateway.registry import Catalog, Changes, ChatSpec, EmbeddingSpec, ModelSpec, Resolved
from gateway.serving.admission import Arrivals
from gateway.serving.embedding.batcher import EmbeddingBatcher
from gateway.serving.generation.batcher import Generation, GenerationBatcher
from gateway.serving.models.cache import ModelCache
from gateway.serving.response_store import ResponseStore
from gateway.serving.tokenize import Kind, TokenPool
from gateway.wire import reading
from gateway.wire.bounds import Bounds as Bounds  # app has its rules from here

log = logs.get("service")

# A body beyond the first is read off the loop: it may take milliseconds. One beyond the second may
# take seconds, in which none that is smaller waits for it.
LONG_BYTES = 32_000
LARGE_BYTES = 1_000_000
T = TypeVar("T")
MOST_NAMED = 16  # in one header
R = TypeVar("R", bound=reading.Request)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How requests are read and answers sent. Times in seconds."""

    max_body_bytes: int
    body_timeout_s: float
    max_input_chars: int
    max_request_chars: int
    bounds: Bounds
    strict_fields: bool
    log_prompts: bool
    request_timeout_s: float
    stream_open_after_s: float
    send_timeout_s: float

    @property
    def chars(self) -> reading.CharBounds:
        """Return how long a text may be, and those of a request together."""
        return reading.CharBounds(self.max_input_chars, self.max_request_chars)


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The floors below, as handlers see them."""

    catalog: Callable[[], Catalog]
    models: ModelCache[EmbeddingBatcher | GenerationBatcher]
    arrivals: Arrivals
    pool: TokenPool
    rules: Rules
    responses: ResponseStore
    fingerprint: Callable[[ModelSpec], str]
    started: int
    health: Callable[[], str]
    readiness: Callable[[], str]
    reload: Callable[[], Coroutine[Any, Any, Changes]]
    has_keys: bool
    has_admin: bool

    async def read(
        self,
        request: Request,
        shape: type[R],
        translate: Callable[[R], T],
        *,
        is_large: Callable[[R], bool] = lambda _: False,
    ) -> tuple[reading.Read[R], T]:
        """Read and check a request's body, and translate it: off the loop if it is large, or stands
        for something that is.
        """
        body = await read_body(request, self.rules.max_body_bytes, self.rules.body_timeout_s)

        def parse() -> reading.Read[R]:
            rules = self.rules
            read = reading.read_request(
                body, shape, strict=rules.strict_fields, bounds=rules.bounds
            )
            if rules.log_prompts:
                log.info("prompt", **read.request.asked())
            return read

        def understand() -> tuple[reading.Read[R], T]:
            read = parse()
            return read, translate(read.request)

        with timed(request, Stage.PARSE):
            kind: Kind = "large bodies" if len(body) > LARGE_BYTES else "bodies"
            if len(body) > LONG_BYTES:
                return await self.pool.run(understand, kind=kind)
            read = parse()
            if is_large(read.request):
                return read, await self.pool.run(translate, read.request, kind=kind)
            return read, translate(read.request)

    def caller(self, request: Request, tier: Tier = Tier.DEFAULT) -> Caller:
        """Say who asks and until when: `x-gateway-timeout-s`, at most the setting."""
        allowed_s = self._allowed_s(request)
        return Caller(
            request_id=request.scope["gateway.request_id"],
            deadline=metrics.now() + allowed_s,
            allowed_s=allowed_s,
            tier=tier,
            key_id=request.scope.get("gateway.key_id"),
            timings=request.scope["gateway.timings"],
        )

    def _allowed_s(self, request: Request) -> float:
        most = self.rules.request_timeout_s
        given: bytes | None = request.scope["gateway.headers"].get(b"x-gateway-timeout-s")
        try:
            asked = float(given) if given is not None else most
        except ValueError:
            asked = 0.0
        if not asked > 0:
            raise BadRequest(
                "The header x-gateway-timeout-s should be a number of seconds above 0.",
                param="x-gateway-timeout-s",
            )
        return min(asked, most)

    def embedder(
        self, spec: EmbeddingSpec, caller: Caller
    ) -> AbstractAsyncContextManager[EmbeddingBatcher]:
        """Lease an embedding model."""
        return cast(AbstractAsyncContextManager[EmbeddingBatcher], self.models.lease(spec, caller))

    def writer(
        self, spec: ChatSpec, caller: Caller
    ) -> AbstractAsyncContextManager[GenerationBatcher]:
        """Lease a chat model."""
        return cast(AbstractAsyncContextManager[GenerationBatcher], self.models.lease(spec, caller))

    def embedding_spec(self, name: str) -> tuple[Resolved, EmbeddingSpec]:
        """Find an embedding model; a chat model is refused by name."""
        resolved = self.catalog().resolve(name)
        if not isinstance(resolved.spec, EmbeddingSpec):
            raise _wrong_kind(name, "chat", "embeddings")
        return resolved, resolved.spec

    def chat_spec(self, name: str) -> tuple[Resolved, ChatSpec]:
        """Find a chat model; an embedding model is refused by name."""
        resolved = self.catalog().resolve(name)
        if not isinstance(resolved.spec, ChatSpec):
            raise _wrong_kind(name, "embedding", "chat completions")
        return resolved, resolved.spec


@contextlib.contextmanager
def timed(request: Request, stage: Stage) -> Iterator[None]:
    """Count what is inside as a stage of the request."""
    started = metrics.now()
    yield
    request.scope["gateway.timings"].add(stage, metrics.now() - started)


def _wrong_kind(name: str, kind: str, wanted: str) -> BadRequest:
    article = "an" if kind == "embedding" else "a"
    return BadRequest(
        f"The model `{name}` is {article} {kind} model and cannot be used for {wanted}.",
        param="model",
        code="unsupported_model",
    )


def unread(generation: Generation) -> dict[str, str]:
    """Say in a header that calls come as text, since the model's form of them is not known."""
    return {"x-gateway-tool-format": "unknown"} if generation.calls_are_text else {}


def unenforced(generation: Generation) -> dict[str, str]:
    """Name in a header what of the schema no grammar holds: some of it, by JSON pointer."""
    return _named("x-gateway-unenforced", generation.verdicts.unenforced)


def judged(verdicts: Sequence[bool | None]) -> dict[str, str]:
    """Say in a header whether answers fit a schema that their grammar held in part."""
    verdict = False if False in verdicts else None if None in verdicts else True
    return {"x-gateway-schema-valid": {True: "true", False: "false", None: "unknown"}[verdict]}


def noted(ignored: Sequence[str]) -> dict[str, str]:
    """Name in a header the fields that nobody knew."""
    return _named("x-gateway-ignored", ignored)


def _named(header: str, names: Sequence[str]) -> dict[str, str]:
    """Write some of the names, in characters that headers allow."""
    told = [quote(name[:64], safe="[]") for name in names[:MOST_NAMED]]
    return {header: ",".join(told)} if told else {}
