"""Runs the jobs of one request to a chat model: completions or label scores."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from functools import partial

from gateway.jobs.chat import Delta, GenerateJob, Usage
from gateway.serving.generation.batcher import ChatBatcher

JOBS_AT_ONCE = 16


async def generate_many(
    batcher: ChatBatcher, jobs: Sequence[GenerateJob]
) -> AsyncGenerator[Usage | Delta, None]:
    """Run the jobs, and yield the usage of each job and all their deltas.

    Choices are numbered across jobs. Only the first job raises Overloaded if the queue is full; the
    other jobs wait for a place. The first error ends all jobs.
    """
    outputs: asyncio.Queue[Usage | Delta | asyncio.Task[None]] = asyncio.Queue()
    queue = iter(enumerate(jobs))
    slots = min(JOBS_AT_ONCE, len(jobs))
    untried = set(range(slots))
    # Set as soon as every job of the first `slots` has been queued or has found the queue full.
    # Nothing is yielded earlier.
    all_tried = asyncio.Event()
    first_admitted = asyncio.Event()  # the other jobs wait for the first one

    def note_try(number: int) -> None:
        untried.discard(number)
        if not untried:
            all_tried.set()

    async def work() -> None:
        for number, job in queue:
            on_full = None
            if number > 0:
                await first_admitted.wait()
                # A job that finds the queue full counts as tried, so that others don't wait for it.
                on_full = partial(note_try, number)
            async with (
                batcher.generate(job, on_full) as generation,
                contextlib.aclosing(generation.deltas) as deltas,
            ):
                first_admitted.set()
                note_try(number)
                await all_tried.wait()
                outputs.put_nowait(generation.usage)
                async for delta in deltas:
                    outputs.put_nowait(replace(delta, index=number * job.n + delta.index))
                await generation.checker.require_fits()

    workers = [asyncio.create_task(work()) for _ in range(slots)]
    for worker in workers:
        worker.add_done_callback(outputs.put_nowait)
    running = len(workers)
    try:
        while running:
            output = await outputs.get()
            if isinstance(output, asyncio.Task):
                output.result()
                running -= 1
            else:
                yield output
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


async def score_labels(
    batcher: ChatBatcher, jobs: Sequence[GenerateJob]
) -> tuple[Sequence[Sequence[float]], Usage]:
    """Return the logprobs of each question's labels, and the usage of all jobs together.

    Questions are numbered across jobs.
    """
    questions = [question for job in jobs for question in job.questions]
    counts = {question.number: len(question.labels) for question in questions}
    logprobs = [[0.0] * counts[number] for number in range(len(counts))]
    usage = Usage(0)
    async with contextlib.aclosing(generate_many(batcher, jobs)) as outputs:
        async for output in outputs:
            prompt = output.prompt_tokens if isinstance(output, Usage) else 0
            usage = Usage(
                usage.prompt_tokens + prompt,
                cached_tokens=usage.cached_tokens + output.cached_tokens,
            )
            if isinstance(output, Delta) and output.judgement is not None:
                for label, logprob in output.judgement.logprobs:
                    logprobs[output.judgement.question][label] += logprob
    return logprobs, usage
