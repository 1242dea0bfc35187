"""POST /v1/completions: prompts → GenerateJobs; their deltas → choices, whole or in chunks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Annotated, Any, ClassVar

import orjson
from pydantic import Field, WithJsonSchema, field_validator

from gateway.errors import BadRequest
from gateway.jobs import (
    Caller,
    Delta,
    EchoedPrompt,
    GenerateJob,
    Sampling,
    Timings,
    TokenLogprob,
    Usage,
)
from gateway.wire import inputs
from gateway.wire.bounds import Label
from gateway.wire.chat import StreamOptions
from gateway.wire.chat_answers import usage_json
from gateway.wire.formats import FormedRequest
from gateway.wire.reading import CharBounds
from gateway.wire.sampling import MaxTokensOrZero, ServiceTier

MAX_CHOICES = 4096


_INVALID = (
    "it should be a text, token ids, or an array of texts or of arrays of token ids: "
    f"1 to {inputs.MOST} prompts, none of them empty"
)


class CompletionRequest(FormedRequest):
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
    prompt: Annotated[Any, WithJsonSchema(inputs.SCHEMA)]
    max_tokens: MaxTokensOrZero = 16
    n: Annotated[int, Field(ge=1, le=128)] = 1
    best_of: Annotated[int, Field(ge=1)] | None = None
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    service_tier: ServiceTier = "auto"

    @field_validator("prompt")
    @classmethod
    def _some_prompts(cls, given: object) -> object:
        try:
            return inputs.rows(given)
        except ValueError as error:
            raise ValueError(f"{_INVALID}; {error}") from None


def to_jobs(
    request: CompletionRequest,
    caller: Caller,
    defaults: Sampling,
    *,
    bounds: CharBounds,
) -> list[GenerateJob]:
    """Translate: one job a prompt, each with `n` choices.

    Raises BadRequest for combinations that cannot be served.
    """
    _check(request, bounds)
    grammar_param, grammar = request.form()
    if (
        grammar is not None and grammar.kind == "json_schema"
    ):  # answers to bare prompts come without a verdict
        grammar = replace(grammar, strict=True)
    caller.timings.beside = [Timings() for _ in request.prompt[1:]]
    return [
        GenerateJob(
            # They run side by side, and what is timed is the first.
            caller=replace(caller, timings=timings),
            prompt=prompt,
            sampling=request.sampling(defaults),
            max_tokens=request.max_tokens,
            stop=request.stop,
            n=request.n,
            grammar=grammar,
            grammar_param=grammar_param,
            logprobs=request.logprobs,
            # A text that is only repeated needs no engine.
            echo=request.echo and (request.logprobs is not None or not isinstance(prompt, str)),
        )
        for prompt, timings in zip(
            request.prompt, [caller.timings, *caller.timings.beside], strict=True
        )
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


def choices(request: CompletionRequest) -> list["Choice"]:
    """Give the choices to be filled: those of the first prompt, those of the second, …"""
    return [
        Choice(
            index,
            echoed=_echoed(request, index // request.n),
            with_logprobs=request.logprobs is not None,
        )
        for index in range(len(request.prompt) * request.n)
    ]


def _echoed(request: CompletionRequest, index: int) -> str:
    """Return the text that a choice begins with, as far as it is known: token ids have none yet."""
    prompt = request.prompt[index]
    return prompt if request.echo and isinstance(prompt, str) else ""


@dataclass(frozen=True, slots=True)
class Heading:
    """What every piece of one answer repeats."""

    id: str
    created: int
    model: str
    fingerprint: str

    def whole(self, choices: Sequence["Choice"], usage: Usage) -> bytes:
        """Write the whole answer."""
        # Each by itself: nobody else has a turn while one is being written.
        parts = [orjson.Fragment(orjson.dumps(choice.whole())) for choice in choices]
        return self._write(parts, usage_json(usage))

    def chunk(self, choice: dict[str, Any]) -> bytes:
        """Write what is new in one choice."""
        return self._write([choice])

    def usage(self, usage: Usage, timings: Mapping[str, float]) -> bytes:
        """Write the chunk that `include_usage` asks for: no choices, and the last."""
        return self._write([], usage_json(usage), timings)

    def _write(
        self,
        choices: Sequence[dict[str, Any] | orjson.Fragment],
        usage: dict[str, Any] | None = None,
        timings: Mapping[str, float] | None = None,
    ) -> bytes:
        answer = {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }
        if usage is not None:
            answer |= {"usage": usage} if timings is None else {"usage": usage, "timings": timings}
        return orjson.dumps(answer)


class Choice:
    """One choice as it grows. An echoed prompt is the beginning of its text."""

    def __init__(self, index: int, *, echoed: str, with_logprobs: bool) -> None:
        self._index = index
        self._texts: list[str] = []
        self._echoed = echoed
        self._offset = len(echoed)
        self._with_logprobs = with_logprobs
        self._logprobs = _no_logprobs()
        self._finish: str | None = None

    def add(self, delta: Delta) -> dict[str, Any]:
        """Take the next delta, and give what it adds."""
        echoed, self._echoed = self._echoed, ""
        new = _no_logprobs()
        if delta.prompt is not None:
            echoed = echoed or "".join(delta.prompt.texts)
            new = _of_prompt(delta.prompt)
            self._offset = len(echoed)
        text = echoed + delta.text
        self._texts.append(text)
        for name, values in self._scored(delta.logprobs).items():
            new[name] += values
        for name, values in new.items():
            self._logprobs[name] += values
        self._finish = delta.finish_reason
        return self._choice(text, new)

    def whole(self) -> dict[str, Any]:
        """Give the choice with all its text."""
        return self._choice("".join(self._texts), self._logprobs)

    def _choice(self, text: str, logprobs: dict[str, list[Any]]) -> dict[str, Any]:
        return {
            "text": text,
            "index": self._index,
            "logprobs": logprobs if self._with_logprobs else None,
            "finish_reason": self._finish,
        }

    def _scored(self, tokens: Sequence[TokenLogprob]) -> dict[str, list[Any]]:
        new = _no_logprobs()
        for token in tokens:
            new["tokens"].append(token.chosen.token)
            new["token_logprobs"].append(token.chosen.logprob)
            new["top_logprobs"].append(_by_text(token))
            new["text_offset"].append(self._offset)
            self._offset += len(token.chosen.token)
        return new


def _of_prompt(prompt: EchoedPrompt) -> dict[str, list[Any]]:
    """Write a prompt's tokens. The first follows nothing, so its logprob is null."""
    starts = accumulate(map(len, prompt.texts), initial=0)
    return {
        "tokens": list(prompt.texts),
        "token_logprobs": [None, *(token.chosen.logprob for token in prompt.logprobs)],
        "top_logprobs": [None, *map(_by_text, prompt.logprobs)],
        "text_offset": list(starts)[:-1],
    }


def _no_logprobs() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _by_text(token: TokenLogprob) -> dict[str, float]:
    """Of tokens with the same text the likelier is told; the chosen one always is."""
    by_text = {token.chosen.token: token.chosen.logprob}
    for likelihood in reversed(token.top):
        by_text[likelihood.token] = likelihood.logprob
    return dict(sorted(by_text.items(), key=lambda item: -item[1]))
