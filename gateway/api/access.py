"""Access to the API: keys, hosts, origins, rate limits."""

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import math
import re
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.api.bodies import Bodies
from gateway.api.in_flight import InFlight, RequestContext, context_of
from gateway.api.middleware import Context, ErrorMiddleware
from gateway.clock import Timings
from gateway.errors import Forbidden, GatewayError, RateLimited, ShuttingDown, Unauthorized, shorten
from gateway.serving.rate_limit import KINDS, Accounts, Allowance, Bucket, Kind

if TYPE_CHECKING:
    from gateway.api.traces import Tracer

EXPOSED_HEADERS = [
    "x-request-id", "request-id", "x-gateway-ignored", "x-gateway-images-left-out",
    "x-gateway-truncated", "x-gateway-reasoning-format", "x-gateway-tool-format",
    "x-gateway-answer-format", "x-gateway-unenforced", "x-gateway-schema-valid",
    "x-gateway-thinking-budget", "server-timing", "retry-after", "x-should-retry",
    *(f"x-ratelimit-{name}-{kind}" for name in ("limit", "remaining", "reset") for kind in KINDS),
]  # fmt: skip
# Origins of desktop apps: no website can have these schemes or Tauri's host.
APP_ORIGINS = r"(?:tauri|app|vscode-webview|vscode-file)://[^/\s]+|https?://tauri\.localhost"
ADMIN = "/admin/"
PAGES = ("/dashboard", "/docs")  # paths that a link on another site may open
DISCARD_BYTES = 16 * 1024 * 1024  # most bytes that are read of a refused body
DISCARD_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessRules:
    """The settings for access: who may send requests, and how many."""

    admin_key: str | None  # the only key for /admin, if set
    local_key: str | None = None  # opens /admin to this user's commands, and hides it from others
    keys: Sequence[str]
    shares_prefixes: bool
    hosts: Sequence[str]
    origins: Sequence[str]
    allowance: Allowance
    max_header_bytes: int
    send_timeout_s: float


def protect(
    app: ASGIApp,
    rules: AccessRules,
    in_flight: InFlight,
    bodies: Bodies,
    *,
    open_paths: Collection[str],
    metered_paths: Collection[str],
    tracer: "Tracer | None" = None,
) -> ASGIApp:
    """Wrap an app in request ids, JSON errors, CORS, API keys and rate limits."""
    # CORS wraps the errors: without CORS headers, a browser hides even a 401 from its page.
    origins = origin_pattern(rules.origins)
    if not rules.allowance.is_unlimited:
        app = Rates(app, Accounts(rules.allowance), metered_paths)
    app = Guard(app, rules, in_flight, origins, open_paths)
    app = CORSMiddleware(
        ErrorMiddleware(app, rules.max_header_bytes),
        allow_origins=["*"] if "*" in rules.origins else (),
        allow_origin_regex=origins.pattern,
        allow_methods=["*"],
        allow_headers=["*"],
        allow_private_network=True,  # Chrome asks whether a public page may reach this machine
        expose_headers=EXPOSED_HEADERS,
    )
    return Context(app, in_flight, bodies, send_timeout_s=rules.send_timeout_s, tracer=tracer)


def origin_pattern(origins: Sequence[str]) -> re.Pattern[str]:
    # `*` alone is any origin, `:*` any port, any other `*` a part of a host.
    patterns = [APP_ORIGINS]
    for origin in origins:
        text = re.escape(origin).replace(r":\*", r"(?::\d+)?").replace(r"\*", r"[^/:]+")
        patterns.append(".*" if origin == "*" else text)
    return re.compile("|".join(patterns))


