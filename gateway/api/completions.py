"""POST /v1/completions: bare prompts, each a job of its own, answered together."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from functools import partial

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from gateway import metrics
from gateway.api import timing
from gateway.api.chat import counted, defaults
from gateway.api.replies import written
from gateway.api.service import Service, noted
from gateway.api.streams import ACCEPTED, DONE, EventStream, frame, while_connected
from gateway.jobs import Delta, GenerateJob, Stage, Usage
from gateway.registry import ChatSpec
from gateway.serving.generation.batcher import Generation, GenerationBatcher
from gateway.wire import completions as wire
from gateway.wire.sampling import tier

JOBS_AT_ONCE = 16  # of one request: a long list of prompts is let in in slices


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One request as understood, and its answer as it grows."""

    service: Service
    spec: ChatSpec
    jobs: Sequence[GenerateJob]
    writer: wire.CompletionWriter
    choices: Sequence[wire.TextChoiceWriter]


async def answer(service: Service, request: Request) -> ASGIApp:
    """Write on from every prompt: whole or as a stream, from the same deltas."""
    rules = service.rules

    def translate(asked: wire.CompletionRequest) -> tuple[ChatSpec, Sequence[GenerateJob]]:
        _, spec = service.chat_spec(asked.model)
        caller = service.caller(request, tier(asked.service_tier))
        return spec, wire.to_jobs(asked, caller, defaults(spec), bounds=rules.chars)

    read, (spec, jobs) = await service.read(request, wire.CompletionRequest, translate)
    asked = read.request
    writer = wire.CompletionWriter(
        id=f"cmpl-{secrets.token_hex(12)}",
        created=int(time.time()),
        model=asked.model,
        fingerprint=service.fingerprint(spec),
    )
    exchange = _Exchange(service, spec, jobs, writer, wire.choices(asked))
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
        exchange.service.writer(exchange.spec, jobs[0].caller) as batcher,
        aclosing(merged(batcher, jobs)) as news,
    ):
        async for each in news:
            usage = summed(usage, each)
            if isinstance(each, Delta):
                choices[each.index].add(each)
    started = metrics.now()
    each_token = 0 if jobs[0].logprobs is None else 1 + jobs[0].logprobs
    tokens = usage.prompt_tokens + usage.completion_tokens  # an echo has the prompt's too
    body = await written(
        lambda: orjson.dumps(writer.completion(choices, usage)), tokens * each_token
    )
    jobs[0].caller.timings.add(Stage.SERIALISE, metrics.now() - started)
    return body


async def _events(exchange: _Exchange, *, with_usage: bool) -> AsyncGenerator[bytes, None]:
    jobs, writer = exchange.jobs, exchange.writer
    usage = Usage(0)
    async with (
        exchange.service.writer(exchange.spec, jobs[0].caller) as batcher,
        aclosing(merged(batcher, jobs)) as news,
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
        last = writer.usage(usage, timing.field(jobs[0].caller.timings))
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


async def merged(
    batcher: GenerationBatcher, jobs: Sequence[GenerateJob]
) -> AsyncGenerator[Usage | Delta, None]:
    """Give the usage of every prompt and every delta as it comes, from some jobs at a time.

    Choices are numbered prompt by prompt. Nothing is given before each of the first jobs has
    been accepted, or found the queue full of tokens. The first error ends all jobs, and so does
    closing the generator; but of a full queue only the first job tells: the others ask once it was
    let in, and wait for room until the deadline.
    """
    news: asyncio.Queue[Usage | Delta | asyncio.Task[None]] = asyncio.Queue()
    waiting = iter(enumerate(jobs))
    workers_wanted = min(JOBS_AT_ONCE, len(jobs))
    unheard = set(range(workers_wanted))
    all_heard, first_in = asyncio.Event(), asyncio.Event()

    def heard(place: int) -> None:
        unheard.discard(place)
        if not unheard:
            all_heard.set()

    async def let_in(stack: AsyncExitStack, place: int, job: GenerateJob) -> Generation:
        if place == 0:
            return await stack.enter_async_context(batcher.generate(job))
        await first_in.wait()
        # Who has room must not wait for who has none.
        refused = partial(heard, place)
        return await stack.enter_async_context(batcher.generate(job, refused))

    async def work() -> None:
        for place, job in waiting:
            async with AsyncExitStack() as stack:
                generation = await let_in(stack, place, job)
                deltas = await stack.enter_async_context(aclosing(generation.deltas))
                first_in.set()
                heard(place)
                await all_heard.wait()
                news.put_nowait(generation.usage)
                async for delta in deltas:
                    news.put_nowait(replace(delta, index=place * job.n + delta.index))

    workers = [asyncio.create_task(work()) for _ in range(workers_wanted)]
    for worker in workers:
        worker.add_done_callback(news.put_nowait)
    under_way = len(workers)
    try:
        while under_way:
            each = await news.get()
            if isinstance(each, asyncio.Task):
                each.result()  # raises what ended it, if anything did
                under_way -= 1
            else:
                yield each
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
