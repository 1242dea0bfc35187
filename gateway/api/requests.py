"""`Service`, which every handler gets: it reads requests, finds models and leases them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar, TypeVarTuple, overload
from urllib.parse import quote

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway import clock, logs
from gateway.api.bodies import read_body
from gateway.api.in_flight import InFlight, Watchers, context_of
from gateway.clock import Stage
from gateway.errors import BadRequest, GatewayError
from gateway.jobs import Caller, Tier
from gateway.registry import (
    Changes,
    ChatSpec,
    EmbeddingSpec,
    ModelSpec,
    RerankSpec,
    Resolved,
)
from gateway.serving.admission import Arrivals, until_deadline
from gateway.serving.embedding.batcher import EmbeddingBatcher
from gateway.serving.embedding.reranker import RerankBatcher
from gateway.serving.generation.batcher import ChatBatcher, GenerationBatcher
from gateway.serving.models.cache import ModelCache
from gateway.serving.models.named import NamedModels
from gateway.serving.models.pulls import NOBODY
from gateway.serving.models.served import KnownInputs, Served
from gateway.serving.response_store import ResponseStore
from gateway.serving.tokenize import Kind, ThreadPools
from gateway.wire.bounds import Bounds
from gateway.wire.images import ImageLimits, ImageReader, hide_images
from gateway.wire.validation import CharBounds, Parsed, missing_parameter, read_request
from gateway.wire.validation import Request as WireRequest

log = logs.get("service")

# Parsing takes milliseconds above the first limit, and seconds above the second.
LONG_BYTES = 32_000
LARGE_BYTES = 1_000_000
T = TypeVar("T")
Ts = TypeVarTuple("Ts")
MAX_HEADER_NAMES = 16
MAX_HEADER_CHARS = 1024
R = TypeVar("R", bound=WireRequest)
Lease = contextlib.AbstractAsyncContextManager


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The settings for reading and answering requests; times are in seconds."""

    max_body_bytes: int
    body_timeout_s: float
    max_input_chars: int
    max_request_chars: int
    max_images: int
    max_image_bytes: int
    bounds: Bounds
    strict_fields: bool
    leave_out_images: bool
    log_prompts: bool
    request_timeout_s: float
    stream_open_after_s: float

    @property
    def chars(self) -> CharBounds:
        return CharBounds(self.max_input_chars, self.max_request_chars)


