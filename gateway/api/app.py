"""The endpoints, in one table, and the ASGI application that serves them."""

from collections.abc import Iterable
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Lifespan

from gateway import metrics
from gateway.api import (
    chat,
    completions,
    dashboard,
    decisions,
    embeddings,
    models,
    ops,
    rerank,
    responses,
)
from gateway.api.access import protect
from gateway.api.endpoint import (
    MODEL_ERRORS,
    REQUEST_ERRORS,
    STORED_ERRORS,
    Endpoint,
    Errors,
    Form,
)
from gateway.api.in_flight import InFlight
from gateway.api.middleware import ErrorResponse
from gateway.api.requests import Bodies, Service
from gateway.errors import (
    Forbidden,
    GatewayError,
    MethodNotAllowed,
    ModelNotFound,
    ModelsFileInvalid,
    Overloaded,
    RequestNotFound,
    ResponseNotFound,
    TooManyWatchers,
    Unavailable,
    UnknownUrl,
    shorten,
)
from gateway.serving.rate_limit import Allowance
from gateway.wire.chat import ChatCompletion, ChatCompletionChunk, ChatRequest
from gateway.wire.completions import Completion, CompletionRequest
from gateway.wire.decisions import Decision, DecisionsRequest
from gateway.wire.embeddings import Embeddings, EmbeddingsRequest
from gateway.wire.rerank import (
    TEXTS_ERROR_STATUSES,
    RankedText,
    Reranking,
    RerankRequest,
    ScoreRequest,
    Scores,
    TextsErrorBody,
    TextsRequest,
)
from gateway.wire.responses import DeletedResponse, InputTokens, ResponsesRequest
from gateway.wire.responses import Response as WireResponse
from gateway.wire.responses_items import InputItems
from gateway.wire.responses_stream import ResponseEvent

if TYPE_CHECKING:
    from gateway.api.traces import Tracer

PAGE_ERRORS: Errors = (Forbidden, Unavailable)  # while there are no keys


