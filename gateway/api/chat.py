"""The endpoints of chat models: chat completions, completions, Messages, decisions."""

import time
from functools import partial

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from gateway.api.exchange import (
    Exchange,
    default_sampling,
    read_exchange,
    template_args,
    thinking_budgets,
    without_images,
)
from gateway.api.in_flight import while_connected
from gateway.api.requests import Service, ignored_header, reply, serialize, time_stage
from gateway.clock import Stage
from gateway.ids import passing_id
from gateway.serving.generation.fan_out import score_labels
from gateway.wire import anthropic, chat, completions, decisions
from gateway.wire.anthropic_stream import MessageWriter
from gateway.wire.generation import Heading, read_tier


async def answer(service: Service, request: Request) -> ASGIApp:
    def translate(wire_request: chat.ChatRequest) -> Exchange:
        resolved, spec = service.chat_spec(wire_request.model)
        given, continues = wire_request.messages, wire_request.continues
        messages, headers = without_images(service, request, spec, given, continues=continues)
        job = chat.to_job(
            wire_request.model_copy(update={"messages": messages}),
            service.caller(request, read_tier(wire_request.service_tier)),
            default_sampling(spec),
            max_tokens=spec.sampling.max_tokens,
            template_args=template_args(resolved, spec),
            max_chars=service.rules.max_input_chars,
            budgets=thinking_budgets(spec),
            images=service.image_reader(spec),
            schema_in_prompt=spec.structured.schema_in_prompt,
        )
        heading = _heading("chatcmpl", wire_request.model, service.fingerprint(spec))
        return Exchange(
            service=service,
            request=wire_request,
            spec=spec,
            jobs=[job],
            writer=chat.ChatCompletionWriter(wire_request, heading, job.caller.timings),
            is_streamed=wire_request.stream,
            headers=headers,
        )

    exchange = await read_exchange(service, request, chat.ChatRequest, translate)
    return await exchange.respond(request)


async def complete(service: Service, request: Request) -> ASGIApp:
    def translate(wire_request: completions.CompletionRequest) -> Exchange:
        _, spec = service.chat_spec(wire_request.model)
        caller = service.caller(request, read_tier(wire_request.service_tier))
        heading = _heading("cmpl", wire_request.model, service.fingerprint(spec))
        return Exchange(
            service=service,
            request=wire_request,
            spec=spec,
            jobs=completions.to_jobs(
                wire_request, caller, default_sampling(spec), bounds=service.rules.chars
            ),
            writer=completions.CompletionWriter(wire_request, heading, caller.timings),
            is_streamed=wire_request.stream,
            is_checked=False,
        )

    exchange = await read_exchange(service, request, completions.CompletionRequest, translate)
    return await exchange.respond(request)


def _heading(prefix: str, model: str, fingerprint: str) -> Heading:
    return {
        "id": passing_id(prefix),
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": fingerprint,
    }


async def answer_message(service: Service, request: Request) -> ASGIApp:
    translate = partial(_message_exchange, service, request)
    exchange = await read_exchange(service, request, anthropic.MessagesRequest, translate)
    return await exchange.respond(request)


async def count_message_tokens(service: Service, request: Request) -> Response:
    translate = partial(_message_exchange, service, request)
    exchange = await read_exchange(service, request, anthropic.CountMessageTokensRequest, translate)
    body: anthropic.MessageTokensCount = {"input_tokens": await exchange.count_tokens(request)}
    return reply(body, headers=exchange.headers)


def _message_exchange(
    service: Service, request: Request, wire_request: anthropic.CountMessageTokensRequest
) -> Exchange:
    resolved, spec = service.chat_spec(wire_request.model, "messages")
    given = wire_request.messages
    messages, headers = without_images(service, request, spec, given, continues=True)
    caller = service.caller(request)
    job = anthropic.to_job(
        wire_request.model_copy(update={"messages": messages}),
        caller,
        default_sampling(spec),
        template_args=template_args(resolved, spec),
        max_chars=service.rules.max_input_chars,
        budgets=thinking_budgets(spec),
        images=service.image_reader(spec),
    )
    writer = MessageWriter(
        wire_request.model,
        max_tokens=job.max_tokens or 0,  # a request to count tokens has no max_tokens
        thoughts=wire_request.thoughts,
        request_id=caller.request_id,
    )
    return Exchange(
        service=service,
        request=wire_request,
        spec=spec,
        jobs=[job],
        writer=writer,
        is_streamed=isinstance(wire_request, anthropic.MessagesRequest) and wire_request.stream,
        headers=headers,
    )


async def decide(service: Service, request: Request) -> Response:
    body = await service.read_body(request)
    with time_stage(request, Stage.PARSE):
        parsed = await service.take(request, body, decisions.DecisionsRequest)
        asked = parsed.request
        resolved, spec = service.chat_spec(asked.model, "decisions")
        caller, args = service.caller(request), template_args(resolved, spec)
        translate = partial(decisions.to_jobs, asked, caller, args, bounds=service.rules.chars)
        jobs = await service.run_on_body(body, translate)
    lease = service.lease(spec, jobs[0].caller, asked)
    async with while_connected(request.receive), lease as batcher:
        logprobs, usage = await score_labels(batcher, jobs)
    with time_stage(request, Stage.SERIALIZE):
        # Writing 102,000 probabilities (400 questions of 255 choices) takes a while.
        answer = await serialize(
            lambda: orjson.dumps(decisions.to_decision(asked, logprobs, usage)),
            sum(map(len, logprobs)),
        )
    headers = ignored_header(parsed.ignored)
    return Response(answer, media_type="application/json", headers=headers)
