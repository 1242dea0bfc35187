"""Around every request: its id, its timing, who is inside, and every error as JSON."""

import asyncio
import contextlib
import re
import secrets
from collections.abc import Iterator

import orjson
import structlog
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import clock, logs, metrics
from gateway.api.requests import Bodies, check_head
from gateway.errors import (
    GatewayError,
    Unavailable,
    shorten,
)
from gateway.jobs import Timings

log = logs.get("http")

CLIENT_LEFT = 499  # nginx's name for it; nobody is there to read the answer
PIECE_BYTES = 256 * 1024  # of a large body, sent at a time: each has to be read in time
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,200}")


def error_response(error: GatewayError) -> Response:
    """Turn an error into its JSON."""
    return Response(
        orjson.dumps(error.body()),
        error.status,
        headers=error.headers,
        media_type="application/json",
    )


def shutting_down() -> Unavailable:
    """Return the error for requests that arrive, or are unfinished, when the gateway stops."""
    return Unavailable("The gateway is shutting down.", retry_after_s=1)


class Door:
    """Knows the requests under way, so that a drain can wait for them, and end them."""

    def __init__(self) -> None:
        self.is_closed = False
        self.sends_away = False
        self._inside: set[asyncio.Task[object] | None] = set()
        self._empty = asyncio.Event()
        self._empty.set()

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """Count one request, the current task, from its arrival to its last byte."""
        task = asyncio.current_task()
        self._inside.add(task)
        self._empty.clear()
        try:
            yield
        finally:
            self._inside.discard(task)
            if not self._inside:
                self._empty.set()

    async def drained(self, timeout_s: float) -> bool:
        """Let nobody in any more; tell whether all had left in time."""
        self.is_closed = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        return not self._inside

    def send_away(self) -> None:
        """End whatever those inside wait for: they are cancelled, and `Context` tells them why."""
        self.sends_away = True
        for task in self._inside:
            if task is not None:
                task.cancel()


def milliseconds(timings: Timings) -> dict[str, float]:
    """Return each stage's milliseconds so far, in the order they came, and the total."""
    stages = {str(stage): round(1000 * s, 2) for stage, s in timings.seconds.items()}
    stages["total"] = round(1000 * (clock.now() - timings.started), 2)
    return stages


def server_timing(timings: Timings) -> str:
    """Write the header (https://www.w3.org/TR/server-timing/); a stream's ends at its opening."""
    return ", ".join(f"{stage};dur={ms:g}" for stage, ms in milliseconds(timings).items())


def timings_field(timings: Timings) -> dict[str, float]:
    """Give what a stream's usage chunk says of its stages."""
    return {f"{stage}_ms": ms for stage, ms in milliseconds(timings).items()}


def timings_log(timings: Timings) -> dict[str, str | int | float]:
    """Give what the access log says beside the total; nothing where no model was asked."""
    if timings.model is None:
        return {}
    stages = {f"{stage}_ms": round(1000 * s, 2) for stage, s in timings.seconds.items()}
    tokens = {"tokens_in": timings.tokens_in, "tokens_out": timings.tokens_out}
    preempted = {"preemptions": timings.preemptions} if timings.preemptions else {}
    return {"model": timings.model, **stages, **tokens, **preempted}


def count_leaver(timings: Timings) -> None:
    """Count a client who left before its answer was made, once, by what was being done for it: for
    the first of its jobs, where it had several under way.
    """
    stages = (each.stage for each in (timings, *timings.parallel) if each.stage is not None)
    if timings.model is not None and (stage := next(stages, None)) is not None:
        metrics.of(metrics.CANCELLED, timings.model, stage).inc()


def record_timings(timings: Timings) -> None:
    """Count the stages of a request that reached a model."""
    if timings.model is not None:
        for stage, seconds in timings.seconds.items():
            metrics.of(metrics.STAGE_SECONDS, timings.model, stage).observe(seconds)


