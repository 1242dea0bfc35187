"""What an endpoint is: how it is routed, guarded, metered and described. The table is in app.py."""

from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from gateway.api.requests import Service
from gateway.errors import (
    BadRequest,
    DeadlineExceeded,
    Forbidden,
    GatewayError,
    HeadTooLarge,
    InsufficientMemory,
    ModelNotFound,
    RateLimited,
    ResponseNotFound,
    SlowBody,
    TooLarge,
    Unauthorized,
    Unavailable,
)
from gateway.wire.validation import Request as WireRequest

Errors = tuple[type[GatewayError], ...]
Handler = Callable[[Service, Request], Awaitable[ASGIApp]]
ANYWHERE: Errors = (HeadTooLarge, GatewayError)
GUARDED: Errors = (Unauthorized, Forbidden, Unavailable)
LEASED: Errors = (ModelNotFound, InsufficientMemory)  # where a model is needed
ASKED: Errors = (*LEASED, BadRequest, SlowBody, TooLarge, RateLimited, DeadlineExceeded)
KEPT: Errors = (BadRequest, ResponseNotFound)  # where a kept response is named


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One method of one path.

    Whether or not `path` begins with /v1, it is served with that and without, but for those of
    `is_admin`, which need the admin key. An
    answer of None has no shape of its own, `events` are what a stream of it carries, and
    `statuses` those of an answer that is no error. `errors` are what can go wrong beyond what can
    anywhere, and beyond the key check. One that `is_open` needs no key, and one that `is_metered`
    counts against the caller's rate limits.
    """

    method: str
    path: str
    handler: Handler
    _: KW_ONLY
    summary: str
    details: str = ""
    request: type[WireRequest] | None = None
    answer: Any = None
    events: Any = None
    content_type: str = "application/json"
    statuses: tuple[int, ...] = (200,)
    errors: Errors = ()
    is_metered: bool = False
    is_open: bool = False
    is_admin: bool = False

    @property
    def bare_path(self) -> str:
        """Return the path without /v1."""
        return self.path.removeprefix("/v1")

    @property
    def all_errors(self) -> Errors:
        """Return every error that it may answer with."""
        return (*ANYWHERE, *(() if self.is_open else GUARDED), *self.errors)
