"""POST /v1/completions: one job for each prompt, answered together."""

import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from gateway import clock
from gateway.api.generation import count_delta, default_sampling
from gateway.api.middleware import timings_field
from gateway.api.requests import Service, ignored_header, serialise
from gateway.api.streams import ACCEPTED, DONE, EventStream, frame, while_connected
from gateway.jobs import Delta, GenerateJob, Stage, Usage
from gateway.registry import ChatSpec
from gateway.wire import completions as wire
from gateway.wire.generation import read_tier


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One request with its jobs, and the writers of its answer."""

    service: Service
    request: wire.CompletionRequest
    spec: ChatSpec
    jobs: Sequence[GenerateJob]
    writer: wire.CompletionWriter
    choices: Sequence[wire.TextChoiceWriter]


async def answer(service: Service, request: Request) -> ASGIApp:
    """Answer a completion request, whole or as a stream."""
    rules = service.rules

    def translate(wire_request: wire.CompletionRequest) -> tuple[ChatSpec, Sequence[GenerateJob]]:
        _, spec = service.chat_spec(wire_request.model)
        caller = service.caller(request, read_tier(wire_request.service_tier))
        return spec, wire.to_jobs(wire_request, caller, default_sampling(spec), bounds=rules.chars)

    parsed, (spec, jobs) = await service.read(request, wire.CompletionRequest, translate)
    wire_request = parsed.request
    writer = wire.CompletionWriter(
        id=f"cmpl-{secrets.token_hex(12)}",
        created=int(time.time()),
        model=wire_request.model,
        fingerprint=service.fingerprint(spec),
    )
    exchange = _Exchange(
        service, wire_request, spec, jobs, writer, wire.choice_writers(wire_request)
    )
    headers = ignored_header(parsed.ignored)
    if not wire_request.stream:
        body = await while_connected(request.receive, _answer_whole(exchange))
        return Response(body, media_type="application/json", headers=headers)
    events = _events(exchange, with_usage=wire_request.stream_options.include_usage)
    stream = EventStream(events, headers, request)
    return await stream.prime(rules.stream_open_after_s)


async def _answer_whole(exchange: _Exchange) -> bytes:
    jobs, writer, choices = exchange.jobs, exchange.writer, exchange.choices
    usage = Usage(0)
    async with (
        exchange.service.lease_chat(exchange.spec, jobs[0].caller, exchange.request) as batcher,
        aclosing(batcher.generate_many(jobs)) as updates,
    ):
        async for update in updates:
            usage = _add(usage, update)
            if isinstance(update, Delta):
                choices[update.index].add(update)
    started = clock.now()
    logprobs_per_token = 0 if jobs[0].logprobs is None else 1 + jobs[0].logprobs
    tokens = usage.prompt_tokens + usage.completion_tokens  # an echo has the prompt's logprobs too
    body = await serialise(
        lambda: orjson.dumps(writer.completion(choices, usage)), tokens * logprobs_per_token
    )
    jobs[0].caller.timings.add(Stage.SERIALISE, started)
    return body


async def _events(exchange: _Exchange, *, with_usage: bool) -> AsyncGenerator[bytes, None]:
    jobs, writer = exchange.jobs, exchange.writer
    usage = Usage(0)
    async with (
        exchange.service.lease_chat(exchange.spec, jobs[0].caller, exchange.request) as batcher,
        aclosing(batcher.generate_many(jobs)) as updates,
    ):
        async for update in updates:
            usage = _add(usage, update)
            if isinstance(update, Usage):
                yield ACCEPTED
            else:
                choice = exchange.choices[update.index].add(update)
                if choice["text"] or update.logprobs or update.finish_reason is not None:
                    yield frame(orjson.dumps(writer.chunk([choice])))
    if with_usage:
        last = writer.usage(usage, timings_field(jobs[0].caller.timings))
        yield frame(orjson.dumps(last))
    yield DONE


def _add(usage: Usage, update: Usage | Delta) -> Usage:
    """Add a prompt's usage, or a delta's tokens."""
    if isinstance(update, Delta):
        return count_delta(usage, update)
    return replace(
        usage,
        prompt_tokens=usage.prompt_tokens + update.prompt_tokens,
        cached_tokens=usage.cached_tokens + update.cached_tokens,
    )