class Exposure(NamedTuple):
    """Whether keys are set, and whether the dashboard is served."""

    has_keys: bool
    has_admin: bool
    has_dashboard: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The models, settings and state that handlers use."""

    served: Served
    models: ModelCache[EmbeddingBatcher | RerankBatcher | ChatBatcher]
    named: NamedModels
    inputs: KnownInputs
    arrivals: Arrivals
    pool: ThreadPools
    rules: Rules
    responses: ResponseStore
    fingerprint: Callable[[ModelSpec], str]
    tokenizer: Callable[[ChatSpec], Any]  # reads files, so it is called on a thread
    started: int
    health: Callable[[], str]
    readiness: Callable[[], str]
    reload: Callable[[], Coroutine[Any, Any, Changes]]
    save_prefixes: Callable[[], Coroutine[Any, Any, int]]
    in_flight: InFlight
    watchers: Watchers
    exposure: Exposure

    async def read_body(self, request: Request) -> bytearray:
        rules, held = self.rules, context_of(request).body
        return await read_body(request, held, rules.max_body_bytes, rules.body_timeout_s)

    async def read(self, body: bytearray, shape: type[R]) -> Parsed[R]:
        strict, bounds = self.rules.strict_fields, self.rules.bounds
        parse = partial(read_request, body, shape, strict=strict, bounds=bounds)
        return await self.run_on_body(body, parse)

    async def take(self, request: Request, body: bytearray, shape: type[R]) -> Parsed[R]:
        """Read and record a request; begin to download a model that is not served yet."""
        parsed = await self.read(body, shape)
        await self._note(request, body, parsed.request)
        await self._admit(request, parsed.request)
        return parsed

    async def _note(self, request: Request, body: bytearray, asked: WireRequest) -> None:
        trace = context_of(request).trace
        if trace is not None:
            trace.note_request(asked)
        if self.rules.log_prompts:
            await self.run_on_body(
                body, lambda: log.info("prompt", **hide_images(asked.prompt_fields()))
            )

    async def _admit(self, request: Request, asked: WireRequest) -> None:
        name = getattr(asked, "model", None)
        if name is not None and self.named.is_new(name):
            caller = self.caller(request)
            async with until_deadline(caller):
                await self.named.admit(name, caller.key_id or NOBODY)

    async def run_on_body(
        self, body: bytearray, work: Callable[[*Ts], T], *args: *Ts, is_large: bool = False
    ) -> T:
        """Run work on a body, on a thread if the body is long or the work `is_large`."""
        if len(body) <= LONG_BYTES and not is_large:
            return work(*args)
        kind: Kind = "large bodies" if len(body) > LARGE_BYTES else "bodies"
        return await self.pool.run(work, *args, kind=kind)

    def caller(self, request: Request, tier: Tier = Tier.DEFAULT) -> Caller:
        """Return the request's caller; the deadline counts from the first call for this request."""
        context = context_of(request)
        allowed_s = self._allowed_s(context.headers)
        if context.asked is None:
            context.asked = clock.now()
        return Caller(
            request_id=context.request_id,
            deadline=context.asked + allowed_s,
            allowed_s=allowed_s,
            tier=tier,
            key_id=context.key_id,
            cache_salt=context.cache_salt,
            timings=context.timings,
            routing_keys=context.routing_keys,
        )

    def _allowed_s(self, headers: Mapping[bytes, bytes]) -> float:
        limit = self.rules.request_timeout_s
        try:
            seconds = float(headers.get(b"x-gateway-timeout-s", limit))
        except ValueError:
            seconds = 0.0
        if not seconds > 0:
            raise BadRequest(
                "The header x-gateway-timeout-s should be a number of seconds above 0.",
                param="x-gateway-timeout-s",
            )
        return min(seconds, limit)

    def knows_images(self, name: str | None) -> bool:
        """Return False if only a look at the files can tell whether a chat model reads images."""
        with contextlib.suppress(GatewayError):
            _, spec = self.chat_spec(name)
            is_loaded = self.models.model(spec.base_spec or spec) is not None
            return is_loaded or self.inputs.of(spec) is not None
        return True

    def reads_images(self, spec: ChatSpec) -> bool:
        """Return True if a model reads images, or if that is not known yet."""
        model = self.models.model(spec.base_spec or spec)
        if isinstance(model, GenerationBatcher):
            return model.engine.facts.images is not None
        inputs = self.inputs.of(spec)
        return inputs is None or "image" in inputs.modalities

    def image_reader(self, spec: ChatSpec) -> ImageReader:
        """Return the reader of one request's images, which refuses all if the model reads none."""
        if not self.reads_images(spec):
            return ImageReader()
        return ImageReader(ImageLimits(self.rules.max_images, self.rules.max_image_bytes))

    @overload
    def lease(self, spec: ChatSpec, caller: Caller, wire: WireRequest) -> Lease[ChatBatcher]: ...

    @overload
    def lease(
        self, spec: EmbeddingSpec, caller: Caller, wire: WireRequest
    ) -> Lease[EmbeddingBatcher]: ...

    @overload
    def lease(
        self, spec: RerankSpec, caller: Caller, wire: WireRequest
    ) -> Lease[RerankBatcher]: ...

    @contextlib.asynccontextmanager
    async def lease(self, spec: ModelSpec, caller: Caller, wire: WireRequest) -> AsyncIterator[Any]:
        """Lease a model; errors about a part of the job get the name of the request's field."""
        try:
            async with self.models.lease(spec, caller) as model:
                yield model
        except GatewayError as error:
            field_error = wire.locate(error)
            if field_error is error:
                raise
            raise field_error from error

    def chat_spec(
        self, name: str | None, wanted: str = "chat completions"
    ) -> tuple[Resolved, ChatSpec]:
        return self.find_spec(name, wanted, ChatSpec)

    def find_spec(
        self, name: str | None, wanted: str, *kinds: type[ModelSpec]
    ) -> tuple[Resolved, Any]:
        """Return the named model and its spec; without a name, `_at_hand` chooses.

        Raises BadRequest if the model's kind is not among `kinds`.
        """
        resolved = self.served.catalog.resolve(name or self._at_hand(*kinds), *kinds)
        if isinstance(resolved.spec, kinds):
            return resolved, resolved.spec
        kind = {"embedding": "an embedding"}.get(resolved.spec.kind, f"a {resolved.spec.kind}")
        raise BadRequest(
            f"The model `{resolved.name}` is {kind} model and cannot be used for {wanted}.",
            param="model",
            code="unsupported_model",
        )

    def _at_hand(self, *kinds: type[ModelSpec]) -> str:
        """Return the id of a loaded model, or else of the first model in models.yaml."""
        for kind in kinds:
            specs = [spec for spec in self.served.catalog.specs if isinstance(spec, kind)]
            loaded = [spec for spec in specs if self.models.model(spec) is not None]
            for spec in (*loaded, *specs):
                return spec.id
        raise missing_parameter("model")


@contextlib.contextmanager
def time_stage(request: Request, stage: Stage) -> Iterator[None]:
    started = clock.now()
    yield
    context_of(request).timings.add(stage, started)


def ignored_header(ignored: Sequence[str]) -> dict[str, str]:
    return named_header("x-gateway-ignored", ignored)


def named_header(header: str, names: Sequence[str]) -> dict[str, str]:
    """Return a header with as many names as fit, percent-encoded; empty if there are none."""
    values = [quote(name, safe="[]+") for name in first_names(names)]
    return {header: ",".join(values)} if values else {}


def first_names(names: Sequence[str]) -> Sequence[str]:
    """Return the names that fit into a header, and `…+N` for N left out."""
    sizes = accumulate(map(len, names[:MAX_HEADER_NAMES]))
    count = sum(size <= MAX_HEADER_CHARS for size in sizes)
    if count == len(names):
        return names
    return [*names[:count], f"…+{len(names) - count}"]


MANY_LOGPROBS = 5_000  # writing this many as JSON takes some milliseconds


def reply(
    body: object, status: int = HTTPStatus.OK, *, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


async def serialize(write: Callable[[], bytes], logprobs: int) -> bytes:
    """Write an answer, on a thread if it has many logprobs."""
    if logprobs <= MANY_LOGPROBS:
        return write()
    return await asyncio.to_thread(write)
