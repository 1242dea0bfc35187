"""The way in: the gateway's own front, with replicas behind it in the place of engines.

Keys, hosts, origins, rates, limits of bodies, request ids and errors are the gateway's own code
(gateway/api/access); Hypercorn serves it as it serves a gateway. Ray sees nothing of a request
before it is let in.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, Final

import grpc
import orjson
from ray.exceptions import RayActorError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from deploy.ray import board
from deploy.ray.calls import BLOCK_BYTES, read_call
from deploy.ray.choice import Call
from deploy.ray.merging import Answer, merge
from gateway import clock, logs
from gateway.api.access import protect
from gateway.api.bodies import Bodies, read_body
from gateway.api.in_flight import InFlight, RequestContext, context_of, while_connected
from gateway.api.middleware import is_anthropic
from gateway.api.paths import METERED_PATHS, OPEN_PATHS
from gateway.api.streams import frame
from gateway.app.gateway import access_rules
from gateway.errors import GatewayError, ModelNotFound, ModelsFileInvalid, Unavailable
from gateway.registry import Catalog, ModelSpec
from gateway.settings import Settings
from gateway.wire.anthropic import error_body

log = logs.get("ingress")
Message = MutableMapping[str, Any]

TRIES: Final = 2  # of a request that had not begun when its replica died
ASK_S: Final = 10.0  # for what all replicas are asked
LONG_BYTES: Final = 256 * 1024  # of a body that is read on another thread
SILENCE_S: Final = 60.0  # of an answer that has begun: a stream has a comment every ten seconds
GRACE_S: Final = 5.0  # beyond a request's own deadline, which its replica sees to
# What a replica is, when it dies under a request: Ray's words for it, and gRPC's.
_DEATHS: Final = (RayActorError, RayServeException, grpc.aio.AioRpcError)
_SENT_ON: Final = ("type", "http_version", "method", "scheme", "path", "raw_path", "root_path")
_OURS: Final = frozenset({b"x-request-id", b"request-id", b"server-timing"})  # of this front
_draining: Final = set[asyncio.Task[None]]()  # calls that are over but for their end
# What every replica has to be told, or asked.
_EVERYWHERE: Final = ("/health", "/ready", "/metrics", "/models", "/admin/")


class Ingress:
    """What Hypercorn serves in the place of a Gateway. It knows the models' names, no models."""

    def __init__(
        self,
        handle: DeploymentHandle[Any],
        settings: Settings,
        read_catalog: Callable[[], Catalog],
        salt: bytes,
    ) -> None:
        self._handle = handle
        self._settings = settings
        self._read_catalog = read_catalog
        self._catalog = read_catalog()
        self._salt = salt
        self.has_tried = self.is_preloaded = asyncio.Event()
        self.local_key: str | None = None
        self.in_flight = InFlight()
        self.asgi: ASGIApp = protect(
            self._serve,
            access_rules(settings),
            self.in_flight,
            Bodies(settings.max_bodies_bytes),
            open_paths=OPEN_PATHS,
            metered_paths=METERED_PATHS,
        )

    async def reload(self) -> None:
        """Have every replica read models.yaml again, as at SIGHUP."""
        told = self._handle.broadcast("reload").results_async(
            timeout_s=ASK_S, return_exceptions=True
        )
        problems = [each for each in await told if isinstance(each, BaseException)]
        if problems:
            raise ModelsFileInvalid("\n".join(map(str, problems)))
        self._catalog = self._read_catalog()

    async def drain(self) -> None:
        """Refuse new requests and wait for those under way, for at most the drain time."""
        if not await self.in_flight.drain(self._settings.drain_s):
            self.in_flight.cancel()
            await self.in_flight.drain(GRACE_S)

    def loaded(self) -> Sequence[ModelSpec]:
        """Return the models that replicas load before they are ready."""
        return [spec for spec in self._catalog.specs if spec.preload]

    def specs(self) -> Sequence[ModelSpec]:
        return self._catalog.specs

    def progress(self) -> None:
        """Return None: a replica's log has the progress of its loads."""

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        limits = self._settings
        request = Request(scope, receive)
        context = context_of(scope)
        read = read_body(request, context.body, limits.max_body_bytes, limits.body_timeout_s)
        body = bytes(await read)
        path = scope["path"].removeprefix("/v1")
        sent_on = _scope_to_send(context)
        if path.startswith(_EVERYWHERE) and not path.endswith("/load"):
            async with while_connected(receive):
                answer = await self._ask(path, sent_on, body)
            head = [each for each in answer.headers if each[0] not in (*_OURS, b"content-length")]
            head.append((b"content-length", str(len(answer.body)).encode()))
            start = {"type": "http.response.start", "status": answer.status, "headers": head}
            await send(start)
            await send({"type": "http.response.body", "body": answer.body})
            return
        if not await board.BOARD.wait_for_any(limits.load_wait_s):
            raise _nobody()
        if len(body) > LONG_BYTES:
            call = await asyncio.to_thread(self._read, path, body, context.cache_salt)
        else:
            call = self._read(path, body, context.cache_salt)
        relay = _Relay(self._handle, context, send, limits.request_timeout_s + GRACE_S)
        async with while_connected(receive):
            await relay.run(call, sent_on, body)
        await send(relay.last)  # only now: with its end the client may disconnect

    async def _live(self, receive: Receive, send: Send) -> None:
        """Connect the router, and wait for replicas in the background."""
        await receive()
        waiting = asyncio.create_task(self._wait_for_replicas(), name="replicas")
        await send({"type": "lifespan.startup.complete"})
        await receive()
        waiting.cancel()
        await send({"type": "lifespan.shutdown.complete"})

    async def _wait_for_replicas(self) -> None:
        while not self.is_preloaded.is_set():
            with contextlib.suppress(Exception):  # none is there yet
                await self._handle.broadcast("record_routing_stats").results_async(timeout_s=ASK_S)
                self.is_preloaded.set()
                log.info("ready")
            await asyncio.sleep(0.1)

    def _read(self, path: str, body: bytes, cache_salt: str) -> Call:
        return read_call(path, body, self._salt, self._find_model, cache_salt)

    def _find_model(self, name: str) -> str | None:
        try:
            return self._catalog.resolve(name).spec.id
        except ModelNotFound:
            return None

    async def _ask(self, path: str, scope: Message, body: bytes) -> Answer:
        """Ask every replica, and make one answer of theirs."""
        answer = merge(path, await self._ask_all(scope, body))
        if path == "/admin/reload" and answer.status < 400:
            self._catalog = self._read_catalog()
        return answer

    async def _ask_all(self, scope: Message, body: bytes) -> list[Answer]:
        try:
            response = self._handle.broadcast("ask", scope, body)
            found = await response.results_async(timeout_s=ASK_S, return_exceptions=True)
        except (*_DEATHS, TimeoutError):
            raise _nobody() from None
        answers = [Answer(*each) for each in found if not isinstance(each, BaseException)]
        if not answers:
            raise _nobody()
        return sorted(answers, key=lambda each: each.name)


