"""Preparation of a job's sequences: prompts, limits and sampling parameters."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gateway.engine.answers.response_template import ResponseTemplate
from gateway.engine.generation.label_scoring import prepare_questions
from gateway.engine.grammar.structured import StructuredOutput
from gateway.engine.models.checkpoint import Checkpoint
from gateway.engine.models.gguf.checkpoint import GgufCheckpoint
from gateway.engine.prompting.chat_tokenizer import ChatTokenizer
from gateway.engine.vision.prompts import ImageFormat
from gateway.errors import BadRequest, ContextLengthExceeded
from gateway.jobs import TokenIds
from gateway.jobs.chat import GenerateJob, Sampling
from gateway.jobs.images import FIRST_IMAGE_ID, ImageRefused
from gateway.jobs.steps import SequenceParams, Verified


@dataclass(frozen=True, slots=True)
class ChatSetup:
    """Everything about a chat model except its weights."""

    checkpoint: Checkpoint | GgufCheckpoint
    chat: ChatTokenizer
    structured: StructuredOutput
    max_context: int
    vocab_size: int
    sampling_defaults: Mapping[str, float]
    unread_formats: Sequence[str] = ()  # see EngineFacts for this field and the next two
    notes: Sequence[str] = ()
    verified: Verified = "no"
    reader: ResponseTemplate | None = None  # set if no built-in format parses the answers
    images: ImageFormat | None = None  # None if the model reads only text

    @property
    def reads_whole(self) -> bool:
        return self.reader is not None and self.reader.problem is None


def prepare(job: GenerateJob, setup: ChatSetup) -> list[SequenceParams]:
    """Return the parameters of a job's sequences: one per choice or per label step.

    Safe on any thread. Raises BadRequest, ImageRefused or ContextLengthExceeded.
    """
    chat = setup.chat
    if job.questions:
        return prepare_questions(job, chat, setup.max_context, setup.vocab_size)
    if job.images and setup.images is None:
        image = job.images[0]
        raise ImageRefused(image.kind, image.place, image.place)
    prompt = chat.prompt(job, setup.images)
    max_tokens = _answer_limit(job, prompt.ids, setup)
    sampling = _complete(job.sampling, setup.sampling_defaults)
    grammar = setup.structured.grammar(job)
    if job.continues and grammar is not None:
        raise BadRequest(
            "An answer that is continued cannot be held to a form, nor to a strict tool.",
            part="prompt",
        )
    is_free = grammar is None and job.prompt is None and not job.continues
    reads_whole = is_free and setup.reads_whole
    is_unread = setup.reader is not None and not setup.reads_whole
    budget = job.thinking_budget
    if budget is not None and (job.prompt is not None or not chat.answers.ends_thoughts):
        budget = None
    params = SequenceParams(
        prompt=prompt.ids,
        max_tokens=max_tokens,
        sampling=sampling,
        stop=job.stop,
        logprobs=job.logprobs,
        echoed=chat.texts_of(prompt.ids, job.prompt) if job.echo else None,
        calling=job.calling,
        grammar=grammar,
        is_open=job.max_tokens is None,
        is_bare=job.prompt is not None,
        is_continued=job.continues,
        is_thinking=prompt.is_thinking,
        may_think=prompt.may_think,
        opening=prompt.opening,
        thinking_budget=budget,
        is_either=job.grammar is not None,
        calls_are_text=not reads_whole and _calls_are_text(job, setup),
        thoughts_are_text=job.prompt is None
        and (is_unread or "reasoning_parser" in setup.unread_formats),
        reads_whole=reads_whole,
        earlier_calls=sum(len(turn.get("tool_calls") or ()) for turn in job.messages),
        routing_keys=job.caller.routing_keys.ends(len(prompt.ids)),
        adapter=job.adapter,
        cache_salt=job.caller.cache_salt,
        images=prompt.images,
    )
    return [
        replace(params, index=i, sampling=_sampling_of_choice(sampling, i)) for i in range(job.n)
    ]


def _calls_are_text(job: GenerateJob, setup: ChatSetup) -> bool:
    if job.calling is None or job.calling.forced:
        return False
    return not setup.chat.answers.reads_calls or "tool_parser" in setup.unread_formats


def _answer_limit(job: GenerateJob, prompt: TokenIds, setup: ChatSetup) -> int:
    """Return the answer's token limit. Raises BadRequest and ContextLengthExceeded."""
    room = setup.max_context - len(prompt)
    least = 0 if job.max_tokens == 0 else 1
    if room < least:
        noun = "messages" if job.prompt is None else "prompt"
        raise ContextLengthExceeded(setup.max_context, len(prompt), noun=noun)
    if not prompt:
        raise BadRequest("The prompt is empty.", part="prompt")
    image_ids = FIRST_IMAGE_ID if job.images and job.prompt is None else math.inf
    if not all(0 <= token < setup.vocab_size or token >= image_ids for token in prompt):
        raise BadRequest(f"Token ids are 0 to {setup.vocab_size - 1}.", part="prompt")
    limit = room if job.max_tokens is None else min(job.max_tokens, room)
    if job.sampling.min_tokens > limit:
        raise BadRequest(
            f"Invalid 'min_tokens': the answer may have {limit} tokens at most.", part="min_tokens"
        )
    return limit


def _complete(sampling: Sampling, defaults: Mapping[str, float]) -> Sampling:
    """Fill the unset sampling fields with the model's defaults."""
    filled: dict[str, Any] = {name: defaults[name] for name in sampling.unset & defaults.keys()}
    return replace(sampling, **filled, unset=frozenset())


def _sampling_of_choice(sampling: Sampling, index: int) -> Sampling:
    """Add the choice's index to the caller's seed, so that choices differ."""
    if sampling.seed is None or index == 0:
        return sampling
    return replace(sampling, seed=sampling.seed + index)
