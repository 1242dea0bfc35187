"""Sampling of the next tokens, for all rows together.

The parameters apply in the order of OpenAI and vLLM: bias, penalties, grammar mask, temperature,
top_k, top_p, min_p. top_p counts only the tokens that top_k leaves, and min_p is relative to the
likeliest token's probability.
"""

import math
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from gateway.engine.answers.reasoning import Thinking
from gateway.jobs.chat import Sampling

_WORD: Final = (1 << 64) - 1
_LOG2_E: Final = math.log2(math.e)
# A window is the likeliest tokens, which alone are sorted for top_k and top_p. If none of these
# sizes is enough, the whole vocabulary is sorted.
WINDOWS: Final = (64, 1024, 16_384)
_P_WINDOW: Final = WINDOWS[1]  # nearly always enough for a top_p of 0.95
# Tokens per block, for small and for large windows. The K greatest logits are in the K blocks with
# the greatest maxima, so only these blocks are partitioned. This takes 0.3 ms instead of 2.8 on
# a CPU (151,936 entries, K = 64).
_LONG_BLOCK, _SHORT_BLOCK = 32, 16
_SUMMED: Final = 128
# On a CPU, mlx takes three times as long for a maximum along the last axis. So the maximum of
# _STRETCH tokens, a stretch, is taken over a square array, first along the columns.
_SIDE: Final = 32
_STRETCH: Final = _SIDE * _SIDE

# vLLM's substitute for the logprob -inf, which JSON cannot express.
LOWEST_LOGPROB: Final = -9999.0

T = TypeVar("T", bound=np.generic)
Floats = npt.NDArray[np.float32]


class Adjustments:
    """The bias and penalties of one sequence, by token."""

    def __init__(self, sampling: Sampling, vocab_size: int, prompt: Sequence[int]) -> None:
        self._sampling = sampling
        self._places: dict[int, int] = {}
        self._ids = np.zeros(64, dtype=np.int32)
        self._bias = np.zeros(64, dtype=np.float32)
        self._counts = np.zeros(64, dtype=np.float32)
        self._was_read = np.zeros(64, dtype=np.bool_)
        self._repels = sampling.repetition_penalty != 1
        self._counts_tokens = bool(
            sampling.presence_penalty or sampling.frequency_penalty or self._repels
        )
        for token, bias in sampling.logit_bias.items():
            # MLX doesn't check bounds, and clients may send ids from another tokenizer.
            if 0 <= token < vocab_size:
                place = self._place(token)
                self._bias[place] = bias
        if self._repels:
            for token in set(prompt):
                if token < vocab_size:
                    place = self._place(token)  # may replace `_was_read`
                    self._was_read[place] = True

    def __len__(self) -> int:
        return len(self._places)

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        """Return the ids, (n,), of the tokens that have a bias or a penalty."""
        return self._ids[: len(self)]

    def count(self, token: int) -> None:
        """Count a generated token for the penalties."""
        if self._counts_tokens:
            place = self._place(token)
            self._counts[place] += 1

    def changes(self) -> tuple[Floats, Floats, Floats]:
        """Return a bias to add, a factor, and a penalty to subtract, (n,) each, in this order.

        Positive logits are divided by the factor, others multiplied.
        """
        counts = self._counts[: len(self)]
        penalty = self._sampling.frequency_penalty * counts
        penalty += self._sampling.presence_penalty * (counts > 0)
        is_known = (counts > 0) | self._was_read[: len(self)]
        factor = np.where(is_known, np.float32(self._sampling.repetition_penalty), np.float32(1))
        return self._bias[: len(self)], factor, penalty

    def _place(self, token: int) -> int:
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._ids):
            self._ids, self._bias = _double(self._ids), _double(self._bias)
            self._counts, self._was_read = _double(self._counts), _double(self._was_read)
        self._ids[place] = token
        return place


def _double(array: npt.NDArray[T]) -> npt.NDArray[T]:
    return np.concatenate([array, np.zeros_like(array)])


