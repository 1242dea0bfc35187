"""Answers whose tokens are given: the engine's own choice at each place is written down.

The engine's own passes run: prefill, decode, joins, kept prefixes, drafts. Only the choice, the
last thing before a token, is replaced (`decode_batch.choose`): it takes the given token, and keeps
its logprob and the best two on the device, so nothing waits that does not wait otherwise.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from unittest.mock import patch

import gateway.engine  # noqa: F401  (first: OpenBLAS must be there before mlx)
from benchmarks.steps import Steps

import mlx.core as mx  # isort: skip

from gateway.engine.generation import decode_batch
from gateway.engine.generation.engine import GenerationEngine
from gateway.engine.generation.sampling import ChosenTokens, Sampler, TopLogprobs, score
from gateway.jobs.chat import Adapter, Sampling
from gateway.jobs.steps import SequenceParams

PREFILL_TOKENS: Final = 64  # size of a chunk, small so that prompts are read in several
LATE_STEPS: Final = 3  # steps of the running rows before others join
FREE: Final = -1  # marks a token that the model chooses
_launch: Any = mx.async_eval  # untyped in mlx's stubs


@dataclass(frozen=True, slots=True)
class Place:
    """A token of an answer: its logprob, the likeliest token, and by how much it is likelier than
    the second, in nats.
    """

    token: int
    logprob: float
    best: int
    margin: float


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt, and the tokens of its answer by position; FREE where the model chooses."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    adapter: Adapter | None = None


@dataclass(slots=True)
class Outcome:
    """The places of each row, and the facts of its passes.

    The facts are tokens from kept prefixes, drafted and accepted tokens, and the rows that had
    others beside them in a pass.
    """

    places: list[list[Place]] = field(default_factory=list)
    cached: int = 0
    drafted: int = 0
    accepted: int = 0
    faults: list[str] = field(default_factory=list)
    beside: set[int] = field(default_factory=set)


class Forcing:
    """Chooses the given tokens. A row is known by its seed: greedy sampling has no use for it."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        self.beside: set[int] = set()
        self._notes: list[tuple[list[tuple[int, int]], mx.array, TopLogprobs]] = []

    def choose(
        self, samplers: Sequence[Sampler], logits: mx.array, positions: Sequence[int]
    ) -> ChosenTokens:
        """Choose as `sampling.choose` does: one token a row of logits, (rows, vocabulary)."""
        numbers = [sampler.sampling.seed or 0 for sampler in samplers]
        if len(set(numbers)) > 1:
            self.beside.update(numbers)
        places = list(zip(numbers, positions, strict=True))
        given = mx.array([self._token(*place) for place in places])
        tokens = mx.where(given == FREE, mx.argmax(logits, axis=-1), given).astype(mx.uint32)
        scores = score(logits, tokens, range(len(places)), 2)
        _launch(tokens, scores.chosen, scores.ids, scores.logprobs)
        self._notes.append((places, tokens, scores))
        return ChosenTokens(tokens, None)

    def places(self) -> list[list[Place]]:
        """Return the places written down, by row and position.

        After a draft's first wrong token come places that no answer has; the pass that reads the
        right token writes them again.
        """
        rows: list[dict[int, Place]] = [{} for _ in self._rows]
        for places, tokens, scores in self._notes:
            columns: Any = (tokens.tolist(), scores.chosen.tolist(), scores.ids.tolist())
            logprobs: Any = scores.logprobs.tolist()
            for (number, position), token, chosen, ids, pair in zip(
                places, *columns, logprobs, strict=True
            ):
                first, second = (0, 1) if pair[0] >= pair[1] else (1, 0)
                margin = pair[first] - pair[second]
                rows[number][position] = Place(token, chosen, ids[first], margin)
        return [[row[at] for at in sorted(row)] for row in rows]

    def _token(self, number: int, position: int) -> int:
        tokens = self._rows[number].tokens
        return tokens[position] if position < len(tokens) else FREE


@contextmanager
def forced(rows: Sequence[Row]) -> Iterator[Forcing]:
    """Let engines choose the rows' tokens for the length of a block."""
    forcing = Forcing(rows)
    with patch.object(decode_batch, "choose", forcing.choose):
        yield forcing


def answer(engine: GenerationEngine, rows: Sequence[Row], late: int = 0) -> Outcome:
    """Answer rows together; the last `late` of them join once the others have decoded a little."""
    outcome = Outcome()
    with forced(rows) as forcing:
        jobs = [(number, _job(number, row)) for number, row in enumerate(rows)]
        first, joining = jobs[: len(jobs) - late], jobs[len(jobs) - late :]
        steps, decoded = Steps(engine), 0
        for job in first:
            steps.join(*job)
        while steps.is_busy or joining:
            if decoded == LATE_STEPS:
                for job in joining:
                    steps.join(*job)
                joining = []
            if steps.is_reading:
                _read(steps.prefill(PREFILL_TOKENS), outcome)
            if steps.is_decoding:
                decoded += 1
                _read(steps.decode(), outcome)
                outcome.drafted += steps.size.drafted
                outcome.accepted += steps.size.accepted
        outcome.faults += [fault.message for fault in steps.faults]
        outcome.places = forcing.places()
        outcome.beside = forcing.beside
    return outcome


def answer_alone(engine: GenerationEngine, rows: Sequence[Row]) -> Outcome:
    """Answer rows one after another."""
    outcome = Outcome()
    for row in rows:
        alone = answer(engine, [row])
        outcome.places += alone.places
        outcome.cached += alone.cached
        outcome.drafted += alone.drafted
        outcome.accepted += alone.accepted
        outcome.faults += alone.faults
    return outcome


def tokens_of(outcome: Outcome) -> list[list[int]]:
    return [[place.token for place in places] for places in outcome.places]


def _job(number: int, row: Row) -> SequenceParams:
    sampling = Sampling(temperature=0, ignore_eos=True, seed=number)
    return SequenceParams(
        prompt=row.prompt,
        max_tokens=len(row.tokens),
        sampling=sampling,
        is_bare=True,
        adapter=row.adapter,
    )


def _read(deltas: Sequence[Any], outcome: Outcome) -> None:
    for delta in deltas:
        if delta.error is not None:
            raise RuntimeError(f"row {delta.id}: {delta.error}")
        outcome.cached += delta.cached_tokens


def quoting(prompt: Sequence[int], length: int, quote: int) -> list[int]:
    """Return an answer's tokens: the model's own, and in their midst a quotation of the prompt.

    Prompt lookup drafts the tokens after a quotation's first ones, rightly until it ends.
    """
    middle = length // 3
    tokens = [FREE] * length
    piece = list(prompt[1 : 1 + quote])[: length - middle]
    tokens[middle : middle + len(piece)] = piece
    return tokens
