"""The batch of decoding sequences, and the outputs of a decode step."""

import copy
from collections import abc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, takewhile
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models.cache import CacheList

from gateway.engine.answers.output_parts import TokenScores
from gateway.engine.device import evaluate, is_late, launch
from gateway.engine.drafts.prompt_lookup import count_accepted
from gateway.engine.generation.sampling import (
    TopLogprobs,
    adjust_logits,
    bar_tokens,
    choose,
    force_tokens,
    is_finite,
    keep_open,
    score,
)
from gateway.engine.generation.sequence import Sequence
from gateway.engine.grammar.structured import StructuredOutput
from gateway.engine.kv.cache import RaggedKVCache, cache_nbytes, compact, filter_layers
from gateway.engine.kv.layers import go_back
from gateway.engine.kv.prefix_cache import BLOCK, PrefixCache
from gateway.jobs.chat import Delta, FinishReason
from gateway.jobs.steps import Drafter, Pass

# The most block ends of an answer at which states are cached. The next prompt may continue from an
# older one, because a template may strip an answer or change its end.
KEPT_ENDS: Final = 4


@dataclass(frozen=True, slots=True)
class Doubt:
    """Sequences whose tokens may have to be chosen again, from `logits`, (rows, vocabulary)."""

    seqs: list[Sequence]
    logits: mx.array
    is_sure: mx.array  # (rows,) bool: True where the token is final


@dataclass(frozen=True, slots=True)
class AheadReading:
    """The input of a speculative pass."""

    inputs: list[list[int]]  # rows of equal length: tokens that the KV lacks, draft, padding
    drafts: list[abc.Sequence[int]]
    padding: list[int]
    places: list[int]  # inputs after which a token is chosen, as indices into the joined rows


# Logprobs on the device, and the sequence of each row; None marks a row to be ignored.
RowScores = tuple[TopLogprobs, abc.Sequence[Sequence | None]]
Draft = Callable[
    [abc.Sequence[Sequence], abc.Sequence[int]], abc.Sequence[abc.Sequence[int]]
]  # sequences and their token limits → a draft per sequence


def plan_reading(
    seqs: abc.Sequence[Sequence], lengths: abc.Sequence[int], limit: int, draft: Draft
) -> AheadReading:
    feeds = [seq.context[length:] for seq, length in zip(seqs, lengths, strict=True)]
    drafts = draft(seqs, [limit + 1 - len(feed) for feed in feeds])
    inputs = [[*feed, *tokens] for feed, tokens in zip(feeds, drafts, strict=True)]
    width = max(map(len, inputs))
    padding = [width - len(tokens) for tokens in inputs]
    places = [
        i * width + at
        for i, (feed, tokens) in enumerate(zip(feeds, inputs, strict=True))
        for at in range(len(feed) - 1, len(tokens))
    ]
    padded = [tokens + [0] * count for tokens, count in zip(inputs, padding, strict=True)]
    return AheadReading(padded, list(drafts), padding, places)


def spread(ends: abc.Sequence[int]) -> list[int]:
    """Thin out the block ends, in ascending order, at which an answer's states stay cached."""
    newest = ends[-1] // BLOCK
    staying = []
    for end in ends:
        number = end // BLOCK
        # Block n stays for 2 * p blocks, where p is the greatest power of two that divides n.
        power_of_two = number & -number
        if newest - number < 2 * power_of_two:
            staying.append(end)
    return staying[-KEPT_ENDS:]


