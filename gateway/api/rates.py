"""Rate limits over HTTP: who has taken too much is told when to come again, and all how they stand.

The headers are OpenAI's (https://platform.openai.com/docs/guides/rate-limits).
"""

import math
from collections.abc import Collection, Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.api.middleware import error_response
from gateway.errors import RateLimited
from gateway.jobs import Timings
from gateway.serving.rate_limit import Accounts, Bucket, Kind


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
            message["headers"] = [*message["headers"], *_told(self._buckets)]
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


def _told(buckets: Mapping[Kind, Bucket]) -> list[tuple[bytes, bytes]]:
    told = []
    for kind, bucket in buckets.items():
        values = {
            "limit": str(bucket.limit),
            "remaining": str(max(0, math.floor(bucket.left))),
            "reset": duration(bucket.reset_s()),
        }
        told += [
            (f"x-ratelimit-{name}-{kind}".encode(), value.encode())
            for name, value in values.items()
        ]
    return told


def duration(seconds: float) -> str:
    """Write a time as OpenAI does: 120ms, 1s, 6m0s, 1h0m0s. It is rounded up."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, s = divmod(math.ceil(seconds), 60)
    hours, m = divmod(minutes, 60)
    if hours:
        return f"{hours}h{m}m{s}s"
    return f"{m}m{s}s" if m else f"{s}s"
