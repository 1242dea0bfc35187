"""The requests and answers of POST /v1/completions."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, NotRequired, cast

import orjson
from pydantic import Field
from typing_extensions import TypedDict

from gateway.clock import Timings
from gateway.errors import BadRequest
from gateway.errors import Part as ErrorPart
from gateway.jobs import Caller
from gateway.jobs.chat import Delta, FinishReason, GenerateJob, Sampling, TokenLogprob
from gateway.wire.answers import Answer, ChunkWriter, Event
from gateway.wire.bounds import Label
from gateway.wire.generation import (
    CompletionUsage,
    Heading,
    MaxTokensOrZero,
    SchemaVerdict,
    ServiceTier,
    StreamOptions,
    StructuredRequest,
    usage_dict,
)
from gateway.wire.validation import CharBounds, Inputs

MAX_CHOICES = 4096


class CompletionRequest(StructuredRequest):
    """A request for text completions."""

    harmless = frozenset(
        {
            "metadata", "prompt_cache_key", "safety_identifier", "store", "user",
        }
    )  # fmt: skip
    refused: ClassVar = {
        "suffix": "This gateway only continues a prompt; it can't fill a gap before a suffix.",
        "prompt_logprobs": "Ask for them with 'echo' and 'logprobs'.",
        "use_beam_search": "This gateway only samples.",
    }
    neutral: ClassVar = {
        "suffix": ("",),
        "use_beam_search": (False,),
    }
    example: ClassVar = {"prompt": "Once"}

    model: Annotated[Label, Field(min_length=1)]
    prompt: Inputs
    max_tokens: MaxTokensOrZero = 16
    n: Annotated[int, Field(ge=1, le=128)] = 1
    best_of: Annotated[int, Field(ge=1)] | None = None
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    service_tier: ServiceTier = "auto"

    def param_of(self, part: ErrorPart) -> str:
        return self.form()[0] if part == "answer_form" else part


def to_jobs(
    request: CompletionRequest,
    caller: Caller,
    defaults: Sampling,
    *,
    bounds: CharBounds,
) -> list[GenerateJob]:
    """Return one job for each prompt.

    Raises BadRequest for fields that cannot be served together.
    """
    _check(request, bounds)
    _, grammar = request.form()
    if grammar is not None and grammar.kind == "json_schema":
        grammar = replace(grammar, strict=True)  # these answers have no field for a verdict
    prompts: list[Any] = list(request.prompt)
    caller.timings.parallel = [Timings() for _ in prompts[1:]]
    return [
        GenerateJob(
            # Jobs that run in parallel need separate timings.
            caller=replace(caller, timings=timings),
            prompt=prompt,
            sampling=request.sampling(defaults),
            max_tokens=request.max_tokens,
            stop=request.stop,
            n=request.n,
            grammar=grammar,
            logprobs=request.logprobs,
            # The engine echoes ids, and text with logprobs. CompletionWriter echoes other text.
            echo=request.echo and (request.logprobs is not None or not isinstance(prompt, str)),
        )
        for prompt, timings in zip(prompts, [caller.timings, *caller.timings.parallel], strict=True)
    ]


def _check(request: CompletionRequest, bounds: CharBounds) -> None:
    if request.best_of not in (None, request.n):
        raise BadRequest(
            "Invalid 'best_of': this gateway returns every answer that it generates, so 'best_of' "
            f"should equal 'n', which is {request.n}.",
            param="best_of",
        )
    if len(request.prompt) * request.n > MAX_CHOICES:
        raise BadRequest(
            f"Invalid 'n': all prompts together ask for more than {MAX_CHOICES} choices.",
            param="n",
        )
    if request.max_tokens == 0 and not request.echo:
        raise BadRequest(
            "Invalid 'max_tokens': 0 is only allowed with 'echo', which returns the prompt.",
            param="max_tokens",
            code="integer_below_min_value",
        )
    texts = [prompt for prompt in request.prompt if isinstance(prompt, str)]
    bounds.check(texts, param="prompt", noun="A prompt")


class TextLogprobs(TypedDict):
    """The tokens of a text with their logprobs, in four lists of the same length."""

    tokens: list[str]
    token_logprobs: list[float | None]  # null for the first token of an echoed prompt
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(TypedDict):
    """One continuation of a prompt, or its new part in a stream."""

    text: str
    index: int
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None


class Completion(Heading):
    """A whole text completion, or one event of its stream."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: NotRequired[CompletionUsage]
    timings: NotRequired[Mapping[str, float]]


