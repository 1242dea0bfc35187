"""POST /v1/decisions: questions about one input, judged by the probabilities of their labels."""

from collections.abc import Sequence

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway.api.disconnects import while_connected
from gateway.api.exchange import template_args
from gateway.api.requests import Service, ignored_header, serialise, time_stage
from gateway.jobs import GenerateJob, Stage, Usage
from gateway.registry import ChatSpec
from gateway.serving.generation.fan_out import score_labels
from gateway.wire import decisions as wire


async def answer(service: Service, request: Request) -> Response:
    """Answer with the probabilities of every question's labels, once all of them are known.

    If one question fails, or the client leaves, the others end too.
    """

    def translate(
        wire_request: wire.DecisionsRequest,
    ) -> tuple[ChatSpec, Sequence[GenerateJob]]:
        resolved, spec = service.chat_spec(wire_request.model, "decisions")
        jobs = wire.to_jobs(
            wire_request,
            service.caller(request),
            template_args(resolved, spec),
            bounds=service.rules.chars,
        )
        return spec, jobs

    parsed, (spec, jobs) = await service.read(request, wire.DecisionsRequest, translate)
    logprobs, usage = await while_connected(
        request.receive,
        _judge(service, spec, jobs, parsed.request),
    )
    with time_stage(request, Stage.SERIALISE):
        body = await _write(parsed.request, logprobs, usage)
    headers = ignored_header(parsed.ignored)
    return Response(body, media_type="application/json", headers=headers)


async def _judge(
    service: Service,
    spec: ChatSpec,
    jobs: Sequence[GenerateJob],
    request: wire.DecisionsRequest,
) -> tuple[Sequence[Sequence[float]], Usage]:
    async with service.lease_chat(spec, jobs[0].caller, request) as batcher:
        return await score_labels(batcher, jobs)


async def _write(
    request: wire.DecisionsRequest, logprobs: Sequence[Sequence[float]], usage: Usage
) -> bytes:
    """Return the answer's JSON; 400 questions of 255 choices have 102,000 probabilities."""
    probabilities = sum(map(len, logprobs))
    return await serialise(
        lambda: orjson.dumps(wire.to_decision(request, logprobs, usage)),
        probabilities,
    )
