"""GET /v1/models and /v1/models/{id}; the endpoints under /admin that change models."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from http import HTTPStatus
from typing import Annotated, Literal

import orjson
from pydantic import Field, WithJsonSchema
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp
from typing_extensions import TypeAliasType, TypedDict

from gateway.api.in_flight import context_of, while_connected
from gateway.api.requests import Service, ignored_header, reply
from gateway.api.streams import COMMENT, DONE, EventStream, frame
from gateway.errors import ShuttingDown
from gateway.registry import ChatSpec, ModelSpec, Resolved
from gateway.serving.embedding.batcher import EmbeddingBatcher
from gateway.serving.embedding.reranker import RerankBatcher
from gateway.serving.generation.batcher import ChatBatcher, GenerationBatcher
from gateway.serving.models.pulls import Pull
from gateway.wire.anthropic import AnthropicModel, AnthropicModels, model_info, model_page
from gateway.wire.pulls import PullProgress, PullRequest

PULL_PERIOD_S = 1.0
STATES = ["unloaded", "loading", "loaded", "failed"]


class Batching(TypedDict):
    """Whether a loaded chat model's sequences share a batch, which its self-test decides."""

    rows: Literal["together", "one at a time"]
    self_test: Literal["passed", "failed", "unfinished", "off"]
    problem: Annotated[str | None, Field(description="The fault that the self-test found.")]


class Model(TypedDict):
    """A model under its id or one of its aliases; `root` is always the model's id."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: Annotated[str | None, Field(description="The id of an adapter's base model.")]
    kind: Literal["chat", "embedding", "rerank"]
    state: Annotated[str, WithJsonSchema({"type": "string", "enum": STATES})]
    pinned: Annotated[bool, Field(description="True: the model is never evicted.")]
    bytes: Annotated[int | None, Field(description="Bytes of the memory budget that it holds.")]
    last_used: Annotated[float | None, Field(description="Unix time.")]
    error: Annotated[str | None, Field(description="Why the last load failed.")]
    max_model_len: Annotated[
        int | None, Field(description="Most tokens of an input; a chat model's include the answer.")
    ]
    context_length: Annotated[int | None, Field(description="`max_model_len`, for OpenRouter.")]
    max_context: Annotated[int | None, Field(description="`max_model_len` of a chat model.")]
    input_modalities: Sequence[str] | None
    verified: Annotated[
        Literal["transformers", "mlx-lm", "no"] | None,
        Field(description="The library that answers of the model's family were compared with."),
    ]
    notes: Annotated[
        Sequence[str], Field(description="Settings in a chat model's files that have no effect.")
    ]
    drafters: Annotated[
        Sequence[str], Field(description="What guesses tokens for a loaded chat model.")
    ]
    batching: Annotated[Batching | None, Field(description="How a loaded chat model batches.")]


class Models(TypedDict):
    """The list of models: one entry for each id and each alias."""

    object: Literal["list"]
    data: list[Model]


ModelList = TypeAliasType("ModelList", Models | AnthropicModels)
AnyModel = TypeAliasType("AnyModel", Model | AnthropicModel)


async def list_models(service: Service, request: Request) -> Response:
    """Answer with one entry for each id and alias; Anthropic's clients get only chat models."""
    await service.inputs.look()
    catalog = service.served.catalog
    if context_of(request).is_anthropic:
        infos = [_anthropic_model(service, entry) for entry in catalog if entry.spec.kind == "chat"]
        return reply(model_page(infos, request.query_params))
    body: Models = {"object": "list", "data": [describe_model(service, each) for each in catalog]}
    return reply(body)


async def show(service: Service, request: Request) -> Response:
    name = request.path_params["name"]
    if not name:
        raise HTTPException(HTTPStatus.NOT_FOUND)
    await service.inputs.look()
    if context_of(request).is_anthropic:
        return reply(_anthropic_model(service, service.served.catalog.resolve(name, ChatSpec)))
    return reply(describe_model(service, service.served.catalog.resolve(name)))


def _anthropic_model(service: Service, resolved: Resolved) -> AnthropicModel:
    return model_info(resolved.name, service.started, _max_tokens(service, resolved.spec))


async def _look(service: Service, resolved: Resolved) -> Model:
    await service.inputs.look()
    return describe_model(service, resolved)


def describe_model(service: Service, resolved: Resolved) -> Model:
    """Return one entry of the model list; a value is None if it is unknown."""
    spec = resolved.spec
    status = service.models.status(spec)
    inputs, max_tokens = service.inputs.of(spec), _max_tokens(service, spec)
    model = service.models.model(spec)
    facts = model.engine.facts if isinstance(model, GenerationBatcher) else None
    return {
        "id": resolved.name,
        "object": "model",
        "created": service.started,
        "owned_by": "mlx-gateway",
        "root": spec.id,
        "parent": spec.base if isinstance(spec, ChatSpec) else None,
        "kind": spec.kind,
        "state": status.state,
        "pinned": service.models.is_pinned(spec),
        "bytes": status.nbytes,
        "last_used": status.last_used,
        "error": status.failure,
        "max_model_len": max_tokens,
        "context_length": max_tokens,
        "max_context": max_tokens if isinstance(spec, ChatSpec) else None,
        "input_modalities": _modalities(service, spec),
        "verified": facts.verified if facts else inputs and inputs.verified,
        "notes": facts.notes if facts else [],
        "drafters": facts.drafters if facts else [],
        "batching": _batching(model),
    }


