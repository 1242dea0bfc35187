"""States kept of answers under way: they are of use to a next turn, and leave prompts' alone."""

from pathlib import Path

import pytest

from gateway.engine.generation.engine import GenerationEngine
from gateway.engine.kv.prefix_cache import BLOCK, MIN_SETS
from gateway.jobs import Sampling
from tests.checkpoints import SLIDING, write_chat
from tests.engine.generation.harness import Run, answers, bare, open_engine, tokens

pytestmark = pytest.mark.slow

# Seven layers of eight: what grows beside their states weighs little.
MOSTLY_SLIDING = {**SLIDING, "num_hidden_layers": 8, "sliding_window_pattern": 8}
FOREVER = Sampling(temperature=0, ignore_eos=True)
SHARED = tokens(2 * BLOCK + 1, 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat(tmp_path_factory.mktemp("sliding"), **MOSTLY_SLIDING)


@pytest.fixture(scope="module")
def set_bytes(folder: Path) -> int:
    return open_engine(folder).facts.kv_cost.states


def count_states(engine: GenerationEngine) -> int:
    return sum(1 for key in engine._prefixes._kept if len(key) == 1)


def cached(engine: GenerationEngine, prompt: list[int]) -> int:
    (told,) = answers(engine, [bare(prompt, FOREVER, max_tokens=1)])
    return told.cached_tokens


def test_a_shared_beginning_stays_while_answers_to_it_grow(folder: Path, set_bytes: int) -> None:
    engine = open_engine(folder, prefix_cache_bytes=4 * set_bytes)
    run, hits, left = Run(engine), [], 12
    ids: list[int] = []
    while left or engine.is_decoding or engine.is_prefilling:
        while left and engine.rows < 4:
            left -= 1
            ids += run.join(
                bare([*SHARED, *tokens(20, left)], FOREVER, max_tokens=80 + 20 * (left % 4))
            )
        run.step()
    hits = [run.answers[each].cached_tokens for each in ids]
    assert hits[4:] == [2 * BLOCK] * 8


@pytest.mark.parametrize(("sets", "are_kept"), [(MIN_SETS - 1, False), (MIN_SETS, True)])
def test_states_of_answers_under_way_are_kept_where_many_sets_fit(
    folder: Path, set_bytes: int, sets: int, are_kept: bool
) -> None:
    engine = open_engine(folder, prefix_cache_bytes=sets * set_bytes)
    answers(engine, [bare(tokens(20, 1), FOREVER, max_tokens=4 * BLOCK)])
    assert (count_states(engine) > 0) is are_kept


def test_answers_under_way_take_at_most_half_of_the_room(folder: Path, set_bytes: int) -> None:
    engine = open_engine(folder, prefix_cache_bytes=(MIN_SETS + 2) * set_bytes)
    answers(engine, [bare(SHARED, FOREVER, max_tokens=1)])
    run = Run(engine)
    for seed in range(4):
        run.join(bare(tokens(20, 1 + seed), FOREVER, max_tokens=6 * BLOCK))
    for _ in range(5 * BLOCK):
        run.step()
    prefixes = engine._prefixes
    growing = sum(prefixes._kept[key].nbytes for key in prefixes._growing)
    assert 3 * set_bytes < growing < (MIN_SETS / 2 + 2) * set_bytes
    run.finish()
    assert cached(engine, SHARED) == 2 * BLOCK
