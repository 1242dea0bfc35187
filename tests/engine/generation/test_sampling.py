"""Draws of tokens, against probabilities computed by hand."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from gateway.engine.generation.sampling import (
    WINDOWS,
    Adjustments,
    Sampler,
    adjust_logits,
    choose,
    is_finite,
    score,
)
from gateway.jobs.chat import Sampling

DRAWS = 2000
FEW = 600  # enough where each draw is slow
Probabilities = npt.NDArray[np.float64]


def sampler(vocab_size: int, **asked: Any) -> Sampler:
    return Sampler(Sampling(**asked), vocab_size)


def chosen(samplers: Sequence[Sampler], logits: mx.array, positions: Sequence[int]) -> list[int]:
    """Choose, as the engine does: again with a wider window where one did not hold enough."""
    while True:
        choice = choose(samplers, logits, positions)
        mx.eval(choice.tokens)
        if choice.is_sure is None or bool(mx.all(choice.is_sure).item()):
            tokens: Any = choice.tokens.tolist()
            return list(tokens)
        for row, is_sure in enumerate(np.array(choice.is_sure)):
            if not is_sure:
                samplers[row].widen()


def exact(logits: npt.NDArray[np.float32], asked: Mapping[str, Any]) -> Probabilities:
    """Compute the distribution as it is defined: top_k, top_p of that, min_p, all normalized."""
    scaled = logits.astype(np.float64) / asked.get("temperature", 1.0)
    odds = np.exp(scaled - scaled.max())
    order = np.argsort(-odds, kind="stable")
    kept = odds[order]
    if 0 < (top_k := asked.get("top_k", 0)) < len(kept):
        kept[top_k:] = 0
    kept /= kept.sum()
    above = np.cumsum(kept) - kept
    kept[1:][above[1:] >= asked.get("top_p", 1.0)] = 0
    kept[kept < asked.get("min_p", 0.0) * kept[0]] = 0
    probabilities: Probabilities = np.zeros_like(odds)
    probabilities[order] = kept / kept.sum()
    return probabilities


def drawn(
    logits: npt.NDArray[np.float32], asked: Mapping[str, Any], rows: int = 50, draws: int = DRAWS
) -> Any:
    """Count how often each token is drawn: rows with seeds of their own, positions in turn."""
    counts = np.zeros(len(logits), dtype=np.int64)
    samplers = [sampler(len(logits), seed=row, **asked) for row in range(rows)]
    batch = mx.array(np.tile(logits, (rows, 1)))
    for position in range(draws // rows):
        np.add.at(counts, chosen(samplers, batch, [position] * rows), 1)
    return counts


def is_likely(counts: npt.NDArray[np.int64], expected: npt.NDArray[np.float64]) -> bool:
    """Test by chi-square, at one false alarm in about 100,000, with rare values taken together."""
    often = expected >= 10
    seen = np.append(counts[often], counts[~often].sum())
    wanted = np.append(expected[often], expected[~often].sum())
    is_there = wanted > 0
    seen, wanted = seen[is_there], wanted[is_there]
    statistic = float(((seen - wanted) ** 2 / np.maximum(wanted, 1)).sum())
    free = max(len(wanted) - 1, 1)
    # Wilson and Hilferty (1931): the cube root of chi-square over its degrees is nearly normal.
    bound = free * (1 - 2 / (9 * free) + 4.3 * math.sqrt(2 / (9 * free))) ** 3
    return statistic <= bound


CASES = [
    {}, {"temperature": 0.5}, {"temperature": 2.0}, {"top_k": 5}, {"top_k": 70}, {"top_k": 1500},
    {"top_p": 0.3}, {"top_p": 0.95}, {"top_p": 0.9999}, {"min_p": 0.1},
    {"top_k": 20, "top_p": 0.8, "temperature": 0.7}, {"top_k": 100, "top_p": 0.9},
    {"top_k": 20, "min_p": 0.2}, {"top_p": 0.9, "min_p": 0.05},
    {"top_k": 40, "top_p": 0.95, "min_p": 0.02, "temperature": 1.3},
]  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "vocab_size"),
    [(asked, size) for asked in CASES for size in (50, 3_111)] + [({"top_p": 0.95}, 20_011)],
    ids=str,
)
def test_tokens_are_drawn_as_the_filters_say(asked: Mapping[str, Any], vocab_size: int) -> None:
    logits = (np.random.default_rng(1).standard_normal(vocab_size) * 3).astype(np.float32)
    probabilities = exact(logits, asked)
    counts = drawn(logits, asked, draws=DRAWS if vocab_size < 1000 else FEW)
    assert counts[probabilities == 0].sum() == 0
    assert is_likely(counts, probabilities * counts.sum())


@pytest.mark.parametrize(
    "asked", [{"top_k": 6}, {"top_p": 0.7}, {"top_k": 8, "top_p": 0.6}], ids=str
)
def test_of_tokens_that_tie_at_the_edge_as_many_stay_as_fit(asked: Mapping[str, Any]) -> None:
    logits = np.full(300, -9.0, dtype=np.float32)
    logits[[5, 100]], logits[[7, 8, 40, 50, 200, 201, 202, 299]] = 2.0, 1.0
    counts, probabilities = drawn(logits, asked), exact(logits, asked)
    assert (counts > 0).sum() == (probabilities > 0).sum()
    assert is_likely(np.sort(counts), np.sort(probabilities) * counts.sum())


def test_a_nucleus_wider_than_the_window_is_noticed_and_drawn_from_whole() -> None:
    """The window has 1,024 of 20,000 equal tokens, a twentieth of the nucleus of top_p."""
    logits = np.zeros(20_000, dtype=np.float32)
    one = sampler(20_000, top_p=0.9, seed=1)
    assert not one.is_certain
    choice = choose([one], mx.array(logits[None]), [0])
    assert choice.is_sure is not None
    assert not bool(choice.is_sure[0].item())
    counts = drawn(logits, {"top_p": 0.9}, draws=FEW)
    quarters = counts.reshape(4, -1).sum(axis=1)
    assert counts.max() < 5
    assert (quarters > 0).sum() >= 3


def test_what_is_forbidden_is_never_drawn_whatever_number_comes() -> None:
    logits = np.full((1, 500), -np.inf, dtype=np.float32)
    logits[0, [130, 131, 300]] = [0.0, -30.0, -30.0]
    for asked in ({}, {"top_k": 10}, {"top_p": 0.99}, {"min_p": 0.01}):
        for number in (0.0, 0.5, 1 - 2**-24):
            one = sampler(500, seed=1, **asked)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(one, "uniform", lambda _, number=number: number)
                assert chosen([one], mx.array(logits), [0])[0] in (130, 131, 300)


def test_random_numbers_differ_by_seed_and_by_position() -> None:
    numbers = [sampler(9, seed=s).uniform(p) for s in range(-50, 50) for p in range(50)]
    assert len(set(numbers)) > 4990
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    assert is_likely(counts, np.full(20, len(numbers) / 20))
    assert all(0 <= number < 1 for number in numbers)


def test_small_penalties_and_biases_count_in_bfloat16() -> None:
    """Neighbouring numbers of bfloat16 are 0.125 apart at a logit of 30."""
    logits = mx.array([[30.0, 30.0, 30.0]], dtype=mx.bfloat16)
    row = sampler(3, temperature=0, presence_penalty=0.01, logit_bias={1: 0.02, 2: 0.01})
    assert chosen([row], adjust_logits([row], logits), [0]) == [1]
    row.count(1)
    row.count(1)
    assert chosen([row], adjust_logits([row], logits), [0]) in ([1], [2])
    assert np.allclose(np.array(adjust_logits([row], logits)), [[30.0, 30.01, 30.01]])


def test_biases_and_penalties_of_many_rows_are_applied_together() -> None:
    generator = np.random.default_rng(2)
    logits = generator.standard_normal((4, 700)).astype(np.float32)
    asked = [
        Sampling(logit_bias={3: 5.0, 699: -100.0, 700: 9.0}),
        Sampling(),
        Sampling(frequency_penalty=0.5, presence_penalty=1.0),
        Sampling(frequency_penalty=-1.0, logit_bias=dict.fromkeys(range(600), 1.0)),
    ]
    samplers = [Sampler(each, 700) for each in asked]
    said = [[1, 1], [1], [4, 4, 4, 9], [i % 650 for i in range(1300)]]
    expected = logits.astype(np.float64)
    expected[0, 3] += 5
    expected[0, 699] -= 100
    expected[2, [4, 9]] -= [0.5 * 3 + 1, 0.5 + 1]
    expected[3, :600] += 1
    expected[3, :650] += 2
    for row, tokens in zip(samplers, said, strict=True):
        for token in tokens:
            row.count(token)
    assert np.allclose(np.array(adjust_logits(samplers, mx.array(logits))), expected, atol=1e-5)


def test_greedy_rows_take_the_likeliest_in_any_of_its_spellings() -> None:
    logits = mx.random.normal((3, 900), key=mx.random.key(3))
    rows = [sampler(900, **each) for each in ({"temperature": 0}, {"top_k": 1}, {"top_p": 0})]
    assert chosen(rows, logits, [0, 0, 0]) == np.argmax(np.array(logits), axis=-1).tolist()


SIZES = [1, 50, 1023, 1024, 1025, 2047, 2048, 5003]
DTYPES = [mx.float32, mx.float16, mx.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", SIZES)
def test_of_equal_logits_greedy_rows_take_the_first(vocab_size: int, dtype: mx.Dtype) -> None:
    rng = np.random.default_rng(vocab_size)
    values = rng.integers(-3, 3, (64, vocab_size)).astype(np.float32)
    for row in values[:32]:  # the rest tie hundreds of times
        row[rng.integers(0, vocab_size, 2)] = 7
    values[0], values[1], values[2] = 0, -np.inf, -np.inf
    values[2, -1] = -5
    values[3, [0, -1]], values[4, -1], values[5, 0] = 9, 9, 9
    values[6, vocab_size // 1024 * 1024 - 1] = 9  # the last before a stretch that is not whole
    values[7, -min(vocab_size, 1024) :] = 9
    greedy = [sampler(vocab_size, temperature=0)] * len(values)
    taken = chosen(greedy, mx.array(values).astype(dtype), [0] * len(values))
    assert taken == np.argmax(values, axis=-1).tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", SIZES)
def test_a_logit_that_is_no_number_is_seen_at_any_place(vocab_size: int, dtype: mx.Dtype) -> None:
    """A NaN, inf, or nothing but -inf is no number; a model may give some -inf."""
    rng = np.random.default_rng(vocab_size)
    places = {0, vocab_size - 1, vocab_size // 2, *rng.integers(0, vocab_size, 20).tolist()}
    plain = rng.standard_normal(vocab_size).astype(np.float32)
    for place in places:
        rows = np.stack([plain] * 4 + [np.full_like(plain, -np.inf)] * 4)
        rows[1:4, place] = [np.nan, np.inf, -np.inf]
        rows[5:8, place] = [1, np.nan, np.inf]
        expected = [True, False, False, vocab_size > 1, False, True, False, False]
        assert is_finite(mx.array(rows).astype(dtype)).tolist() == expected


def test_logits_that_are_adjusted_stay_as_they_are_for_the_caller() -> None:
    """A token may have to be chosen again, and doubts keep the logits it was chosen from."""
    for dtype in DTYPES:
        logits = mx.arange(12).reshape(3, 4).astype(dtype)
        rows = [sampler(4, logit_bias={1: 5.0}), sampler(4), sampler(4, presence_penalty=1.0)]
        rows[2].count(3)
        adjusted = adjust_logits(rows, logits)
        assert adjusted.tolist() == [[0, 6, 2, 3], [4, 5, 6, 7], [8, 9, 10, 10]]
        assert logits.tolist() == np.arange(12).reshape(3, 4).tolist()


@pytest.mark.parametrize("vocab_size", [40, 5003])
def test_logprobs_are_those_of_softmax(vocab_size: int) -> None:
    rng = np.random.default_rng(5)
    values = rng.standard_normal((4, vocab_size)) * [[1], [10], [100], [3]]
    values[1] += 1000
    values[3, 3:] = -np.inf
    logits = values.astype(np.float32).astype(np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    expected = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    tokens = mx.array([2, 2, 2, 2])
    scores = score(mx.array(logits.astype(np.float32)), tokens, [3, 0, 1, 2], 2)
    order = [3, 0, 1, 2]
    assert np.allclose(np.array(scores.chosen), expected[order, 2], rtol=1e-5, atol=2e-4)
    best = np.sort(expected[order], axis=-1)[:, :-3:-1]
    assert np.allclose(np.array(scores.logprobs), best, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("vocab_size", [60, 64, 65, 1024, 1025, 2048 * 64 + 1])
def test_a_window_is_never_larger_than_the_vocabulary(vocab_size: int) -> None:
    logits = mx.random.permutation(vocab_size, key=mx.random.key(1)).astype(mx.float32)[None]
    for top_k in (2, 63, 64, 65, 1000, 1024, 20_000):
        one = sampler(vocab_size, top_k=top_k, temperature=100.0, seed=1)
        assert one.window <= vocab_size
        token = chosen([one], logits, [0])[0]
        assert np.array(logits)[0, token] >= vocab_size - top_k
    assert list(WINDOWS) == sorted(WINDOWS)


def test_a_repetition_penalty_counts_every_token_of_a_prompt_but_those_of_images() -> None:
    prompt = [*range(100), 1 << 40, (1 << 40) + 7]
    adjustments = Adjustments(Sampling(repetition_penalty=1.3), 128, prompt)
    assert sorted(adjustments.ids.tolist()) == [*range(100)]