class CompletionWriter(ChunkWriter):
    """Writes a text completion or its chunks."""

    chunk_object = "text_completion"

    def __init__(self, request: CompletionRequest, heading: Heading, timings: Timings) -> None:
        super().__init__(heading, timings, has_usage=request.stream_options.include_usage)
        has_logprobs = request.logprobs is not None
        # The choices are in the order of the prompts.
        self._choices: list[TextChoiceWriter] = []
        for index in range(len(request.prompt) * request.n):
            prompt = request.prompt[index // request.n]  # a delta has the text of token ids
            echo = prompt if request.echo and isinstance(prompt, str) else ""
            self._choices.append(TextChoiceWriter(index, echo=echo, with_logprobs=has_logprobs))

    def add(self, delta: Delta, verdict: SchemaVerdict | None = None) -> Sequence[Event]:
        choice = self._choices[delta.index].add(delta)
        is_empty = not (choice["text"] or delta.logprobs or delta.finish_reason is not None)
        if is_empty:
            return []
        return [self._chunk([choice])]

    def whole(self, answer: Answer) -> Completion:
        for delta in chain.from_iterable(answer.choices):
            self._choices[delta.index].add(delta)
        # Each choice is dumped by itself, since orjson holds the GIL during a dump.
        choices_json = [orjson.Fragment(orjson.dumps(choice.to_dict())) for choice in self._choices]
        completion = {**self._chunk(choices_json), "usage": usage_dict(answer.usage)}
        return cast(Completion, completion)


class TextChoiceWriter:
    """Builds one choice, whose text begins with `echo`."""

    def __init__(self, index: int, *, echo: str, with_logprobs: bool) -> None:
        self._index = index
        self._texts: list[str] = []
        self._echo = echo
        self._offset = len(echo)
        self._with_logprobs = with_logprobs
        self._scored: list[_ScoredToken] = []
        self._finish_reason: FinishReason | None = None

    def add(self, delta: Delta) -> TextChoice:
        echo, self._echo = self._echo, ""
        scored: list[_ScoredToken] = []
        if delta.prompt is not None:
            texts = delta.prompt.texts
            echo = echo or "".join(texts)
            self._offset = 0
            scored += self._score(texts, [None, *delta.prompt.logprobs])
            self._offset = len(echo)
        text = echo + delta.text
        self._texts.append(text)
        scored += self._score([token.chosen.token for token in delta.logprobs], delta.logprobs)
        self._scored += scored
        self._finish_reason = delta.finish_reason
        return self._choice(text, scored)

    def to_dict(self) -> TextChoice:
        return self._choice("".join(self._texts), self._scored)

    def _choice(self, text: str, scored: Sequence["_ScoredToken"]) -> TextChoice:
        logprobs: TextLogprobs | None = None
        if self._with_logprobs:
            logprobs = {
                "tokens": [token.text for token in scored],
                "token_logprobs": [token.logprob for token in scored],
                "top_logprobs": [token.top for token in scored],
                "text_offset": [token.offset for token in scored],
            }
        return {
            "text": text,
            "index": self._index,
            "logprobs": logprobs,
            "finish_reason": self._finish_reason,
        }

    def _score(
        self, texts: Sequence[str], logprobs: Sequence[TokenLogprob | None]
    ) -> Iterator["_ScoredToken"]:
        for text, logprob in zip(texts, logprobs, strict=False):
            if logprob is None:
                yield _ScoredToken(text, None, None, self._offset)
            else:
                top = _logprobs_by_text(logprob)
                yield _ScoredToken(text, logprob.chosen.logprob, top, self._offset)
            self._offset += len(text)


class _ScoredToken(NamedTuple):
    text: str
    logprob: float | None
    top: dict[str, float] | None
    offset: int  # characters before the token


def _logprobs_by_text(token: TokenLogprob) -> dict[str, float]:
    # If several tokens have the same text, the likeliest is written last and is kept.
    by_text = {token.chosen.token: token.chosen.logprob}
    for likelihood in reversed(token.top):
        by_text[likelihood.token] = likelihood.logprob
    return dict(sorted(by_text.items(), key=lambda item: -item[1]))
