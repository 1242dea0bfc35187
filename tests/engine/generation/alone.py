"""A model's answer to one sequence alone, and whether an engine's deltas agree with it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from gateway.engine.answers.output_parts import TokenScores
from gateway.engine.generation.decode_batch import constrain
from gateway.engine.generation.engine import GenerationEngine
from gateway.engine.generation.label_scoring import score_labels
from gateway.engine.generation.sampling import score
from gateway.jobs.chat import Delta, EchoedPrompt, Judgement, TokenLogprob
from gateway.jobs.steps import SequenceParams
from tests.engine.generation.ties import may_draw

NEVER = -40.0  # logprobs below it are as good as none, and their rounding is large


@dataclass
class Told:
    """All that a sequence was told, put together; a call's random id aside."""

    text: str = ""
    reasoning: str = ""
    tokens: int = 0
    reasoning_tokens: int = 0
    end: str | None = None
    stop: str | None = None
    error: str | None = None
    calls: dict[int, str] = field(default_factory=dict)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt: EchoedPrompt | None = None
    judgement: Judgement | None = None
    cached: int = 0

    @property
    def is_over(self) -> bool:
        return self.end is not None or self.error is not None

    @property
    def words(self) -> tuple[Any, ...]:
        """Return the parts that are to be equal to the letter."""
        ends = (self.end, self.stop, self.error)
        counts = (self.tokens, self.reasoning_tokens)
        shown = [(each.chosen.token, each.chosen.bytes) for each in self.logprobs]
        return (*ends, *counts, self.text, self.reasoning, self.calls, shown)

    def add(self, delta: Delta) -> None:
        assert not self.is_over, "nothing comes after the end"
        self.text += delta.text
        self.reasoning += delta.reasoning
        self.tokens += delta.tokens
        self.reasoning_tokens += delta.reasoning_tokens
        self.end, self.stop, self.error = delta.finish_reason, delta.stop, delta.error
        if (call := delta.call) is not None:
            self.calls[call.index] = (
                self.calls.get(call.index, "") + (call.name or "") + call.arguments
            )
        self.logprobs += delta.logprobs
        self.prompt = delta.prompt or self.prompt
        self.judgement = delta.judgement or self.judgement
        self.cached += delta.cached_tokens


class Alone:
    """A model that reads one sequence at a time, whole. Its logits may be moved by `rounding`."""

    def __init__(self, engine: GenerationEngine, rounding: float) -> None:
        self.engine = engine
        self._model: Any = engine._model
        self._rounding = rounding

    def check(
        self,
        params: SequenceParams,
        tokens: Sequence[int],
        told: Told,
        *,
        is_ended_early: bool = False,
    ) -> None:
        """Fail unless each token of an answer could be drawn, and the deltas agree with them."""
        prompt, engine = list(params.prompt), self.engine
        row = engine._sequences.begin(0, params)
        read = mx.array([[*prompt, *tokens[:-1]]])
        logits = self._model(read, cache=make_prompt_cache(self._model))[0].astype(mx.float32)
        expected = Told()
        if params.step is not None and told.is_over:
            (delta,) = score_labels([row], logits[-1:])
            expected.add(delta)
        if params.max_tokens == 0 and told.is_over:
            expected.end = "length"
        for at, token in enumerate(tokens):
            last = len(prompt) + at - 1
            allowed = constrain(engine._setup.structured, [row], logits[last : last + 1])
            assert may_draw(row.sampler, np.array(allowed[0]), at, token, self._rounding), (
                f"token {at}, {token}, cannot be drawn: {mx.argmax(allowed).item()} is likeliest"
            )
            assert token not in row.barred or row.matcher is not None, "it ended too soon"
            scores = self._score(allowed, token, params.logprobs)
            for delta in row.to_deltas(row.append(token), scores):
                expected.add(delta)
        for delta in row.end_early() if is_ended_early else []:
            expected.add(delta)
        assert told.words == expected.words
        self._check_logprobs(told.logprobs, expected.logprobs)
        self._check_judgement(told.judgement, expected.judgement)
        if params.echoed is not None and (tokens or told.is_over):
            self._check_echo(params, told.prompt, logits)

    def continued(self, context: list[int], count: int) -> list[int]:
        """Return the `count` likeliest tokens after a context, one after another."""
        cache, tokens = make_prompt_cache(self._model), list[int]()
        read = context
        while len(tokens) < count:
            logits = self._model(mx.array([read]), cache=cache)[0, -1]
            read = [int(logits.argmax().item())]
            tokens += read
        return tokens

    def _score(self, logits: mx.array, token: int, wanted: int | None) -> TokenScores | None:
        if wanted is None:
            return None
        found: Any = score(logits, mx.array([token]), [0], max(wanted, 1))
        chosen, ids, logprobs = (
            each.tolist()[0] for each in (found.chosen, found.ids, found.logprobs)
        )
        return TokenScores(chosen, ids, logprobs, wanted)

    def _check_logprobs(
        self, found: Sequence[TokenLogprob], expected: Sequence[TokenLogprob]
    ) -> None:
        for one, other in zip(found, expected, strict=True):
            self._check_close([one.chosen.logprob], [other.chosen.logprob])
            self._check_close(
                [each.logprob for each in one.top], [each.logprob for each in other.top]
            )

    def _check_judgement(self, found: Judgement | None, expected: Judgement | None) -> None:
        if found is None or expected is None:
            assert found is expected
            return
        assert found.question == expected.question
        assert [place for place, _ in found.logprobs] == [place for place, _ in expected.logprobs]
        self._check_close(*([value for _, value in each.logprobs] for each in (found, expected)))

    def _check_echo(
        self, params: SequenceParams, found: EchoedPrompt | None, logits: mx.array
    ) -> None:
        assert found is not None
        assert found.texts == params.echoed
        follows = list(params.prompt[1:])
        if params.logprobs is None or not follows:
            assert not found.logprobs
            return
        scores = score(logits, mx.array(follows), range(len(follows)), 1)
        expected: Any = scores.chosen.tolist()
        self._check_close([each.chosen.logprob for each in found.logprobs], expected)

    def _check_close(self, found: Sequence[float], expected: Sequence[float]) -> None:
        """Fail unless logprobs are equal but for rounding: that of a logit, and of their sum."""
        near = pytest.approx(
            [max(NEVER, each) for each in expected], abs=4 * self._rounding, nan_ok=False
        )
        assert [max(NEVER, each) for each in found] == near
        assert not any(map(math.isnan, found))
