"""/v1/embeddings; /embed and /info as in Text Embeddings Inference (TEI)."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from gateway import __version__
from gateway.api.in_flight import context_of, while_connected
from gateway.api.requests import Service, ignored_header, reply, time_stage
from gateway.clock import Stage
from gateway.errors import BadRequest, GatewayError
from gateway.ids import passing_id
from gateway.jobs.embed import Embedded, EmbedJob
from gateway.registry import EmbeddingSpec
from gateway.serving.embedding.batcher import EmbeddingBatcher
from gateway.wire import embeddings as wire
from gateway.wire.rerank import TextsError
from gateway.wire.validation import MAX_INPUTS

R = TypeVar("R", wire.EmbeddingsRequest, wire.InputsRequest)


class _Result(NamedTuple, Generic[R]):
    request: R
    embedded: Embedded
    headers: dict[str, str]


async def answer(service: Service, request: Request) -> Response:
    result = await _embedded(service, request, wire.EmbeddingsRequest)
    pieces = wire.write_pieces(
        result.embedded,
        name=passing_id("embd"),
        model=result.request.model,
        encoding=result.request.encoding_format,
    )
    return await _write(request, pieces, result.headers)


async def embed(service: Service, request: Request) -> Response:
    """Answer as TEI does, with a bare list of vectors."""
    try:
        result = await _embedded(service, request, wire.InputsRequest)
    except GatewayError as error:
        raise TextsError(error) from error
    return await _write(request, wire.write_vectors(result.embedded), result.headers)


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


async def _embedded(service: Service, request: Request, shape: type[R]) -> _Result[R]:
    def translate(wire_request: R) -> tuple[EmbeddingSpec, EmbedJob]:
        resolved, spec = service.find_spec(wire_request.model, "embeddings", EmbeddingSpec)
        truncate = wire_request.truncate
        if truncate is None:
            truncate = spec.overflow == "truncate"
        alias_prompt = resolved.alias.prompt_name if resolved.alias else None
        return spec, wire.to_job(
            wire_request,
            service.caller(request),
            accepts_ids=spec.token_ids == "accept",
            truncate=truncate,
            dimensions=wire_request.dimensions,
            prompt_name=wire_request.prompt_name or alias_prompt or spec.default_prompt_name,
            bounds=service.rules.chars,
        )

    with service.arrivals.expect() as arrival:
        body = await service.read_body(request)
        with time_stage(request, Stage.PARSE):
            parsed = await service.take(request, body, shape)
            asked = parsed.request
            spec, job = await service.run_on_body(body, translate, asked)
        lease = service.lease(spec, job.caller, asked)
        async with while_connected(request.receive), lease as batcher:
            check_dimensions(spec, batcher.engine.dimensions, job.dimensions)
            embedded = await batcher.embed(job, arrival)
    number_bytes = wire.NUMBER_BYTES[asked.encoding_format]
    # The answer is counted before it is written, since JSON is several times larger than floats.
    context_of(request).unread.count_answer(embedded.vectors.size * number_bytes)
    headers = ignored_header(parsed.ignored)
    if embedded.truncated:
        headers["x-gateway-truncated"] = str(embedded.truncated)
    return _Result(asked, embedded, headers)


async def _write(request: Request, pieces: Iterator[bytes], headers: dict[str, str]) -> Response:
    body = []
    with time_stage(request, Stage.SERIALIZE):
        for piece in pieces:
            body.append(piece)
            # Writing 2,048 vectors without a break would block all other requests.
            if len(piece) > wire.PIECE_FLOATS:
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
