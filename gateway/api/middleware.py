"""The layers around every request: its id, its timing, and every error as JSON."""

import asyncio
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import orjson
import structlog
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import clock, logs, metrics
from gateway.api.bodies import Bodies, Body, check_head
from gateway.api.in_flight import (
    CLIENT_CLOSED,
    InFlight,
    RequestContext,
    context_of,
    count_cancelled,
)
from gateway.clock import Timings
from gateway.errors import EngineFailed, GatewayError, Overloaded, Unavailable, shorten
from gateway.ids import passing_id
from gateway.jobs import RoutingKeys
from gateway.panics import NativeError, as_exception
from gateway.wire.anthropic import error_body, error_status

if TYPE_CHECKING:
    from gateway.api.traces import Tracer

log = logs.get("http")

LEAST_RATE = 128 * 1024  # bytes per second that a client has to read
PIECE_BYTES = 256 * 1024  # bytes of each piece of a large body
ANTHROPIC = "/messages"
MODELS = "/models"  # a path of both APIs; see `speaks_anthropic`
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,200}")


def is_anthropic(path: str) -> bool:
    """Return True if a path, with or without /v1, belongs to Anthropic's API alone."""
    bare = path.removeprefix("/v1")
    return bare == ANTHROPIC or bare.startswith(f"{ANTHROPIC}/")


def speaks_anthropic(path: str, headers: Mapping[bytes, bytes]) -> bool:
    """Return True if a request must be answered in Anthropic's format."""
    bare = path.removeprefix("/v1")
    is_shared = bare == MODELS or bare.startswith(f"{MODELS}/")
    return is_anthropic(path) or (is_shared and b"anthropic-version" in headers)


class ErrorResponse(Response):
    """An error as JSON, in OpenAI's, Anthropic's or Cohere's format."""

    def __init__(self, error: GatewayError, context: RequestContext) -> None:
        body: object = error.body()
        status = int(error.status)
        if context.is_cohere:
            body = {"message": error.message, **error.body()}
        if context.is_anthropic:
            body, status = error_body(error, context.request_id), error_status(error)
        super().__init__(
            orjson.dumps(body), status, headers=error.headers, media_type="application/json"
        )
        self._error, self._context = error, context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._context.error = self._error.code or self._error.type
        await super().__call__(scope, receive, send)


def server_timing(timings: Timings) -> str:
    """Return the Server-Timing header (https://www.w3.org/TR/server-timing/)."""
    return ", ".join(f"{stage};dur={ms:g}" for stage, ms in timings.milliseconds.items())


def timings_log(timings: Timings) -> dict[str, str | int | float]:
    """Return the access log's fields about the model; empty if the request reached no model."""
    if timings.model is None:
        return {}
    stages = {f"{stage}_ms": round(1000 * s, 2) for stage, s in timings.seconds.items()}
    tokens = {"tokens_in": timings.tokens_in, "tokens_out": timings.tokens_out}
    fields: dict[str, str | int | float] = {"model": timings.model, **stages, **tokens}
    if timings.preemptions:
        fields["preemptions"] = timings.preemptions
    return fields


def record_timings(timings: Timings, route: str) -> None:
    if timings.model is not None:
        for stage, seconds in timings.seconds.items():
            metrics.of(metrics.STAGE_SECONDS, timings.model, stage, route).observe(seconds)