class Guard:
    """Admits requests with an API key. Without keys, admits requests that no page of another site
    can send.
    """

    def __init__(
        self,
        app: ASGIApp,
        rules: AccessRules,
        in_flight: InFlight,
        origins: re.Pattern[str],
        open_paths: Collection[str],
    ) -> None:
        self._app = app
        self._in_flight = in_flight
        self._keys = [_digest(key.encode()) for key in rules.keys]
        self._admin_keys = [_digest(rules.admin_key.encode())] if rules.admin_key else self._keys
        self._local_keys = [_digest(rules.local_key.encode())] if rules.local_key else []
        self._has_salts = len(self._keys) > 1 and not rules.shares_prefixes
        self._hosts = frozenset(host.lower() for host in rules.hosts)
        self._origins = origins
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            is_open = scope["path"].removeprefix("/v1") in self._open_paths
            context = context_of(scope)
            try:
                self._identify(context)
                context.is_known = True
                if self._in_flight.is_draining and not is_open:
                    raise ShuttingDown
            except GatewayError:
                if not is_open:
                    raise
        await self._app(scope, receive, send)

    def _identify(self, context: RequestContext) -> None:
        is_admin = context.scope["path"].startswith(ADMIN)
        if is_admin and self._local_keys:
            with contextlib.suppress(Unauthorized):
                _key_id(context.headers, self._local_keys)
                context.is_admin = True
                return
        keys = self._admin_keys if is_admin else self._keys
        if keys:
            context.key_id = _key_id(context.headers, keys)
            context.is_admin = keys is not self._keys
            context.cache_salt = context.key_id if self._has_salts else ""
            return
        self._check_page(context.scope, context.headers)

    def _check_page(self, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        """Raise Forbidden for a request that a page of another site may have sent."""
        # DNS rebinding lets a page reach localhost under a public name, so Host must be a name that
        # no page can have, or an allowed one. Cross-origin requests reach localhost too, so Origin
        # must be the gateway's own or allowed by CORS. Starlette's TrustedHostMiddleware knows
        # neither loopback networks nor unix sockets.
        host = headers.get(b"host", b"").decode("latin-1").lower()
        is_known = is_here(host) or not self._hosts.isdisjoint((host, _host_name(host)))
        is_socket = scope.get("server") is None  # no host name leads to a unix socket
        if not (is_known or is_socket or "*" in self._hosts):
            raise Forbidden(
                f"The host `{shorten(host)}` is not this gateway's. Add it to "
                "GATEWAY_ALLOWED_HOSTS, or set GATEWAY_API_KEYS."
            )
        origin = headers.get(b"origin", b"").decode("latin-1")
        # If every origin is allowed, an absent Origin matches too.
        if self._origins.fullmatch(origin):
            return
        # The dashboard sends the gateway's own origin; if any host is allowed, DNS rebinding could
        # fake that origin.
        is_own = is_known and origin.lower() == f"{scope['scheme']}://{host}"
        if b"origin" in headers and not is_own:
            raise Forbidden(f"The origin `{shorten(origin)}` is not in GATEWAY_CORS_ORIGINS.")
        # Requests for images, scripts, frames and links have no Origin; Sec-Fetch-Site is `none` if
        # the user typed the URL.
        site = headers.get(b"sec-fetch-site", b"none")
        if site not in (b"same-origin", b"none") and not _opens_page(scope, headers):
            raise Forbidden(
                "The request comes from a page of another site (Sec-Fetch-Site: "
                f"{shorten(site.decode('latin-1'))}), without an Origin of GATEWAY_CORS_ORIGINS."
            )


def _opens_page(scope: Scope, headers: Mapping[bytes, bytes]) -> bool:
    is_link = headers.get(b"sec-fetch-mode") == b"navigate"
    is_whole = headers.get(b"sec-fetch-dest") == b"document"
    return is_link and is_whole and scope["method"] == "GET" and scope["path"] in PAGES


def _key_id(headers: Mapping[bytes, bytes], keys: Sequence[bytes]) -> str:
    # Agents may send two keys, one of which is for another service.
    sent = []
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer":
        sent.append(token.strip())
    if b"x-api-key" in headers:
        sent.append(headers[b"x-api-key"].strip())
    for digest in map(_digest, sent):
        # Every key is compared in constant time.
        matches = [hmac.compare_digest(digest, known_digest) for known_digest in keys]
        if any(matches):
            return f"key-{matches.index(True) + 1}"
    what = "You didn't provide an API key."
    if b"authorization" in headers or sent:
        what = "Incorrect API key provided."
    raise Unauthorized(f"{what} Send it as `Authorization: Bearer <key>` or `x-api-key`.")


@lru_cache
def is_here(host: str) -> bool:
    """Return True if a Host header names this machine by a name that no website can have."""
    name = _host_name(host)
    # The network may have assigned the hostname's domain, so the domain is left out.
    hostname = socket.gethostname().partition(".")[0].lower()
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        # `.localhost`, `.internal`, `.local` and names without a dot are never in public DNS.
        is_own = bool(hostname) and name in (hostname, f"{hostname}.local")
        return name == "localhost" or is_own or name.endswith((".localhost", ".internal"))


def _host_name(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class Rates:
    """Limits the requests and tokens per minute of each API key."""

    def __init__(self, app: ASGIApp, accounts: Accounts, paths: Collection[str]) -> None:
        self._app = app
        self._accounts = accounts
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].removeprefix("/v1") not in self._paths:
            await self._app(scope, receive, send)
            return
        context = context_of(scope)
        meter = Meter(self._accounts.of(context.key_id), context.timings)
        context.rate_headers = meter.headers
        try:
            meter.admit()
        except RateLimited:
            # If the connection closed while the client still sends, the client would not see the
            # answer.
            await _discard_body(receive)
            raise
        try:
            await self._app(scope, receive, send)
        finally:
            meter.charge()


async def _discard_body(receive: Receive) -> None:
    size, has_more = 0, True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_S):
            while has_more and size <= DISCARD_BYTES:
                message = await receive()
                has_more = message.get("more_body", False)
                size += len(message.get("body", b""))


class Meter:
    """Charges one request and its tokens to the buckets of the caller's key."""

    def __init__(self, buckets: Mapping[Kind, Bucket], timings: Timings) -> None:
        self._buckets = buckets
        self._timings = timings
        self._charged = 0

    def admit(self) -> None:
        """Charge the request. Raises RateLimited if a bucket is empty."""
        for kind, bucket in self._buckets.items():
            wait_s = bucket.wait_s()
            if wait_s > 0:
                raise RateLimited(
                    f"Rate limit reached on {kind} per minute: limit {bucket.limit}. Please try "
                    f"again in {format_duration(wait_s)}.",
                    retry_after_s=math.ceil(wait_s),
                )
        if "requests" in self._buckets:
            self._buckets["requests"].take(1)

    def charge(self) -> None:
        tokens = self._timings.tokens
        if "tokens" in self._buckets:
            self._buckets["tokens"].take(tokens - self._charged)
        self._charged = tokens

    def headers(self) -> Iterator[tuple[bytes, bytes]]:
        """Charge the tokens known so far, and yield headers with the remaining allowance."""
        self.charge()
        for kind, bucket in self._buckets.items():
            values = {
                "limit": str(bucket.limit),
                "remaining": str(max(0, math.floor(bucket.left))),
                "reset": format_duration(bucket.reset_s()),
            }
            for name, value in values.items():
                yield f"x-ratelimit-{name}-{kind}".encode(), value.encode()


def format_duration(seconds: float) -> str:
    """Return a duration as OpenAI writes it, rounded up: 120ms, 1s, 6m0s, 1h0m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, s = divmod(math.ceil(seconds), 60)
    hours, m = divmod(minutes, 60)
    if hours:
        return f"{hours}h{m}m{s}s"
    return f"{m}m{s}s" if m else f"{s}s"
