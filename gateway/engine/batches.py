"""Rows between two decode steps, and what a step has said."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from gateway.engine.rows import Row, TokenScores
from gateway.engine.sampling import Scores
from gateway.jobs import FinishReason, RowDelta


@dataclass(slots=True)
class Running:
    """Rows between two steps: their KV, and their next tokens, (rows,), perhaps still on the way.

    `finite` tells, (rows,), whether those tokens came from numbers; `scores` are the logprobs of
    the rows that want them.
    """

    rows: list[Row]
    cache: list[Any]
    tokens: mx.array
    finite: mx.array
    scores: list[tuple[Scores, list[Row]]]

    @property
    def may_go_on(self) -> bool:
        """Tell whether the next pass may begin before these tokens are read: none is the last
        its row may say, and no row has met a fault, which must be found in its own pass.
        """
        return not any(row.is_at_last or row.was_suspect for row in self.rows)

    def keep(self, indices: list[int]) -> None:
        """Drop the rows not named, and the padding that only they needed."""
        self.rows = [self.rows[i] for i in indices]
        self.tokens = self.tokens[mx.array(indices)]
        self.finite = self.finite[mx.array(indices)]
        for layer in self.cache:
            layer.filter(indices)

    def extend(self, other: "Running") -> None:
        """Take in rows that have read their prompts."""
        self.rows += other.rows
        self.tokens = mx.concatenate([self.tokens, other.tokens])
        self.finite = mx.concatenate([self.finite, other.finite])
        self.scores += other.scores
        for mine, theirs in zip(self.cache, other.cache, strict=True):
            mine.extend(theirs)

    def read(self) -> "list[Said]":
        """Wait for the tokens on their way: one a row."""
        mx.eval(self.tokens, self.finite)
        # mlx's stubs cannot tell what `tolist` gives.
        tokens: Any = self.tokens.tolist()
        finite: Any = self.finite.tolist()
        scores = {id(row): score for some, rows in self.scores for row, score in _off(some, rows)}
        return [
            Said(row, token, ok, scores.get(id(row)))
            for row, token, ok in zip(self.rows, tokens, finite, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Said:
    """A row's next token, off the device; `is_finite` tells whether it came from numbers."""

    row: Row
    token: int
    is_finite: bool
    scores: TokenScores | None

    def told(self, end: FinishReason | None) -> list[RowDelta]:
        """Tell the token; what goes wrong with its text is its row's own error, and its end."""
        if not self.is_finite:
            return [RowDelta(self.row.id, error="its output is not a number")]
        try:
            return self.row.told(end, self.scores)
        except Exception as error:
            self.row.is_broken = True
            return [RowDelta(self.row.id, error=f"{type(error).__name__}: {error}")]


def _off(scores: Scores, rows: Sequence[Row]) -> Iterator[tuple[Row, TokenScores]]:
    """Bring logprobs from the device, row by row."""
    chosen: Any = scores.chosen.tolist()
    ids: Any = scores.ids.tolist()
    logprobs: Any = scores.logprobs.tolist()
    for row, own, alike, theirs in zip(rows, chosen, ids, logprobs, strict=True):
        yield row, TokenScores(own, alike, theirs, row.job.logprobs or 0)
