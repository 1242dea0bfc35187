"""Prompts that stop at ends of their blocks, where states are kept, share passes all the same."""

from collections import deque
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.generate import PromptProcessingBatch
from mlx_lm.models.cache import ArraysCache, CacheList, RotatingKVCache, make_prompt_cache

from benchmarks.steps import Steps
from benchmarks.tiny_models import tiny_config, tiny_model
from gateway.engine.generation.engine import GenerationEngine
from gateway.engine.generation.prefill import (
    OPENING,
    PrefillBatch,
    cut_prompt,
    plan_passes,
    take_prompts,
)
from gateway.engine.kv.cache import RaggedKVCache
from gateway.engine.kv.layers import make_batch_caches
from gateway.engine.kv.prefix_cache import BLOCK
from gateway.jobs.chat import GenerateJob, Sampling
from tests.checkpoints import HYBRID, SLIDING, STATEFUL, write_chat
from tests.engine.generation.harness import ARCHITECTURES as CONFIGS
from tests.engine.generation.harness import (
    GREEDY,
    PLENTY,
    SEEDED,
    Passing,
    answers,
    bare,
    cached,
    exchange,
    ids,
    open_engine,
    shapes,
    spoil,
    tokens,
)

pytestmark = pytest.mark.slow

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sliding": SLIDING,
    "sinks": CONFIGS["gpt_oss"],
    "stateful": STATEFUL,
    "hybrid": HYBRID,
}
STATES = [kind for kind in KINDS if kind != "plain"]
# Each kind of cache that mlx-lm's models have beside plain KV: windows, with sinks and without;
# convolutions; gated delta rules; SSMs, beside KV too; states and KV of one layer in a list. Not
# those whose states take padding in: test_self_test.py.
ARCHITECTURES = [
    "gemma3_text", "gpt_oss", "lfm2", "qwen3_next", "qwen3_5", "kimi_linear", "mamba2", "falcon_h1",
    "granitemoehybrid",
]  # fmt: skip
# Cuts of several lengths and numbers of pieces; the last but one continues from a kept block.
CUTS = [[128, 64, 3], [64, 64, 11], [192, 20], [64, 79], [64, 64], [64, 1], [37]]
LENGTHS = (150, 200, 20, 131, 64, 65, 193, 77, 320)


@given(st.integers(0, 9), st.integers(1, 700), st.integers(0, 12))
def test_a_prompt_is_cut_wherever_its_states_are_kept(known: int, rest: int, branch: int) -> None:
    start, end = known * BLOCK, known * BLOCK + rest
    pieces = cut_prompt(start, end, branch * BLOCK)
    ends = list(accumulate(pieces, initial=start))[1:]
    assert min(pieces) > 0
    assert ends[-1] == end
    assert not any(each % BLOCK for each in ends[:-1])
    for kept in (branch * BLOCK, (end - OPENING) // BLOCK * BLOCK, end // BLOCK * BLOCK):
        assert kept in ends or not start < kept <= end


@given(
    st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=4), min_size=1, max_size=20),
    st.integers(1, 3000),
)
def test_prompts_taken_together_are_within_the_budget(
    prompts: list[list[int]], budget: int
) -> None:
    taken = take_prompts(prompts, budget)

    def padded(rows: int) -> int:
        some = sorted(prompts[:rows], key=len, reverse=True)
        return sum(len(sizes) * max(sizes) for sizes in plan_passes(some))

    assert taken == 1 or padded(taken) <= budget
    assert taken == len(prompts) or padded(taken + 1) > budget


def made(name: str) -> tuple[Any, int]:
    """Make a tiny model with random weights; return it and its vocabulary's size."""
    config = tiny_config(name)
    model = tiny_model(config)
    return model, (config.get("text_config") or config)["vocab_size"]


def states(layer: Any) -> list[mx.array]:
    """Return the arrays of one row's cache, as far as a next token depends on them."""
    if isinstance(layer, CacheList):
        return [array for each in layer.caches for array in states(each)]
    if isinstance(layer, ArraysCache):
        filled: list[Any] = layer.cache
        return [array for array in filled if array is not None]
    if isinstance(layer, RotatingKVCache):
        kept: Any = layer  # untyped in mlx-lm
        both = (kept._temporal_order(each) for each in (kept.keys, kept.values))
        return [each[:, :, -min(kept.offset, kept.max_size) :] for each in both]
    length = layer.size() if isinstance(layer, RaggedKVCache) else layer.offset
    return [each[:, :, :length] for each in layer.state[:2]]