def _modalities(service: Service, spec: ModelSpec) -> Sequence[str] | None:
    inputs = service.inputs.of(spec)
    if inputs is None or not isinstance(spec, ChatSpec):
        return inputs and inputs.modalities
    return ("text", "image") if service.reads_images(spec) else ("text",)


def _max_tokens(service: Service, spec: ModelSpec) -> int | None:
    inputs = service.inputs.of(spec)
    if isinstance(spec, ChatSpec):
        spec = spec.base_spec or spec
    model = service.models.model(spec)
    if isinstance(model, GenerationBatcher):
        return model.engine.facts.max_context
    if isinstance(model, EmbeddingBatcher | RerankBatcher):
        return model.engine.max_tokens
    return None if inputs is None else inputs.max_tokens


def _batching(batcher: object) -> Batching | None:
    if not isinstance(batcher, ChatBatcher):
        return None
    verdict, problem = batcher.verdict, None
    outcome: Literal["passed", "failed", "unfinished", "off"] = "off"
    if verdict is not None:
        problem = verdict.problem or None
        outcome = "unfinished"
        if problem:
            outcome = "failed"
        elif verdict.is_whole:
            outcome = "passed"
    return {
        "rows": "together" if batcher.is_batched else "one at a time",
        "self_test": outcome,
        "problem": problem,
    }


async def pull(service: Service, request: Request) -> ASGIApp:
    """Download a model's files, and report the progress.

    The download goes on if the client leaves.
    """
    parsed = await service.read(await service.read_body(request), PullRequest)
    headers, asked = ignored_header(parsed.ignored), parsed.request
    pull = await service.named.pull(asked.model)
    if not asked.stream:
        async with while_connected(request.receive):
            async for progress in _watch(service, pull):
                last = progress
        return reply(last, headers=headers)
    stream = EventStream(
        _frames(service, pull),
        headers,
        request,
        write_error=lambda error: frame(orjson.dumps(error.body())),
        keep_alive=COMMENT,
    )
    return await stream.prime(service.rules.stream_open_after_s)


async def _frames(service: Service, pull: Pull) -> AsyncGenerator[bytes, None]:
    async for progress in _watch(service, pull):
        yield frame(orjson.dumps(progress))
    yield DONE


async def _watch(service: Service, pull: Pull) -> AsyncGenerator[PullProgress, None]:
    """Yield the progress of a pull until it succeeds."""
    while not pull.task.done():
        if service.in_flight.is_draining:  # the next process resumes from the bytes on disk
            raise ShuttingDown
        yield describe_pull(service, pull)
        await asyncio.wait({pull.task}, timeout=PULL_PERIOD_S)
    files = await pull.wait()
    yield {**describe_pull(service, pull), "status": "success", "path": str(files)}


def describe_pull(service: Service, pull: Pull) -> PullProgress:
    completed, total = service.named.pulls.fetched(pull)
    return {
        "object": "pull",
        "model": pull.spec.id,
        "status": pull.status,
        "completed": completed,
        "total": total,
        "path": None,
    }


class Reload(TypedDict):
    """The ids of the models that a reload of models.yaml added, changed or removed."""

    object: Literal["reload"]
    added: list[str]
    changed: list[str]
    removed: list[str]


class SavedPrefixes(TypedDict):
    """The number of files that the prefix cache was saved to."""

    object: Literal["prefixes"]
    files: int


async def load(service: Service, request: Request) -> Response:
    """Load a model as a request would, but without the pause after a failed load."""
    resolved = service.served.catalog.resolve(request.path_params["name"])
    await service.models.load(resolved.spec)
    return reply(await _look(service, resolved))


async def unload(service: Service, request: Request) -> Response:
    """Unload a model, even a pinned one: 200 if it is unloaded, 202 if requests still use it."""
    resolved = service.served.catalog.resolve(request.path_params["name"])
    is_gone = await service.models.unload(resolved.spec)
    body = await _look(service, resolved)
    return reply(body, HTTPStatus.OK if is_gone else HTTPStatus.ACCEPTED)


async def pin(service: Service, request: Request, *, is_pinned: bool) -> Response:
    """Pin or unpin a model until models.yaml is reloaded; a pinned model is not evicted."""
    resolved = service.served.catalog.resolve(request.path_params["name"])
    service.models.pin(resolved.spec, is_pinned=is_pinned)
    return reply(await _look(service, resolved))


async def reload(service: Service, request: Request) -> Response:
    async with while_connected(request.receive):
        changes = await service.reload()
    return reply({"object": "reload", **changes.by_kind()})


async def save_prefixes(service: Service, request: Request) -> Response:
    body: SavedPrefixes = {"object": "prefixes", "files": await service.save_prefixes()}
    return reply(body)