class Sampler:
    """The sampling parameters, random numbers and window of one sequence."""

    def __init__(self, sampling: Sampling, vocab_size: int, prompt: Sequence[int] = ()) -> None:
        self.sampling = sampling
        self.adjustments = Adjustments(sampling, vocab_size, prompt)
        self._vocab_size = vocab_size
        self._seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        self.top_k = sampling.top_k if 0 < sampling.top_k < vocab_size else 0
        self._window = self._smallest(self.top_k or _P_WINDOW)

    @property
    def is_greedy(self) -> bool:
        return 0 in (self.sampling.temperature, self.sampling.top_p) or self.top_k == 1

    @property
    def window(self) -> int:
        """Return how many of the likeliest tokens to sort; 0 if no sorting is needed."""
        if self.top_k or self.sampling.top_p < 1:
            return self._window
        return 0

    @property
    def is_certain(self) -> bool:
        """Return True if the window always contains all tokens that the filters keep."""
        return self.is_greedy or bool(self.top_k) or self.window in (0, self._vocab_size)

    def widen(self) -> None:
        self._window = self._smallest(self._window + 1)

    def count(self, token: int) -> None:
        self.adjustments.count(token)

    def uniform(self, position: int) -> float:
        """Return the random number in [0, 1) for a position, with 24 random bits."""
        # It depends only on seed and position, so a seeded answer is the same in any batch and
        # after preemption (SplitMix64: Steele, Lea and Flood, OOPSLA 2014).
        z = (self._seed + (position + 1) * 0x9E3779B97F4A7C15) & _WORD
        z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & _WORD
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & _WORD
        return float((z ^ z >> 31) >> 40) / (1 << 24)

    def _smallest(self, least: int) -> int:
        return next(
            (size for size in WINDOWS if least <= size < self._vocab_size), self._vocab_size
        )


def is_finite(logits: mx.array) -> mx.array:
    """Return which rows of logits, (rows, vocabulary), can be sampled from, as (rows,) bool."""
    # The maximum is finite if the row has no NaN or inf, and some token isn't -inf.
    return mx.isfinite(_peak(logits))[:, 0]


def adjust_logits(samplers: Sequence[Sampler], logits: mx.array) -> mx.array:
    """Apply every row's bias and penalties to logits, (rows, vocabulary). The result is float32, or
    the same array if no row has any.
    """
    adjusting = [i for i, sampler in enumerate(samplers) if sampler.adjustments]
    if not adjusting:
        return logits
    adjustments = [samplers[i].adjustments for i in adjusting]
    rows = np.repeat(adjusting, [len(adjustment) for adjustment in adjustments])
    ids = np.concatenate([adjustment.ids for adjustment in adjustments])
    parts = zip(*(adjustment.changes() for adjustment in adjustments), strict=True)
    bias, factor, penalty = (np.concatenate(part) for part in parts)
    at = mx.array(rows.astype(np.int32)), mx.array(ids)
    # A small bias would be lost in bfloat16, whose steps are 0.125 between 16 and 32.
    values = logits[at].astype(mx.float32) + mx.array(bias)
    if (factor != 1).any():
        factors = mx.array(factor)
        values = mx.where(values > 0, values / factors, values * factors)
    # `astype` returns a new array even for the same dtype, so the caller's logits don't change.
    adjusted = logits.astype(mx.float32)
    adjusted[at] = values - mx.array(penalty)
    return adjusted


def bar_tokens(logits: mx.array, tokens: Sequence[tuple[int, Collection[int]]]) -> mx.array:
    """Return logits, (rows, vocabulary), with -inf for each (row, barred ids) in `tokens`."""
    vocab_size = logits.shape[-1]
    pairs = [(row, token) for row, barred in tokens for token in barred if token < vocab_size]
    if not pairs:
        return logits
    at = mx.array(pairs)
    logits = mx.array(logits)
    logits[at[:, 0], at[:, 1]] = mx.array(-mx.inf, dtype=logits.dtype)
    return logits


def force_tokens(logits: mx.array, tokens: Sequence[tuple[int, int]]) -> mx.array:
    """Return logits, (rows, vocabulary), that allow only the given token in some rows."""
    pairs = [(row, token) for row, token in tokens if token < logits.shape[-1]]
    if not pairs:
        return logits
    at = mx.array(pairs)
    logits = mx.array(logits)
    logits[at[:, 0]] = mx.array(-mx.inf, dtype=logits.dtype)
    logits[at[:, 0], at[:, 1]] = mx.array(0, dtype=logits.dtype)
    return logits


def keep_open(logits: mx.array, row: int, thinking: Thinking) -> mx.array:
    """Change logits, (rows, vocabulary), so that a row can't end its answer while thinking."""
    stops = mx.array(thinking.stops)
    end = logits[row, stops].max()
    logits[row, stops] = -mx.inf
    close = thinking.closes_with
    if close is not None:
        logits[row, close] = mx.maximum(logits[row, close], end)
    return logits


@dataclass(frozen=True, slots=True)
class ChosenTokens:
    """The next tokens, and whether each row's window was large enough."""

    tokens: mx.array  # (rows,)
    is_sure: mx.array | None  # (rows,) bool: False if a row must be drawn again; None: all True


