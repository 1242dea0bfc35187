"""A conversation's next prompt reads only its new tokens, whatever the model keeps."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.steps import Steps
from gateway.engine.generation.decode_batch import KEPT_ENDS, spread
from gateway.engine.generation.engine import GenerationEngine
from gateway.engine.kv.prefix_cache import BLOCK, MIN_SETS
from gateway.jobs.chat import Sampling
from tests.checkpoints import HYBRID, SLIDING, teach_thinking, write_chat
from tests.engine.generation.harness import (
    PLENTY,
    Passing,
    Rows,
    active_memory,
    answers,
    bare,
    cached,
    exchange,
    ids,
    open_engine,
    tokens,
)

pytestmark = pytest.mark.slow

# A hybrid keeps plain KV and states; plain KV alone is in test_prefix_cache.
FOREVER = Sampling(temperature=0, ignore_eos=True)
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
    for turn, most in enumerate((70, 10, 20)):
        (told,) = answers(warm, [bare(prompt, max_tokens=most)])
        assert told.ids == answers(cold, [bare(prompt, max_tokens=most)])[0].ids
        assert told.cached_tokens >= whole(before - 1)
        before = len(prompt) + len(told.ids)
        prompt = prompt + told.ids + tokens(50, turn)


@pytest.mark.parametrize("is_cut", [True, False])
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_template_that_drops_earlier_thinking_costs_no_more_than_the_answer(
    tmp_path: Path, kind: str, is_cut: bool
) -> None:
    folder = write_chat(tmp_path, **FAMILIES[kind], vocab_size=1028)
    engine = open_engine(teach_thinking(folder, opens=True), prefix_cache_bytes=PLENTY)
    for filler in range(BLOCK):
        question = {"role": "user", "content": "tell me more " * 30 + "x " * filler}
        answer = {"role": "assistant", "content": "Yes."}
        first = replace(bare([1], messages=[question], max_tokens=90), prompt=None)
        second = replace(first, messages=[question, answer, {"role": "user", "content": "why?"}])
        before, after = ([*engine.prepare(each)[0].prompt] for each in (first, second))
        alike = count_alike(before, after)
        assert alike < len(before)
        if (alike < whole(len(before) - 1)) is is_cut:
            break
    answers(engine, [first])
    (told,) = answers(engine, [second])
    assert told.cached_tokens == whole(alike)
    cold = open_engine(folder)
    assert told.ids == answers(cold, [second])[0].ids


def test_a_turn_that_writes_the_last_end_anew_goes_on_within_it(tmp_path: Path) -> None:
    """A template may write calls of tools another way than the model did."""
    folder = write_chat(tmp_path, **HYBRID)
    engine, cold = open_engine(folder, prefix_cache_bytes=PLENTY), open_engine(folder)
    prompt = tokens(100, 1)
    (told,) = answers(engine, [bare(prompt, FOREVER, max_tokens=420)])
    for differs in (10, 200):
        following = [*prompt, *told.ids[:-differs], *tokens(60, 2)]
        (again,) = answers(engine, [bare(following)])
        assert again.ids == answers(cold, [bare(following)])[0].ids
        alike = len(prompt) + len(told.ids) - differs
        assert alike - again.cached_tokens <= differs + 3 * BLOCK
        assert again.cached_tokens > len(prompt)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_long_answer_keeps_few_states(tmp_path: Path, kind: str) -> None:
    engine = open_engine(write_chat(tmp_path, **FAMILIES[kind]), prefix_cache_bytes=PLENTY)
    asked = bare(tokens(100, 1), FOREVER, max_tokens=230)
    answers(
        engine, [replace(asked, max_tokens=30)]
    )  # makes what passes leave behind: constants, masks
    Steps(engine).change(clear_prefixes=True)
    weights, before = engine.nbytes(), active_memory()
    answers(engine, [asked])
    kept = engine.prefixes._entries
    states = sum(1 for key in kept if len(key) == 1)
    assert states == 3 + 1  # three of the ends of the answer's four blocks; the prompt's
    assert sum(1 for key in kept if len(key) > 1) == 329 // BLOCK
    assert engine.prefixes.nbytes == engine.nbytes() - weights
    assert engine.prefixes.nbytes == sum(each.nbytes for each in kept.values())
    Steps(engine).change(clear_prefixes=True)
    assert active_memory() == before


def test_the_ends_of_an_answers_blocks_that_stay_are_fewer_further_back() -> None:
    ends: list[int] = []
    for newest in range(1, 70):
        ends = spread([*ends, newest * BLOCK])
        back = [newest - end // BLOCK for end in ends]
        assert back[-2:] == [1, 0][-newest:]
        assert len(ends) <= KEPT_ENDS
        assert newest < 8 or 4 <= back[0] <= 7


def test_a_cache_dropped_under_an_answer_is_not_filled_again_by_it(warm: GenerationEngine) -> None:
    """Memory that others need was freed: it stays so until another prompt is read."""
    run = Rows(warm)
    run.add(bare(tokens(200, 1), FOREVER, max_tokens=70))
    for _ in range(20):
        run.step()
    assert warm.prefixes.nbytes > 0
    Steps(warm).change(clear_prefixes=True)
    run.finish()
    assert warm.prefixes.nbytes == 0


PAIR = [tokens(each, each) for each in (50, 100)]


@pytest.fixture(scope="module")
def expected(cold: GenerationEngine) -> list[list[int]]:
    return ids(answers(cold, [bare(prompt, max_tokens=90) for prompt in PAIR]))


@pytest.mark.parametrize("at", [3, 66])
def test_a_fault_in_a_step_changes_no_answer(
    folder: Path, expected: list[list[int]], at: int
) -> None:
    engine = open_engine(folder, prefix_cache_bytes=PLENTY)
    model = engine._model
    exchange(engine, Passing(model, at))
    assert ids(answers(engine, [bare(prompt, max_tokens=90) for prompt in PAIR])) == expected
    exchange(engine, model)
    for left in (90, 9):  # what was kept of the prompts, and of the answers
        begun = [
            bare([*prompt, *answer[: 90 - left]], max_tokens=9)
            for prompt, answer in zip(PAIR, expected, strict=True)
        ]
        told = answers(engine, begun)
        assert ids(told) == [answer[90 - left :][:9] for answer in expected]
    assert all(cached(told))


# States kept of answers under way: they are of use to a next turn, and leave prompts' alone.
# Three layers of four: what grows beside their states weighs little.
MOSTLY_SLIDING = {**SLIDING, "num_hidden_layers": 4, "sliding_window_pattern": 4}
SHARED = tokens(2 * BLOCK + 1, 0)


@pytest.fixture(scope="module")
def sliding(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat(tmp_path_factory.mktemp("sliding"), **MOSTLY_SLIDING)


@pytest.fixture(scope="module")
def set_bytes(sliding: Path) -> int:
    return open_engine(sliding).facts.kv_cost.states


def test_a_shared_beginning_stays_while_answers_to_it_grow(sliding: Path, set_bytes: int) -> None:
    engine = open_engine(sliding, prefix_cache_bytes=4 * set_bytes)
    run, hits, left = Rows(engine), [], 12
    ids: list[int] = []
    while left or run.is_busy:
        while left and run.count < 4:
            left -= 1
            ids += run.add(
                bare([*SHARED, *tokens(20, left)], FOREVER, max_tokens=50 + 10 * (left % 4))
            )
        run.step()
    hits = [run.answers[each].cached_tokens for each in ids]
    assert hits[4:] == [2 * BLOCK] * 8


def test_answers_under_way_take_at_most_half_of_the_room(sliding: Path, set_bytes: int) -> None:
    engine = open_engine(sliding, prefix_cache_bytes=(MIN_SETS + 2) * set_bytes)
    answers(engine, [bare(SHARED, FOREVER, max_tokens=1)])
    run = Rows(engine)
    for seed in range(4):
        run.add(bare(tokens(20, 1 + seed), FOREVER, max_tokens=4 * BLOCK))
    for _ in range(3 * BLOCK):
        run.step()
    prefixes = engine.prefixes
    growing = sum(prefixes._entries[key].nbytes for key in prefixes._growing)
    assert 3 * set_bytes < growing < (MIN_SETS / 2 + 2) * set_bytes
    run.finish()
    assert answers(engine, [bare(SHARED)])[0].cached_tokens == 2 * BLOCK
