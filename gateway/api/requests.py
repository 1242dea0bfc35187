"""What every handler is given, how bodies are read within limits, and how JSON is answered."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from itertools import chain
from typing import Any, TypeVar, cast
from urllib.parse import quote

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Scope

from gateway import clock, logs
from gateway.errors import BadRequest, GatewayError, HeadTooLarge, SlowBody, TooLarge, Unavailable
from gateway.jobs import Caller, Stage, Tier
from gateway.registry import Catalog, Changes, ChatSpec, EmbeddingSpec, ModelSpec, Resolved
from gateway.serving.admission import Arrivals
from gateway.serving.embedding.batcher import EmbeddingBatcher
from gateway.serving.generation.batcher import GenerationBatcher
from gateway.serving.models.cache import ModelCache
from gateway.serving.response_store import ResponseStore
from gateway.serving.tokenize import Kind, TokenPool
from gateway.wire.bounds import Bounds
from gateway.wire.validation import CharBounds, Parsed, read_request
from gateway.wire.validation import Request as WireRequest

log = logs.get("service")

# A body beyond the first is read off the loop: it may take milliseconds. One beyond the second may
# take seconds, in which none that is smaller waits for it.
LONG_BYTES = 32_000
LARGE_BYTES = 1_000_000
T = TypeVar("T")
MOST_NAMED = 16  # in one header
R = TypeVar("R", bound=WireRequest)


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
    def chars(self) -> CharBounds:
        """Return how long a text may be, and those of a request together."""
        return CharBounds(self.max_input_chars, self.max_request_chars)


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
    ) -> tuple[Parsed[R], T]:
        """Read and check a request's body, and translate it: off the loop if it is large, or stands
        for something that is.
        """
        body = await read_body(request, self.rules.max_body_bytes, self.rules.body_timeout_s)

        def parse() -> Parsed[R]:
            rules = self.rules
            read = read_request(body, shape, strict=rules.strict_fields, bounds=rules.bounds)
            if rules.log_prompts:
                log.info("prompt", **read.request.prompt_fields())
            return read

        def understand() -> tuple[Parsed[R], T]:
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
            deadline=clock.now() + allowed_s,
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

    @contextlib.asynccontextmanager
    async def embedder(
        self, spec: EmbeddingSpec, caller: Caller, asked: WireRequest
    ) -> AsyncIterator[EmbeddingBatcher]:
        """Lease an embedding model. What it refuses inside is named as the request's fields are."""
        with _naming(asked):
            async with self.models.lease(spec, caller) as model:
                yield cast(EmbeddingBatcher, model)

    @contextlib.asynccontextmanager
    async def writer(
        self, spec: ChatSpec, caller: Caller, asked: WireRequest
    ) -> AsyncIterator[GenerationBatcher]:
        """Lease a chat model. What it refuses inside is named as the request's fields are."""
        with _naming(asked):
            async with self.models.lease(spec, caller) as model:
                yield cast(GenerationBatcher, model)

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
def _naming(asked: WireRequest) -> Iterator[None]:
    """Have errors of the floors below name the fields of a request."""
    try:
        yield
    except GatewayError as error:
        if (named := asked.locate(error)) is error:
            raise
        raise named from error


@contextlib.contextmanager
def timed(request: Request, stage: Stage) -> Iterator[None]:
    """Count what is inside as a stage of the request."""
    started = clock.now()
    yield
    request.scope["gateway.timings"].add(stage, clock.now() - started)


def _wrong_kind(name: str, kind: str, wanted: str) -> BadRequest:
    article = "an" if kind == "embedding" else "a"
    return BadRequest(
        f"The model `{name}` is {article} {kind} model and cannot be used for {wanted}.",
        param="model",
        code="unsupported_model",
    )


def noted(ignored: Sequence[str]) -> dict[str, str]:
    """Name in a header the fields that nobody knew."""
    return named_header("x-gateway-ignored", ignored)


def named_header(header: str, names: Sequence[str]) -> dict[str, str]:
    """Write some of the names, in characters that headers allow."""
    shown = [quote(name[:64], safe="[]") for name in names[:MOST_NAMED]]
    return {header: ",".join(shown)} if shown else {}


# What is refused for its size is read on, and thrown away, up to so many times the limit: a
# connection closed in the middle of a client's sending is reset, and it would never see the 413.
PATIENCE = 4


UNCOUNTED_BYTES = 64 * 1024  # of each body: most requests are let in however full it is


class Bodies:
    """The bytes of all bodies inside, each counted from its arrival to the end of its answer.

    One that finds no room is refused and not made to wait: who has read half of a body and waits
    for room to read the rest may wait for another who does the same.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.nbytes = 0

    @contextlib.contextmanager
    def body(self) -> Iterator["Body"]:
        """Count one request's body while it is inside."""
        body = Body(self)
        try:
            yield body
        finally:
            body.count(0)

    def has_room(self, more: int, held: int) -> bool:
        """Return True if a body that holds so much may hold more; one alone always may."""
        return self.nbytes == held or self.nbytes + more <= self._max_bytes


class Body:
    """One body's share."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._held = 0

    def count(self, size: int) -> None:
        """Count it as so large. Raises Unavailable when there is no room for it."""
        held = max(0, size - UNCOUNTED_BYTES)
        more = held - self._held
        if more > 0 and not self._bodies.has_room(more, self._held):
            raise Unavailable(
                "The requests being read are too large together. Please try again shortly.",
                retry_after_s=1,
            )
        self._bodies.nbytes += more
        self._held = held


def check_head(scope: Scope, max_bytes: int) -> None:
    """Raise HeadTooLarge for a path, query and headers above the limit, together."""
    size = sum(map(len, chain.from_iterable(scope["headers"])))
    if size + len(scope["path"]) + len(scope["query_string"]) > max_bytes:
        raise HeadTooLarge(f"The path, query and headers are larger than {max_bytes} bytes.")


async def read_body(request: Request, max_bytes: int, timeout_s: float) -> bytearray:
    """Read the body whole.

    Raises TooLarge for one above the limit, SlowBody when it is not here after `timeout_s`, and
    Unavailable when there is no room beside the others.
    """
    share: Body = request.scope["gateway.body"]
    body = bytearray()
    size = 0
    refusal: GatewayError | None = None
    try:
        async with asyncio.timeout(timeout_s):
            more = True
            while more and size <= PATIENCE * max_bytes:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                chunk = message.get("body", b"")
                more = message.get("more_body", False)
                size += len(chunk)
                if refusal is not None:
                    continue
                try:
                    if size > max_bytes:
                        raise TooLarge(f"The request body is larger than {max_bytes} bytes.")
                    share.count(size)
                    body += chunk
                except GatewayError as error:
                    refusal, body = error, bytearray()
                    share.count(0)
    except TimeoutError:
        raise SlowBody(f"The request body did not arrive within {timeout_s:g} seconds.") from None
    if refusal is not None:
        raise refusal
    return body


MANY = 5_000  # logprobs: some milliseconds' work


def reply(
    body: object, status: int = HTTPStatus.OK, *, headers: Mapping[str, str] | None = None
) -> Response:
    """Answer with JSON."""
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


async def written(write: Callable[[], bytes], logprobs: int) -> bytes:
    """Write an answer with so many logprobs: off the loop if they are very many."""
    return write() if logprobs <= MANY else await asyncio.to_thread(write)
