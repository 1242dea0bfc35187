"""Access to the API: keys, hosts, origins, rate limits; and all of it around an app."""

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import math
import re
import socket
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.api.bodies import Bodies
from gateway.api.in_flight import InFlight, shutting_down
from gateway.api.middleware import Context, ErrorResponse
from gateway.errors import Forbidden, GatewayError, RateLimited, Unauthorized, shorten
from gateway.jobs import Timings
from gateway.serving.admission import KINDS, Accounts, Allowance, Bucket, Kind

if TYPE_CHECKING:
    from gateway.api.traces import Tracer

EXPOSED_HEADERS = [
    *(
        "x-request-id",
        "request-id",
        "x-gateway-ignored",
        "x-gateway-truncated",
        "x-gateway-tool-format",
        "x-gateway-unenforced",
        "x-gateway-schema-valid",
    ),
    *("server-timing", "retry-after", "x-should-retry"),
    *(f"x-ratelimit-{name}-{kind}" for name in ("limit", "remaining", "reset") for kind in KINDS),
]
# Of desktop apps: no web page can have these schemes. Tauri's is a host of http on Windows.
APP_ORIGINS = r"(?:tauri|app|vscode-webview|vscode-file)://[^/\s]+|https?://tauri\.localhost"
ADMIN = "/admin/"
DISCARD_BYTES = 16 * 1024 * 1024  # of the body of a request beyond its key's rate
DISCARD_S = 5.0


def protect(
    app: ASGIApp,
    in_flight: InFlight,
    bodies: Bodies,
    *,
    admin_key: str | None,
    keys: Sequence[str],
    hosts: Sequence[str],
    origins: Sequence[str],
    open_paths: Collection[str],
    metered_paths: Collection[str],
    allowance: Allowance,
    max_header_bytes: int,
    send_timeout_s: float,
    tracer: "Tracer | None" = None,
) -> ASGIApp:
    """Return an app behind ids, limits, CORS, keys and rates. What is under /admin needs the admin
    key, if there is one, and no other.
    """
    allowed = origin_pattern(origins)
    inner = app
    if not allowance.is_unlimited:
        app = Rates(app, Accounts(allowance), metered_paths)
    app = Guard(app, in_flight, keys=keys, hosts=hosts, origins=allowed, open_paths=open_paths)
    if admin_key:
        admin = Guard(inner, in_flight, keys=[admin_key], hosts=hosts, origins=allowed)
        app = _route_admin(admin, app)
    app = CORSMiddleware(
        app,
        allow_origins=["*"] if "*" in origins else (),
        allow_origin_regex=allowed.pattern,
        allow_methods=["*"],
        allow_headers=["*"],
        allow_private_network=True,  # as Chrome asks before a public page reaches this machine
        expose_headers=EXPOSED_HEADERS,
    )
    return Context(
        app,
        in_flight,
        bodies,
        max_header_bytes=max_header_bytes,
        send_timeout_s=send_timeout_s,
        tracer=tracer,
    )


