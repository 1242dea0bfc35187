"""The table of all endpoints."""

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from gateway.api import (
    chat,
    dashboard,
    embeddings,
    models,
    ops,
    rerank,
    responses,
    tokenization,
)
from gateway.api.openapi import (
    MODEL_ERRORS,
    STORED_ERRORS,
    Endpoint,
    Errors,
    Form,
)
from gateway.api.requests import Service
from gateway.errors import (
    BadRequest,
    DeadlineExceeded,
    Forbidden,
    InsufficientDisk,
    ModelNotFound,
    ModelsFileInvalid,
    Overloaded,
    RateLimited,
    RequestNotFound,
    ResponseNotFound,
    TooManyWatchers,
    Unavailable,
    UnknownUrl,
)
from gateway.wire import rerank as ranking
from gateway.wire import tokenization as tokens
from gateway.wire.anthropic import (
    AnthropicMessage,
    CountMessageTokensRequest,
    MessagesRequest,
    MessageTokensCount,
)
from gateway.wire.anthropic_stream import MessageEvent
from gateway.wire.chat import ChatCompletion, ChatCompletionChunk, ChatRequest
from gateway.wire.cohere import CohereEmbeddings, CohereErrorBody, CohereRequest
from gateway.wire.completions import Completion, CompletionRequest
from gateway.wire.decisions import Decision, DecisionsRequest
from gateway.wire.embeddings import (
    Embeddings,
    EmbeddingsRequest,
    Info,
    InputsRequest,
    Pooled,
    PoolingRequest,
    SparseRequest,
    SparseVectors,
    Vectors,
)
from gateway.wire.pulls import PullProgress, PullRequest
from gateway.wire.responses import DeletedResponse, InputTokens, ResponsesRequest
from gateway.wire.responses import Response as WireResponse
from gateway.wire.responses_items import InputItems
from gateway.wire.responses_stream import ResponseEvent

PAGE_ERRORS: Errors = (Forbidden, Unavailable)  # raised only if no keys are set


