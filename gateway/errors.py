"""Every error of the gateway, with the status, type, code and message that the client gets."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from typing import ClassVar, Literal, Self

from typing_extensions import TypedDict

SHOWN_CHARS = 256


def shorten(text: str) -> str:
    if len(text) <= SHOWN_CHARS:
        return text
    return f"{text[:SHOWN_CHARS]}…"


# The parts of a job that an error can name. gateway.wire names the request's field for each.
Part = Literal[
    "prompt", "documents", "questions", "prompt_name", "template_args", "tools", "answer_form",
    "min_tokens", "thinking_budget", "dimensions", "output", "max_tokens",
]  # fmt: skip


class ErrorDetails(TypedDict):
    """The object inside OpenAI's error envelope, always with all four keys."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    """OpenAI's error envelope."""

    error: ErrorDetails


class GatewayError(Exception):
    """An error that a client gets as a response."""

    status: int = HTTPStatus.INTERNAL_SERVER_ERROR
    type: ClassVar[str] = "server_error"
    code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        part: Part | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        should_retry: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.part = part
        self.code = code if code is not None else type(self).code
        self.retry_after_s = retry_after_s
        self.should_retry = should_retry

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers that tell OpenAI's SDKs whether and when to retry."""
        headers = {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, round(self.retry_after_s)))
        if self.should_retry is not None:
            headers["x-should-retry"] = "true" if self.should_retry else "false"
        return headers

    def copy(self, **changes: str | None) -> Self:
        """Return a copy without the traceback, which grows each time an error is raised."""
        copy = type(self).__new__(type(self), *self.args)
        vars(copy).update(vars(self), **changes)
        return copy

    def named(self, param: str, code: str | None = None) -> Self:
        return self.copy(param=param, code=self.code or code)

    def body(self) -> ErrorBody:
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


class RequestError(GatewayError):
    """An error caused by the request, which the caller has to correct."""

    type = "invalid_request_error"


class BadRequest(RequestError):
    """The request can never succeed as it is."""

    status = HTTPStatus.BAD_REQUEST


class ContextLengthExceeded(BadRequest):
    """A prompt or text is longer than the model's context."""

    code = "context_length_exceeded"

    def __init__(
        self, limit: int, tokens: int, *, noun: str = "messages", part: Part = "prompt"
    ) -> None:
        self.limit = limit
        self.tokens = tokens
        # litellm looks for OpenAI's sentence, langchain for the code inside the message.
        super().__init__(
            f"This model's maximum context length is {limit} tokens. However, your {noun} "
            f"resulted in {tokens} tokens. Please reduce the length of the {noun}. "
            f"({type(self).code})",
            part=part,
        )


class UnsupportedParameter(BadRequest):
    """The request has a field of the API that isn't supported and would change the answer."""

    code = "unsupported_parameter"


class UnknownParameter(BadRequest):
    """The request has an unknown field, and GATEWAY_STRICT_FIELDS is set."""

    code = "unknown_parameter"


class Unauthorized(RequestError):
    """The request has no API key, or a wrong one."""

    status = HTTPStatus.UNAUTHORIZED
    code = "invalid_api_key"

    @property
    def headers(self) -> dict[str, str]:
        """Add the scheme, which RFC 9110 requires with a 401."""
        return {**super().headers, "www-authenticate": "Bearer"}


class Forbidden(RequestError):
    """The request's `Origin` or `Host` is not allowed."""

    status = HTTPStatus.FORBIDDEN
    code = "forbidden"


class UnknownUrl(RequestError):
    """The path is not served."""

    status = HTTPStatus.NOT_FOUND
    code = "unknown_url"


class ResponseNotFound(RequestError):
    """The caller has no stored response or item with this id."""

    status = HTTPStatus.NOT_FOUND
    code = "response_not_found"


class RequestNotFound(RequestError):
    """No request in flight has the number that the operator wants to cancel."""

    status = HTTPStatus.NOT_FOUND
    code = "request_not_found"

    def __init__(self, number: int) -> None:
        super().__init__(f"No request in flight has the number {number}: it may have ended.")