def _route_admin(admin: ASGIApp, others: ASGIApp) -> ASGIApp:
    """Return an app that routes paths under /admin/ to one app, all others to another."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        is_admin = scope["type"] == "http" and scope["path"].startswith(ADMIN)
        await (admin if is_admin else others)(scope, receive, send)

    return app


def origin_pattern(origins: Sequence[str]) -> re.Pattern[str]:
    """Return what matches desktop apps' origins and the given ones.

    A `*` is any origin, any port, or any host, alone or before a domain.
    """
    patterns = [APP_ORIGINS]
    for origin in origins:
        text = re.escape(origin).replace(r":\*", r"(?::\d+)?").replace(r"\*", r"[^/:]+")
        patterns.append(".*" if origin == "*" else text)
    return re.compile("|".join(patterns))


class Guard:
    """Admits requests with an API key or, if no keys are set, those of programs on this machine."""

    def __init__(
        self,
        app: ASGIApp,
        in_flight: InFlight,
        *,
        keys: Sequence[str],
        hosts: Sequence[str],
        origins: re.Pattern[str],
        open_paths: Collection[str] = (),
    ) -> None:
        self._app = app
        self._in_flight = in_flight
        self._keys = [_digest(key.encode()) for key in keys]
        self._hosts = frozenset(host.lower() for host in hosts)
        self._origins = origins
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            is_open = scope["path"].removeprefix("/v1") in self._open_paths
            try:
                self._identify(scope)
                scope["gateway.is_known"] = True
                if self._in_flight.is_draining and not is_open:
                    raise shutting_down()
            except GatewayError as error:  # answered here, so that CORS adds its headers
                if not is_open:
                    await ErrorResponse(error, scope)(scope, receive, send)
                    return
        await self._app(scope, receive, send)

    def _identify(self, scope: Scope) -> None:
        """Set the id of the request's key. Raises Unauthorized or Forbidden."""
        headers: Mapping[bytes, bytes] = scope["gateway.headers"]
        if self._keys:
            scope["gateway.key_id"] = self._key_id(headers)
            return
        # A web page could reach localhost by DNS rebinding, so Host has to be a name that no page
        # can have or an allowed one; or across origins, so Origin has to be the gateway's own or
        # one that CORS allows.
        if scope.get("server") is not None:  # no hostname resolves to a unix socket
            self._check_host(headers)
        self._check_origin(scope, headers)

    def _key_id(self, headers: Mapping[bytes, bytes]) -> str:
        """Return the id of the first known key: a bearer token, or in Anthropic's header."""
        # Agents may send both, of which only one is this gateway's.
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        sent = [token.strip()] if scheme.lower() == b"bearer" else []
        sent += [headers[b"x-api-key"].strip()] if b"x-api-key" in headers else []
        for digest in map(_digest, sent):
            # Compare with every key, each in constant time.
            matches = [hmac.compare_digest(digest, known_digest) for known_digest in self._keys]
            if any(matches):
                return f"key-{matches.index(True) + 1}"
        has_any = b"authorization" in headers or sent
        what = "Incorrect API key provided." if has_any else "You didn't provide an API key."
        raise Unauthorized(f"{what} Send it as `Authorization: Bearer <key>` or `x-api-key`.")

    def _check_host(self, headers: Mapping[bytes, bytes]) -> None:
        # Starlette's TrustedHostMiddleware knows no loopback network and no host with its port,
        # cannot let open paths and unix sockets pass, and answers plain text.
        host = headers.get(b"host", b"").decode("latin-1")
        if not (is_here(host) or {host.lower(), _host_name(host), "*"} & self._hosts):
            raise Forbidden(
                f"The host `{shorten(host)}` is not this gateway's. Add it to "
                "GATEWAY_ALLOWED_HOSTS, or set GATEWAY_API_KEYS."
            )

    def _check_origin(self, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        if b"origin" not in headers:
            return
        origin = headers[b"origin"].decode("latin-1")
        if not (self._origins.fullmatch(origin) or self._is_own(origin, scope, headers)):
            raise Forbidden(f"The origin `{shorten(origin)}` is not in GATEWAY_CORS_ORIGINS.")

    def _is_own(self, origin: str, scope: Scope, headers: Mapping[bytes, bytes]) -> bool:
        """Return True for pages of the gateway itself: the dashboard."""
        # The host must be known by name: with `*`, and on a unix socket, it may have been rebound.
        host = headers.get(b"host", b"").decode("latin-1").lower()
        is_known = is_here(host) or {host, _host_name(host)} & self._hosts
        return bool(is_known) and origin.lower() == f"{scope['scheme']}://{host}"


@lru_cache
def is_here(host: str) -> bool:
    """Return True if a Host header names this machine, in a way that no web page can."""
    name = _host_name(host)
    # A network may have chosen all but the first word.
    hostname = socket.gethostname().partition(".")[0].lower()
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        # `.localhost` and `.internal` are in no public DNS, nor are `.local` and names of one word.
        is_own = bool(hostname) and name in (hostname, f"{hostname}.local")
        return name == "localhost" or is_own or name.endswith((".localhost", ".internal"))


def _host_name(host: str) -> str:
    """Return a Host header's name, without port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class Rates:
    """Limits requests and tokens per minute of each API key, which the guard has set.

    A request counts when it is admitted, tokens when they are known.
    """

    def __init__(self, app: ASGIApp, accounts: Accounts, paths: Collection[str]) -> None:
        self._app = app
        self._accounts = accounts
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].removeprefix("/v1") not in self._paths:
            await self._app(scope, receive, send)
            return
        buckets = self._accounts.of(scope.get("gateway.key_id"))
        meter = _Meter(buckets, scope["gateway.timings"], send)
        try:
            admit(buckets)
        except RateLimited as error:
            await _discard_body(receive)
            await ErrorResponse(error, scope)(scope, receive, meter)
            return
        try:
            await self._app(scope, receive, meter)
        finally:
            meter.read()


async def _discard_body(receive: Receive) -> None:
    """Read a body, or as much of it as may be."""
    # Were its connection closed while the client still sends, it would be reset before the answer
    # arrived.
    size, has_more = 0, True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_S):
            while has_more and size <= DISCARD_BYTES:
                message = await receive()
                has_more = message.get("more_body", False)
                size += len(message.get("body", b""))


class _Meter:
    """Wraps `send`: charges tokens and adds the rate limit headers."""

    def __init__(self, buckets: Mapping[Kind, Bucket], timings: Timings, send: Send) -> None:
        self._buckets = buckets
        self._timings = timings
        self._send = send
        self._charged = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            # The prompt's tokens are known by now, and of an unstreamed answer all: those of a
            # stream count when it ends.
            self.read()
            message["headers"] = [*message["headers"], *_rate_headers(self._buckets)]
        await self._send(message)

    def read(self) -> None:
        """Charge the tokens counted since the last call."""
        tokens = self._timings.tokens
        if "tokens" in self._buckets:
            self._buckets["tokens"].take(tokens - self._charged)
        self._charged = tokens


def admit(buckets: Mapping[Kind, Bucket]) -> None:
    """Take one request from its bucket. Raises RateLimited if any bucket is empty or overdrawn."""
    for kind, bucket in buckets.items():
        wait_s = bucket.wait_s()
        if wait_s > 0:
            raise RateLimited(
                f"Rate limit reached on {kind} per minute: limit {bucket.limit}. Please try again "
                f"in {format_duration(wait_s)}.",
                retry_after_s=math.ceil(wait_s),
            )
    if "requests" in buckets:
        buckets["requests"].take(1)


def _rate_headers(buckets: Mapping[Kind, Bucket]) -> list[tuple[bytes, bytes]]:
    headers = []
    for kind, bucket in buckets.items():
        values = {
            "limit": str(bucket.limit),
            "remaining": str(max(0, math.floor(bucket.left))),
            "reset": format_duration(bucket.reset_s()),
        }
        headers += [
            (f"x-ratelimit-{name}-{kind}".encode(), value.encode())
            for name, value in values.items()
        ]
    return headers


def format_duration(seconds: float) -> str:
    """Return a time as OpenAI writes it, rounded up: 120ms, 1s, 6m0s, 1h0m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, s = divmod(math.ceil(seconds), 60)
    hours, m = divmod(minutes, 60)
    if hours:
        return f"{hours}h{m}m{s}s"
    if m:
        return f"{m}m{s}s"
    return f"{s}s"
