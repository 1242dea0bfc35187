"""A job → the sequences it asks for: its prompt rendered, encoded and measured."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gateway.engine.generation.label_scoring import prepare_questions
from gateway.engine.generation.sampling import Sampler
from gateway.engine.generation.sequence import Sequence
from gateway.engine.grammar.structured import StructuredOutput
from gateway.engine.prompting.chat_tokenizer import ChatTokenizer
from gateway.errors import BadRequest, ContextLengthExceeded
from gateway.jobs import GenerateJob, Sampling, SequenceParams


def prepare_sequences(
    job: GenerateJob,
    chat: ChatTokenizer,
    structured: StructuredOutput,
    max_context: int,
    vocab_size: int,
    own: Mapping[str, float],
) -> list[SequenceParams]:
    """Return the parameters of one sequence per choice, or per step into the labels of a job's
    questions. Safe on any thread.

    `own` are the sampling defaults of the model's files, for fields that the job leaves unset.
    Raises BadRequest for what the template refuses, ContextLengthExceeded for a prompt that leaves
    no room for one token.
    """
    if job.questions:
        return prepare_questions(job, chat, max_context, vocab_size)
    read = chat.prompt(job)
    prompt = read.ids
    is_bare = job.prompt is not None
    noun = "prompt" if is_bare else "messages"
    room = max_context - len(prompt)
    if room < (job.max_tokens != 0):
        raise ContextLengthExceeded(max_context, len(prompt), noun=noun)
    if not prompt:
        raise BadRequest("The prompt is empty.", part="prompt")
    if not all(0 <= token < vocab_size for token in prompt):
        raise BadRequest(f"Token ids are 0 to {vocab_size - 1}.", part="prompt")
    most = room if job.max_tokens is None else min(job.max_tokens, room)
    if job.sampling.min_tokens > most:
        raise BadRequest(
            f"Invalid 'min_tokens': the answer may have {most} tokens at most.", part="min_tokens"
        )
    sampling = _complete(job.sampling, own)
    grammar = structured.grammar(job)
    if job.continues and grammar is not None:
        raise BadRequest(
            "An answer that is continued cannot be held to a form, nor to a strict tool.",
            part="prompt",
        )
    row = SequenceParams(
        prompt=prompt,
        max_tokens=most,
        sampling=sampling,
        stop=job.stop,
        logprobs=job.logprobs,
        echoed=chat.texts_of(prompt, job.prompt) if job.echo else None,
        calling=job.calling,
        grammar=grammar,
        is_open=job.max_tokens is None,
        is_bare=is_bare,
        is_continued=job.continues,
        is_thinking=read.is_thinking,
        may_think=read.may_think,
        is_either=job.grammar is not None,
        calls_are_text=(
            job.calling is not None and not job.calling.forced and not chat.reads_calls
        ),
        earlier_calls=sum(len(turn.get("tool_calls") or ()) for turn in job.messages),
        beginning=job.caller.prefix_names.ends(len(prompt)),
        adapter=job.adapter,
    )
    return [replace(row, index=i, sampling=_sampling_of_choice(sampling, i)) for i in range(job.n)]


def begin_sequence(
    number: int, params: SequenceParams, chat: ChatTokenizer, vocab_size: int
) -> Sequence:
    """Return the sequence of these parameters, with nothing read yet."""
    return Sequence(
        number,
        params,
        Sampler(params.sampling, vocab_size, params.prompt),
        chat.output_processor(params),
        chat.eos_ids,
        chat.thinking(params),
    )


def _complete(sampling: Sampling, own: Mapping[str, float]) -> Sampling:
    """Fill in unset fields from the model's own defaults."""
    given: dict[str, Any] = {name: own[name] for name in sampling.unset & own.keys()}
    return replace(sampling, **given, unset=frozenset())


def _sampling_of_choice(sampling: Sampling, index: int) -> Sampling:
    """Return the sampling of choice `index`: only the first has the caller's own seed."""
    if sampling.seed is None or index == 0:
        return sampling
    return replace(sampling, seed=sampling.seed + index)
