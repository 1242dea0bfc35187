"""Around every request: its id, its timing, and every error as JSON."""

import asyncio
import re
import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING

import orjson
import structlog
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import clock, logs, metrics
from gateway.api.bodies import Bodies, Body, check_head
from gateway.api.disconnects import CLIENT_CLOSED, count_cancelled
from gateway.api.endpoint import speaks_anthropic
from gateway.api.in_flight import InFlight, RequestInFlight
from gateway.errors import GatewayError, Unavailable, shorten
from gateway.jobs import Timings
from gateway.wire.anthropic_stream import error_body, error_status

if TYPE_CHECKING:
    from gateway.api.traces import Trace, Tracer

log = logs.get("http")

LEAST_RATE = 128 * 1024  # bytes a second that a client reads of its answer, after the send timeout
PIECE_BYTES = 256 * 1024  # of a large body, sent at a time; the send timeout is for each piece
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,200}")


class ErrorResponse(Response):
    """An error as JSON, in the envelope of the request's path.

    Its code is left in the scope, for the list of the last errors.
    """

    def __init__(self, error: GatewayError, scope: Scope) -> None:
        body: object = error.body()
        status = int(error.status)
        if scope["gateway.is_anthropic"]:
            body, status = error_body(error, scope["gateway.request_id"]), error_status(error)
        super().__init__(
            orjson.dumps(body), status, headers=error.headers, media_type="application/json"
        )
        self._code = error.code or error.type

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["gateway.error"] = self._code
        await super().__call__(scope, receive, send)


def server_timing(timings: Timings) -> str:
    """Return the header's value, https://www.w3.org/TR/server-timing/, with the stages so far."""
    return ", ".join(f"{stage};dur={ms:g}" for stage, ms in timings.milliseconds.items())


def timings_log(timings: Timings) -> dict[str, str | int | float]:
    """Return the access log's fields about a model; none if the request reached no model."""
    if timings.model is None:
        return {}
    stages = {f"{stage}_ms": round(1000 * s, 2) for stage, s in timings.seconds.items()}
    tokens = {"tokens_in": timings.tokens_in, "tokens_out": timings.tokens_out}
    preempted = {"preemptions": timings.preemptions} if timings.preemptions else {}
    return {"model": timings.model, **stages, **tokens, **preempted}


def record_timings(timings: Timings, route: str) -> None:
    """Count the stages of a request that reached a model."""
    if timings.model is not None:
        for stage, seconds in timings.seconds.items():
            metrics.of(metrics.STAGE_SECONDS, timings.model, stage, route).observe(seconds)


class Context:
    """The outermost middleware: every answer has a request id, every error is JSON.

    A client that reads nothing for `send_timeout_s`, or its whole answer more slowly than
    LEAST_RATE, counts as disconnected. If there is a tracer, every request has a trace.
    """

    def __init__(
        self,
        app: ASGIApp,
        in_flight: InFlight,
        bodies: Bodies,
        *,
        max_header_bytes: int,
        send_timeout_s: float,
        tracer: "Tracer | None" = None,
    ) -> None:
        self._app = app
        self._in_flight = in_flight
        self._bodies = bodies
        self._max_header_bytes = max_header_bytes
        self._send_timeout_s = send_timeout_s
        self._tracer = tracer
        self._log = log.bind()  # once, not for every line

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # For all readers; of a header sent twice, the first counts.
        headers = scope["gateway.headers"] = dict(reversed(scope["headers"]))
        scope["gateway.is_anthropic"] = speaks_anthropic(scope["path"], headers)
        sent = headers.get(b"x-request-id", b"")
        is_valid = _REQUEST_ID.fullmatch(sent)
        request_id = sent.decode() if is_valid else f"req-{secrets.token_hex(12)}"
        scope["gateway.request_id"] = request_id
        structlog.contextvars.bind_contextvars(request_id=request_id)
        is_last = self._in_flight.is_draining  # connections close after their answer then
        timings = scope["gateway.timings"] = Timings()
        trace = None if self._tracer is None else self._begin_trace(self._tracer, scope)
        unread = scope["gateway.unread"] = Body(self._bodies)
        reply = _Reply(
            send,
            scope,
            unread,
            request_id,
            timings,
            is_last=is_last,
            is_anthropic=scope["gateway.is_anthropic"],
            send_timeout_s=self._send_timeout_s,
            trace=trace,
        )
        status = 0  # if it ends by a cancellation
        try:
            with (
                self._in_flight.track(scope) as request,
                self._bodies.body() as scope["gateway.body"],
            ):
                status = await self._serve(scope, receive, reply, request)
        finally:
            unread.count(0)
            seconds = clock.now() - timings.started
            route = getattr(scope.get("route"), "path", None)
            if trace is not None:
                error = scope.get("gateway.error")
                trace.end(route, reply.status, error, seconds, has_left=status == CLIENT_CLOSED)
            self._record(scope, status or reply.status or CLIENT_CLOSED, seconds)

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        timings: Timings = scope["gateway.timings"]
        route = getattr(scope.get("route"), "path", None) or "none"
        metrics.of(metrics.REQUESTS, route, str(int(status))).inc()
        if "gateway.is_watch" not in scope:  # which lasts as long as somebody looks
            metrics.of(metrics.REQUEST_SECONDS, route).observe(seconds)
        record_timings(timings, route)
        if "gateway.error" in scope and "route" in scope and status != CLIENT_CLOSED:
            self._in_flight.note_error(scope, status, seconds)
        self._log.info(
            "request",
            method=scope["method"],
            path=shorten(scope["path"]),
            status=int(status),  # an enum, where the answer is an error
            ms=round(seconds * 1000, 1),
            **timings_log(timings),
        )

    def _begin_trace(self, tracer: "Tracer", scope: Scope) -> "Trace | None":
        trace = tracer.begin(scope, scope["gateway.timings"])
        if trace is not None:
            scope["gateway.trace"] = trace
            structlog.contextvars.bind_contextvars(trace_id=trace.trace_id)
        return trace

    async def _serve(
        self, scope: Scope, receive: Receive, reply: "_Reply", request: RequestInFlight
    ) -> int:
        try:
            check_head(scope, self._max_header_bytes)
            await self._app(scope, receive, reply)
        except ClientDisconnect:
            count_cancelled(scope["gateway.timings"])
            return CLIENT_CLOSED
        except asyncio.CancelledError:
            if reply.status is not None or request.cancellation is None:
                scope["gateway.error"] = "cancelled"
                raise
            request.uncancel()
            await ErrorResponse(request.cancellation, scope)(scope, receive, reply)
        except GatewayError as error:
            if reply.status is None:
                await ErrorResponse(error, scope)(scope, receive, reply)
        except Exception:
            log.exception("request_failed", path=shorten(scope["path"]))
            if reply.status is None:
                failure = GatewayError("The server had an error while processing your request.")
                await ErrorResponse(failure, scope)(scope, receive, reply)
        return reply.status or CLIENT_CLOSED