async def _describe(service: Service, request: Request) -> Response:
    return await ops.describe(service, ENDPOINTS)


ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        "POST /v1/embeddings",
        partial(embeddings.answer, shape=EmbeddingsRequest),
        summary="Turn texts into vectors",
        details="Takes a string, a list of strings or, where the model allows it, token ids; "
        "answers in `float` or `base64`; `dimensions` for Matryoshka models; also "
        "`truncate` and `prompt_name`. With `output`: dense, sparse and multi-vector "
        "[outputs](#sparse-and-multi-vector-outputs).",
        request=EmbeddingsRequest,
        answer=Embeddings,
        operation="embeddings",
    ),
    Endpoint(
        "POST /v2/embed",
        embeddings.embed_v2,
        summary="Turn texts into vectors, as Cohere does",
        details="As floats, int8, bits or base64; `input_type` chooses a prompt; [more](#cohere).",
        request=CohereRequest,
        answer=CohereEmbeddings,
        cohere_error=CohereErrorBody,
        operation="embeddings",
    ),
    Endpoint(
        "POST /v1/embed",
        partial(embeddings.embed, shape=InputsRequest),
        summary="Turn texts into vectors, as TEI does",
        details="The answer is a bare list of the vectors, each of unit length; errors are TEI's. "
        "Without `model`, a loaded embedding model answers, or else the first one. With `texts`, "
        "body, answer and errors are those of [Cohere's v1](#cohere).",
        request=InputsRequest,
        form=Form("with `texts`", CohereRequest, CohereEmbeddings),
        answer=Vectors,
        texts_error=ranking.TextsErrorBody,
        cohere_error=CohereErrorBody,
        operation="embeddings",
    ),
    Endpoint(
        "POST /v1/embed_sparse",
        partial(embeddings.embed, shape=SparseRequest),
        summary="Turn texts into sparse vectors, as TEI does",
        details="The answer is a list for each text, of token ids and weights above 0.",
        request=SparseRequest,
        answer=SparseVectors,
        texts_error=ranking.TextsErrorBody,
        operation="embeddings",
    ),
    Endpoint(
        "POST /v1/pooling",
        partial(embeddings.answer, shape=PoolingRequest),
        summary="Turn texts into vectors, or their tokens, as vLLM does",
        details="`task` is `embed` or `token_embed`; without it, the first that the model has.",
        request=PoolingRequest,
        answer=Pooled,
        operation="embeddings",
    ),
    Endpoint(
        "GET /v1/info",
        embeddings.info,
        summary="Describe the model that answers `/embed`, as TEI does",
        answer=Info,
        errors=(BadRequest,),
    ),
    Endpoint(
        "POST /v1/rerank",
        rerank.rerank,
        also="/v2/rerank",
        summary="Sort documents by how well they answer a query",
        details="Takes the bodies of Cohere, Jina, vLLM, infinity, llama.cpp and, with `texts`, "
        "[TEI's](#reranking). Works with rerank models, and with embedding models, whose scores "
        "are cosines or, for ColBERT, MaxSim.",
        request=ranking.RerankRequest,
        form=Form("with `texts`", ranking.TextsRequest, ranking.RankedTexts),
        answer=ranking.Reranking,
        texts_error=ranking.TextsErrorBody,
        operation="rerank",
    ),
    Endpoint(
        "POST /v1/score",
        rerank.score,
        summary="Score pairs of texts",
        details="As vLLM does: `text_1` is one text for all of `text_2`, or a list of the same "
        "length. The scores are in the order of `text_2`.",
        request=ranking.ScoreRequest,
        answer=ranking.Scores,
        operation="rerank",
    ),
    Endpoint(
        "POST /v1/chat/completions",
        chat.answer,
        summary="Answer a conversation",
        details="Whole or streamed; tools, structured output, logprobs, reasoning separate from "
        "content.",
        request=ChatRequest,
        answer=ChatCompletion,
        events=ChatCompletionChunk,
        operation="chat",
    ),
    Endpoint(
        "POST /v1/completions",
        chat.complete,
        summary="Continue prompts",
        details="The older form: `prompt` as text, token ids, or a list of either.",
        request=CompletionRequest,
        answer=Completion,
        events=Completion,
        operation="text_completion",
    ),
    Endpoint(
        "POST /v1/decisions",
        chat.decide,
        summary="Answer questions about an input, as probabilities",
        details="Up to 400 questions, each a predicate, a choice or a score, for any chat model. "
        "No text is generated: each label gets the probability that it is the answer.",
        request=DecisionsRequest,
        answer=Decision,
        operation="decisions",
    ),
    Endpoint(
        "POST /v1/responses",
        responses.answer,
        summary="Answer a conversation, and keep the answer to continue from",
        details="Messages, functions (alone or in namespaces), structured text, streaming "
        "events; `previous_response_id` and `item_reference` continue from kept answers.",
        request=ResponsesRequest,
        answer=WireResponse,
        events=ResponseEvent,
        errors=(ResponseNotFound,),
        operation="chat",
    ),
    Endpoint(
        "POST /v1/responses/input_tokens",
        responses.count_tokens,
        summary="Count the tokens of a prompt",
        details="Takes the request that `/responses` takes.",
        request=ResponsesRequest,
        answer=InputTokens,
        errors=(ResponseNotFound,),
    ),
    Endpoint(
        "GET /v1/responses/{name}",
        responses.show,
        summary="Return a kept response",
        details="Responses are kept in memory for `GATEWAY_RESPONSES_TTL_S` unless the request "
        "said `store: false`. Each API key sees only its own responses, and has an even share of "
        "`GATEWAY_RESPONSES_KEPT`.",
        answer=WireResponse,
        errors=STORED_ERRORS,
    ),
    Endpoint(
        "DELETE /v1/responses/{name}",
        responses.delete,
        summary="Delete a kept response",
        answer=DeletedResponse,
        errors=STORED_ERRORS,
    ),
    Endpoint(
        "POST /v1/responses/{name}/cancel",
        responses.cancel,
        summary="Refused, since no response is made in the background",
        statuses=(),
        errors=STORED_ERRORS,
    ),
    Endpoint(
        "GET /v1/responses/{name}/input_items",
        responses.list_items,
        summary="List the conversation that a kept response answers",
        details="Takes `limit`, `order` and `after`.",
        answer=InputItems,
        errors=STORED_ERRORS,
    ),
    Endpoint(
        "POST /v1/messages",
        chat.answer_message,
        summary="Answer a conversation, as Anthropic's API does",
        details="[For its SDKs and agents](agents.md): text, tools, thinking, stop sequences, "
        "streaming; keys in `x-api-key` too, and errors in Anthropic's envelope.",
        request=MessagesRequest,
        answer=AnthropicMessage,
        events=MessageEvent,
        errors=(Overloaded,),
        operation="chat",
    ),
    Endpoint(
        "POST /v1/messages/count_tokens",
        chat.count_message_tokens,
        summary="Count the tokens of a prompt",
        details="Takes the request that `/messages` takes.",
        request=CountMessageTokensRequest,
        answer=MessageTokensCount,
        errors=(Overloaded,),
    ),
    Endpoint(
        "POST /v1/tokenize",
        tokenization.tokenize,
        summary="Return the tokens of a prompt or of a conversation, as vLLM does",
        details="Also serves lm-eval's `remote` tokenizer. Without `model`, a loaded chat model is "
        "used, or else the first one.",
        request=tokens.TokenizeRequest,
        answer=tokens.Tokenized,
    ),
    Endpoint(
        "POST /v1/detokenize",
        tokenization.detokenize,
        summary="Return the text of tokens, as vLLM does",
        request=tokens.DetokenizeRequest,
        answer=tokens.Detokenized,
    ),
    Endpoint(
        "GET /v1/tokenizer_info",
        tokenization.info,
        summary="Return a model's special tokens and chat template, as vLLM does",
        details="`?model=` names the model; without it, a loaded chat model is used, or else the "
        "first one. No model is loaded for this: 404 if its files are not on this disk.",
        answer=tokens.TokenizerInfo,
        errors=(ModelNotFound, BadRequest, RateLimited, DeadlineExceeded),
    ),
    Endpoint(
        "GET /v1/models",
        models.list_models,
        summary="List the models",
        details="One entry for each id and alias. `root` is the model's id, and `parent` the base "
        "of an adapter. `state`, `bytes`, `last_used` and `error` describe the model now. "
        "`max_model_len` (also `context_length` and, for a chat model, `max_context`) is the "
        "maximum number of tokens in an input and its answer together; null if the files are not "
        "on disk or do not say. `verified` names the library whose answers ours were compared "
        "with, for the model's architecture. For a loaded "
        "chat model, `notes` lists settings in its files that have no effect, `drafters` what "
        "guesses its tokens ahead, and `batching` says whether answers share a batch. With the "
        "header `anthropic-version`: the chat models in Anthropic's format, with `limit`, "
        "`after_id` and `before_id`.",
        answer=models.ModelList,
        errors=(BadRequest,),
    ),
    Endpoint(
        "GET /v1/models/{name:path}",
        models.show,
        summary="Describe one model",
        answer=models.AnyModel,
        errors=(ModelNotFound,),
    ),
    Endpoint(
        "GET /",
        ops.index,
        summary="Name of the server, and where its models and pages are",
        details="Agents ask for it before their first request. A browser, which asks for "
        "`text/html`, is sent to the dashboard.",
        answer=ops.Index,
        statuses=(200, 307),
        is_open=True,
        is_traced=False,
    ),
    Endpoint(
        "GET /health",
        ops.health,
        also="/healthz",
        summary="Check that the engine works",
        details="200 while the device's thread makes progress, else 503.",
        answer=ops.Health,
        statuses=(200, 503),
        is_open=True,
        is_traced=False,
    ),
    Endpoint(
        "GET /ready",
        ops.ready,
        summary="Check that requests are accepted",
        details="200 once all preloaded models are loaded and until the gateway stops, else 503; "
        "lists the models' states to callers who may list models.",
        answer=ops.Ready,
        statuses=(200, 503),
        is_open=True,
        is_traced=False,
    ),
    Endpoint(
        "GET /version",
        ops.version,
        summary="Return the gateway's version, as vLLM does",
        answer=ops.Version,
        is_traced=False,
    ),
    Endpoint(
        "GET /metrics",
        ops.metrics,
        summary="Return Prometheus metrics",
        is_traced=False,
        content_type="text/plain",
    ),
    Endpoint(
        "GET /openapi.json",
        _describe,
        summary="Return the OpenAPI document of these endpoints",
    ),
    Endpoint(
        "GET /dashboard",
        dashboard.page,
        summary="Watch the gateway, and try its models, in a browser",
        details="[The page](dashboard.md) holds no data and needs no key; it asks for a key before "
        "it shows data. Other machines can open it only if the gateway has API keys.",
        content_type="text/html",
        errors=PAGE_ERRORS,
        is_open=True,
        is_page=True,
    ),
    Endpoint(
        "GET /docs",
        partial(dashboard.page, name=dashboard.DOCS),
        summary="Read about these endpoints and their fields, in a browser",
        details="A page made from `/openapi.json`, served where `/dashboard` is.",
        content_type="text/html",
        errors=PAGE_ERRORS,
        is_open=True,
        is_page=True,
    ),
    Endpoint(
        "GET /dashboard/samples",
        partial(dashboard.samples, is_admin=False),
        summary="Stream a sample of models and metrics each second",
        details="Lines of JSON for the dashboard, for at most four readers, until they disconnect.",
        content_type="application/x-ndjson",
        errors=(TooManyWatchers,),
        is_page=True,
    ),
    Endpoint(
        "GET /dashboard/{file}",
        dashboard.page,
        summary="Return a file of the dashboard",
        content_type="*/*",
        errors=(*PAGE_ERRORS, UnknownUrl),
        is_open=True,
        is_page=True,
    ),
    Endpoint(
        "POST /admin/models/pull",
        models.pull,
        summary="Download a model's files",
        details="Takes a model of models.yaml, or `org/name` of the hub, which is then served "
        "until the gateway ends. Unless `stream` is false, an event each second has the bytes so "
        "far. The download goes on if the client leaves. One model at a time: others wait.",
        request=PullRequest,
        answer=PullProgress,
        events=PullProgress,
        errors=(InsufficientDisk, Overloaded),
        is_admin=True,
    ),
    Endpoint(
        "POST /admin/models/{name:path}/load",
        models.load,
        summary="Load a model",
        details="Needs `GATEWAY_ADMIN_KEY`; without it `/admin` is off (404), but for the commands "
        "[`load` and `stop`](hardening.md#the-admin-key).",
        answer=models.Model,
        errors=MODEL_ERRORS,
        is_admin=True,
    ),
    Endpoint(
        "POST /admin/models/{name:path}/unload",
        models.unload,
        summary="Unload a model",
        details="202 while requests still use it.",
        answer=models.Model,
        statuses=(200, 202),
        errors=(ModelNotFound,),
        is_admin=True,
    ),
    Endpoint(
        "POST /admin/models/{name:path}/pin",
        partial(models.pin, is_pinned=True),
        summary="Pin a model",
        details="Until models.yaml is read again, the model is not unloaded to make room, "
        "whatever that file says.",
        answer=models.Model,
        errors=(ModelNotFound,),
        is_admin=True,
    ),
    Endpoint(
        "POST /admin/models/{name:path}/unpin",
        partial(models.pin, is_pinned=False),
        summary="Unpin a model",
        details="Until models.yaml is read again, the model may be unloaded to make room, even if "
        "that file pins it.",
        answer=models.Model,
        errors=(ModelNotFound,),
        is_admin=True,
    ),
    Endpoint(
        "GET /admin/samples",
        partial(dashboard.samples, is_admin=True),
        summary="Stream samples with the requests in flight and the last errors",
        details="Like `/dashboard/samples`, without requests' texts. It is served only where "
        "`/dashboard` is.",
        content_type="application/x-ndjson",
        errors=(TooManyWatchers,),
        is_admin=True,
        is_page=True,
    ),
    Endpoint(
        "POST /admin/requests/{number:number}/cancel",
        dashboard.cancel,
        summary="Cancel a request in flight",
        details="Takes a `number` from the samples. Its memory is freed; its client gets an error.",
        answer=dashboard.Cancelled,
        errors=(RequestNotFound,),
        is_admin=True,
    ),
    Endpoint(
        "POST /admin/reload",
        models.reload,
        summary="Read models.yaml again",
        answer=models.Reload,
        errors=(ModelsFileInvalid,),
        is_admin=True,
    ),
    Endpoint(
        "POST /admin/prefixes/save",
        models.save_prefixes,
        summary="Save the prefix cache",
        details="Writes the cached prompts to `GATEWAY_PREFIX_FOLDER`, as a drain does.",
        answer=models.SavedPrefixes,
        errors=(Unavailable,),
        is_admin=True,
    ),
)
