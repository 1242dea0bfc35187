"""POST /v1/embeddings."""

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from gateway.api.requests import Service, noted, timed
from gateway.api.streams import while_connected
from gateway.errors import BadRequest
from gateway.jobs import Embedded, EmbedJob, Stage
from gateway.registry import EmbeddingSpec
from gateway.serving.admission import Arrival
from gateway.wire import embeddings as wire


async def answer(service: Service, request: Request) -> Response:
    """Answer with a vector for every input."""
    with service.arrivals.expect() as arrival:
        return await _answer(service, request, arrival)


async def _answer(service: Service, request: Request, arrival: Arrival) -> Response:
    def translate(asked: wire.EmbeddingsRequest) -> tuple[EmbeddingSpec, EmbedJob]:
        resolved, spec = service.embedding_spec(asked.model)
        alias_prompt = resolved.alias.prompt_name if resolved.alias else None
        return spec, wire.to_job(
            asked,
            service.caller(request),
            accepts_ids=spec.token_ids == "accept",
            truncate=spec.overflow == "truncate" if asked.truncate is None else asked.truncate,
            dimensions=asked.dimensions,
            prompt_name=asked.prompt_name or alias_prompt or spec.default_prompt_name,
            bounds=service.rules.chars,
        )

    read, (spec, job) = await service.read(request, wire.EmbeddingsRequest, translate)
    asked = read.request
    embedded = await while_connected(request.receive, _embed(service, spec, job, asked, arrival))
    headers = noted(read.ignored)
    if embedded.truncated:
        headers["x-gateway-truncated"] = str(embedded.truncated)
    with timed(request, Stage.SERIALISE):
        body = await _written(embedded, asked)
    return Response(body, media_type="application/json", headers=headers)


async def _written(embedded: Embedded, asked: wire.EmbeddingsRequest) -> bytes:
    """Write the answer piece by piece, with a turn for everybody else after a large one."""
    pieces = []
    for piece in wire.write_pieces(embedded, asked.model, asked.encoding_format):
        pieces.append(piece)
        if len(piece) > wire.PIECE_FLOATS:
            await asyncio.sleep(0)
    return b"".join(pieces)


async def _embed(
    service: Service,
    spec: EmbeddingSpec,
    job: EmbedJob,
    asked: wire.EmbeddingsRequest,
    arrival: Arrival,
) -> Embedded:
    async with service.embedder(spec, job.caller, asked) as batcher:
        check_dimensions(spec, batcher.engine.dimensions, job.dimensions)
        return await batcher.embed(job, arrival)


def check_dimensions(spec: EmbeddingSpec, own: int, asked: int | None) -> None:
    """Refuse `dimensions` that the model was not trained to be shortened to."""
    if asked is None or asked == own:
        return
    sizes = spec.matryoshka
    if sizes is False or asked > own:
        raise BadRequest(
            f"The model `{spec.id}` has {own} dimensions"
            + (" and cannot be shortened." if sizes is False else f", fewer than {asked}."),
            param="dimensions",
        )
    if sizes is not True and asked not in sizes:
        known = ", ".join(map(str, sizes))
        raise BadRequest(
            f"The model `{spec.id}` can be shortened to {known} dimensions.",
            param="dimensions",
        )
