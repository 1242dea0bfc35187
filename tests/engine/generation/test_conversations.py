"""A conversation's next prompt reads only what is new in it, whatever the model keeps."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.engine.generation.decode_batch import KEPT_ENDS, spread
from gateway.engine.generation.engine import GenerationEngine
from gateway.engine.kv.prefix_cache import BLOCK
from gateway.jobs import GenerateJob, Sampling
from tests.checkpoints import HYBRID, SLIDING, teach_thinking, write_chat
from tests.engine.generation.harness import (
    PLENTY,
    Passing,
    Run,
    active_memory,
    answers,
    bare,
    exchange,
    ids,
    open_engine,
    tokens,
)
from tests.fakes import caller

pytestmark = pytest.mark.slow

# A hybrid keeps plain KV and states; plain KV alone is in test_prefix_cache.
FAMILIES: dict[str, dict[str, Any]] = {"sliding": SLIDING, "hybrid": HYBRID}
WORDS = ["the", "of", "and", "to", "you", "is"]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat(tmp_path_factory.mktemp(request.param), **FAMILIES[request.param])


def whole(length: int) -> int:
    return length // BLOCK * BLOCK


def count_alike(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


@pytest.mark.parametrize("length", [20, 129])
def test_a_next_turn_reads_again_at_most_the_last_block_of_the_last(
    cold: GenerationEngine, warm: GenerationEngine, length: int
) -> None:
    prompt, before = tokens(length, length), 1
    for turn, most in enumerate((150, 30, 70)):
        (told,) = answers(warm, [bare(prompt, max_tokens=most)])
        assert told.ids == answers(cold, [bare(prompt, max_tokens=most)])[0].ids
        assert told.cached_tokens >= whole(before - 1)
        before = len(prompt) + len(told.ids)
        prompt = prompt + told.ids + tokens(50, turn)


def spoken(engine: GenerationEngine) -> Sampling:
    """Return what makes an answer of plain words, which are the same tokens in the next prompt."""
    bias = {}
    for word in WORDS:
        (row,) = engine.prepare(replace(bare([1]), prompt=f" {word}"))
        bias[row.prompt[-1]] = 100.0
    return Sampling(temperature=0, logit_bias=bias)


def chat(messages: list[dict[str, Any]], sampling: Sampling) -> GenerateJob:
    return GenerateJob(caller=caller(), messages=messages, sampling=sampling, max_tokens=150)


@pytest.mark.parametrize("filler", [0, 9])
def test_a_chats_next_turn_goes_on_from_its_last_through_the_template(
    warm: GenerationEngine, filler: int
) -> None:
    sampling = spoken(warm)
    messages = [{"role": "user", "content": "tell me more " * 30 + "x " * filler}]
    (first,) = answers(warm, [chat(messages, sampling)])
    (asked,) = warm.prepare(chat(messages, sampling))
    messages += [
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "and then?"},
    ]
    (again,) = warm.prepare(chat(messages, sampling))
    alike = count_alike([*asked.prompt, *first.ids], again.prompt)
    assert alike > len(asked.prompt) + 100
    (second,) = answers(warm, [chat(messages, sampling)])
    assert second.cached_tokens >= whole(alike - 1)


@pytest.mark.parametrize("is_cut", [True, False])
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_template_that_drops_earlier_thinking_costs_no_more_than_the_answer(
    tmp_path: Path, kind: str, is_cut: bool
) -> None:
    """The next prompt differs from the last from where the thinking began: also where that `is_cut`
    by the end of the prompt's last block.
    """
    folder = write_chat(tmp_path, **FAMILIES[kind], vocab_size=1028)
    engine = open_engine(teach_thinking(folder, opens=True), prefix_cache_bytes=PLENTY)
    for filler in range(BLOCK):
        question = {"role": "user", "content": "tell me more " * 30 + "x " * filler}
        answer = {"role": "assistant", "content": "Yes."}
        first = bare([1], messages=[question], max_tokens=90)
        first = replace(first, prompt=None)
        second = replace(first, messages=[question, answer, {"role": "user", "content": "why?"}])
        before, after = ([*engine.prepare(each)[0].prompt] for each in (first, second))
        alike = count_alike(before, after)
        assert alike < len(before)
        if (alike < whole(len(before) - 1)) is is_cut:
            break
    answers(engine, [first])
    (told,) = answers(engine, [second])
    assert told.cached_tokens == whole(alike)
    engine.close()
    cold = open_engine(folder)
    assert told.ids == answers(cold, [second])[0].ids
    cold.close()


@given(st.integers(1, 20), st.integers(1, 200))
def test_the_ends_that_stay_of_an_answer_are_the_denser_the_later(first: int, blocks: int) -> None:
    ends: list[int] = []
    for n in range(first, first + blocks):
        ends = spread([*ends, n * BLOCK])
        back = [n - end // BLOCK for end in reversed(ends)]
        assert back[:2] == [0, 1][: len(back)]
        assert len(back) == min(KEPT_ENDS, len(back)) == len(set(back))
        assert all(far <= 2 * near + 2 for near, far in pairwise(back))
        assert back[-1] >= min(n - first - 1, 2)
        assert back[-1] >= 4 or n - first < 16


@pytest.mark.parametrize("differs", [10, 200])
def test_a_next_turn_that_writes_the_answers_end_anew_goes_on_within_it(
    tmp_path: Path, differs: int
) -> None:
    """A template may write calls of tools another way than the model did."""
    folder = write_chat(tmp_path, **HYBRID)
    engine, cold = open_engine(folder, prefix_cache_bytes=PLENTY), open_engine(folder)
    forever = Sampling(temperature=0, ignore_eos=True)
    prompt = tokens(100, 1)
    (told,) = answers(engine, [bare(prompt, forever, max_tokens=600)])
    following = [*prompt, *told.ids[:-differs], *tokens(60, 2)]
    (again,) = answers(engine, [bare(following)])
    assert again.ids == answers(cold, [bare(following)])[0].ids
    alike = len(prompt) + len(told.ids) - differs
    assert alike - again.cached_tokens <= differs + 3 * BLOCK
    assert again.cached_tokens > len(prompt)
    engine.close()
    cold.close()


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_long_answer_keeps_few_states(tmp_path: Path, kind: str) -> None:
    engine = open_engine(write_chat(tmp_path, **FAMILIES[kind]), prefix_cache_bytes=PLENTY)
    asked = bare(tokens(100, 1), Sampling(temperature=0, ignore_eos=True), max_tokens=300)
    answers(engine, [asked])  # makes what passes leave behind: constants, masks
    engine.clear_prefixes()
    weights, before = engine.nbytes(), active_memory()
    answers(engine, [asked])
    kept = engine._prefixes._kept
    assert sum(1 for key in kept if len(key) == 1) <= KEPT_ENDS + 1  # and the prompt's
    assert sum(1 for key in kept if len(key) > 1) == 399 // BLOCK
    assert engine._prefixes.nbytes == engine.nbytes() - weights
    assert engine._prefixes.nbytes == sum(each.nbytes for each in kept.values())
    engine.clear_prefixes()
    assert active_memory() == before


def test_a_cache_dropped_under_an_answer_is_not_filled_again_by_it(warm: GenerationEngine) -> None:
    """Memory that others need was freed: it stays so until another prompt is read."""
    if not warm._prefixes.needs_block_ends:
        return
    run = Run(warm)
    run.join(bare(tokens(200, 1), max_tokens=300))
    for _ in range(20):
        run.step()
    assert warm._prefixes.nbytes > 0
    warm.clear_prefixes()
    run.finish()
    assert warm._prefixes.nbytes == 0


@pytest.mark.parametrize("at", [3, 66])
def test_a_fault_while_decoding_leaves_right_answers(
    folder: Path, cold: GenerationEngine, at: int
) -> None:
    engine = open_engine(folder, prefix_cache_bytes=PLENTY)
    jobs = [bare(tokens(each, each), max_tokens=150) for each in (50, 100)]
    model = engine._model
    exchange(engine, Passing(model, at))
    assert ids(answers(engine, jobs)) == ids(answers(cold, jobs))
    exchange(engine, model)
    assert ids(answers(engine, jobs)) == ids(answers(cold, jobs))