class Context:
    """The outermost layer: nothing leaves it but an answer with a request id. A client that leaves
    it unread for `send_timeout_s` is taken to have gone.
    """

    def __init__(
        self,
        app: ASGIApp,
        door: Door,
        bodies: Bodies,
        *,
        max_header_bytes: int,
        send_timeout_s: float,
    ) -> None:
        self._app = app
        self._door = door
        self._bodies = bodies
        self._max_header_bytes = max_header_bytes
        self._send_timeout_s = send_timeout_s
        self._log = log.bind()  # once, not for every line

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Read once for all who ask; of a header sent twice, the first.
        headers = scope["gateway.headers"] = dict(reversed(scope["headers"]))
        given = headers.get(b"x-request-id", b"")
        is_fit = _REQUEST_ID.fullmatch(given)
        request_id = given.decode() if is_fit else f"req-{secrets.token_hex(12)}"
        scope["gateway.request_id"] = request_id
        structlog.contextvars.bind_contextvars(request_id=request_id)
        # While draining, a connection ends with its answer; HTTP/2 has no such header.
        is_last = self._door.is_closed and scope["http_version"].startswith("1")
        timings = scope["gateway.timings"] = Timings()
        reply = _Reply(
            send, request_id, timings, is_last=is_last, send_timeout_s=self._send_timeout_s
        )
        with self._door.passing(), self._bodies.body() as scope["gateway.body"]:
            status = await self._serve(scope, receive, reply)
        seconds = clock.now() - timings.started
        route = getattr(scope.get("route"), "path", "none")
        metrics.of(metrics.REQUESTS, route, str(status)).inc()
        metrics.of(metrics.REQUEST_SECONDS, route).observe(seconds)
        record_timings(timings)
        self._log.info(
            "request",
            method=scope["method"],
            path=shorten(scope["path"]),
            status=int(status),  # an enum, where the answer is an error
            ms=round(seconds * 1000, 1),
            **timings_log(timings),
        )

    async def _serve(self, scope: Scope, receive: Receive, reply: "_Reply") -> int:
        try:
            check_head(scope, self._max_header_bytes)
            await self._app(scope, receive, reply)
        except ClientDisconnect:
            count_leaver(scope["gateway.timings"])
            return CLIENT_LEFT
        except asyncio.CancelledError:
            if reply.status is not None or not self._door.sends_away:
                raise
            await error_response(shutting_down())(scope, receive, reply)
        except GatewayError as error:
            if reply.status is None:
                await error_response(error)(scope, receive, reply)
        except Exception:
            log.exception("request_failed", path=shorten(scope["path"]))
            if reply.status is None:
                oops = GatewayError("The server had an error while processing your request.")
                await error_response(oops)(scope, receive, reply)
        return reply.status or CLIENT_LEFT


class _Reply:
    """The way back to the client: it adds the request id and the timings so far, remembers the
    status, and does not wait for ever for who stopped reading: that raises ClientDisconnect.
    """

    def __init__(
        self,
        send: Send,
        request_id: str,
        timings: Timings,
        *,
        is_last: bool,
        send_timeout_s: float,
    ) -> None:
        self._send = send
        self._request_id = request_id
        self._timings = timings
        self._is_last = is_last
        self._send_timeout_s = send_timeout_s
        self.status: int | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [
                *message["headers"],
                (b"x-request-id", self._request_id.encode()),
                (b"server-timing", server_timing(self._timings).encode()),
            ]
            if self._is_last:
                headers.append((b"connection", b"close"))
            message["headers"] = headers
        for piece in pieces(message):
            try:
                async with asyncio.timeout(self._send_timeout_s):
                    await self._send(piece)
            except TimeoutError:
                log.warning("client_stopped_reading")
                raise ClientDisconnect from None


def pieces(message: Message) -> Iterator[Message]:
    """Part a large body, so that who reads it slowly can be told from who does not."""
    body = message.get("body", b"")
    if len(body) <= PIECE_BYTES:
        yield message
        return
    last = range(0, len(body), PIECE_BYTES)[-1]
    for start in range(0, len(body), PIECE_BYTES):
        more = start < last or message.get("more_body", False)
        yield {**message, "body": body[start : start + PIECE_BYTES], "more_body": more}