@dataclass(slots=True, eq=False)
class DecodeBatch:
    """Sequences between two decode steps.

    `tokens` has each sequence's next token, and one more for each token of its draft.
    """

    seqs: list[Sequence]
    cache: list[Any]  # one per layer; includes the tokens of drafts
    tokens: mx.array  # (tokens,)
    finite: mx.array  # (tokens,) bool: whether each token's logits were finite
    scores: list[RowScores]
    doubts: list[Doubt]
    drafts: list[abc.Sequence[int]]
    late_error: Exception | None = None  # an error of the running step; `check` raises it
    is_evaluated: bool = False

    @property
    def may_go_on(self) -> bool:
        """Return True if the next pass may be launched before these tokens are read."""
        # A suspect's passes are launched one by one, so that an error belongs to one pass.
        return not any(seq.is_at_last or seq.was_suspect for seq in self.seqs)

    @property
    def can_take_back(self) -> bool:
        return all(isinstance(layer, RaggedKVCache) for layer in self.cache)

    @property
    def nbytes(self) -> int:
        return cache_nbytes(self.cache)

    def keep_block_ends(
        self, prefixes: PrefixCache, lengths: abc.Sequence[int] | None = None
    ) -> None:
        """Cache the states of sequences whose KV has just filled a block.

        Call this before the next pass is launched.
        """
        if not prefixes.needs_block_ends:
            return
        lengths = lengths or [len(seq.context) for seq in self.seqs]
        for i, (seq, end) in enumerate(zip(self.seqs, lengths, strict=True)):
            is_growing = end > len(seq.params.prompt)
            if end % BLOCK or (is_growing and not prefixes.keeps_growing):
                continue
            ends = [*seq.kept_ends, end]
            staying = spread(ends)
            dropped = [end for end in ends if end not in staying]
            is_new = prefixes.store_next(
                seq.context[:end], self.cache, i, dropped, seq.root, is_growing=is_growing
            )
            if is_new and is_growing:  # states of the prompt itself are never dropped here
                seq.kept_ends = staying

    def keep_answers(self, prefixes: PrefixCache, ended: abc.Sequence[int]) -> None:
        """Cache the KV of the `ended` rows, because a conversation's next prompt begins with it."""
        if not prefixes.is_on or not ended:
            return
        if prefixes.needs_block_ends:
            for seq in [self.seqs[i] for i in ended]:
                prefixes.note_ended(seq.context, seq.kept_ends, seq.root)
            return
        lengths = self.cache[0].lengths.counts  # the KV lacks forced tokens at the end
        for i in ended:
            seq = self.seqs[i]
            prefixes.store(seq.context[: lengths[i]], self.cache, i, root=seq.root)

    def take_back(self) -> None:
        """Undo the pass that has read `tokens`: remove one token of each row from the KV."""
        for layer in self.cache:
            layer.trim(1)

    def replace(
        self,
        seqs: abc.Sequence[Sequence],
        tokens: mx.array,
        scores: list[RowScores],
        doubts: list[Doubt],
    ) -> None:
        first = [at.start for at in self._places()]
        places = [first[self.seqs.index(seq)] for seq in seqs]
        self.tokens[mx.array(places)] = tokens
        self.scores += scores  # `read` uses a sequence's last scores
        self.doubts += doubts
        self.is_evaluated = False

    def keep(self, indices: list[int]) -> None:
        """Keep only these sequences, in the order that `compact` returns."""
        if len(indices) == len(self.seqs):
            return  # mlx-lm's caches for one sequence have no `filter`
        indices = compact(indices)
        spans = self._places()
        places = mx.array([place for i in indices for place in spans[i]])
        self.tokens, self.finite = self.tokens[places], self.finite[places]
        had_drafts = any(self.drafts)
        self.seqs = [self.seqs[i] for i in indices]
        self.drafts = [self.drafts[i] for i in indices]
        filter_layers(self.cache, indices)
        if had_drafts and not any(self.drafts):  # no rollback is needed: release the old states
            go_back(self.cache, [0] * len(indices), [0] * len(indices))
        # Launch the smaller caches now: until they are computed, the larger ones use memory that
        # may be promised to new sequences.
        launch([layer.state for layer in self.cache])
        self.is_evaluated = False

    def take(self, index: int) -> "DecodeBatch":
        """Return a batch with a copy of one sequence, which also stays in this batch."""
        seq = self.seqs[index]
        # Other sequences' logprobs are left out: after a merge they would overwrite newer ones.
        scores: list[RowScores] = []
        for logprobs, seqs in self.scores:
            if seq in seqs:
                owners: list[Sequence | None] = [None] * len(seqs)
                owners[seqs.index(seq)] = seq
                scores.append((logprobs, owners))
        doubts = []
        for doubt in self.doubts:
            if seq in doubt.seqs:
                place = doubt.seqs.index(seq)
                at = slice(place, place + 1)
                doubts.append(Doubt([seq], doubt.logits[at], doubt.is_sure[at]))
        cache = [copy_layer(layer) for layer in self.cache]
        single = DecodeBatch(
            self.seqs, cache, self.tokens, self.finite, scores, doubts, self.drafts
        )
        single.keep([index])
        single.late_error = self.late_error
        single.settle()
        return single

    def extend(self, other: "DecodeBatch") -> None:
        self.seqs = [*self.seqs, *other.seqs]  # a new list: doubts keep the old one
        self.tokens = mx.concatenate([self.tokens, other.tokens])
        self.finite = mx.concatenate([self.finite, other.finite])
        self.scores += other.scores
        self.doubts += other.doubts
        self.drafts = [*self.drafts, *other.drafts]
        self.late_error = self.late_error or other.late_error
        for layer, joining in zip(self.cache, other.cache, strict=True):
            layer.extend(joining)
        self.is_evaluated = False

    def settle(self) -> None:
        """Wait for the running step if the device reports errors late (`is_late`).

        Call this before any other launch, which would raise this step's error in its place.
        """
        if is_late():
            self.wait()

    def wait(self) -> None:
        """Wait for the running step, and keep its error for `check`."""
        try:
            self.evaluate()
        except Exception as error:
            self.late_error = self.late_error or error

    def evaluate(self) -> None:
        """Wait for all results of the running step. Raises the device's error."""
        if self.is_evaluated:
            return
        scores = [(score.chosen, score.ids, score.logprobs) for score, _ in self.scores]
        evaluate(self.tokens, self.finite, scores, [doubt.is_sure for doubt in self.doubts])
        self.is_evaluated = True

    def check(self) -> None:
        if self.late_error is not None:
            raise self.late_error

    def read(self) -> "list[SequenceOutput]":
        """Wait for the tokens, remove rejected drafts from the KV, and return one output per
        sequence.
        """
        self.evaluate()
        tokens: Any = self.tokens.tolist()
        finite: Any = self.finite.tolist()
        scores: dict[int, TokenScores] = {}
        for logprobs, seqs in self.scores:
            scores.update((id(seq), score) for seq, score in _to_host(logprobs, seqs))
        if not any(self.drafts):
            return [
                SequenceOutput(seq, (token,), is_finite, scores.get(id(seq)))
                for seq, token, is_finite in zip(self.seqs, tokens, finite, strict=True)
            ]
        outputs = []
        for seq, draft, at in zip(self.seqs, self.drafts, self._places(), strict=True):
            chosen = tokens[at.start : at.stop]
            numbers = sum(1 for _ in takewhile(bool, finite[at.start : at.stop]))
            end = 1 + count_accepted(draft[: max(0, numbers - 1)], chosen)
            outputs.append(SequenceOutput(seq, chosen[:end], numbers > 0, scores.get(id(seq))))
        pairs = zip(self.drafts, outputs, strict=True)
        dropped = [1 + len(draft) - len(out.tokens) for draft, out in pairs]
        go_back(self.cache, dropped, [seq.read_last for seq in self.seqs])
        self.drafts = [()] * len(self.seqs)
        self.tokens = mx.array([output.tokens[-1] for output in outputs])
        self.finite = mx.array([output.is_finite for output in outputs])
        return outputs

    def _places(self) -> list[range]:
        starts = accumulate((1 + len(draft) for draft in self.drafts), initial=0)
        return [range(start, end) for start, end in pairwise(starts)]


