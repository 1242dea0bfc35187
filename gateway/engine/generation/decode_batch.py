"""Rows between two decode steps, and what a step has said."""

import copy
from collections import abc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, CacheList

from gateway.engine.generation.sampling import Scores
from gateway.engine.generation.sequence import Sequence, TokenScores
from gateway.jobs import FinishReason, SequenceDelta

_launch: Any = mx.async_eval  # untyped in mlx's stubs


@dataclass(frozen=True, slots=True)
class Doubt:
    """Rows some of whose tokens may have to be chosen again: `is_sure`, (rows,) bool, says which
    are right, once it is known; `logits`, (rows, vocabulary), are what they were chosen from.
    """

    rows: list[Sequence]
    logits: mx.array
    is_sure: mx.array


@dataclass(slots=True)
class DecodeBatch:
    """Rows between two steps: their KV, and their next tokens, (rows,), perhaps still on the way.

    `finite` tells, (rows,), whether those tokens came from numbers; `scores` are the logprobs of
    the rows that want them.
    """

    rows: list[Sequence]
    cache: list[Any]
    tokens: mx.array
    finite: mx.array
    scores: list[tuple[Scores, list[Sequence | None]]]
    doubts: list[Doubt]

    @property
    def may_go_on(self) -> bool:
        """Tell whether the next pass may begin before these tokens are read: none is the last
        its row may say, no row has met a fault, which must be found in its own pass, and a token
        that turns out to be wrong can be taken back.
        """
        if self.doubts and any(type(layer) is not BatchKVCache for layer in self.cache):
            return False
        return not any(row.is_at_last or row.was_suspect for row in self.rows)

    def take_back(self) -> None:
        """Undo the pass that has read these tokens."""
        for layer in self.cache:
            layer.trim(1)

    def replace(self, other: "DecodeBatch") -> None:
        """Put another choice in the place of these rows' tokens."""
        places = [self.rows.index(row) for row in other.rows]
        self.tokens[mx.array(places)] = other.tokens
        self.scores += other.scores  # the later ones count
        self.doubts += other.doubts

    def keep(self, indices: list[int]) -> None:
        """Drop the rows not named, and the padding that only they needed.

        The smaller caches are launched at once: until then the larger ones are held, and others
        may be let in meanwhile by what is counted of these.
        """
        if len(indices) == len(self.rows):
            return  # caches of a single row cannot be filtered
        self.rows = [self.rows[i] for i in indices]
        self.tokens = self.tokens[mx.array(indices)]
        self.finite = self.finite[mx.array(indices)]
        for layer in self.cache:
            layer.filter(indices)
        _launch([layer.state for layer in self.cache])

    def take(self, index: int) -> "DecodeBatch":
        """Copy one row out, with its next token; the row stays here too until it is dropped."""
        row = self.rows[index]
        # Another's logprobs here would be taken for its next ones when the row comes back.
        scores = [
            (some, [each if each is row else None for each in theirs])
            for some, theirs in self.scores
            if row in theirs
        ]
        doubts = [
            Doubt([row], each.logits[place], each.is_sure[place])
            for each in self.doubts
            for place in [slice(i, i + 1) for i, other in enumerate(each.rows) if other is row]
        ]
        cache = [copy_layer(layer) for layer in self.cache]
        taken = DecodeBatch(self.rows, cache, self.tokens, self.finite, scores, doubts)
        taken.keep([index])
        return taken

    def extend(self, other: "DecodeBatch") -> None:
        """Take in rows that have read their prompts."""
        self.rows = [*self.rows, *other.rows]  # a new list: a doubt's rows are those of its choice
        self.tokens = mx.concatenate([self.tokens, other.tokens])
        self.finite = mx.concatenate([self.finite, other.finite])
        self.scores += other.scores
        self.doubts += other.doubts
        for mine, theirs in zip(self.cache, other.cache, strict=True):
            mine.extend(theirs)

    def read(self) -> "list[SequenceOutput]":
        """Wait for the tokens on their way: one a row."""
        mx.eval(self.tokens, self.finite)
        # mlx's stubs cannot tell what `tolist` gives.
        tokens: Any = self.tokens.tolist()
        finite: Any = self.finite.tolist()
        scores = {
            id(row): score for some, rows in self.scores for row, score in _to_host(some, rows)
        }
        return [
            SequenceOutput(row, token, ok, scores.get(id(row)))
            for row, token, ok in zip(self.rows, tokens, finite, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """A row's next token, off the device; `is_finite` tells whether it came from numbers."""

    row: Sequence
    token: int
    is_finite: bool
    scores: TokenScores | None

    def to_deltas(self, end: FinishReason | None) -> list[SequenceDelta]:
        """Tell the token; what goes wrong with its text is its row's own error, and its end."""
        if not self.is_finite:
            return [SequenceDelta(self.row.id, error="its output is not a number")]
        try:
            return self.row.to_deltas(end, self.scores)
        except Exception as error:
            self.row.is_broken = True
            return [SequenceDelta(self.row.id, error=f"{type(error).__name__}: {error}")]


def copy_layer(layer: Any) -> Any:
    """Copy a layer's cache, but for its arrays: filtering the copy leaves the other whole."""
    twin = copy.copy(layer)
    if isinstance(layer, CacheList):
        twin.caches = [copy_layer(each) for each in layer.caches]
    return twin


def _to_host(
    scores: Scores, rows: abc.Sequence[Sequence | None]
) -> Iterator[tuple[Sequence, TokenScores]]:
    """Bring logprobs from the device, row by row."""
    chosen: Any = scores.chosen.tolist()
    ids: Any = scores.ids.tolist()
    logprobs: Any = scores.logprobs.tolist()
    for row, own, alike, theirs in zip(rows, chosen, ids, logprobs, strict=True):
        if row is not None:
            yield row, TokenScores(own, alike, theirs, row.job.logprobs or 0)
