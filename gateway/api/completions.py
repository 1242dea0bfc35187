"""POST /v1/completions: bare prompts, each a job of its own, answered together."""

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
from gateway.api.generation import counted, defaults
from gateway.api.middleware import timings_field
from gateway.api.requests import Service, noted, written
from gateway.api.streams import ACCEPTED, DONE, EventStream, frame, while_connected
from gateway.jobs import Delta, GenerateJob, Stage, Usage
from gateway.registry import ChatSpec
from gateway.wire import completions as wire
from gateway.wire.generation import read_tier


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One request as understood, and its answer as it grows."""

    service: Service
    asked: wire.CompletionRequest
    spec: ChatSpec
    jobs: Sequence[GenerateJob]
    writer: wire.CompletionWriter
    choices: Sequence[wire.TextChoiceWriter]


async def answer(service: Service, request: Request) -> ASGIApp:
    """Write on from every prompt: whole or as a stream, from the same deltas."""
    rules = service.rules

    def translate(asked: wire.CompletionRequest) -> tuple[ChatSpec, Sequence[GenerateJob]]:
        _, spec = service.chat_spec(asked.model)
        caller = service.caller(request, read_tier(asked.service_tier))
        return spec, wire.to_jobs(asked, caller, defaults(spec), bounds=rules.chars)

    read, (spec, jobs) = await service.read(request, wire.CompletionRequest, translate)
    asked = read.request
    writer = wire.CompletionWriter(
        id=f"cmpl-{secrets.token_hex(12)}",
        created=int(time.time()),
        model=asked.model,
        fingerprint=service.fingerprint(spec),
    )
    exchange = _Exchange(service, asked, spec, jobs, writer, wire.choice_writers(asked))
    headers = noted(read.ignored)
    if not asked.stream:
        body = await while_connected(request.receive, _whole(exchange))
        return Response(body, media_type="application/json", headers=headers)
    events = _events(exchange, with_usage=asked.stream_options.include_usage)
    stream = EventStream(events, headers, request.receive)
    return await stream.primed(rules.stream_open_after_s)


async def _whole(exchange: _Exchange) -> bytes:
    jobs, writer, choices = exchange.jobs, exchange.writer, exchange.choices
    usage = Usage(0)
    async with (
        exchange.service.writer(exchange.spec, jobs[0].caller, exchange.asked) as batcher,
        aclosing(batcher.generate_many(jobs)) as news,
    ):
        async for each in news:
            usage = summed(usage, each)
            if isinstance(each, Delta):
                choices[each.index].add(each)
    started = clock.now()
    each_token = 0 if jobs[0].logprobs is None else 1 + jobs[0].logprobs
    tokens = usage.prompt_tokens + usage.completion_tokens  # an echo has the prompt's too
    body = await written(
        lambda: orjson.dumps(writer.completion(choices, usage)), tokens * each_token
    )
    jobs[0].caller.timings.add(Stage.SERIALISE, clock.now() - started)
    return body


async def _events(exchange: _Exchange, *, with_usage: bool) -> AsyncGenerator[bytes, None]:
    jobs, writer = exchange.jobs, exchange.writer
    usage = Usage(0)
    async with (
        exchange.service.writer(exchange.spec, jobs[0].caller, exchange.asked) as batcher,
        aclosing(batcher.generate_many(jobs)) as news,
    ):
        async for each in news:
            usage = summed(usage, each)
            if isinstance(each, Usage):
                yield ACCEPTED
            else:
                new = exchange.choices[each.index].add(each)
                if new["text"] or each.logprobs or each.finish_reason is not None:
                    yield frame(orjson.dumps(writer.chunk([new])))
    if with_usage:
        last = writer.usage(usage, timings_field(jobs[0].caller.timings))
        yield frame(orjson.dumps(last))
    yield DONE


def summed(usage: Usage, news: Usage | Delta) -> Usage:
    """Count a prompt, or what a delta wrote."""
    if isinstance(news, Delta):
        return counted(usage, news)
    return replace(
        usage,
        prompt_tokens=usage.prompt_tokens + news.prompt_tokens,
        cached_tokens=usage.cached_tokens + news.cached_tokens,
    )