def choose_tokens(
    structured: StructuredOutput,
    seqs: list[Sequence],
    cache: list[Any],
    logits: mx.array,
    drafts: abc.Sequence[abc.Sequence[int]] = (),
) -> DecodeBatch:
    """Launch the choice of the next tokens.

    `logits`, (tokens, vocabulary), has a row for each sequence's next token, followed by a row for
    each token of its draft. `drafts` has one draft per sequence, or is empty.
    """
    drafts = drafts or [()] * len(seqs)
    ahead = [i for tokens in drafts for i in range(len(tokens) + 1)]
    choosing = [
        seq for seq, tokens in zip(seqs, drafts, strict=True) for _ in range(len(tokens) + 1)
    ]
    finite = is_finite(logits)
    logits = constrain(structured, choosing, logits)
    tokens, scores, doubts = _draw(choosing, ahead, logits)
    launch(tokens, finite, [(score.chosen, score.ids, score.logprobs) for score, _ in scores])
    launch([doubt.is_sure for doubt in doubts])
    return DecodeBatch(seqs, cache, tokens, finite, scores, doubts, list(drafts))


def constrain(structured: StructuredOutput, seqs: list[Sequence], logits: mx.array) -> mx.array:
    """Apply bias and penalties to logits, (rows, vocabulary), and set forbidden tokens to -inf."""
    logits = adjust_logits([seq.sampler for seq in seqs], logits)
    for i, seq in enumerate(seqs):
        thinking = seq.thinking_first
        if thinking is not None:
            logits = keep_open(logits, i, thinking)
    free = [(i, seq.unwanted) for i, seq in enumerate(seqs) if seq.matcher is None]
    if free:
        logits = bar_tokens(logits, free)
    bound = list(filter(None, (seq.bound(i) for i, seq in enumerate(seqs))))
    if bound:
        logits = structured.mask(logits, bound)
    ends = [(i, seq.forced_end) for i, seq in enumerate(seqs)]
    return force_tokens(logits, [(i, token) for i, token in ends if token is not None])


