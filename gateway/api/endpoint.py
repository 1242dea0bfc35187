"""What an endpoint is: how it is routed, guarded, metered and described. The table is in app.py."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

from starlette.convertors import IntegerConvertor, register_url_convertor
from starlette.requests import Request
from starlette.types import ASGIApp

from gateway.api.requests import Service
from gateway.errors import (
    BadRequest,
    DeadlineExceeded,
    EncodingNotSupported,
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
ANTHROPIC = "/messages"  # what is here and below is Anthropic's, its errors and headers too
MODELS = "/models"  # what is here and below is Anthropic's where its version is sent
Handler = Callable[[Service, Request], Awaitable[ASGIApp]]
COMMON_ERRORS: Errors = (HeadTooLarge, GatewayError)
ACCESS_ERRORS: Errors = (Unauthorized, Forbidden, Unavailable)
MODEL_ERRORS: Errors = (ModelNotFound, InsufficientMemory)  # if a model has to be loaded
REQUEST_ERRORS: Errors = (
    *MODEL_ERRORS,
    BadRequest,
    SlowBody,
    TooLarge,
    EncodingNotSupported,
    RateLimited,
    DeadlineExceeded,
)
STORED_ERRORS: Errors = (BadRequest, ResponseNotFound)  # if a stored response is named


class _Number(IntegerConvertor):
    """A number that Python reads: of thousands of digits it would raise ValueError."""

    regex = "[0-9]{1,18}"


register_url_convertor("number", _Number())


class Form(NamedTuple):
    """Another form of an endpoint's requests."""

    name: str  # what makes a body one
    request: type[WireRequest]
    item: Any  # of the answer, which is a list
    error: Any


def is_anthropic(path: str) -> bool:
    """Return True if a path, with or without /v1, is one of Anthropic's API."""
    bare = path.removeprefix("/v1")
    return bare == ANTHROPIC or bare.startswith(f"{ANTHROPIC}/")


def speaks_anthropic(path: str, headers: Mapping[bytes, bytes]) -> bool:
    """Return True if a request is to be answered in Anthropic's form: by its path or, of models,
    by the header that Anthropic's clients send.
    """
    bare = path.removeprefix("/v1")
    is_shared = bare == MODELS or bare.startswith(f"{MODELS}/")
    return is_anthropic(path) or (is_shared and b"anthropic-version" in headers)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One method of one path: its handler, and what the document and the docs have about it."""

    method: str
    path: str  # served with /v1 and without
    handler: Handler
    _: KW_ONLY
    summary: str
    details: str = ""
    also: str | None = None  # another path, served as it is
    request: type[WireRequest] | None = None
    form: Form | None = None  # of requests, besides `request`
    answer: Any = None  # None if its shape is not described
    texts_error: Any = None  # the shape of its own errors, if they are TEI's
    events: Any = None  # the shape of a stream's events
    content_type: str = "application/json"
    statuses: tuple[int, ...] = (200,)  # of success
    errors: Errors = ()  # besides those of every endpoint and of the key check
    is_open: bool = False  # it needs no key
    # It needs the admin key, or is the dashboard's: neither has a /v1.
    is_admin: bool = False
    is_page: bool = False
    operation: str | None = None  # what it has a model do, by GenAI's name
    # Machines ask some every few seconds, of which nobody wants traces.
    is_traced: bool = True

    def is_served(self, *, has_admin: bool, has_dashboard: bool) -> bool:
        """Return True if the settings allow it: an admin key is set, the dashboard is on."""
        return (has_admin or not self.is_admin) and (has_dashboard or not self.is_page)

    @property
    def is_metered(self) -> bool:
        """Return True if its requests count against the caller's rate limits."""
        return RateLimited in self.errors

    @property
    def bare_path(self) -> str:
        return self.path.removeprefix("/v1")

    @property
    def paths(self) -> tuple[str, ...]:
        """Return every path that it is served by."""
        is_bare = self.is_admin or self.is_page
        versions = (self.path,) if is_bare else (self.bare_path, f"/v1{self.bare_path}")
        if self.also is None:
            return versions
        return (*versions, self.also)

    @property
    def all_errors(self) -> Errors:
        """Return the endpoint's errors, with those of every endpoint and of the key check."""
        return (*COMMON_ERRORS, *(() if self.is_open else ACCESS_ERRORS), *self.errors)