class Context:
    """The outermost middleware: it gives every request an id and timings, logs it and traces it."""

    def __init__(
        self,
        app: ASGIApp,
        in_flight: InFlight,
        bodies: Bodies,
        *,
        send_timeout_s: float,
        tracer: "Tracer | None" = None,
    ) -> None:
        self._app = app
        self._in_flight = in_flight
        self._bodies = bodies
        self._send_timeout_s = send_timeout_s
        self._tracer = tracer
        self._log = log.bind()  # binds the processors once, not for every line

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context = scope["gateway"] = self._begin(scope)
        is_last = self._in_flight.is_draining  # True: the connection closes after this answer
        reply = _Reply(send, context, self._send_timeout_s, is_last=is_last)
        has_left = False
        try:
            with self._in_flight.track(context):
                await self._app(scope, receive, reply)
        except ClientDisconnect:
            has_left = True
            count_cancelled(context.timings)
        finally:
            reply.close()
            context.body.count(0)
            context.unread.count(0)
            self._end(context, has_left=has_left)

    def _begin(self, scope: Scope) -> RequestContext:
        scope["method"] = shorten(scope["method"])
        # The first value counts if a header is repeated.
        headers = dict(reversed(scope["headers"]))
        request_id = headers.get(b"x-request-id", b"").decode("latin-1")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = passing_id("req")
        structlog.contextvars.bind_contextvars(request_id=request_id)
        context = RequestContext(
            scope=scope,
            headers=headers,
            request_id=request_id,
            is_anthropic=speaks_anthropic(scope["path"], headers),
            is_cohere=scope["path"].endswith("/v2/embed"),
            body=Body(self._bodies),
            unread=Body(self._bodies),
            routing_keys=scope.get("routing_keys", RoutingKeys()),
        )
        if self._tracer is not None:
            context.trace = self._tracer.begin(scope, headers, request_id, context.timings)
        if context.trace is not None:
            structlog.contextvars.bind_contextvars(trace_id=context.trace.trace_id)
        return context

    def _end(self, context: RequestContext, *, has_left: bool) -> None:
        scope, timings, sent = context.scope, context.timings, context.status
        seconds = clock.now() - timings.started
        path = getattr(scope.get("route"), "path", None)
        if context.trace is not None:
            context.trace.end(path, sent, context.error, seconds, has_left=has_left)
        status = CLIENT_CLOSED if has_left or sent is None else int(sent)
        route = path or "none"
        metrics.of(metrics.REQUESTS, route, str(status)).inc()
        if not context.is_watch:
            metrics.of(metrics.REQUEST_SECONDS, route).observe(seconds)
        record_timings(timings, route)
        if context.error is not None and path is not None and status != CLIENT_CLOSED:
            self._in_flight.note_error(context, status, seconds)
        self._log.info(
            "request",
            method=scope["method"],
            path=shorten(scope["path"]),
            status=status,
            ms=round(seconds * 1000, 1),
            **timings_log(timings),
        )


class ErrorMiddleware:
    """Answers every error of the inner app as JSON, unless an answer has begun."""

    def __init__(self, app: ASGIApp, max_header_bytes: int) -> None:
        self._app = app
        self._max_header_bytes = max_header_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context = context_of(scope)
        try:
            check_head(scope, self._max_header_bytes)
            await self._app(scope, receive, send)
            return
        except ClientDisconnect:
            raise
        except asyncio.CancelledError:
            # If an admin cancelled the request, or the gateway stops, the client gets the reason.
            if context.status is not None or context.cancellation is None:
                context.error = "cancelled"
                raise
            context.uncancel()
            failure = context.cancellation
        except GatewayError as error:
            failure = error
        except BaseException as error:
            unforeseen = as_exception(error)
            log.exception("request_failed", path=shorten(scope["path"]))
            failure = GatewayError("The server had an error while processing your request.")
            named = context.timings.model
            if isinstance(unforeseen, NativeError) and named is not None:
                failure = EngineFailed(named, str(unforeseen))
        if context.status is not None:
            return
        model = context.timings.model
        if failure.status == Overloaded.status and model is not None:
            metrics.of(metrics.REJECTED, model).inc()
        await ErrorResponse(failure, context)(scope, receive, send)


