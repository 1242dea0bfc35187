"""POST /v1/completions: prompts → GenerateJobs; deltas → a completion or its chunks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from typing import Annotated, Any, ClassVar, Literal, NotRequired, cast

import orjson
from pydantic import Field
from typing_extensions import TypedDict

from gateway.errors import BadRequest
from gateway.errors import Part as ErrorPart
from gateway.jobs import (
    Caller,
    Delta,
    EchoedPrompt,
    FinishReason,
    GenerateJob,
    Sampling,
    Timings,
    TokenLogprob,
)
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
    """What OpenAI's endpoint takes. `prompt` is always an array, of texts or of token ids."""

    harmless = frozenset(
        {
            "metadata", "prompt_cache_key", "safety_identifier", "store", "user",
        }
    )  # fmt: skip
    refused: ClassVar = {
        "suffix": "This gateway only writes on; it fills no gaps.",
        "prompt_logprobs": "Ask for them with 'echo' and 'logprobs'.",
        "use_beam_search": "This gateway samples.",
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
        if part == "answer_form":
            return self.form()[0]
        return part


def to_jobs(
    request: CompletionRequest,
    caller: Caller,
    defaults: Sampling,
    *,
    bounds: CharBounds,
) -> list[GenerateJob]:
    """Return one job for each prompt, each with `n` choices.

    Raises BadRequest for combinations that cannot be served.
    """
    _check(request, bounds)
    _, grammar = request.form()
    if grammar is not None and grammar.kind == "json_schema":
        grammar = replace(grammar, strict=True)  # this endpoint's answers have no verdict
    prompts: list[Any] = list(request.prompt)
    caller.timings.parallel = [Timings() for _ in prompts[1:]]
    return [
        GenerateJob(
            # The jobs run in parallel; the request's timings are those of the first.
            caller=replace(caller, timings=timings),
            prompt=prompt,
            sampling=request.sampling(defaults),
            max_tokens=request.max_tokens,
            stop=request.stop,
            n=request.n,
            grammar=grammar,
            logprobs=request.logprobs,
            # Echoing a text without logprobs needs no engine.
            echo=request.echo and (request.logprobs is not None or not isinstance(prompt, str)),
        )
        for prompt, timings in zip(prompts, [caller.timings, *caller.timings.parallel], strict=True)
    ]


def _check(request: CompletionRequest, bounds: CharBounds) -> None:
    if request.best_of not in (None, request.n):
        raise BadRequest(
            "Invalid 'best_of': this gateway makes no more answers than it gives, so it should "
            f"equal 'n', which is {request.n}.",
            param="best_of",
        )
    if len(request.prompt) * request.n > MAX_CHOICES:
        raise BadRequest(
            f"Invalid 'n': the prompts ask for more than {MAX_CHOICES} choices together.",
            param="n",
        )
    if request.max_tokens == 0 and not request.echo:
        raise BadRequest(
            "Invalid 'max_tokens': 0 asks for nothing, unless 'echo' gives the prompt back.",
            param="max_tokens",
            code="integer_below_min_value",
        )
    texts = [prompt for prompt in request.prompt if isinstance(prompt, str)]
    bounds.check(texts, param="prompt", noun="A prompt")


def _echo(request: CompletionRequest, index: int) -> str:
    """Return the prompt that a choice repeats, if any; that of token ids comes with a delta."""
    prompt = request.prompt[index]
    return prompt if request.echo and isinstance(prompt, str) else ""


class TextLogprobs(TypedDict):
    """Every token of a text, in four lists of one length.

    An echoed prompt's first token follows nothing: its logprobs are null.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(TypedDict):
    """One continuation; of a chunk, what is new in it."""

    text: str
    index: int
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None


class Completion(Heading):
    """Continuations of prompts; in a stream, an event."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: NotRequired[CompletionUsage]
    timings: NotRequired[Mapping[str, float]]


class CompletionWriter(ChunkWriter):
    """Writes a completion or its chunks."""

    chunk_object = "text_completion"

    def __init__(self, request: CompletionRequest, heading: Heading, timings: Timings) -> None:
        super().__init__(heading, timings, has_usage=request.stream_options.include_usage)
        # Those of the first prompt, those of the second, …
        self._choices = [
            TextChoiceWriter(
                index,
                echo=_echo(request, index // request.n),
                with_logprobs=request.logprobs is not None,
            )
            for index in range(len(request.prompt) * request.n)
        ]

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
    """Builds one choice from its deltas. Its text begins with the prompt, if that is echoed."""

    def __init__(self, index: int, *, echo: str, with_logprobs: bool) -> None:
        self._index = index
        self._texts: list[str] = []
        self._echo = echo
        self._offset = len(echo)
        self._with_logprobs = with_logprobs
        self._logprobs = _no_logprobs()
        self._finish_reason: FinishReason | None = None

    def add(self, delta: Delta) -> TextChoice:
        """Add a delta, and return the chunk's choice."""
        echo, self._echo = self._echo, ""
        new = _no_logprobs()
        if delta.prompt is not None:
            echo = echo or "".join(delta.prompt.texts)
            new = _prompt_logprobs(delta.prompt)
            self._offset = len(echo)
        text = echo + delta.text
        self._texts.append(text)
        _extend(new, self._token_logprobs(delta.logprobs))
        _extend(self._logprobs, new)
        self._finish_reason = delta.finish_reason
        return self._choice(text, new)

    def to_dict(self) -> TextChoice:
        return self._choice("".join(self._texts), self._logprobs)

    def _choice(self, text: str, logprobs: TextLogprobs) -> TextChoice:
        return {
            "text": text,
            "index": self._index,
            "logprobs": logprobs if self._with_logprobs else None,
            "finish_reason": self._finish_reason,
        }

    def _token_logprobs(self, tokens: Sequence[TokenLogprob]) -> TextLogprobs:
        new = _no_logprobs()
        for token in tokens:
            new["tokens"].append(token.chosen.token)
            new["token_logprobs"].append(token.chosen.logprob)
            new["top_logprobs"].append(_logprobs_by_text(token))
            new["text_offset"].append(self._offset)
            self._offset += len(token.chosen.token)
        return new


def _prompt_logprobs(prompt: EchoedPrompt) -> TextLogprobs:
    """Return the logprobs of a prompt's tokens; the first token has none."""
    starts = accumulate(map(len, prompt.texts), initial=0)
    return {
        "tokens": list(prompt.texts),
        "token_logprobs": [None, *(token.chosen.logprob for token in prompt.logprobs)],
        "top_logprobs": [None, *map(_logprobs_by_text, prompt.logprobs)],
        "text_offset": list(starts)[:-1],
    }


def _no_logprobs() -> TextLogprobs:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _extend(logprobs: TextLogprobs, new: TextLogprobs) -> None:
    logprobs["tokens"] += new["tokens"]
    logprobs["token_logprobs"] += new["token_logprobs"]
    logprobs["top_logprobs"] += new["top_logprobs"]
    logprobs["text_offset"] += new["text_offset"]


def _logprobs_by_text(token: TokenLogprob) -> dict[str, float]:
    """Return logprobs by text, likeliest first. Of tokens with the same text the chosen one's
    counts, else the likeliest one's.
    """
    by_text = {token.chosen.token: token.chosen.logprob}
    for likelihood in reversed(token.top):
        by_text[likelihood.token] = likelihood.logprob
    return dict(sorted(by_text.items(), key=lambda item: -item[1]))