def apart(layers: Sequence[Any], others: Sequence[Any]) -> float:
    """Return how much caches differ, in parts of each array's greatest value."""
    most = 0.0
    for layer, other in zip(layers, others, strict=True):
        for one, two in zip(states(layer), states(other), strict=True):
            assert one.shape == two.shape
            gap: Any = (mx.abs(one - two).max() / mx.maximum(mx.abs(one).max(), 1e-6)).item()
            most = max(most, float(gap))
    return most


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_state_taken_out_of_a_padded_pass_is_that_of_its_row_alone(name: str) -> None:
    model, vocab_size = made(name)
    drawn = (tokens(sum(cut), seed) for seed, cut in enumerate(CUTS))
    prompts = [[1 + each % (vocab_size - 1) for each in prompt] for prompt in drawn]
    caches = [make_batch_caches(model) for _ in CUTS]
    starts = [BLOCK if i == len(CUTS) - 2 else 0 for i in range(len(CUTS))]
    read = PromptProcessingBatch(model, [0], [caches[-2]])
    read.prompt([prompts[-2][:BLOCK]])
    caches[-2] = [layer.extract(0) for layer in read.prompt_cache]
    pieces = [cut[1:] if start else cut for cut, start in zip(CUTS, starts, strict=True)]
    order = sorted(range(len(CUTS)), key=lambda i: -len(pieces[i]))
    first, *later = (
        PromptProcessingBatch(model, list(group), [caches[i] for i in group], prefill_step_size=999)
        for group in [list(g) for _, g in groupby(order, lambda i: len(pieces[i]))]
    )
    rows: Any = order
    batch = PrefillBatch(
        rows,
        first,
        [prompts[i][starts[i] :] for i in order],
        [pieces[i] for i in order],
        [starts[i] for i in order],
        deque(later),
    )
    alone = [make_prompt_cache(model) for _ in order]
    for i, layers in zip(order, alone, strict=True):
        if starts[i]:
            model(mx.array([prompts[i][:BLOCK]]), cache=layers)
    for sizes in plan_passes(batch.pieces):
        before = batch.positions
        batch.read_on(sizes)
        for place, size in enumerate(sizes):
            at = before[place]
            model(mx.array([prompts[order[place]][at : at + size]]), cache=alone[place])
            found = [layer.extract(place) for layer in batch.lm_batch.prompt_cache]
            assert apart(alone[place], found) < 1e-4, (place, at, size)
    assert batch.is_read
    following = mx.array([[5]] * len(order))
    together = model(following, cache=batch.lm_batch.prompt_cache)[:, -1]
    for place, layers in enumerate(alone):
        logits = model(following[:1], cache=layers)[0, -1]
        assert mx.allclose(logits, together[place], rtol=1e-3, atol=1e-3).item()


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat(tmp_path_factory.mktemp(request.param), **KINDS[request.param])


def alone(
    cold: GenerationEngine, prompts: Sequence[Sequence[int]], sampling: Sampling = GREEDY
) -> list[list[int]]:
    return [answered(cold, tuple(prompt), sampling is SEEDED) for prompt in prompts]


@cache
def answered(cold: GenerationEngine, prompt: tuple[int, ...], is_seeded: bool) -> list[int]:
    return answers(cold, [short(prompt, SEEDED if is_seeded else GREEDY)])[0].ids


def short(prompt: Sequence[int], sampling: Sampling = GREEDY) -> GenerateJob:
    """Ask for a few tokens: they show how a prompt was read."""
    return bare(prompt, sampling, max_tokens=4)


