"""The batch that decodes, between two steps, and the outputs of a step."""

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

# The most blocks of an answer after which a next prompt can continue, if states are to be kept with
# each: the last two, and two further back, the oldest four to seven blocks back. The prompt may
# differ from the last tokens: a template may strip an answer, end it anew, or write its calls
# another way.
KEPT_ENDS: Final = 4


@dataclass(frozen=True, slots=True)
class Doubt:
    """Sequences whose tokens may have to be chosen again. `is_sure`, (rows,) bool, says which
    tokens are right, once it is evaluated; they were chosen from `logits`, (rows, vocabulary).
    """

    seqs: list[Sequence]
    logits: mx.array
    is_sure: mx.array


@dataclass(frozen=True, slots=True)
class AheadReading:
    """The input of a pass, for each sequence: the tokens that its KV lacks, then a draft, then
    padding.

    `places` are those of the tokens, in all rows put end to end, after which a token is chosen.
    """

    inputs: list[list[int]]
    drafts: list[abc.Sequence[int]]
    padding: list[int]
    places: list[int]


# Logprobs still on the device, and the sequences they belong to; None for a sequence that has newer
# ones.
RowScores = tuple[TopLogprobs, abc.Sequence[Sequence | None]]
Draft = Callable[
    [abc.Sequence[Sequence], abc.Sequence[int]], abc.Sequence[abc.Sequence[int]]
]  # a draft for each sequence, within its limit of tokens


def plan_reading(
    seqs: abc.Sequence[Sequence], lengths: abc.Sequence[int], limit: int, draft: Draft
) -> AheadReading:
    """Plan the pass after KV of these lengths that reads up to `limit` tokens ahead in each."""
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
    """Return the ends of an answer's blocks that stay when the last of `ends` is new: that one, the
    one before, and ever fewer further back. The call before returned the other `ends`.
    """
    newest = ends[-1] // BLOCK
    staying = []
    for end in ends:
        number = end // BLOCK
        # The nth stays for twice as many blocks as the greatest power of two that divides n.
        power_of_two = number & -number
        if newest - number < 2 * power_of_two:
            staying.append(end)
    return staying[-KEPT_ENDS:]


@dataclass(slots=True, eq=False)
class DecodeBatch:
    """Sequences between two steps: their KV, and their next tokens, (tokens,), perhaps not
    evaluated yet. There is one a sequence, and one more for each token of its draft, which is in
    the KV already.

    `finite`, (tokens,) bool, says whether a token's logits were numbers; `scores` are the logprobs
    of the sequences that requested them.
    """

    seqs: list[Sequence]
    cache: list[Any]
    tokens: mx.array
    finite: mx.array
    scores: list[RowScores]
    doubts: list[Doubt]
    drafts: list[abc.Sequence[int]]
    late_error: Exception | None = None  # error of the step under way, raised when that is read
    is_evaluated: bool = False  # the step under way has been waited for

    @property
    def may_go_on(self) -> bool:
        """Return True if the next pass may be launched before these tokens are read. There are two
        conditions: no token is the last that its sequence may have, and no sequence was in a failed
        pass, as its fault must show in a pass of its own.
        """
        return not any(seq.is_at_last or seq.was_suspect for seq in self.seqs)

    @property
    def can_take_back(self) -> bool:
        """Return True if a pass can be undone. Otherwise the next one is launched after all tokens
        are sure, and before they are appended.
        """
        return all(isinstance(layer, RaggedKVCache) for layer in self.cache)

    @property
    def nbytes(self) -> int:
        return cache_nbytes(self.cache)

    def keep_block_ends(
        self, prefixes: PrefixCache, lengths: abc.Sequence[int] | None = None
    ) -> None:
        """Store each sequence whose KV ends with a block, if KV can be kept only there. The KV has
        these lengths, or else those of the contexts.

        To be called before the next pass is launched. The step under way is waited for.
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
            if is_new and is_growing:  # states at the prompt's end stay
                seq.kept_ends = staying

    def keep_answers(self, prefixes: PrefixCache, ended: abc.Sequence[int]) -> None:
        """Store the KV of ended answers: a conversation's next prompt begins with it. If KV is kept
        only at ends of blocks, where few answers end, the states kept so far count as used.
        """
        if not prefixes.is_on or not ended:
            return
        if prefixes.needs_block_ends:
            for seq in [self.seqs[i] for i in ended]:
                prefixes.note_ended(seq.context, seq.kept_ends, seq.root)
            return
        lengths = self.cache[0].lengths.counts  # forced tokens at the end were not read
        for i in ended:
            seq = self.seqs[i]
            prefixes.store(seq.context[: lengths[i]], self.cache, i, root=seq.root)

    def take_back(self) -> None:
        """Undo the pass that has read these tokens."""
        for layer in self.cache:
            layer.trim(1)

    def replace(
        self,
        seqs: abc.Sequence[Sequence],
        tokens: mx.array,
        scores: list[RowScores],
        doubts: list[Doubt],
    ) -> None:
        """Replace these sequences' next tokens by newly chosen ones."""
        first = [at.start for at in self._places()]
        places = [first[self.seqs.index(seq)] for seq in seqs]
        self.tokens[mx.array(places)] = tokens
        self.scores += scores  # later scores count
        self.doubts += doubts
        self.is_evaluated = False

    def keep(self, indices: list[int]) -> None:
        """Drop the other sequences. The kept ones are then in the order of `compact`."""
        if len(indices) == len(self.seqs):
            return  # caches of a single row cannot be filtered
        indices = compact(indices)
        spans = self._places()
        places = mx.array([place for i in indices for place in spans[i]])
        self.tokens, self.finite = self.tokens[places], self.finite[places]
        had_drafts = any(self.drafts)
        self.seqs = [self.seqs[i] for i in indices]
        self.drafts = [self.drafts[i] for i in indices]
        filter_layers(self.cache, indices)
        if had_drafts and not any(self.drafts):  # no sequence is left that may go back
            go_back(self.cache, [0] * len(indices), [0] * len(indices))
        # The smaller caches are made at once: larger ones are held until then, and the memory
        # counted as free may already be given to new sequences.
        launch([layer.state for layer in self.cache])
        self.is_evaluated = False

    def take(self, index: int) -> "DecodeBatch":
        """Return a copy of one sequence with its next token; it stays here until dropped."""
        seq = self.seqs[index]
        # The other sequences' logprobs are left out: they would be taken for newer ones once this
        # one is back.
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
        """Add sequences that have read their prompts."""
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
        """Wait for the step under way, if the device is late, before any other launch: that would
        raise the step's error, and the tokens would look right.
        """
        if is_late():
            self.wait()

    def wait(self) -> None:
        """Wait for the step under way, and keep its error."""
        try:
            self.evaluate()
        except Exception as error:
            self.late_error = self.late_error or error

    def evaluate(self) -> None:
        """Wait, once, for all results of the step under way. Raises the device's error."""
        if self.is_evaluated:
            return
        scores = [(score.chosen, score.ids, score.logprobs) for score, _ in self.scores]
        evaluate(self.tokens, self.finite, scores, [doubt.is_sure for doubt in self.doubts])
        self.is_evaluated = True

    def check(self) -> None:
        """Raise the error of the step under way if it has been waited for."""
        if self.late_error is not None:
            raise self.late_error

    def read(self) -> "list[SequenceOutput]":
        """Wait for the tokens under way; return one output per sequence. Draft tokens that were not
        chosen leave the KV.
        """
        self.evaluate()
        # mlx's stubs have no type for the result of `tolist`.
        tokens: Any = self.tokens.tolist()
        finite: Any = self.finite.tolist()
        scores: dict[int, TokenScores] = {}  # scores of the tokens, by id(seq)
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
        """Return the places of each sequence's tokens."""
        starts = accumulate((1 + len(draft) for draft in self.drafts), initial=0)
        return [range(start, end) for start, end in pairwise(starts)]