class _Relay:
    """One request's way to a replica and back."""

    def __init__(
        self, handle: DeploymentHandle[Any], context: RequestContext, send: Send, patience_s: float
    ) -> None:
        self._handle = handle.options(stream=True)
        self._context = context
        self._send = send
        self._patience_s = patience_s
        self._began: Message | None = None  # the message that the answer began with
        self.last: Message = {"type": "http.response.body", "body": b"", "more_body": False}

    async def run(self, call: Call, scope: Message, body: bytes) -> None:
        """Relay the answer, all but the `last` message. If the replica dies, what has not begun is
        given to another one, once;
        a stream that has begun ends with an error event.
        """
        for tries in range(1, TRIES + 1):
            try:
                await self._try(call, scope, body)
                return
            except (*_DEATHS, TimeoutError) as error:
                is_last = tries == TRIES or isinstance(error, TimeoutError)
                log.warning("replica_lost", error=type(error).__name__, begun=bool(self._began))
                if self._began is not None:
                    board.BROKEN.inc()
                    await self._break_off()
                    return
                if is_last:
                    raise _nobody() from None
                board.RETRIES.inc()

    async def _try(self, call: Call, scope: Message, body: bytes) -> None:
        share = min(1.0, len(call.blocks) * BLOCK_BYTES / max(1, len(body)))
        response = self._handle.remote(call, share, scope, body)
        is_over = False
        try:
            while not is_over:
                async with asyncio.timeout(self._patience_s if self._began is None else SILENCE_S):
                    messages, timings = await anext(response)
                self._take_timings(timings)
                for message in messages:
                    if "status" in message:
                        message = self._begin(message)
                    elif not message.get("more_body", False):
                        self.last, is_over = message, True
                        continue
                    await self._send(message)
        except StopAsyncIteration:
            raise RayServeException("the replica ended an answer early") from None
        finally:
            if is_over:
                _drain(response)
            else:
                response.cancel()

    def _begin(self, message: Message) -> Message:
        self._began = message
        headers = [each for each in message["headers"] if each[0] not in _OURS]
        return {**message, "headers": headers}

    def _take_timings(self, told: Mapping[str, Any]) -> None:
        if not told:
            return
        timings = self._context.timings
        timings.model = told["model"]
        now = clock.now()
        stages = told["seconds"].items()
        timings.intervals = [(clock.Stage(name), now - seconds, now) for name, seconds in stages]
        timings.tokens_in, timings.tokens_out = told["tokens_in"], told["tokens_out"]

    async def _break_off(self) -> None:
        """End an event stream with an error event; of any other answer the end stays missing."""
        assert self._began is not None
        kinds = dict(self._began["headers"])
        error = Unavailable("The replica that wrote this answer is gone.", retry_after_s=1)
        if not kinds.get(b"content-type", b"").startswith(b"text/event-stream"):
            raise error
        self._context.error = error.code or error.type
        event = _error_event(error, self._context)
        await self._send({"type": "http.response.body", "body": event, "more_body": True})


