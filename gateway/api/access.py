"""Who may come in, and how often."""

import hashlib
import hmac
import ipaddress
import math
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.api.middleware import Door, error_response, shutting_down
from gateway.errors import Forbidden, GatewayError, RateLimited, Unauthorized, shorten
from gateway.jobs import Timings
from gateway.serving.rate_limit import Accounts, Bucket, Kind


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
                    raise shutting_down()
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


class Rates:
    """Inside the guard, which says whose the key is; a request counts as soon as it is let in.

    Tokens count as they become known: the prompt's, and all of an answer that is sent whole,
    before its headers; the rest of a stream at its end, however it ends.
    """

    def __init__(self, app: ASGIApp, accounts: Accounts, paths: Collection[str]) -> None:
        self._app = app
        self._accounts = accounts
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request in and count what it takes, or answer when it may come."""
        if scope["type"] != "http" or scope["path"].removeprefix("/v1") not in self._paths:
            await self._app(scope, receive, send)
            return
        buckets = self._accounts.of(scope.get("gateway.key_id"))
        meter = _Meter(buckets, scope["gateway.timings"], send)
        try:
            admit(buckets)
        except RateLimited as error:
            await error_response(error)(scope, receive, meter)
            return
        try:
            await self._app(scope, receive, meter)
        finally:
            meter.read()


class _Meter:
    """The way back to the client: it charges tokens, and adds the headers."""

    def __init__(self, buckets: Mapping[Kind, Bucket], timings: Timings, send: Send) -> None:
        self._buckets = buckets
        self._timings = timings
        self._send = send
        self._charged = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.read()
            message["headers"] = [*message["headers"], *_rate_headers(self._buckets)]
        await self._send(message)

    def read(self) -> None:
        """Charge the tokens that are new."""
        tokens = self._timings.tokens
        if "tokens" in self._buckets:
            self._buckets["tokens"].take(tokens - self._charged)
        self._charged = tokens


def admit(buckets: Mapping[Kind, Bucket]) -> None:
    """Take one request. Raises RateLimited when a bucket is empty, or overdrawn."""
    for kind, bucket in buckets.items():
        if (wait_s := bucket.wait_s()) > 0:
            raise RateLimited(
                f"Rate limit reached on {kind} per minute: limit {bucket.limit}. Please try again "
                f"in {duration(wait_s)}.",
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
            "reset": duration(bucket.reset_s()),
        }
        headers += [
            (f"x-ratelimit-{name}-{kind}".encode(), value.encode())
            for name, value in values.items()
        ]
    return headers


def duration(seconds: float) -> str:
    """Write a time as OpenAI does: 120ms, 1s, 6m0s, 1h0m0s. It is rounded up."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, s = divmod(math.ceil(seconds), 60)
    hours, m = divmod(minutes, 60)
    if hours:
        return f"{hours}h{m}m{s}s"
    return f"{m}m{s}s" if m else f"{s}s"
