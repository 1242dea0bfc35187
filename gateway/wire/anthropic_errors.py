"""Anthropic's envelope of errors: each error's status and type there, and the body."""

from http import HTTPStatus
from typing import Literal, NotRequired

from typing_extensions import TypedDict

from gateway.errors import (
    ContextLengthExceeded,
    GatewayError,
    NoRoom,
    Overloaded,
)

OVERLOADED = 529  # Anthropic's own status, which HTTP does not know
AnthropicErrorType = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "timeout_error",
    "api_error",
    "overloaded_error",
]
_TYPES: dict[int, AnthropicErrorType] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
    OVERLOADED: "overloaded_error",
}
# By this one, the SDKs' tool runners know that they have to send whole conversations.
_CODES: dict[tuple[str | None, str | None], str] = {
    ("unsupported_parameter", "thread"): "thread_unsupported_request"
}


class AnthropicErrorCode(TypedDict):
    """A code that names the cause: this gateway's own, as in OpenAI's envelope."""

    error_code: str


class AnthropicErrorDetails(TypedDict):
    """The error itself."""

    type: AnthropicErrorType
    message: str
    details: NotRequired[AnthropicErrorCode]


class AnthropicErrorBody(TypedDict):
    """Anthropic's error envelope; in a stream, the data of an `error` event."""

    type: Literal["error"]
    error: AnthropicErrorDetails
    request_id: str


def error_status(error: GatewayError | type[GatewayError]) -> int:
    """Return an error's status: the gateway's own, but 529 if others take all there is.

    That is a full queue and a model that finds no room, not an allowance used up (429), nor a
    gateway that loads a model or shuts down (503). SDKs retry all of these.
    """
    kind = error if isinstance(error, type) else type(error)
    return OVERLOADED if issubclass(kind, Overloaded | NoRoom) else int(kind.status)


def error_body(error: GatewayError, request_id: str) -> AnthropicErrorBody:
    """Return the envelope of an error."""
    status = error_status(error)
    fallback: AnthropicErrorType = (
        "api_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    )
    details: AnthropicErrorDetails = {
        "type": _TYPES.get(status, fallback),
        "message": _message(error),
    }
    code = _CODES.get((error.code, error.param)) or error.code
    if code is not None:
        details["details"] = {"error_code": code}
    return {"type": "error", "error": details, "request_id": request_id}


def _message(error: GatewayError) -> str:
    """Return the message. Agents shorten a conversation when they find Anthropic's sentence."""
    if isinstance(error, ContextLengthExceeded):
        return f"prompt is too long: {error.tokens} tokens > {error.limit} maximum"
    return error.message
