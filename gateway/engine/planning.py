"""A job becomes rows: its prompt rendered, encoded and measured."""

from dataclasses import replace

from gateway.engine.chat import ChatTokenizer
from gateway.engine.grammar.structured import Structured
from gateway.errors import BadRequest, ContextLengthExceeded
from gateway.jobs import GenerateJob, RowJob, Sampling


def planned(
    job: GenerateJob,
    chat: ChatTokenizer,
    structured: Structured,
    max_context: int,
    vocab_size: int,
) -> list[RowJob]:
    """Give one row a choice. Safe on any thread.

    Raises BadRequest for what the template refuses, ContextLengthExceeded for a prompt that
    leaves no room for one token.
    """
    prompt = chat.encode(job)
    is_bare = job.prompt is not None
    noun = "prompt" if is_bare else "messages"
    room = max_context - len(prompt)
    if room < 1:
        raise ContextLengthExceeded(max_context, len(prompt), param=noun, noun=noun)
    if not prompt:
        raise BadRequest("The prompt is empty.", param=noun)
    if not all(0 <= token < vocab_size for token in prompt):
        raise BadRequest(f"Token ids are 0 to {vocab_size - 1}.", param=noun)
    row = RowJob(
        prompt=prompt,
        max_tokens=room if job.max_tokens is None else min(job.max_tokens, room),
        sampling=job.sampling,
        stop=job.stop,
        logprobs=job.logprobs,
        calling=job.calling,
        grammar=structured.grammar(job),
        is_open=job.max_tokens is None,
        is_bare=is_bare,
        is_thinking=not is_bare and chat.is_thinking(prompt),
        may_think=not is_bare and chat.may_think(prompt),
    )
    return [replace(row, sampling=_nth(job.sampling, i)) for i in range(job.n)]


def _nth(sampling: Sampling, index: int) -> Sampling:
    """Give choice `index` a seed of its own; the first keeps the caller's."""
    if sampling.seed is None or index == 0:
        return sampling
    return replace(sampling, seed=sampling.seed + index)
