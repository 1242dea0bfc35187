"""The places where two answers to a job may part: tokens whose draw is a tie.

How a product is rounded depends on the rows of its matrices and on a machine's kernels. Where that
decides which of two tokens is drawn, either is right, and the text after it differs.
"""

import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import make_prompt_cache

from gateway.engine.generation.engine import GenerationEngine
from gateway.engine.generation.sampling import Sampler, adjust_logits
from gateway.jobs.chat import GenerateJob

# The most that a logit may move. Those of tests/checkpoints.py's models, read in other pieces, move
# by 1e-4 at most with OpenBLAS's kernels for Nehalem, Sandybridge, Haswell and AVX-512.
ROUNDING = 5e-4


def may_draw(
    sampler: Sampler, logits: npt.NDArray[Any], position: int, token: int, rounding: float
) -> bool:
    """Return True if some logits draw a token that differ from adjusted ones, (vocabulary,), by no
    more than `rounding` each.
    """
    given = sampler.sampling
    exact = logits.astype(np.float64)
    if sampler.is_greedy:
        return bool(exact[token] >= exact.max() - 2 * rounding)
    spread = math.exp(2 * rounding / given.temperature)  # between two tokens' weights
    weights = np.exp((exact - exact.max()) / given.temperature)
    ranked = np.sort(weights)[::-1][: sampler.top_k or None]
    above = np.cumsum(ranked) - ranked
    nucleus = given.top_p * ranked.sum()
    surely = (above * spread < nucleus) & (ranked >= given.min_p * spread)
    perhaps = (above < nucleus * spread) & (ranked * spread >= given.min_p)
    surely[0] = perhaps[0] = True
    if weights[token] * spread < ranked[perhaps].min():
        return False
    if sampler.window:  # drawn in the order of likelihood, else in that of the vocabulary
        others = np.delete(weights, token)
        first = others[others > weights[token] * spread].sum()
        last = others[others * spread >= weights[token]].sum() + weights[token]
    else:
        first = weights[:token][weights[:token] >= given.min_p * spread].sum()
        last = weights[: token + 1][weights[: token + 1] * spread >= given.min_p].sum()
    share = sampler.uniform(position)
    is_past_first = first <= share * ranked[perhaps].sum() * spread
    return bool(is_past_first and last * spread >= share * ranked[surely].sum())


def count_common(
    engine: GenerationEngine,
    job: GenerateJob,
    found: Sequence[int],
    expected: Sequence[int],
    rounding: float = ROUNDING,
) -> int:
    """Count the tokens that two answers begin with. Fails if they part where there is no tie.

    That is judged by logits of its own: of the prompt and these tokens, read alone in one pass.
    """
    pairs = enumerate(zip(found, expected, strict=False))
    at = next((i for i, (one, other) in pairs if one != other), None)
    if at is None:
        assert len(found) == len(expected)
        return len(found)
    [row] = engine.prepare(job)
    sampler = Sampler(job.sampling, engine._setup.vocab_size, row.prompt)
    for token in found[:at]:
        sampler.count(token)
    model: Any = engine._model
    read = mx.array([[*row.prompt, *found[:at]]])
    logits = adjust_logits([sampler], model(read, cache=make_prompt_cache(model))[:, -1])
    for token in (found[at], expected[at]):
        is_tie = may_draw(sampler, np.array(logits[0].astype(mx.float32)), at, token, rounding)
        assert is_tie, f"token {at}: {token} is not drawn, of {found[at]} and {expected[at]}"
    return at


def assert_alike(
    engine: GenerationEngine,
    jobs: Sequence[GenerateJob],
    found: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
    rounding: float = ROUNDING,
) -> None:
    """Fail if answers to jobs part where there is no tie, or before the half of all tokens."""
    pairs = zip(jobs, found, expected, strict=True)
    common = sum(count_common(engine, *each, rounding) for each in pairs)
    assert 2 * common >= sum(map(len, expected))