def choose(samplers: Sequence[Sampler], logits: mx.array, positions: Sequence[int]) -> ChosenTokens:
    """Choose one token per row from adjusted logits, (rows, vocabulary).

    `positions` are the tokens' indices in their answers.
    """
    # Rows are grouped by window, so that a row's window doesn't depend on other rows.
    groups: dict[int, list[int]] = {}
    for row, sampler in enumerate(samplers):
        if not sampler.is_greedy:
            groups.setdefault(sampler.window, []).append(row)
    if not groups:
        return ChosenTokens(_likeliest_one(logits), None)
    is_sure = None
    if not all(sampler.is_certain for sampler in samplers):
        is_sure = mx.ones(len(samplers), dtype=mx.bool_)
    is_all = len(groups) == 1 and sum(map(len, groups.values())) == len(samplers)
    tokens = mx.zeros(len(samplers), dtype=mx.uint32) if is_all else _likeliest_one(logits)
    for window, rows in groups.items():
        at = mx.array(rows)
        group = [samplers[row] for row in rows]
        group_logits = logits if is_all else logits[at]
        uniforms = [samplers[row].uniform(positions[row]) for row in rows]
        if window:
            drawn, has_all = _draw_in_window(group, group_logits, uniforms, window)
            if is_sure is not None:
                is_sure[at] = has_all
        else:
            drawn = _draw_from_all(group, group_logits, uniforms)
        tokens[at] = drawn.astype(mx.uint32)
    return ChosenTokens(tokens, is_sure)


def _draw_from_all(
    samplers: Sequence[Sampler], logits: mx.array, uniforms: Sequence[float]
) -> mx.array:
    """Draw a token per row from the whole vocabulary. Rows must have no top_k or top_p."""
    weights = _weights(samplers, logits, _peak(logits))
    if any(sampler.sampling.min_p for sampler in samplers):
        min_p = _column([sampler.sampling.min_p for sampler in samplers])
        weights = mx.where(weights >= min_p, weights, 0)
    lacking = -weights.shape[-1] % _SUMMED
    if lacking:
        weights = mx.pad(weights, [(0, 0), (0, lacking)])
    # A block is drawn first, then a token in the block: a cumulative sum over the whole vocabulary
    # would lose small weights to rounding.
    blocks = weights.reshape(len(samplers), -1, _SUMMED)
    sums = mx.sum(blocks, axis=-1)
    above = mx.cumsum(sums, axis=-1, inclusive=False)
    target = _column(uniforms) * (above[:, -1:] + sums[:, -1:])
    block = _find_places(sums, target)
    rest = target - mx.take_along_axis(above, block, axis=-1)
    inner = mx.take_along_axis(blocks, block[:, :, None], axis=1)[:, 0]
    return (block * _SUMMED + _find_places(inner, rest))[:, 0]


def _draw_in_window(
    samplers: Sequence[Sampler], logits: mx.array, uniforms: Sequence[float], window: int
) -> tuple[mx.array, mx.array]:
    """Draw from the `window` likeliest tokens. Return the tokens and `is_sure` of ChosenTokens."""
    samplings = [sampler.sampling for sampler in samplers]
    ids = _likeliest(logits, window)
    values = mx.take_along_axis(logits, ids, axis=-1)
    weights = _weights(samplers, values, values[:, :1])
    rank = mx.arange(window)
    top_k = mx.array([[sampler.top_k or window] for sampler in samplers])
    weights = mx.where(rank < top_k, weights, 0)
    above = mx.cumsum(weights, axis=-1, inclusive=False)
    in_window = above[:, -1:] + weights[:, -1:]
    total = in_window
    if not all(sampler.top_k for sampler in samplers) and window < logits.shape[-1]:
        whole = mx.sum(_weights(samplers, logits, values[:, :1]), axis=-1, keepdims=True)
        has_top_k = mx.array([[bool(sampler.top_k)] for sampler in samplers])
        total = mx.where(has_top_k, in_window, whole)
    nucleus = _column([sampling.top_p for sampling in samplings]) * total
    weights = mx.where((above < nucleus) | (rank == 0), weights, 0)
    min_p = _column([sampling.min_p for sampling in samplings])
    weights = mx.where(weights >= min_p, weights, 0)
    target = _column(uniforms) * mx.sum(weights, axis=-1, keepdims=True)
    place = _find_places(weights, target)
    return mx.take_along_axis(ids, place, axis=-1)[:, 0], mx.logical_not(in_window < nucleus)[:, 0]


def _weights(samplers: Sequence[Sampler], logits: mx.array, peak: mx.array) -> mx.array:
    """Return probabilities, (rows, n) float32, relative to the probability of `peak`, (rows, 1)."""
    # On a CPU, mlx's `exp` takes 23 ns per element, and `power` takes 7.
    scale = [_LOG2_E / max(sampler.sampling.temperature, 1e-4) for sampler in samplers]
    below = logits.astype(mx.float32) - peak.astype(mx.float32)
    return mx.power(2.0, below * _column(scale))