async def _describe(service: Service, request: Request) -> Response:
    return ops.describe(service, ENDPOINTS)


ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        "POST",
        "/v1/embeddings",
        embeddings.answer,
        summary="Turn texts into vectors",
        details="Takes a string, a list of strings or, where the model allows it, token ids; "
        "answers in `float` or `base64`; `dimensions` for Matryoshka models; also "
        "`truncate` and `prompt_name`.",
        request=EmbeddingsRequest,
        answer=Embeddings,
        errors=REQUEST_ERRORS,
        operation="embeddings",
    ),
    Endpoint(
        "POST",
        "/v1/rerank",
        rerank.rerank,
        also="/v2/rerank",
        summary="Sort documents by how well they answer a query",
        details="Takes the bodies of Cohere, Jina, vLLM, infinity and llama.cpp; one with `texts` "
        "is [TEI's](#reranking). By a rerank model or, with the cosine, any embedding model.",
        request=RerankRequest,
        form=Form("with `texts`", TextsRequest, RankedText, TextsErrorBody, TEXTS_ERROR_STATUSES),
        answer=Reranking,
        errors=REQUEST_ERRORS,
        operation="rerank",
    ),
    Endpoint(
        "POST",
        "/v1/score",
        rerank.score,
        summary="Score pairs of texts",
        details="As vLLM does: `text_1` is one text, or as many as `text_2`; in the order of the "
        "request.",
        request=ScoreRequest,
        answer=Scores,
        errors=REQUEST_ERRORS,
        operation="rerank",
    ),
    Endpoint(
        "POST",
        "/v1/chat/completions",
        chat.answer,
        summary="Answer a conversation",
        details="Whole or streamed; tools, structured output, logprobs, reasoning separate from "
        "content.",
        request=ChatRequest,
        answer=ChatCompletion,
        events=ChatCompletionChunk,
        errors=REQUEST_ERRORS,
        operation="chat",
    ),
    Endpoint(
        "POST",
        "/v1/completions",
        completions.answer,
        summary="Continue prompts",
        details="The older form: `prompt` as text, token ids, or a list of either.",
        request=CompletionRequest,
        answer=Completion,
        events=Completion,
        errors=REQUEST_ERRORS,
        operation="text_completion",
    ),
    Endpoint(
        "POST",
        "/v1/decisions",
        decisions.answer,
        summary="Answer questions about an input with probabilities",
        details="Up to 400 predicates, choices and scores, on any chat model. Nothing is "
        "generated: the probabilities are those of the labels as answers.",
        request=DecisionsRequest,
        answer=Decision,
        errors=REQUEST_ERRORS,
        operation="decisions",
    ),
    Endpoint(
        "POST",
        "/v1/responses",
        responses.answer,
        summary="Answer a conversation, and keep the answer to continue from",
        details="Messages, function tools alone or in namespaces, structured text, streaming "
        "events; continues from `previous_response_id` and reads `item_reference`s.",
        request=ResponsesRequest,
        answer=WireResponse,
        events=ResponseEvent,
        errors=(*REQUEST_ERRORS, ResponseNotFound),
        operation="chat",
    ),
    Endpoint(
        "POST",
        "/v1/responses/input_tokens",
        responses.count_tokens,
        summary="Count the tokens of a prompt",
        details="The prompt is that of the same request to `/responses`.",
        request=ResponsesRequest,
        answer=InputTokens,
        errors=(*REQUEST_ERRORS, ResponseNotFound),
    ),
    Endpoint(
        "GET",
        "/v1/responses/{name}",
        responses.show,
        summary="Return a kept response",
        details="Responses are kept in memory for `GATEWAY_RESPONSES_TTL_S` unless the request "
        "said `store: false`. Each API key sees only its own, and has an even share of "
        "`GATEWAY_RESPONSES_KEPT`.",
        answer=WireResponse,
        errors=STORED_ERRORS,
    ),
    Endpoint(
        "DELETE",
        "/v1/responses/{name}",
        responses.delete,
        summary="Delete a kept response",
        answer=DeletedResponse,
        errors=STORED_ERRORS,
    ),
    Endpoint(
        "POST",
        "/v1/responses/{name}/cancel",
        responses.cancel,
        summary="Refused: no response is made in the background",
        statuses=(),
        errors=STORED_ERRORS,
    ),
    Endpoint(
        "GET",
        "/v1/responses/{name}/input_items",
        responses.list_items,
        summary="List the conversation that a kept response answers",
        details="Takes `limit`, `order` and `after`.",
        answer=InputItems,
        errors=STORED_ERRORS,
    ),
    Endpoint(
        "GET",
        "/v1/models",
        models.list_models,
        summary="List the models",
        details="Every id and alias; `root` is the id; `state`, `bytes`, `last_used` and `error` "
        "describe the model's condition, and `batching` says whether its answers are "
        "decoded together.",
        answer=models.Models,
    ),
    Endpoint(
        "GET",
        "/v1/models/{name:path}",
        models.show,
        summary="Describe one model",
        answer=models.Model,
        errors=(ModelNotFound,),
    ),
    Endpoint(
        "GET",
        "/health",
        ops.health,
        summary="Check that the engine works",
        details="200 while the engine's thread does its work.",
        answer=ops.Health,
        statuses=(200, 503),
        is_open=True,
        is_traced=False,
    ),
    Endpoint(
        "GET",
        "/ready",
        ops.ready,
        summary="Check that requests are accepted",
        details="200 from when all preloaded models are loaded until shutdown begins; lists the "
        "models' states to callers who may list models.",
        answer=ops.Ready,
        statuses=(200, 503),
        is_open=True,
        is_traced=False,
    ),
    Endpoint(
        "GET",
        "/metrics",
        ops.metrics,
        summary="Return Prometheus metrics",
        is_traced=False,
        content_type="text/plain",
    ),
    Endpoint(
        "GET",
        "/openapi.json",
        _describe,
        summary="Return the OpenAPI document of all this",
    ),
    Endpoint(
        "GET",
        "/dashboard",
        dashboard.page,
        summary="Watch the gateway, and try its models, in a browser",
        details="[The page](dashboard.md) holds no data and needs no key: it asks for one. Beyond "
        "loopback it is there only if API keys are set.",
        content_type="text/html",
        errors=PAGE_ERRORS,
        is_open=True,
        is_page=True,
    ),
    Endpoint(
        "GET",
        "/dashboard/samples",
        dashboard.samples,
        summary="Stream a sample of models and metrics each second",
        details="For the page: lines of JSON, to at most four readers, until they leave.",
        content_type="application/x-ndjson",
        errors=(TooManyWatchers,),
        is_page=True,
    ),
    Endpoint(
        "GET",
        "/dashboard/{file}",
        dashboard.page,
        summary="Return a file of the page",
        content_type="*/*",
        errors=(*PAGE_ERRORS, UnknownUrl),
        is_open=True,
        is_page=True,
    ),
    Endpoint(
        "POST",
        "/admin/models/{name:path}/load",
        models.load,
        summary="Load a model",
        details="Needs `GATEWAY_ADMIN_KEY`; without that setting, what is under `/admin` is a 404.",
        answer=models.Model,
        errors=MODEL_ERRORS,
        is_admin=True,
    ),
    Endpoint(
        "POST",
        "/admin/models/{name:path}/unload",
        models.unload,
        summary="Unload a model",
        details="202 while requests still use it.",
        answer=models.Model,
        statuses=(200, 202),
        errors=(ModelNotFound,),
        is_admin=True,
    ),
    Endpoint(
        "POST",
        "/admin/models/{name:path}/pin",
        models.pin,
        summary="Pin a model",
        details="It is not evicted, whatever models.yaml says, until that is reloaded.",
        answer=models.Model,
        errors=(ModelNotFound,),
        is_admin=True,
    ),
    Endpoint(
        "POST",
        "/admin/models/{name:path}/unpin",
        models.unpin,
        summary="Unpin a model",
        details="It may be evicted, whatever models.yaml says, until that is reloaded.",
        answer=models.Model,
        errors=(ModelNotFound,),
        is_admin=True,
    ),
    Endpoint(
        "GET",
        "/admin/samples",
        dashboard.admin_samples,
        summary="Stream samples with the requests in flight and the last errors",
        details="As `/dashboard/samples`, and on where that is; what requests say is not in them.",
        content_type="application/x-ndjson",
        errors=(TooManyWatchers,),
        is_admin=True,
        is_page=True,
    ),
    Endpoint(
        "POST",
        "/admin/requests/{number:int}/cancel",
        dashboard.cancel,
        summary="Cancel a request in flight",
        details="By its `number` in the samples. What it held is freed as if its client had left; "
        "its client gets an error.",
        answer=dashboard.Cancelled,
        errors=(RequestNotFound,),
        is_admin=True,
    ),
    Endpoint(
        "POST",
        "/admin/reload",
        models.reload,
        summary="Read models.yaml again",
        answer=models.Reload,
        errors=(ModelsFileInvalid,),
        is_admin=True,
    ),
)


