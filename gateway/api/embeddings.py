"""/v1/embeddings; TEI's /embed, /embed_sparse and /info; vLLM's /pooling."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from gateway import __version__
from gateway.api.in_flight import context_of, while_connected
from gateway.api.requests import Service, ignored_header, reply, time_stage
from gateway.clock import Stage
from gateway.errors import BadRequest, GatewayError
from gateway.jobs.embed import EmbedJob
from gateway.registry import EmbeddingSpec, Resolved
from gateway.serving.embedding.batcher import EmbeddingBatcher
from gateway.wire import embeddings as wire
from gateway.wire.rerank import TextsError
from gateway.wire.validation import MAX_INPUTS

R = TypeVar(
    "R", wire.EmbeddingsRequest, wire.InputsRequest, wire.SparseRequest, wire.PoolingRequest
)


async def embed(service: Service, request: Request, shape: type[R]) -> Response:
    """Answer as TEI does, with a bare list and errors of its own."""
    try:
        return await answer(service, request, shape)
    except GatewayError as error:
        raise TextsError(error) from error


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


async def answer(service: Service, request: Request, shape: type[R]) -> Response:
    def translate(wire_request: R) -> tuple[Resolved, EmbeddingSpec, EmbedJob]:
        resolved, spec = service.find_spec(wire_request.model, "embeddings", EmbeddingSpec)
        truncate = wire_request.truncate
        if truncate is None:
            truncate = spec.overflow == "truncate"
        alias_prompt = resolved.alias.prompt_name if resolved.alias else None
        job = wire.to_job(
            wire_request,
            service.caller(request),
            accepts_ids=spec.token_ids == "accept",
            truncate=truncate,
            dimensions=wire_request.dimensions,
            prompt_name=wire_request.prompt_name or alias_prompt or spec.default_prompt_name,
            bounds=service.rules.chars,
        )
        return resolved, spec, job

    with service.arrivals.expect() as arrival:
        body = await service.read_body(request)
        with time_stage(request, Stage.PARSE):
            parsed = await service.take(request, body, shape)
            asked = parsed.request
            resolved, spec, job = await service.run_on_body(body, translate, asked)
        lease = service.lease(spec, job.caller, asked)
        unread, encoding = context_of(request).unread, asked.encoding_format
        max_bytes = unread.bodies.max_bytes
        async with while_connected(request.receive), lease as batcher:
            outputs = asked.choose_outputs(batcher.engine.outputs)
            if "dense" in outputs and "dense" in batcher.engine.outputs:
                check_dimensions(spec, batcher.engine.dimensions, job.dimensions)
            elif job.dimensions is not None:
                raise BadRequest("Only dense vectors have 'dimensions'.", param="dimensions")
            most = max_bytes // wire.NUMBER_BYTES[encoding]
            job = replace(job, outputs=outputs, max_numbers=most)
            embedded = await batcher.embed(job, arrival)
    # The answer is counted before it is written, since JSON is several times larger than floats.
    nbytes = wire.count_bytes(embedded, asked, encoding)
    if embedded.sparse and nbytes > max_bytes:
        raise BadRequest(
            f"The answer would have up to {nbytes} bytes, and may have {max_bytes}: "
            "send fewer texts at once.",
            param=asked.field,
        )
    unread.count_answer(nbytes)
    headers = ignored_header(parsed.ignored)
    if embedded.truncated:
        headers["x-gateway-truncated"] = str(embedded.truncated)
    return await _write(request, asked.write(embedded, outputs, resolved.name), headers)


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
        f"send {fitting} as 'dimensions', or leave it out.",
        param="dimensions",
    )
