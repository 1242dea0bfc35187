"""Around every request: its id, the key check, the access log, and every error → OpenAI JSON."""

import asyncio
import hashlib
import hmac
import ipaddress
import re
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache

import orjson
import structlog
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import logs, metrics
from gateway.api import timing
from gateway.api.door import Door
from gateway.api.limits import Bodies, check_head
from gateway.errors import (
    Forbidden,
    GatewayError,
    Unauthorized,
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
        seconds = metrics.now() - timings.started
        route = getattr(scope.get("route"), "path", "none")
        metrics.of(metrics.REQUESTS, route, str(status)).inc()
        metrics.of(metrics.REQUEST_SECONDS, route).observe(seconds)
        timing.record(timings)
        self._log.info(
            "request",
            method=scope["method"],
            path=shorten(scope["path"]),
            status=int(status),  # an enum, where the answer is an error
            ms=round(seconds * 1000, 1),
            **timing.logged(timings),
        )

    async def _serve(self, scope: Scope, receive: Receive, reply: "_Reply") -> int:
        try:
            check_head(scope, self._max_header_bytes)
            await self._app(scope, receive, reply)
        except ClientDisconnect:
            timing.left(scope["gateway.timings"])
            return CLIENT_LEFT
        except asyncio.CancelledError:
            if reply.status is not None or not self._door.sends_away:
                raise
            await error_response(_closing())(scope, receive, reply)
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
                (b"server-timing", timing.server_timing(self._timings).encode()),
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


class Guard:
    """Who may come in: holders of a key or, where there are none, this machine's own programs.

    Browsers attack localhost: without keys a page could call us by rebinding its name (so the
    Host must be ours) or across origins (so its Origin must be one that CORS allows).
    """

    def __init__(
        self,
        app: ASGIApp,
        door: Door,
        *,
        keys: Sequence[str],
        hosts: Sequence[str],
        origins: Sequence[str],
        open_paths: Collection[str] = (),
    ) -> None:
        self._app = app
        self._door = door
        self._keys = [_digest(key.encode()) for key in keys]
        self._hosts = frozenset(host.lower() for host in hosts)
        self._origins = frozenset(origins)
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request in, or answer why not."""
        if scope["type"] == "http":
            is_open = scope["path"].removeprefix("/v1") in self._open_paths
            try:
                self._identify(scope)
                scope["gateway.is_known"] = True
                if self._door.is_closed and not is_open:
                    raise _closing()
            except GatewayError as error:  # answered here, so that CORS adds its headers
                if not is_open:
                    await error_response(error)(scope, receive, send)
                    return
        await self._app(scope, receive, send)

    def _identify(self, scope: Scope) -> None:
        """Find whose the key is. Raises Unauthorized or Forbidden for strangers."""
        headers: Mapping[bytes, bytes] = scope["gateway.headers"]
        if self._keys:
            scope["gateway.key_id"] = self._key_id(headers.get(b"authorization", b""))
            return
        if scope.get("server") is not None:  # a unix socket is no server that a name may lead to
            self._check_host(headers)
        self._check_origin(headers)

    def _key_id(self, authorization: bytes) -> str:
        scheme, _, key = authorization.partition(b" ")
        given = _digest(key.strip())
        # Every key is compared, in constant time, whichever matches.
        matches = [hmac.compare_digest(given, known) for known in self._keys]
        if scheme.lower() != b"bearer" or not any(matches):
            raise Unauthorized(
                "Incorrect API key provided. Send it as `Authorization: Bearer <key>`."
                if authorization
                else "You didn't provide an API key. Send it as `Authorization: Bearer <key>`."
            )
        return f"key-{matches.index(True) + 1}"

    def _check_host(self, headers: Mapping[bytes, bytes]) -> None:
        host = headers.get(b"host", b"").decode("latin-1")
        if not (is_loopback(host) or {host.lower(), _name(host), "*"} & self._hosts):
            raise Forbidden(
                f"The host `{shorten(host)}` is not this gateway's. Add it to "
                "GATEWAY_ALLOWED_HOSTS, or set GATEWAY_API_KEYS."
            )

    def _check_origin(self, headers: Mapping[bytes, bytes]) -> None:
        if b"origin" not in headers:
            return
        origin = headers[b"origin"].decode("latin-1")
        if not {origin, "*"} & self._origins:
            raise Forbidden(f"The origin `{shorten(origin)}` is not in GATEWAY_CORS_ORIGINS.")


def _closing() -> Unavailable:
    return Unavailable("The gateway is shutting down.", retry_after_s=1)


@lru_cache
def is_loopback(host: str) -> bool:
    """Tell whether a Host header names this machine itself."""
    name = _name(host)
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _name(host: str) -> str:
    """Give a Host header without its port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