def _paths(endpoints: Iterable[Endpoint]) -> frozenset[str]:
    return frozenset(path.removeprefix("/v1") for each in endpoints for path in each.paths)


PATHS = _paths(each for each in ENDPOINTS if not each.is_admin)
OPERATIONS = {path: each.operation for each in ENDPOINTS for path in each.paths if each.operation}
UNTRACED_PATHS = frozenset(path for each in ENDPOINTS if not each.is_traced for path in each.paths)
OPEN_PATHS = _paths(each for each in ENDPOINTS if each.is_open and not each.is_page)
METERED_PATHS = _paths(each for each in ENDPOINTS if each.is_metered)


def create_app(
    service: Service,
    *,
    in_flight: InFlight,
    bodies: Bodies,
    admin_key: str | None,
    keys: list[str],
    hosts: list[str],
    origins: list[str],
    max_header_bytes: int,
    allowance: Allowance,
    tracer: "Tracer | None",
    lifespan: Lifespan[Starlette],
) -> ASGIApp:
    """Return the ASGI application; without an admin key, it has nothing under /admin."""
    router = Starlette(
        routes=[
            Route(path, partial(each.handler, service), methods=[each.method])
            for each in ENDPOINTS
            if each.is_served(has_admin=bool(admin_key), has_dashboard=service.has_dashboard)
            for path in each.paths
        ],
        exception_handlers={
            GatewayError: _answer_error,
            HTTPException: _answer_http_exception,
            Exception: _answer_exception,
        },
        lifespan=lifespan,
    )
    router.router.redirect_slashes = False
    # A browser that opens the page can send no key. Without keys the page has its host checked.
    open_paths = OPEN_PATHS | dashboard.PATHS if keys else OPEN_PATHS
    return protect(
        router,
        in_flight,
        bodies,
        admin_key=admin_key,
        keys=keys,
        hosts=hosts,
        origins=origins,
        open_paths=open_paths,
        metered_paths=METERED_PATHS,
        allowance=allowance,
        max_header_bytes=max_header_bytes,
        send_timeout_s=service.rules.send_timeout_s,
        tracer=tracer,
    )


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, GatewayError)
    model = request.scope["gateway.timings"].model
    if error.status == Overloaded.status and model is not None:
        metrics.of(metrics.REJECTED, model).inc()
    return ErrorResponse(error)


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    """Answer Starlette's own errors, such as an unknown path, in OpenAI's words."""
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path
    refusal = GatewayError(error.detail)
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allow = (error.headers or {}).get("Allow", "")
        refusal = MethodNotAllowed(f"Not allowed to {method} on {shorten(path)}.", allow)
    elif error.status_code == HTTPStatus.NOT_FOUND:
        refusal = UnknownUrl(f"Invalid URL ({method} {shorten(path)}){_hint(path)}")
    return ErrorResponse(refusal)


def _hint(path: str) -> str:
    """Return a hint if a path without extra slashes or /v1 is an endpoint."""
    steps = [step for step in path.split("/") if step]
    while steps[:2] == ["v1", "v1"]:
        del steps[0]
    nearest = "/" + "/".join(steps)
    is_known = nearest.removeprefix("/v1") in PATHS
    return f". Did you mean {nearest}?" if is_known and nearest != path else ""


async def _answer_exception(request: Request, error: Exception) -> Response:
    """Answer 500. Starlette raises the error again after it; Context logs it."""
    return ErrorResponse(GatewayError("The server had an error while processing your request."))