class _Reply:
    """Wraps `send`: adds the request id and the timings so far, and keeps the status.

    Raises ClientDisconnect if the client stops reading, or reads too slowly. An answer of known
    length for which there is no room becomes an error: Starlette takes none once it has begun one.
    """

    def __init__(
        self,
        send: Send,
        scope: Scope,
        unread: Body,
        request_id: str,
        timings: Timings,
        *,
        is_last: bool,
        is_anthropic: bool,
        send_timeout_s: float,
        trace: "Trace | None",
    ) -> None:
        self._send = send
        self._scope = scope
        self._unread = unread
        self._request_id = request_id
        self._timings = timings
        self._is_last = is_last
        self._is_anthropic = is_anthropic
        self._send_timeout_s = send_timeout_s
        self._trace = trace
        self._is_refused = False  # an error was sent in its place
        self._waited_s = 0.0  # for the client to read
        self._nbytes = 0
        self.status: int | None = None

    async def __call__(self, message: Message) -> None:
        if self._is_refused:
            return
        if message["type"] == "http.response.start":
            if self.status is None and not await self._has_room(message):
                return
            self.status = message["status"]
            headers = [
                *message["headers"],
                (b"x-request-id", self._request_id.encode()),
                (b"server-timing", server_timing(self._timings).encode()),
            ]
            if self._is_anthropic:  # by its own name
                headers.append((b"request-id", self._request_id.encode()))
            if self._trace is not None:
                headers.append(self._trace.header)
            if self._is_last:
                headers.append((b"connection", b"close"))
            message["headers"] = headers
        await self._send_body(message)

    async def _has_room(self, start: Message) -> bool:
        """Count an answer of known length; return False if it was refused: there is no room."""
        length = int(dict(start["headers"]).get(b"content-length", b"0"))
        try:
            self._unread.count_answer(length)
        except Unavailable as error:
            await ErrorResponse(error, self._scope)(self._scope, _receive_nothing, self)
            self._is_refused = True
        return not self._is_refused

    async def _send_body(self, message: Message) -> None:
        left = len(message.get("body", b""))
        for piece in split_body(message):
            began = clock.now()
            self._nbytes += len(piece.get("body", b""))
            late_s = self._send_timeout_s + self._nbytes / LEAST_RATE - self._waited_s
            try:
                async with asyncio.timeout(min(self._send_timeout_s, late_s)):
                    await self._send(piece)
            except TimeoutError:
                log.warning("client_stopped_reading")
                raise ClientDisconnect from None
            self._waited_s += clock.now() - began
            if left > PIECE_BYTES and not message.get("more_body"):  # a stream counts its own
                left -= PIECE_BYTES
                self._unread.count(left)


async def _receive_nothing() -> Message:
    raise AssertionError("an error reads no body")


def split_body(message: Message) -> Iterator[Message]:
    """Yield a large body in pieces, to tell a client that reads slowly from one that stopped."""
    body = message.get("body", b"")
    if len(body) <= PIECE_BYTES:
        yield message
        return
    last = range(0, len(body), PIECE_BYTES)[-1]
    for start in range(0, len(body), PIECE_BYTES):
        has_more = start < last or message.get("more_body", False)
        yield {**message, "body": body[start : start + PIECE_BYTES], "more_body": has_more}
