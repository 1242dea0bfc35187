"""/v1/embeddings; TEI's /embed, /embed_sparse and /info; Cohere's /embed; vLLM's /pooling."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Generic, NamedTuple, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from gateway import __version__
from gateway.api.in_flight import context_of, while_connected
from gateway.api.requests import Service, ignored_header, reply, time_stage
from gateway.clock import Stage
from gateway.errors import BadRequest, GatewayError
from gateway.ids import passing_id
from gateway.jobs.embed import Embedded, EmbedJob, Output
from gateway.registry import EmbeddingSpec, Resolved
from gateway.serving.admission import Arrival
from gateway.serving.embedding.batcher import EmbeddingBatcher
from gateway.wire import cohere
from gateway.wire import embeddings as wire
from gateway.wire.rerank import TextsError, is_texts
from gateway.wire.validation import MAX_INPUTS

W = TypeVar(
    "W", wire.EmbeddingsRequest, wire.InputsRequest, wire.SparseRequest, wire.PoolingRequest
)
R = TypeVar(
    "R",
    wire.EmbeddingsRequest,
    wire.InputsRequest,
    wire.SparseRequest,
    wire.PoolingRequest,
    cohere.CohereRequest,
)


class _Result(NamedTuple, Generic[R]):
    request: R
    model: str
    outputs: Sequence[Output]
    embedded: Embedded
    headers: dict[str, str]
    job: EmbedJob


async def answer(service: Service, request: Request, shape: type[W]) -> Response:
    with service.arrivals.expect() as arrival:
        body = await service.read_body(request)
        return await _answer(service, request, body, shape, arrival)


async def embed(service: Service, request: Request, shape: type[W]) -> Response:
    """Answer as TEI does, with a bare list and errors of its own.

    A body of /embed with `texts` is answered as Cohere's v1 does.
    """
    try:
        with service.arrivals.expect() as arrival:
            body = await service.read_body(request)
            depth = service.rules.bounds.max_depth
            if shape is wire.InputsRequest and await service.run_on_body(
                body, is_texts, body, depth, "inputs"
            ):
                context_of(request).is_cohere = True
                return await _answer_cohere(service, request, body, arrival, "1")
            return await _answer(service, request, body, shape, arrival)
    except GatewayError as error:
        if context_of(request).is_cohere:
            raise
        raise TextsError(error) from error


async def embed_v2(service: Service, request: Request) -> Response:
    """Answer as Cohere's v2 does."""
    with service.arrivals.expect() as arrival:
        body = await service.read_body(request)
        return await _answer_cohere(service, request, body, arrival, "2")


async def _answer(
    service: Service, request: Request, body: bytearray, shape: type[W], arrival: Arrival
) -> Response:
    result = await _embedded(service, request, body, shape, arrival)
    pieces = result.request.write(result.embedded, result.outputs, result.model)
    return await _write(request, pieces, result.headers)


async def _answer_cohere(
    service: Service, request: Request, body: bytearray, arrival: Arrival, version: str
) -> Response:
    result = await _embedded(service, request, body, cohere.CohereRequest, arrival)
    pieces = cohere.write_pieces(
        result.embedded, result.request, result.job.texts, version, name=passing_id("embd")
    )
    return await _write(request, pieces, result.headers)


async def info(service: Service, request: Request) -> Response:
    _, spec = service.find_spec(None, "embeddings", EmbeddingSpec)
    model = service.models.model(spec)
    limit = model.engine.max_tokens if isinstance(model, EmbeddingBatcher) else None
    body: wire.Info = {
        "model_id": spec.id,
        "model_type": {"embedding": {"pooling": spec.pooling}},
        "max_input_length": limit,
        "max_client_batch_size": MAX_INPUTS,
        "auto_truncate": spec.overflow == "truncate",
        "version": __version__,
    }
    return reply(body)


