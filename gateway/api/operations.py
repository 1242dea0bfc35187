"""Every operation there is, as /openapi.json tells it; a test walks the routes beside it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from gateway.errors import (
    BadRequest,
    DeadlineExceeded,
    Forbidden,
    GatewayError,
    HeadTooLarge,
    InsufficientMemory,
    ModelNotFound,
    ModelsFileInvalid,
    RateLimited,
    ResponseNotFound,
    SlowBody,
    TooLarge,
    Unauthorized,
    Unavailable,
)
from gateway.wire import answers
from gateway.wire.chat import ChatRequest
from gateway.wire.completions import CompletionRequest
from gateway.wire.embeddings import EmbeddingsRequest
from gateway.wire.responses import ResponsesRequest

Errors = tuple[type[GatewayError], ...]
ANYWHERE: Errors = (HeadTooLarge, GatewayError)
GUARDED: Errors = (*ANYWHERE, Unauthorized, Forbidden, Unavailable)
LEASED: Errors = (*GUARDED, ModelNotFound, InsufficientMemory)
ASKED: Errors = (*LEASED, BadRequest, SlowBody, TooLarge, RateLimited, DeadlineExceeded)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path. `given` None is an answer that has no shape of its own; `events`
    is what a stream of it carries; `statuses` are those of an answer that is no error.
    """

    summary: str
    given: type[BaseModel] | None = None
    taken: type[BaseModel] | None = None
    example: Mapping[str, Any] = field(default_factory=dict)
    events: type[BaseModel] | None = None
    statuses: tuple[int, ...] = (200,)
    errors: Errors = GUARDED
    content: str = "application/json"

    @property
    def is_open(self) -> bool:
        """Tell whether it is answered without a key."""
        return Unauthorized not in self.errors


Operations = Mapping[tuple[str, str], Operation]
KEPT: Errors = (*GUARDED, BadRequest, ResponseNotFound)
OPERATIONS: Operations = {
    ("post", "/embeddings"): Operation(
        summary="Turn texts into vectors",
        given=answers.Embeddings,
        taken=EmbeddingsRequest,
        example={"input": ["Hello!"]},
        errors=ASKED,
    ),
    ("post", "/chat/completions"): Operation(
        summary="Answer a conversation",
        given=answers.ChatCompletion,
        taken=ChatRequest,
        example={"messages": [{"role": "user", "content": "Hello!"}]},
        events=answers.ChatCompletionChunk,
        errors=ASKED,
    ),
    ("post", "/completions"): Operation(
        summary="Write on from prompts",
        given=answers.Completion,
        taken=CompletionRequest,
        example={"prompt": "Once"},
        events=answers.Completion,
        errors=ASKED,
    ),
    ("post", "/responses"): Operation(
        summary="Answer a conversation, and keep the answer to go on from",
        given=answers.Response,
        taken=ResponsesRequest,
        example={"input": "Hello!"},
        events=answers.ResponseEvent,
        errors=(*ASKED, ResponseNotFound),
    ),
    ("post", "/responses/input_tokens"): Operation(
        summary="Count the tokens of a prompt",
        given=answers.InputTokens,
        taken=ResponsesRequest,
        example={"input": "Hello!"},
        errors=(*ASKED, ResponseNotFound),
    ),
    ("get", "/responses/{name}"): Operation(
        summary="Show a kept response", given=answers.Response, errors=KEPT
    ),
    ("delete", "/responses/{name}"): Operation(
        summary="Forget a kept response", given=answers.Deleted, errors=KEPT
    ),
    ("post", "/responses/{name}/cancel"): Operation(
        summary="Not served: no response is made in the background", statuses=(), errors=KEPT
    ),
    ("get", "/responses/{name}/input_items"): Operation(
        summary="List the conversation that a kept response answers",
        given=answers.InputItems,
        errors=KEPT,
    ),
    ("get", "/models"): Operation(summary="List the models", given=answers.Models),
    ("get", "/models/{name}"): Operation(
        summary="Tell of one model", given=answers.Model, errors=(*GUARDED, ModelNotFound)
    ),
    ("get", "/health"): Operation(
        summary="Tell whether the engine moves",
        given=answers.Health,
        statuses=(200, 503),
        errors=ANYWHERE,
    ),
    ("get", "/ready"): Operation(
        summary="Tell whether requests are welcome",
        given=answers.Ready,
        statuses=(200, 503),
        errors=ANYWHERE,
    ),
    ("get", "/metrics"): Operation(summary="Count, for Prometheus", content="text/plain"),
    ("get", "/openapi.json"): Operation(summary="This document"),
}
ADMIN: Operations = {
    ("post", "/admin/models/{name}/load"): Operation(
        summary="Load a model", given=answers.Model, errors=LEASED
    ),
    ("post", "/admin/models/{name}/unload"): Operation(
        summary="Let a model go; 202 while requests still use it",
        given=answers.Model,
        statuses=(200, 202),
        errors=(*GUARDED, ModelNotFound),
    ),
    ("post", "/admin/reload"): Operation(
        summary="Read models.yaml again",
        given=answers.Reload,
        errors=(*GUARDED, ModelsFileInvalid),
    ),
}