def _find_places(weights: mx.array, target: mx.array) -> mx.array:
    """Return the first place, (rows, 1), where the cumulative sum of weights, (rows, n), exceeds
    the target.
    """
    # A place with weight 0 is never chosen, even if rounding keeps the sum below the target.
    count = weights.shape[-1]
    place = mx.arange(count)
    is_past = mx.cumsum(weights, axis=-1) > target
    order = mx.where(weights > 0, mx.where(is_past, 2 * count - place, place), -1)
    return mx.argmax(order, axis=-1, keepdims=True)


def _stretches(logits: mx.array) -> mx.array:
    """Return the greatest logit of each stretch, (rows, stretches). The last two may overlap."""
    rows, vocab_size = logits.shape
    count = vocab_size // _STRETCH
    sides = logits[:, : count * _STRETCH].reshape(rows, count, _SIDE, _SIDE)
    greatest = mx.max(mx.max(sides, axis=2), axis=2)
    if vocab_size == count * _STRETCH:
        return greatest
    last = mx.max(logits[:, -_STRETCH:], axis=-1, keepdims=True)
    return mx.concatenate([greatest, last], axis=-1)


def _peak(logits: mx.array) -> mx.array:
    """Return the greatest logit of each row, (rows, 1); NaN if any logit of the row is NaN."""
    if logits.shape[-1] >= _STRETCH and _is_on_cpu():
        logits = _stretches(logits)
    return mx.max(logits, axis=-1, keepdims=True)


def _likeliest_one(logits: mx.array) -> mx.array:
    """Return the id of each row's greatest logit, (rows,); the lowest id if several are equal."""
    vocab_size = logits.shape[-1]
    if vocab_size < _STRETCH or not _is_on_cpu():
        return mx.argmax(logits, axis=-1)
    stretch = mx.argmax(_stretches(logits), axis=-1, keepdims=True)
    start = mx.minimum(stretch * _STRETCH, vocab_size - _STRETCH)
    # The last stretch is never chosen for a maximum in its overlap: argmax returns the first.
    inner = mx.take_along_axis(logits, start + mx.arange(_STRETCH, dtype=mx.uint32), axis=-1)
    return start[:, 0] + mx.argmax(inner, axis=-1)


def _is_on_cpu() -> bool:
    return mx.default_device() == mx.cpu


def _likeliest(logits: mx.array, count: int) -> mx.array:
    """Return the ids of the `count` greatest logits, (rows, count), in descending order."""
    rows, vocab_size = logits.shape
    if count >= vocab_size:
        return mx.argsort(-logits, axis=-1)
    block = _LONG_BLOCK if count <= WINDOWS[0] else _SHORT_BLOCK
    candidates, ids = logits, None
    if vocab_size >= 4 * count * block:
        lacking = -vocab_size % block
        if lacking:
            logits = mx.pad(logits, [(0, 0), (0, lacking)], constant_values=-mx.inf)
        blocks = logits.reshape(rows, -1, block)
        best = mx.argpartition(-mx.max(blocks, axis=-1), kth=count - 1, axis=-1)[:, :count, None]
        candidates = mx.take_along_axis(blocks, best, axis=1).reshape(rows, -1)
        ids = (best * block + mx.arange(block)).reshape(rows, -1)
    top = mx.argpartition(-candidates, kth=count - 1, axis=-1)[:, :count]
    order = mx.argsort(-mx.take_along_axis(candidates, top, axis=-1), axis=-1)
    top = mx.take_along_axis(top, order, axis=-1)
    if ids is None:
        return top
    return mx.take_along_axis(ids, top, axis=-1)


def _column(values: Sequence[float]) -> mx.array:
    return mx.array(list(values), dtype=mx.float32)[:, None]


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """Logprobs of some rows of a batch, still on the device."""

    rows: Sequence[int]
    chosen: mx.array  # (rows,): logprobs of the chosen tokens
    ids: mx.array  # (rows, k): the likeliest tokens, in descending order
    logprobs: mx.array  # (rows, k): logprobs of `ids`


def score(logits: mx.array, tokens: mx.array, rows: Sequence[int], k: int) -> TopLogprobs:
    """Return the logprobs of the chosen `tokens` and of the `k` likeliest tokens, for `rows` only.

    A logprob is the log-softmax of the adjusted logits, without temperature.
    """
    places = mx.array(list(rows))
    logits = logits[places].astype(mx.float32)
    peak = _peak(logits)
    # On a CPU, powers of two take half the time of mlx's logsumexp.
    total = peak + mx.log(mx.sum(mx.power(2.0, (logits - peak) * _LOG2_E), axis=-1, keepdims=True))
    chosen = (mx.take_along_axis(logits, tokens[places][:, None], axis=-1) - total)[:, 0]
    ids = _likeliest(logits, max(k, 1))
    return TopLogprobs(rows, chosen, ids, mx.take_along_axis(logits, ids, axis=-1) - total)