@pytest.mark.parametrize(("budget", "sampling"), [(400, SEEDED), (100_000, GREEDY)])
def test_answers_of_prompts_read_together_are_those_alone(
    cold: GenerationEngine, warm: GenerationEngine, budget: int, sampling: Sampling
) -> None:
    prompts = [tokens(length, length) for length in LENGTHS]
    longer = [prompt + tokens(40 + 9 * i, i) for i, prompt in enumerate(prompts)]
    passes = shapes(warm)
    for asked in (prompts, prompts, longer, longer):
        told = answers(warm, [short(prompt, sampling) for prompt in asked], budget)
        assert ids(told) == alone(cold, asked, sampling)
    whole = [(len(each) - 1) // BLOCK * BLOCK for each in longer]
    assert cached(told) == whole
    assert max(passes)[0] == len(prompts) or budget < 100_000


@pytest.mark.parametrize("kind", STATES)
def test_a_burst_takes_three_passes_whatever_its_blocks(tmp_path: Path, kind: str) -> None:
    """Reading each prompt by itself took two or three passes a prompt."""
    engine = open_engine(write_chat(tmp_path, **KINDS[kind]), prefix_cache_bytes=PLENTY)
    passes = shapes(engine)
    prompts = [tokens(140 + 9 * i, i) for i in range(8)]
    answers(engine, [short(each) for each in prompts], 4096)
    rows = [rows for rows, width in passes if width > 1]
    assert (len(rows), rows[-1]) == (3, len(prompts))
    assert cached(answers(engine, [short(each) for each in prompts])) == [
        (len(each) - 1) // BLOCK * BLOCK for each in prompts
    ]


@pytest.mark.parametrize("at", [1, 3, 7])
def test_a_fault_of_a_pass_changes_no_answer(folder: Path, cold: GenerationEngine, at: int) -> None:
    engine = open_engine(folder, prefix_cache_bytes=PLENTY)
    prompts = [tokens(length, length) for length in LENGTHS]
    expected = alone(cold, prompts)
    model = engine._model
    exchange(engine, Passing(model, at))
    assert ids(answers(engine, [short(prompt) for prompt in prompts], 4096)) == expected
    exchange(engine, model)
    told = answers(engine, [short(prompt) for prompt in prompts], 4096)
    assert ids(told) == expected
    assert any(cached(told))


@pytest.mark.parametrize("kind", ["plain", "sliding", "sinks", "hybrid"])  # ends not tied
def test_a_row_that_is_no_number_spoils_no_other(tmp_path: Path, kind: str) -> None:
    folder = write_chat(tmp_path, **KINDS[kind])
    prompts = [tokens(length, length) for length in LENGTHS]
    cold = open_engine(folder)
    expected = alone(cold, prompts)
    poison = min({*range(3, 300)} - {token for answer in expected for token in answer})
    spoil(folder, "model.embed_tokens.weight", float("nan"), poison)
    engine = open_engine(folder, prefix_cache_bytes=PLENTY)
    broken = [*prompts[1][:100], poison, *prompts[1][100:]]
    for _ in range(2):
        told = answers(engine, [short(each) for each in (prompts[0], broken, *prompts[1:])], 4096)
        assert "not a number" in (told[1].error or "")
        assert told[1].cached_tokens <= BLOCK
        assert ids([told[0], *told[2:]]) == expected


@pytest.mark.parametrize("kind", STATES)
def test_prompts_that_begin_alike_go_on_from_one_state(tmp_path: Path, kind: str) -> None:
    """In a burst the first prompt stops where the others leave it. If they come one after another,
    the second shows where they part, and stops there for the ones that follow.
    """
    folder = write_chat(tmp_path, **KINDS[kind])
    engine, cold = open_engine(folder, prefix_cache_bytes=PLENTY), open_engine(folder)
    begin = tokens(140, 1)
    prompts = [begin + tokens(90 + 9 * i, 10 + i) for i in range(7)]
    prompts.append(begin[:80] + tokens(90, 9))
    told = answers(engine, [short(each) for each in prompts], 1000)
    assert ids(told) == alone(cold, prompts)
    assert cached(told) == [0, *[128] * 6, 64]
    Steps(engine).change(clear_prefixes=True)
    told = [answers(engine, [short(each)])[0] for each in prompts[:4]]
    assert ids(told) == alone(cold, prompts[:4])
    assert cached(told) == [0, 0, 128, 128]