class _Limit:
    """Limits the time of each send with one timer for all sends.

    An `asyncio.timeout` for each send would cost half as much as sending a token's event.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[Any] | None = None
        self._cancelling = 0  # `Task.cancelling()` before the send
        self._due = 0.0  # deadline on the loop's clock
        self._is_over = False

    def of(self, seconds: float) -> "_Limit":
        """Return a context manager that raises TimeoutError after this many seconds."""
        self._due = self._loop.time() + seconds
        if self._timer is None or self._due < self._timer.when():
            self.close()
            self._timer = self._loop.call_at(self._due, self._check)
        return self

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelling = self._task.cancelling()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        task, self._task = self._task, None
        if task is not None and self._is_over:
            self._is_over = False
            if task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
                raise TimeoutError

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        self._timer = None
        if self._task is None:
            return
        if self._loop.time() < self._due:
            self._timer = self._loop.call_at(self._due, self._check)
        else:
            self._is_over = True
            self._task.cancel()


class _Reply:
    """Adds headers to every answer. Raises ClientDisconnect if the client reads too slowly."""

    def __init__(
        self, send: Send, context: RequestContext, send_timeout_s: float, *, is_last: bool
    ) -> None:
        self._send = send
        self._context = context
        self._send_timeout_s = send_timeout_s
        self._is_last = is_last
        self._limit = _Limit()
        self._is_refused = False  # True: an error was sent in place of the answer
        self._waited_s = 0.0  # seconds spent waiting for the client to read
        self._nbytes = 0

    async def __call__(self, message: Message) -> None:
        if self._is_refused:
            return
        if message["type"] == "http.response.start":
            if self._context.status is None and not await self._has_room(message):
                return
            self._context.status = message["status"]
            message["headers"] = [*message["headers"], *self._headers()]
        await self._send_body(message)

    def close(self) -> None:
        self._limit.close()

    def _headers(self) -> Iterator[tuple[bytes, bytes]]:
        context = self._context
        request_id = context.request_id.encode()
        yield b"x-request-id", request_id
        yield b"server-timing", server_timing(context.timings).encode()
        if context.is_anthropic:
            yield b"request-id", request_id
        if context.trace is not None:
            yield context.trace.header
        yield from context.rate_headers()
        if self._is_last:
            yield b"connection", b"close"

    async def _has_room(self, start: Message) -> bool:
        """Count an answer of known length; without room, send an error instead and return False."""
        length = int(dict(start["headers"]).get(b"content-length", b"0"))
        # The error is sent here: Starlette handles no exception once an answer has begun.
        try:
            self._context.unread.count_answer(length)
        except Unavailable as error:
            refusal = ErrorResponse(error, self._context)
            await refusal(self._context.scope, _receive_nothing, self)
            self._is_refused = True
        return not self._is_refused

    async def _send_body(self, message: Message) -> None:
        left = len(message.get("body", b""))
        for piece in split_body(message):
            began = clock.now()
            self._nbytes += len(piece.get("body", b""))
            # A limit for each piece is not enough: a client could hold a large answer in memory for
            # hours.
            late_s = self._send_timeout_s + self._nbytes / LEAST_RATE - self._waited_s
            try:
                with self._limit.of(min(self._send_timeout_s, late_s)):
                    await self._send(piece)
            except TimeoutError:
                log.warning("client_stopped_reading")
                raise ClientDisconnect from None
            self._waited_s += clock.now() - began
            # EventStream counts its own bytes.
            if left > PIECE_BYTES and not message.get("more_body"):
                left -= PIECE_BYTES
                self._context.unread.count(left)


async def _receive_nothing() -> Message:
    raise AssertionError("an error reads no body")


def split_body(message: Message) -> Iterator[Message]:
    """Yield a message in pieces, so that each piece of a large body gets its own timeout."""
    body = message.get("body", b"")
    if len(body) <= PIECE_BYTES:
        yield message
        return
    last = range(0, len(body), PIECE_BYTES)[-1]
    for start in range(0, len(body), PIECE_BYTES):
        has_more = start < last or message.get("more_body", False)
        yield {**message, "body": body[start : start + PIECE_BYTES], "more_body": has_more}