async def _embedded(
    service: Service, request: Request, body: bytearray, shape: type[R], arrival: Arrival
) -> _Result[R]:
    def translate(wire_request: R) -> tuple[Resolved, EmbeddingSpec, EmbedJob]:
        resolved, spec = service.find_spec(wire_request.model, "embeddings", EmbeddingSpec)
        alias_prompt = resolved.alias.prompt_name if resolved.alias else None
        prompt_name = alias_prompt or spec.default_prompt_name
        caller, bounds = service.caller(request), service.rules.chars
        if isinstance(wire_request, cohere.CohereRequest):
            job = cohere.to_job(wire_request, caller, prompt_name=prompt_name, bounds=bounds)
            return resolved, spec, job
        truncate = wire_request.truncate
        if truncate is None:
            truncate = spec.overflow == "truncate"
        job = wire.to_job(
            wire_request,
            caller,
            accepts_ids=spec.token_ids == "accept",
            truncate=truncate,
            dimensions=wire_request.dimensions,
            prompt_name=wire_request.prompt_name or prompt_name,
            bounds=bounds,
        )
        return resolved, spec, job

    with time_stage(request, Stage.PARSE):
        parsed = await service.take(request, body, shape)
        asked = parsed.request
        resolved, spec, job = await service.run_on_body(body, translate, asked)
    lease = service.lease(spec, job.caller, asked)
    unread = context_of(request).unread
    max_bytes = unread.bodies.max_bytes
    async with while_connected(request.receive), lease as batcher:
        outputs = asked.choose_outputs(batcher.engine.outputs)
        if "dense" in outputs and "dense" in batcher.engine.outputs:
            check_dimensions(spec, batcher.engine.dimensions, job.dimensions)
        elif job.dimensions is not None:
            raise BadRequest("Only dense vectors have 'dimensions'.", part="dimensions")
        job = replace(job, outputs=outputs, max_numbers=max_bytes // asked.number_bytes)
        embedded = await batcher.embed(job, arrival)
    # The answer is counted before it is written, since JSON is several times larger than floats.
    nbytes = wire.count_bytes(embedded, number_bytes=asked.number_bytes, copies=asked.copies)
    if embedded.sparse and nbytes > max_bytes:
        raise BadRequest(
            f"The answer would have up to {nbytes} bytes, and may have {max_bytes}: "
            "send fewer texts at once.",
            param=asked.params["prompt"],
        )
    unread.count_answer(nbytes)
    headers = ignored_header(parsed.ignored)
    if embedded.truncated:
        headers["x-gateway-truncated"] = str(embedded.truncated)
    return _Result(asked, resolved.name, outputs, embedded, headers, job)


async def _write(request: Request, pieces: Iterator[bytes], headers: dict[str, str]) -> Response:
    body, written = [], 0
    with time_stage(request, Stage.SERIALIZE):
        for piece in pieces:
            body.append(piece)
            written += len(piece)
            # Writing 2,048 vectors without a break would block all other requests.
            if written > wire.PIECE_FLOATS:
                written = 0
                await asyncio.sleep(0)
    return Response(b"".join(body), media_type="application/json", headers=headers)


def check_dimensions(spec: EmbeddingSpec, native: int, dimensions: int | None) -> None:
    """Raise BadRequest for `dimensions` that the model's vectors cannot have."""
    if dimensions is None or dimensions == native:
        return
    sizes = () if isinstance(spec.matryoshka, bool) else spec.matryoshka
    shorter: Sequence[int] = sorted(size for size in sizes if size < native)
    fitting = " or ".join(map(str, (*shorter, native)))
    if spec.matryoshka is True:
        shorter, fitting = range(1, native), f"at most {native}"
    if dimensions in shorter:
        return
    raise BadRequest(
        f"Vectors of the model `{spec.id}` have {native} dimensions, and cannot have {dimensions}: "
        f"send {fitting}, or leave the field out.",
        part="dimensions",
    )