def choose_tokens(
    structured: StructuredOutput,
    seqs: list[Sequence],
    cache: list[Any],
    logits: mx.array,
    drafts: abc.Sequence[abc.Sequence[int]] = (),
) -> DecodeBatch:
    """Launch the choice of the next tokens. The masks are made while the pass runs.

    `logits`, (tokens, vocabulary), are those of each sequence's next token, followed by those after
    each token of its draft. `drafts` has one draft a sequence, or is empty.
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
    """Return logits, (rows, vocabulary), with each sequence's bias and penalties, and with -inf for
    tokens that may not be next.
    """
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
    """Draw the tokens again whose window was too small; return True if there were any."""
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
    """Choose from logits, (rows, vocabulary), that are adjusted and masked.

    `ahead` is each row's distance, in tokens, from its sequence's next token.
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
    """The next tokens of a sequence, on the host: one, and the chosen tokens of its draft, up to
    the first whose logits were no numbers.
    """

    seq: Sequence
    tokens: abc.Sequence[int]
    is_finite: bool  # the logits of the first token were numbers
    scores: TokenScores | None
    # Set once the first token is appended, if it is the last.
    end: FinishReason | None = None

    @property
    def goes_on(self) -> bool:
        """Return True if the sequence has a next token, its text aside."""
        return self.is_finite and self.end is None

    def append_first(self) -> None:
        """Append the only token, without its text."""
        if self.is_finite:
            self.end = self.seq.append(self.tokens[0])

    def append(self, limit: int) -> tuple[list[Delta], bool]:
        """Append these tokens to the sequence, then up to `limit` tokens that its grammar forces.
        Return the deltas, and whether the sequence goes on.
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
        """Return the deltas of the token appended last. An error in its text ends only this
        sequence.
        """
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
    """Count a pass that read drafts; `outputs` are each sequence's tokens from it."""
    # An answer may end inside a draft.
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
    """Copy a layer's cache without its arrays. Filtering the copy leaves the original unchanged."""
    twin = copy.copy(layer)
    if isinstance(layer, CacheList):
        twin.caches = [copy_layer(inner) for inner in layer.caches]
    return twin


def _to_host(
    scores: TopLogprobs, seqs: abc.Sequence[Sequence | None]
) -> Iterator[tuple[Sequence, TokenScores]]:
    """Read logprobs from the device, one sequence at a time."""
    chosen: Any = scores.chosen.tolist()
    ids: Any = scores.ids.tolist()
    logprobs: Any = scores.logprobs.tolist()
    for seq, logprob, top, top_logprobs in zip(seqs, chosen, ids, logprobs, strict=True):
        if seq is not None:
            yield seq, TokenScores(logprob, top, top_logprobs, seq.params.logprobs or 0)