class MethodNotAllowed(RequestError):
    """The path is served, but not with this method."""

    status = HTTPStatus.METHOD_NOT_ALLOWED
    code = "method_not_allowed"

    def __init__(self, message: str, allow: str) -> None:
        super().__init__(message)
        self.allow = allow

    @property
    def headers(self) -> dict[str, str]:
        """Add the allowed methods, which RFC 9110 requires with a 405."""
        return {**super().headers, "allow": self.allow}


class ModelNotFound(RequestError):
    """No model has this id or alias."""

    status = HTTPStatus.NOT_FOUND
    code = "model_not_found"

    def __init__(self, name: str, patterns: Sequence[str] = (), why: str = "") -> None:
        self.why = why
        hint = why and f" {why}"
        if patterns:
            hint = f" Models of the hub that may be named here: {', '.join(patterns)}."
        super().__init__(
            f"The model `{shorten(name)}` does not exist or you do not have access to it.{hint}",
            param="model",
        )


class TooLarge(RequestError):
    """The body is larger than the limit."""

    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    code = "request_too_large"


class EncodingNotSupported(RequestError):
    """The body is compressed."""

    status = HTTPStatus.UNSUPPORTED_MEDIA_TYPE
    code = "unsupported_content_encoding"

    def __init__(self, encoding: str) -> None:
        super().__init__(
            f"The request body has Content-Encoding `{shorten(encoding)}`; send it uncompressed."
        )

    @property
    def headers(self) -> dict[str, str]:
        """Add the accepted encodings, which RFC 9110 recommends with this 415."""
        return {**super().headers, "accept-encoding": "identity"}


class VersionNotSupported(RequestError):
    """The client speaks a version of HTTP later than 1.1."""

    status = HTTPStatus.HTTP_VERSION_NOT_SUPPORTED
    code = "http_version_not_supported"

    def __init__(self) -> None:
        super().__init__("Only HTTP/1.1 is supported; for HTTP/2, put a proxy in front.")


class HeadTooLarge(RequestError):
    """The path, query and headers together are larger than the limit."""

    status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
    code = "request_header_fields_too_large"


class SlowBody(RequestError):
    """The body took too long to arrive."""

    status = HTTPStatus.REQUEST_TIMEOUT
    code = "request_timeout"


class Overloaded(GatewayError):
    """The model's queue is full."""

    status = HTTPStatus.TOO_MANY_REQUESTS
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class TooManyWatchers(GatewayError):
    """The limit of open dashboards is reached."""

    status = HTTPStatus.TOO_MANY_REQUESTS
    type = "rate_limit_error"
    code = "too_many_watchers"

    def __init__(self, most: int) -> None:
        message = f"{most} dashboards are open already, which is the limit: close one of them."
        super().__init__(message, retry_after_s=10)


class RateLimited(GatewayError):
    """The caller has used up its requests or tokens per minute."""

    status = HTTPStatus.TOO_MANY_REQUESTS
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class Unavailable(GatewayError):
    """The gateway cannot answer now: it is loading or draining, or has no network."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    type = "server_error"
    code = "service_unavailable"


class ShuttingDown(Unavailable):
    """The gateway is shutting down."""

    def __init__(self) -> None:
        super().__init__("The gateway is shutting down.", retry_after_s=1)


class RequestCancelled(Unavailable):
    """The gateway's operator cancelled the request."""

    code = "request_cancelled"

    def __init__(self) -> None:
        super().__init__("The gateway's operator cancelled this request.", should_retry=False)


class ModelLoading(Unavailable):
    """The model is still loading."""

    code = "model_loading"


class ModelUnavailable(Unavailable):
    """The model's files cannot be found or downloaded."""

    code = "model_unavailable"

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"The model `{model}` cannot be loaded: {reason}", should_retry=False)
        self.model = model
        self.reason = reason


