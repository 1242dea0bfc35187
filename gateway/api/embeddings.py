"""POST /v1/embeddings."""

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from gateway.api.requests import Service, ignored_header, time_stage
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
    def translate(wire_request: wire.EmbeddingsRequest) -> tuple[EmbeddingSpec, EmbedJob]:
        resolved, spec = service.embedding_spec(wire_request.model)
        alias_prompt = resolved.alias.prompt_name if resolved.alias else None
        return spec, wire.to_job(
            wire_request,
            service.caller(request),
            accepts_ids=spec.token_ids == "accept",
            truncate=spec.overflow == "truncate"
            if wire_request.truncate is None
            else wire_request.truncate,
            dimensions=wire_request.dimensions,
            prompt_name=wire_request.prompt_name or alias_prompt or spec.default_prompt_name,
            bounds=service.rules.chars,
        )

    parsed, (spec, job) = await service.read(request, wire.EmbeddingsRequest, translate)
    wire_request = parsed.request
    embedded = await while_connected(
        request.receive, _embed(service, spec, job, wire_request, arrival)
    )
    headers = ignored_header(parsed.ignored)
    if embedded.truncated:
        headers["x-gateway-truncated"] = str(embedded.truncated)
    with time_stage(request, Stage.SERIALISE):
        body = await _write(embedded, wire_request)
    return Response(body, media_type="application/json", headers=headers)


async def _write(embedded: Embedded, wire_request: wire.EmbeddingsRequest) -> bytes:
    """Return the answer's JSON, yielding to the event loop after each large piece."""
    pieces = []
    for piece in wire.write_pieces(embedded, wire_request.model, wire_request.encoding_format):
        pieces.append(piece)
        if len(piece) > wire.PIECE_FLOATS:
            await asyncio.sleep(0)
    return b"".join(pieces)


async def _embed(
    service: Service,
    spec: EmbeddingSpec,
    job: EmbedJob,
    request: wire.EmbeddingsRequest,
    arrival: Arrival,
) -> Embedded:
    async with service.lease_embedding(spec, job.caller, request) as batcher:
        check_dimensions(spec, batcher.engine.dimensions, job.dimensions)
        return await batcher.embed(job, arrival)


def check_dimensions(spec: EmbeddingSpec, native: int, dimensions: int | None) -> None:
    """Raise BadRequest for `dimensions` that the model's vectors cannot be shortened to."""
    if dimensions is None or dimensions == native:
        return
    sizes = spec.matryoshka
    if sizes is False or dimensions > native:
        raise BadRequest(
            f"The model `{spec.id}` has {native} dimensions"
            + (" and cannot be shortened." if sizes is False else f", fewer than {dimensions}."),
            param="dimensions",
        )
    if sizes is not True and dimensions not in sizes:
        known = ", ".join(map(str, sizes))
        raise BadRequest(
            f"The model `{spec.id}` can be shortened to {known} dimensions.",
            param="dimensions",
        )