def _drain(response: Any) -> None:
    """Read a call to its end, which follows its last message: until then Ray counts it."""

    async def read() -> None:
        with contextlib.suppress(*_DEATHS):
            async for _ in response:
                pass

    task = asyncio.ensure_future(read())
    _draining.add(task)
    task.add_done_callback(_draining.discard)


def _error_event(error: GatewayError, context: RequestContext) -> bytes:
    """Return an error as the stream of its path has it."""
    path = context.scope["path"]
    if is_anthropic(path):
        return frame(orjson.dumps(error_body(error, context.request_id)), "error")
    if path.removeprefix("/v1") == "/responses":
        return _responses_error(error)
    return frame(orjson.dumps(error.body()))


def _responses_error(error: GatewayError) -> bytes:
    """Return the error event of a stream of /responses. Its number is past all that came before."""
    details = error.body()["error"]
    body = {
        "type": "error",
        "sequence_number": int(time.time()),
        "code": details["code"],
        "message": details["message"],
        "param": None,
    }
    return b"event: error\n" + frame(orjson.dumps(body))


def _scope_to_send(context: RequestContext) -> Message:
    """Return what a replica needs of a scope; the id is the one that the front has given."""
    scope = context.scope
    headers = [each for each in scope["headers"] if each[0] != b"x-request-id"]
    headers.append((b"x-request-id", context.request_id.encode()))
    return {
        **{name: scope[name] for name in _SENT_ON if name in scope},
        "query_string": scope["query_string"],
        "headers": headers,
        "client": scope.get("client"),
        "server": scope.get("server"),
        "asgi": {"version": "3.0"},
    }


def _nobody() -> Unavailable:
    return Unavailable("No replica is there to answer. Please try again shortly.", retry_after_s=2)