class ModelRefused(BadRequest):
    """The request names a model outside models.yaml that isn't allowed or cannot be served."""

    code = "model_refused"

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"The model `{shorten(model)}` is not served: {reason}", param="model")
        self.reason = reason


class NoRoom(Unavailable):
    """The model needs memory that models in use occupy."""

    code = "no_room"

    def __init__(self, model: str, users: Sequence[str]) -> None:
        in_use = ", ".join(f"`{user}`" for user in users) or "others"
        super().__init__(
            f"There is no room for the model `{model}` while {in_use} are in use. Try again "
            "shortly.",
            retry_after_s=5,
        )


class InsufficientMemory(GatewayError):
    """The model can never fit in the memory budget."""

    status = HTTPStatus.INSUFFICIENT_STORAGE
    code = "insufficient_memory"

    def __init__(self, model: str, reason: str) -> None:
        message = f"The model `{model}` does not fit in memory: {reason}"
        super().__init__(message, should_retry=False)


class InsufficientDisk(GatewayError):
    """The model's files would leave too little free disk space."""

    status = HTTPStatus.INSUFFICIENT_STORAGE
    code = "insufficient_disk"

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"The model `{model}` is not fetched: {reason}", should_retry=False)


class PromptTooLarge(GatewayError):
    """The prompt's KV can never fit in the memory that its model may use."""

    status = HTTPStatus.INSUFFICIENT_STORAGE
    code = "insufficient_memory"

    def __init__(self, model: str, tokens: int, most: int) -> None:
        super().__init__(
            f"A prompt of {tokens} tokens needs more memory than the model `{model}` may use here: "
            f"at most {most} tokens fit.",
            should_retry=False,
        )


class ModelLoadFailed(GatewayError):
    """The model's files are on disk but invalid."""

    code = "model_load_failed"

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"The model `{model}` failed to load: {reason:.1000}", should_retry=False)
        self.model = model
        self.reason = reason


class EngineFailed(GatewayError):
    """The engine failed on this request."""

    code = "engine_failed"

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"The model `{model}` failed on this request: {reason}")
        self.reason = reason


class SchemaViolated(GatewayError):
    """The answer violates the JSON schema that it must fit."""

    code = "schema_violated"

    def __init__(self) -> None:
        message = "The model's answer does not match the required JSON schema."
        super().__init__(message, should_retry=False)


class OutOfMemory(Unavailable):
    """The device has too little memory for this row, even if the row runs alone."""

    code = "out_of_memory"

    def __init__(self, model: str) -> None:
        super().__init__(
            f"The device ran out of memory for the model `{model}`. Try again shortly, or with a "
            "shorter prompt.",
            retry_after_s=5,
        )


class DeviceLost(Unavailable):
    """The device no longer works in this process."""

    code = "device_lost"

    def __init__(self) -> None:
        message = "The device has failed, and the gateway is being started again."
        super().__init__(message, retry_after_s=5)


class DeadlineExceeded(GatewayError):
    """The request took longer than its time limit."""

    status = HTTPStatus.GATEWAY_TIMEOUT
    code = "deadline_exceeded"

    def __init__(self, seconds: float) -> None:
        message = f"The request did not finish within {seconds:g} seconds."
        super().__init__(message, should_retry=False)


class ModelsFileInvalid(BadRequest):
    """models.yaml is invalid on reload."""

    code = "models_file_invalid"


class RegistryInvalid(Exception):
    """models.yaml is invalid."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class BlasUnusable(Exception):
    """The library that GATEWAY_BLAS names cannot be used as BLAS."""


class Fault(StrEnum):
    """The kinds of errors that MLX raises."""

    FATAL = "fatal"  # the device no longer works in this process
    PRESSURE = "pressure"  # the device has run out of memory
    ROW = "row"  # this input fails on every try
    COMPILER = "compiler"  # g++ failed; MLX can run without compiled code
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class PassFault:
    """An error that a pass has raised."""

    fault: Fault
    message: str

    @property
    def is_pressure(self) -> bool:
        return self.fault is Fault.PRESSURE
