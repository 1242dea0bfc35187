"""Logits → the next token of one row: bias, penalties, temperature, filters, draw.

Order and meaning follow OpenAI's and vLLM's: penalties count generated tokens only, bias and
penalties come before the temperature, the filters after it. The filters are mlx-lm's.
"""

import secrets

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
        bias = {i: b for i, b in sampling.logit_bias.items() if 0 <= i < vocab_size}
        self._bias = (mx.array(list(bias)), mx.array(list(bias.values()))) if bias else None
        self._counts: mx.array | None = None
        if sampling.presence_penalty or sampling.frequency_penalty:
            self._counts = mx.zeros((vocab_size,), dtype=mx.float32)

    @property
    def is_plain(self) -> bool:
        """Tell whether the token is just the likeliest: such rows share one argmax."""
        return self._sampling.temperature == 0 and self._bias is None and self._counts is None

    def count(self, token: mx.array) -> None:
        """Remember a generated token, () or (1,), for the penalties."""
        if self._counts is not None:
            self._counts = self._counts.at[token].add(1.0)

    def recount(self, tokens: list[int]) -> None:
        """Start the penalties again from these generated tokens."""
        if self._counts is not None:
            self._counts = mx.zeros((self._vocab_size,), dtype=mx.float32)
            for token in tokens:
                self.count(mx.array(token))

    def choose(self, logits: mx.array, position: int) -> mx.array:
        """Draw the token, (1,), at `position` of the answer from logits, (1, vocabulary)."""
        logits = self._adjusted(logits)
        sampling = self._sampling
        if sampling.temperature == 0:
            return mx.argmax(logits, axis=-1)
        return mx.random.categorical(self._filtered(logits), key=self._key(position))

    def _adjusted(self, logits: mx.array) -> mx.array:
        sampling = self._sampling
        if self._bias is not None:
            ids, values = self._bias
            logits = logits.at[:, ids].add(values.astype(logits.dtype))
        if self._counts is not None:
            penalty = sampling.frequency_penalty * self._counts
            penalty = penalty + sampling.presence_penalty * (self._counts > 0)
            logits = logits - penalty[: logits.shape[-1]].astype(logits.dtype)
        return logits

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


def choose_all(samplers: list[Sampler], logits: mx.array, positions: list[int]) -> mx.array:
    """Draw one token a row, (rows,), from logits, (rows, vocabulary)."""
    if all(sampler.is_plain for sampler in samplers):
        return mx.argmax(logits, axis=-1)
    chosen = [
        sampler.choose(logits[i : i + 1], position)
        for i, (sampler, position) in enumerate(zip(samplers, positions, strict=True))
    ]
    tokens = mx.concatenate(chosen)
    for i, sampler in enumerate(samplers):
        sampler.count(tokens[i])
    return tokens
