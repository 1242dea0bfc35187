"""What a chat model is made to do: rows alone, rows of every kind together, and its speed."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

from gateway.bench.workloads import PERSON
from gateway.doctor import findings
from gateway.doctor.examination import Stage
from gateway.doctor.findings import Finding, Tolerance
from gateway.errors import EngineFailed
from gateway.jobs import (
    Caller,
    GenerateJob,
    Grammar,
    Sampling,
    SequenceDelta,
    SequenceParams,
    TokenLogprob,
)
from gateway.serving.ports import GenerationEngine

STAGES: Final = ("load", "batch", "alone", "together", "speed", "memory")
ROWS_AT_ONCE: Final = (1, 8)
TOKENS: Final = 24  # of each greedy answer; an end before them is not allowed
FORM_TOKENS: Final = 256  # more than the longest answer that the form allows has
STEPS: Final = 4  # that the first rows run before one leaves and others join
LIKELIEST: Final = 5
EXPECTED: Final = "Paris"
PROMPTS: Final = (
    "What is the capital of France?",
    "Count from one to twelve, in words.",
    "A gateway keeps one lane to its device, and every request waits its turn on it. Texts to "
    "embed arrive in storms, questions come one by one, and neither should keep the other waiting "
    "for long. Say in one sentence what the gateway has to take care of.",
)
_CALLER: Final = Caller(request_id="doctor", deadline=math.inf, allowed_s=math.inf)
_FORM: Final = Grammar("json_schema", json.dumps(PERSON), strict=True)
_GREEDY: Final = Sampling(temperature=0)
_SAMPLED: Final = Sampling(temperature=1, seed=7)


@dataclass(slots=True)
class Answer:
    """What a row has said so far, and in how many pieces."""

    text: str = ""
    pieces: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    is_whole: bool = False

    def add(self, delta: SequenceDelta) -> None:
        """Take what is new; raises EngineFailed."""
        if delta.error is not None:
            raise EngineFailed("the model", delta.error)
        self.text += delta.text
        self.pieces += 1
        self.logprobs += delta.logprobs
        self.is_whole = delta.finish_reason == "stop"


class GenerationTrial:
    """A chat engine on trial; `rate` gives tokens a second, so many rows at once.

    `knows_paris` says of a model that it is known to answer the first prompt rightly.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        allowed: Tolerance,
        rate: Callable[[int], float],
        *,
        dtype: str,
        template_args: Mapping[str, Any],
        prefill_chunk_tokens: int,
        knows_paris: bool,
    ) -> None:
        self.dtype = dtype
        self._engine = engine
        self._knows_paris = knows_paris
        self._allowed = allowed
        self._rate = rate
        self._template_args = template_args
        self._prefill_chunk_tokens = prefill_chunk_tokens

    def stages(self) -> Sequence[Stage]:
        """List what is tried, in order."""
        return (
            Stage("batch", self._batch),
            Stage("alone", self._answer),
            Stage("together", self._together),
            Stage("speed", self._speed),
        )

    def rest(self) -> None:
        """Let go of all but the weights."""
        self._engine.forget()

    def close(self) -> None:
        """Let go of the weights too."""
        self._engine.close()

    def _batch(self) -> list[Finding]:
        """Have the engine compare logits, and run the rows as the gateway would from then on."""
        *_, verdict = self._engine.self_test()
        self._engine.hold_to(verdict)
        return [findings.rows_together(verdict, self._allowed)]

    def _answer(self) -> list[Finding]:
        said = self._alone[0].text
        return [findings.answer(said, EXPECTED, is_known_to=self._knows_paris)]

    @cached_property
    def _alone(self) -> list[Answer]:
        return [self._answered(prompt) for prompt in PROMPTS]

    def _answered(self, prompt: str) -> Answer:
        with self._rows() as answers:
            row = self._join(self._greedy(prompt), answers)
            for _ in self._stepped(answers):
                pass
        return answers[row]

    def _together(self) -> list[Finding]:
        """Run rows of every kind: greedy, held to a schema, sampled, leaving, joining late."""
        alone = self._alone
        with self._rows() as answers:
            return self._mixed(alone, answers)

    def _mixed(self, alone: Sequence[Answer], answers: dict[int, Answer]) -> list[Finding]:
        engine = self._engine
        held = self._planned("Describe a person called Ada, as JSON.", FORM_TOKENS, grammar=_FORM)
        form = self._join(held, answers)
        leaving = self._planned(
            "Tell me a long story.", 2 * TOKENS, replace(_SAMPLED, min_tokens=TOKENS)
        )
        gone = self._join(leaving, answers)
        greedy = [self._join(self._greedy(prompt), answers) for prompt in PROMPTS[:-1]]
        steps = self._stepped(answers)
        for _ in range(STEPS):
            next(steps, None)
        rows, heard = engine.rows, answers[gone].pieces
        engine.leave(gone)
        left = engine.rows
        greedy.append(self._join(self._greedy(PROMPTS[-1]), answers))
        self._join(self._planned("Tell me a short story.", TOKENS, _SAMPLED), answers)
        for _ in steps:
            pass
        partings = [
            findings.parting(each.logprobs, answers[row].logprobs)
            for each, row in zip(alone, greedy, strict=True)
        ]
        may_think = held.is_thinking or held.may_think
        said = answers[form]
        return [
            findings.greedy(partings, TOKENS, len(answers) - 1, self._allowed),
            findings.structured(said.text, PERSON, is_whole=said.is_whole, may_think=may_think),
            findings.cancelled(rows, left, answers[gone].pieces - heard),
            *findings.faults(engine.take_faults()),
        ]

    def _speed(self) -> list[Finding]:
        return [findings.speed("tokens", {rows: self._rate(rows) for rows in ROWS_AT_ONCE})]

    def _greedy(self, prompt: str) -> SequenceParams:
        sampling = replace(_GREEDY, min_tokens=TOKENS)
        return self._planned(prompt, TOKENS, sampling, logprobs=LIKELIEST)

    def _planned(
        self,
        text: str,
        max_tokens: int,
        sampling: Sampling = _GREEDY,
        *,
        grammar: Grammar | None = None,
        logprobs: int | None = None,
    ) -> SequenceParams:
        [row] = self._engine.plan(
            GenerateJob(
                caller=_CALLER,
                messages=[{"role": "user", "content": text}],
                sampling=sampling,
                max_tokens=max_tokens,
                grammar=grammar,
                logprobs=logprobs,
                template_args=self._template_args,
            )
        )
        if row.grammar is None:
            return row
        return replace(row, compiled=self._engine.compile(row.grammar))

    @contextmanager
    def _rows(self) -> Iterator[dict[int, Answer]]:
        """Have rows join an engine that remembers no prompt; none of them is left at the end."""
        self._engine.forget()
        answers: dict[int, Answer] = {}
        try:
            yield answers
        finally:
            for row in answers:
                self._engine.leave(row)

    def _join(self, job: SequenceParams, answers: dict[int, Answer]) -> int:
        row = self._engine.join(job)
        answers[row] = Answer()
        return row

    def _stepped(self, answers: Mapping[int, Answer]) -> Iterator[None]:
        """Read and decode until no row is left; between two steps rows may join and leave."""
        engine = self._engine
        while engine.is_prefilling or engine.is_decoding:
            read = engine.prefill(self._prefill_chunk_tokens) if engine.is_prefilling else ()
            for delta in (*read, *engine.decode()):
                answers[delta.sequence_id].add(delta)
            yield
