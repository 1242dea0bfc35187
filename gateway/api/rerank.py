"""POST /v1/rerank, /v2/rerank and /v1/score."""

import time
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from gateway.api.in_flight import context_of, while_connected
from gateway.api.requests import Service, ignored_header, reply, time_stage
from gateway.clock import Stage
from gateway.errors import GatewayError
from gateway.ids import passing_id
from gateway.jobs.rerank import Reranked, RerankJob
from gateway.registry import EmbeddingSpec, RerankSpec, Resolved
from gateway.serving.admission import Arrival
from gateway.wire import rerank as wire

R = TypeVar("R", bound=wire.ScoringRequest)
FLOAT_BYTES = 4


async def rerank(service: Service, request: Request) -> Response:
    """Answer with the documents' scores, best first, in the format of the request's API."""
    with service.arrivals.expect() as arrival:
        body = await service.read_body(request)
        # TEI's API has the same path, but `texts` instead of `documents`.
        if await _is_texts(service, request, body):
            try:
                return await _rerank_texts(service, request, body, arrival)
            except GatewayError as error:
                raise wire.TextsError(error) from error
        result = await _score(service, request, body, wire.RerankRequest, arrival)
        with time_stage(request, Stage.SERIALIZE):
            answer = wire.write_reranking(
                result.answer, result.request, name=passing_id("rerank"), model=result.model
            )
            return reply(answer, headers=result.headers)


async def _is_texts(service: Service, request: Request, body: bytearray) -> bool:
    max_depth = service.rules.bounds.max_depth
    with time_stage(request, Stage.PARSE):
        return await service.run_on_body(body, lambda: wire.is_texts(body, max_depth))


async def _rerank_texts(
    service: Service, request: Request, body: bytearray, arrival: Arrival
) -> Response:
    result = await _score(service, request, body, wire.TextsRequest, arrival)
    with time_stage(request, Stage.SERIALIZE):
        return reply(wire.write_ranked_texts(result.answer, result.request), headers=result.headers)


async def score(service: Service, request: Request) -> Response:
    with service.arrivals.expect() as arrival:
        body = await service.read_body(request)
        result = await _score(service, request, body, wire.ScoreRequest, arrival)
    with time_stage(request, Stage.SERIALIZE):
        created = int(time.time())
        answer = wire.write_scores(
            result.answer, name=passing_id("score"), created=created, model=result.model
        )
        return reply(answer, headers=result.headers)


@dataclass(frozen=True, slots=True)
class _Result(Generic[R]):
    request: R
    answer: Reranked
    model: str
    headers: dict[str, str]


async def _score(
    service: Service, request: Request, body: bytearray, shape: type[R], arrival: Arrival
) -> _Result[R]:
    def translate(wire_request: R) -> tuple[Resolved, EmbeddingSpec | RerankSpec, RerankJob]:
        resolved, spec = service.find_spec(
            wire_request.model, "reranking", RerankSpec, EmbeddingSpec
        )
        job = wire.to_job(
            wire_request,
            service.caller(request),
            max_tokens_per_doc=spec.max_tokens_per_doc if isinstance(spec, RerankSpec) else None,
            prompt_name=spec.default_prompt_name if isinstance(spec, EmbeddingSpec) else None,
            bounds=service.rules.chars,
        )
        return resolved, spec, job

    with time_stage(request, Stage.PARSE):
        parsed = await service.take(request, body, shape)
        asked = parsed.request
        resolved, spec, job = await service.run_on_body(body, translate, asked)
    lease = service.lease(spec, job.caller, asked)
    most = context_of(request).unread.bodies.max_bytes // FLOAT_BYTES
    async with while_connected(request.receive), lease as batcher:
        answer = await batcher.rerank(replace(job, max_numbers=most), arrival)
    ignored = parsed.ignored
    reads_instruction = isinstance(spec, RerankSpec) and spec.scoring == "labels"
    if asked.instruction is not None and not reads_instruction:
        ignored = (*ignored, "instruction")
    headers = ignored_header(ignored)
    if answer.truncated:
        headers["x-gateway-truncated"] = str(answer.truncated)
    return _Result(asked, answer, resolved.name, headers)
