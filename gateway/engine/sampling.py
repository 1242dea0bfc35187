"""Logits → the next tokens: bias, penalties, masks, temperature, filters, draw, logprobs.

Order and meaning follow OpenAI's and vLLM's: penalties count generated tokens only; bias,
penalties and grammar come before the temperature, the filters after it. The filters are mlx-lm's.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from gateway.jobs import Sampling

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / phi: spreads neighbouring seeds (Knuth, TAOCP 3, 6.4)
_WORD = (1 << 64) - 1


class Sampler:
    """Chooses the tokens of one row. It draws from its own keys, one a position, so that a
    seeded row repeats exactly whatever runs beside it, and after it was admitted again.
    """

    def __init__(self, sampling: Sampling, vocab_size: int) -> None:
        self._sampling = sampling
        self._vocab_size = vocab_size
        self._seed = sampling.seed if sampling.seed is not None else secrets.randbits(64)
        # MLX checks no bounds, and clients send the ids of other tokenizers.
        self.bias = {i: b for i, b in sampling.logit_bias.items() if 0 <= i < vocab_size}
        self._counts: mx.array | None = None
        if sampling.presence_penalty or sampling.frequency_penalty:
            self._counts = mx.zeros((vocab_size,), dtype=mx.float32)

    @property
    def is_greedy(self) -> bool:
        """Tell whether the likeliest token is always taken."""
        return self._sampling.temperature == 0

    @property
    def penalty(self) -> mx.array | None:
        """Give what to take from each logit, (vocabulary,), for what was said already."""
        if self._counts is None:
            return None
        penalty = self._sampling.frequency_penalty * self._counts
        return penalty + self._sampling.presence_penalty * (self._counts > 0)

    def count(self, token: mx.array) -> None:
        """Remember a generated token, () or (1,), for the penalties."""
        if self._counts is not None:
            self._counts = self._counts.at[token].add(1.0)

    def recount(self, tokens: Sequence[int]) -> None:
        """Start the penalties again from these generated tokens."""
        if self._counts is not None:
            self._counts = mx.zeros((self._vocab_size,), dtype=mx.float32)
            for token in tokens:
                self.count(mx.array(token))

    def draw(self, logits: mx.array, position: int) -> mx.array:
        """Draw the token, (1,), at `position` of the answer from logits, (1, vocabulary)."""
        return mx.random.categorical(self._filtered(logits), key=self._key(position))

    def _filtered(self, logits: mx.array) -> mx.array:
        sampling = self._sampling
        # Below 1e-4 a division would overflow float32, and the answer is the likeliest anyway.
        scaled = logits.astype(mx.float32) / max(sampling.temperature, 1e-4)
        logprobs = scaled - mx.logsumexp(scaled, axis=-1, keepdims=True)
        if 0 < sampling.top_k < self._vocab_size:
            logprobs = apply_top_k(logprobs, sampling.top_k)
        if 0 < sampling.top_p < 1:
            logprobs = apply_top_p(logprobs, sampling.top_p)
        elif sampling.top_p == 0:
            logprobs = apply_top_k(logprobs, 1)
        if sampling.min_p > 0:
            logprobs = apply_min_p(logprobs, sampling.min_p)
        return logprobs

    def _key(self, position: int) -> mx.array:
        """Derive the key of a position from the seed alone: nothing to keep, nothing to lose."""
        return mx.random.key((self._seed * _GOLDEN + position) & _WORD)


def is_finite(logits: mx.array) -> mx.array:
    """Tell, (rows,) bool, which rows of logits, (rows, vocabulary), are numbers throughout."""
    return mx.isfinite(mx.max(logits, axis=-1))


def adjusted(samplers: Sequence[Sampler], logits: mx.array) -> mx.array:
    """Add every row's bias and take its penalties from logits, (rows, vocabulary)."""
    rows: list[int] = []
    ids: list[int] = []
    values: list[float] = []
    for row, sampler in enumerate(samplers):
        rows += [row] * len(sampler.bias)
        ids += sampler.bias.keys()
        values += sampler.bias.values()
    if rows:
        bias = mx.array(values, dtype=logits.dtype)
        logits = logits.at[mx.array(rows), mx.array(ids)].add(bias)
    for row, sampler in enumerate(samplers):
        if (penalty := sampler.penalty) is not None:
            taken = penalty[: logits.shape[-1]].astype(logits.dtype)
            logits = logits.at[row].subtract(taken)
    return logits


def choose(samplers: Sequence[Sampler], logits: mx.array, positions: Sequence[int]) -> mx.array:
    """Choose one token a row, (rows,), from adjusted logits, (rows, vocabulary)."""
    tokens = mx.argmax(logits, axis=-1)
    drawn = [row for row, sampler in enumerate(samplers) if not sampler.is_greedy]
    if drawn:
        picks = [samplers[row].draw(logits[row : row + 1], positions[row]) for row in drawn]
        tokens[mx.array(drawn)] = mx.concatenate(picks)
    for row, sampler in enumerate(samplers):
        sampler.count(tokens[row])
    return tokens


@dataclass(frozen=True, slots=True)
class Scores:
    """Logprobs of some rows, still on the device: `rows` says whose.

    `chosen` is (rows,); `ids` and `logprobs` are (rows, k), in no order.
    """

    rows: Sequence[int]
    chosen: mx.array
    ids: mx.array
    logprobs: mx.array


def score(logits: mx.array, tokens: mx.array, rows: Sequence[int], k: int) -> Scores:
    """Take the log-softmax of `rows` of adjusted logits, before any temperature."""
    wanted = mx.array(list(rows))
    some = logits[wanted].astype(mx.float32)
    logprobs = some - mx.logsumexp(some, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logprobs, tokens[wanted][:, None], axis=-1)[:, 0]
    k = min(max(k, 1), logprobs.shape[-1] - 1)
    ids = mx.argpartition(-logprobs, kth=k - 1, axis=-1)[:, :k]
    return Scores(rows, chosen, ids, mx.take_along_axis(logprobs, ids, axis=-1))