def redraw_unsure(running: DecodeBatch) -> bool:
    """Draw a token again if its sampling window was too small. Return True if any was."""
    has_mended = False
    while running.doubts:
        running.evaluate()
        doubt = running.doubts.pop()
        is_sure: Any = doubt.is_sure.tolist()
        wrong = [i for i, seq in enumerate(doubt.seqs) if not is_sure[i] and seq in running.seqs]
        if wrong:
            seqs = [doubt.seqs[i] for i in wrong]
            for seq in seqs:
                seq.sampler.widen()
            running.replace(seqs, *_draw(seqs, [0] * len(seqs), doubt.logits[mx.array(wrong)]))
            has_mended = True
    return has_mended


def _draw(
    seqs: list[Sequence], ahead: list[int], logits: mx.array
) -> tuple[mx.array, list[RowScores], list[Doubt]]:
    """Choose a token per row from adjusted and masked logits, (rows, vocabulary).

    `ahead` has 0 for a sequence's next token, and n for the token after n draft tokens.
    """
    positions = [len(seq.tokens) + i for seq, i in zip(seqs, ahead, strict=True)]
    choice = choose([seq.sampler for seq in seqs], logits, positions)
    scores: list[RowScores] = []
    places = [i for i, seq in enumerate(seqs) if seq.params.logprobs is not None]
    if places:
        k = max(seqs[i].params.logprobs or 0 for i in places)
        scores.append((score(logits, choice.tokens, places, k), [seqs[i] for i in places]))
    if choice.is_sure is None:
        return choice.tokens, scores, []
    return choice.tokens, scores, [Doubt(seqs, logits, choice.is_sure)]


@dataclass(slots=True)
class SequenceOutput:
    """A sequence's new tokens, on the host: the accepted draft tokens, and one more."""

    seq: Sequence
    tokens: abc.Sequence[int]
    is_finite: bool  # whether the first token's logits were finite
    scores: TokenScores | None
    end: FinishReason | None = None  # set by `append_first` if the token ends the answer

    @property
    def goes_on(self) -> bool:
        """Return True if no token has ended the sequence. Its text may still end it."""
        return self.is_finite and self.end is None

    def append_first(self) -> None:
        """Append the first token to the sequence; `to_deltas` adds its text."""
        if self.is_finite:
            self.end = self.seq.append(self.tokens[0])

    def append(self, limit: int) -> tuple[list[Delta], bool]:
        """Append these tokens, then up to `limit` tokens that the grammar forces.

        Return the deltas, and whether the sequence continues.
        """
        seq = self.seq
        if not self.is_finite:
            return self.to_deltas(None), False
        deltas: list[Delta] = []
        for token in self.tokens:
            end = seq.append(token)
            deltas += self.to_deltas(end)
            if end is not None or seq.is_over:
                return deltas, False
        for token in seq.forced(limit):
            end = seq.append(token)
            deltas += replace(self, scores=seq.certainty(token)).to_deltas(end)
            if end is not None or seq.is_over:
                return deltas, False
        return deltas, True

    def to_deltas(self, end: FinishReason | None) -> list[Delta]:
        """Return the deltas of the last appended token. An error here ends only this sequence."""
        if not self.is_finite:
            return [self.seq.error_delta("its output is not a number")]
        try:
            return self.seq.to_deltas(end, self.scores)
        except Exception as error:
            self.seq.is_broken = True
            return [self.seq.error_delta(f"{type(error).__name__}: {error}")]


def count_ahead_pass(
    outputs: abc.Sequence[SequenceOutput],
    counts: abc.Sequence[int],
    drafts: abc.Sequence[abc.Sequence[int]],
    drafter: Drafter | None,
) -> Pass:
    # An answer may end inside a draft, so fewer tokens may be appended than accepted.
    pairs = [(count, len(output.tokens)) for count, output in zip(counts, outputs, strict=True)]
    return Pass(
        rows=len(outputs),
        tokens=sum(counts),
        padded_tokens=len(outputs) * max(counts),
        forced=sum(max(0, count - chosen) for count, chosen in pairs),
        drafted=sum(map(len, drafts)),
        accepted=sum(max(0, min(pair) - 1) for pair in pairs),
        drafter=drafter if any(drafts) else None,
    )


def copy_layer(layer: Any) -> Any:
    """Return a shallow copy of a layer's cache, which can be filtered separately."""
    twin = copy.copy(layer)
    if isinstance(layer, CacheList):
        twin.caches = [copy_layer(inner) for inner in layer.caches]
    return twin


def _to_host(
    scores: TopLogprobs, seqs: abc.Sequence[Sequence | None]
) -> Iterator[tuple[Sequence, TokenScores]]:
    chosen: Any = scores.chosen.tolist()
    ids: Any = scores.ids.tolist()
    logprobs: Any = scores.logprobs.tolist()
    for seq, logprob, top, top_logprobs in zip(seqs, chosen, ids, logprobs, strict=True):
        if seq is not None:
            yield seq, TokenScores(logprob, top, top_logprobs, seq.params.logprobs or 0)
