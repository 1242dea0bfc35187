"""A beginning that prompts share is read once, and nobody's answer changes by it."""

import gc
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache

from benchmarks.steps import Steps
from gateway.engine.generation.engine import GenerationEngine
from gateway.engine.kv.cache import RaggedKVCache
from gateway.engine.kv.prefix_cache import BLOCK, PrefixCache, PrefixPool, count_shared
from gateway.jobs import RoutingKeys
from gateway.jobs.chat import Sampling
from tests.checkpoints import SLIDING, STATEFUL, write_chat
from tests.engine.generation.harness import (
    PLENTY,
    SEEDED,
    Rows,
    active_memory,
    answers,
    bare,
    cached,
    ids,
    open_engine,
    shapes,
    spoil,
    tokens,
    watch,
)
from tests.fakes import caller

KINDS: dict[str, dict[str, Any]] = {"plain": {}, "sliding": SLIDING, "stateful": STATEFUL}


BASE = tokens(400, 0)


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat(tmp_path_factory.mktemp(request.param), **KINDS[request.param])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat(tmp_path_factory.mktemp("only"))


CASES = {
    "repeated": [BASE],
    "repeated to the last token of a block": [BASE[: 3 * BLOCK + 1]],
    "one token shorter than that": [BASE[: 3 * BLOCK]],
    "longer": [BASE + tokens(150, 1)],
    "different from the middle on": [BASE[:201] + tokens(90, 2)],
    "shorter": [BASE[:270]],
    "shorter than a block": [BASE[: BLOCK - 1]],
    "hits and misses together": [
        tokens(30, 3), BASE[:257] + tokens(30, 4), BASE[:150] + tokens(40, 5), tokens(90, 6),
        BASE[: 3 * BLOCK + 1], [7],
    ],
    "a burst that begins alike": [tokens(300, 7) + tokens(20 + i, 8 + i) for i in range(6)],
}  # fmt: skip


def test_tokens_that_a_prompt_adds_to_the_cache_are_counted_once(plain: Path) -> None:
    engine = open_engine(plain, prefix_cache_bytes=PLENTY)
    longer = [*BASE, *tokens(100, 1)]
    told = [answers(engine, [bare(each)])[0] for each in (BASE, BASE, longer)]
    # The last token of a prompt is read with the answer; of 499 others 448 are in whole blocks.
    assert [each.cached_tokens for each in told] == [0, 384, 384]
    assert [each.kept_tokens for each in told] == [384, 0, 64]
    without = open_engine(plain)
    assert answers(without, [bare(BASE)])[0].kept_tokens == 0


@pytest.mark.parametrize(
    ("case", "budget"), [*zip(CASES, itertools.cycle([100, 512, 100_000]), strict=False)]
)
def test_the_greedy_tokens_are_those_without_it(
    cold: GenerationEngine, warm: GenerationEngine, case: str, budget: int
) -> None:
    """The prompts' common parts do not matter, nor the chunks they are read in."""
    jobs = [bare(prompt, max_tokens=6) for prompt in CASES[case]]
    expected = ids(answers(cold, jobs))
    answers(warm, [bare(BASE, max_tokens=1)], budget)
    for _ in range(2):
        told = answers(warm, jobs, budget)
        assert ids(told) == expected
    reused = [len(prompt) - 1 - len(prompt) % BLOCK for prompt in CASES[case]]
    assert any(cached(told)) or max(reused) < BLOCK


@pytest.mark.parametrize("case", CASES)
def test_a_plain_prompt_goes_on_from_its_last_whole_block(plain: Path, case: str) -> None:
    engine = open_engine(plain, prefix_cache_bytes=PLENTY)
    answers(engine, [bare(BASE)])
    jobs = [bare(prompt) for prompt in CASES[case]]
    first, second = answers(engine, jobs), answers(engine, jobs)
    whole = [(len(prompt) - 1) // BLOCK * BLOCK for prompt in CASES[case]]
    assert cached(second) == whole
    if not case.startswith("a burst"):
        assert cached(first) == [
            min(count_shared(BASE[:-1], p[:-1]), w) for p, w in zip(CASES[case], whole, strict=True)
        ]


def test_where_states_cannot_be_cut_a_prompt_goes_on_from_the_end_of_a_chunk(
    tmp_path: Path,
) -> None:
    engine = open_engine(write_chat(tmp_path, **SLIDING), prefix_cache_bytes=PLENTY)
    told = [
        answers(engine, [bare(prompt)], 150)[0].cached_tokens
        for prompt in (BASE, BASE, BASE[:300] + tokens(50, 1), BASE[:100])
    ]
    assert told == [0, 384, 256, 0]


def test_a_sampled_answer_is_the_same(cold: GenerationEngine, warm: GenerationEngine) -> None:
    jobs = [bare(BASE, SEEDED), bare(BASE[:250], SEEDED)]
    expected = ids(answers(cold, jobs))
    for _ in range(2):
        assert ids(answers(warm, jobs)) == expected


def test_choices_read_their_prompt_once(cold: GenerationEngine, warm: GenerationEngine) -> None:
    asked = bare(BASE, Sampling(temperature=1.5, seed=3), n=3)
    told = answers(warm, [asked])
    assert cached(told) == [0, 384, 384]
    assert ids(told) == ids(answers(cold, [asked]))


def test_a_burst_reads_what_it_shares_once(plain: Path) -> None:
    engine = open_engine(plain, prefix_cache_bytes=PLENTY)
    passes = shapes(engine)
    begin = tokens(1500, 1)
    told = answers(engine, [bare(begin + tokens(40, 10 + i)) for i in range(18)])
    assert cached(told) == [0] + [1472] * 17
    assert sum(rows * width for rows, width in passes if width > 1) < 1540 + 17 * (68 + 2)


def test_who_waits_for_a_prompt_that_leaves_reads_on_alone(plain: Path) -> None:
    engine = open_engine(plain, prefix_cache_bytes=PLENTY)
    run = Rows(engine)
    begin = tokens(600, 1)
    (leaving,) = run.add(bare([*begin, 1]))
    (waiting,) = run.add(bare([*begin, 2]))
    run.step(200)
    run.leave(leaving)
    run.finish(200)
    assert run.answers[leaving].tokens == 0
    assert run.answers[waiting].cached_tokens == 192
    assert ids([run.answers[waiting]]) == ids(answers(open_engine(plain), [bare([*begin, 2])]))


@pytest.mark.parametrize("limit", [1, PLENTY])
def test_a_row_waits_only_for_the_beginning_that_it_shares(plain: Path, limit: int) -> None:
    engine = open_engine(plain, prefix_cache_bytes=limit)
    run = Rows(engine)
    begin = tokens(256, 1)
    (long,) = run.add(bare(begin + tokens(900, 2)))
    (short,) = run.add(bare(begin + tokens(40, 3)))
    for _ in range(8):
        run.step(128)
    assert run.answers[long].tokens == 0
    assert run.answers[short].tokens > 0
    assert run.answers[short].cached_tokens == (256 if limit == PLENTY else 0)


@pytest.mark.parametrize(("others", "speculate_rows"), [(0, 4), (2, 0)])
def test_a_next_turn_reads_no_answer_again(plain: Path, others: int, speculate_rows: int) -> None:
    """Answers that met a stop string are included, alone or beside answers that go on."""
    engine = open_engine(plain, prefix_cache_bytes=PLENTY, speculate_rows=speculate_rows)
    (whole,) = answers(engine, [bare(BASE, max_tokens=90)])
    stop = whole.text[-25:-16]
    assert stop not in whole.text[: len(whole.text) // 2]
    beside = [bare(tokens(50, i), max_tokens=110) for i in range(others)]
    for stops in ((), (stop,)):
        Steps(engine).change(clear_prefixes=True)
        answer, *_ = answers(engine, [bare(BASE, max_tokens=90, stop=stops), *beside])
        assert (answer.stop, answer.ids == whole.ids) == (stops[0] if stops else None, not stops)
        turn = BASE + answer.ids + tokens(30, 1)
        (told,) = answers(engine, [bare(turn)])
        assert told.cached_tokens == (len(BASE) + len(answer.ids) - 1) // BLOCK * BLOCK > len(BASE)
        assert told.ids == answers(open_engine(plain), [bare(turn)])[0].ids


@pytest.mark.parametrize(
    ("kind", "kv_heads"),
    # the tokens of a row lie side by side if it has one head
    [("plain", 1), ("plain", 2), ("sliding", 2), ("stateful", 2)],
)
def test_the_bytes_kept_never_pass_the_bound(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, kv_heads: int
) -> None:
    limit = mx.set_cache_limit(0)  # a freed buffer of up to twice its size would serve an array
    request.addfinalizer(lambda: mx.set_cache_limit(limit))
    folder = write_chat(tmp_path, **KINDS[kind], num_key_value_heads=kv_heads)
    one = open_engine(folder, prefix_cache_bytes=PLENTY)
    weights = one.nbytes()
    answers(one, [bare(BASE[: BLOCK + 1], max_tokens=1)])
    block = one.nbytes() - weights
    rounds = [
        [bare(prompt, max_tokens=2) for prompt in (tokens(150, i) + tokens(90, i), BASE)]
        for i in range(3)
    ]
    cold = open_engine(folder)
    expected = [ids(answers(cold, jobs)) for jobs in rounds]
    for blocks in (0, 1, 7):
        engine = open_engine(folder, prefix_cache_bytes=blocks * block)
        before = active_memory()
        for jobs, told in zip(rounds, expected, strict=True):
            assert ids(answers(engine, jobs)) == told
            assert engine.nbytes() - weights == engine.prefixes.nbytes <= blocks * block
            assert active_memory() - before <= engine.prefixes.nbytes
        assert (engine.prefixes.nbytes > 0) == (blocks > 0)
        engine.close()


def test_models_share_a_room_by_use(plain: Path) -> None:
    """The part used longest ago goes first, whosever it is; each model finds only its own."""
    pool = PrefixPool(PLENTY)
    one, two = (open_engine(plain, prefixes=pool) for _ in range(2))
    other = tokens(400, 9)
    first = answers(one, [bare(BASE, max_tokens=1), bare(other, max_tokens=1)])
    assert [each.cached_tokens for each in answers(two, [bare(BASE, max_tokens=1)])] == [0]
    assert ids(answers(one, [bare(BASE, max_tokens=1)])) == ids(first[:1])
    assert (
        one.prefixes.pool_bytes
        == two.prefixes.pool_bytes
        == one.prefixes.nbytes + two.prefixes.nbytes
    )
    whole, before = pool.nbytes, active_memory()
    Steps(two).change(prefix_limit=2 * whole // 3)
    assert 0.6 * whole < pool.nbytes <= 2 * whole // 3
    assert before - active_memory() >= 0.9 * (whole - pool.nbytes)
    assert [one.prefixes.count_known(each) for each in (BASE, other)] == [384, 0]
    Steps(two).change(prefix_limit=0)
    assert one.prefixes.nbytes == two.prefixes.nbytes == pool.nbytes == 0
    assert ids(answers(one, [bare(BASE, max_tokens=1)])) == ids(first[:1])
    assert pool.nbytes == 0, "the limit holds"
    Steps(one).change(prefix_limit=PLENTY)
    answers(one, [bare(BASE)])
    one.close()
    assert pool.nbytes == 0


def test_an_engine_opened_while_the_pool_has_no_room_keeps_prompts_later(plain: Path) -> None:
    """No room is spare while a model waits to load; the engine keeps prompts once there is."""
    pool = PrefixPool(PLENTY)
    pool.limit = 0
    engine = open_engine(plain, prefixes=pool)
    pool.limit = PLENTY
    answers(engine, [bare(BASE)])
    assert answers(engine, [bare(BASE)])[0].cached_tokens > 0


def test_tokens_of_a_prompt_without_room_are_told(folder: Path) -> None:
    """Room taken by others' prompts is not told, nor anything of a model that keeps nothing."""
    engine = open_engine(folder, prefix_cache_bytes=PLENTY)
    (told,) = answers(engine, [bare(BASE)])
    assert told.unkept_tokens == 0
    for room, unkept in ((1, 384), (0, 0)):
        engine = open_engine(folder, prefix_cache_bytes=room)
        (told,) = answers(engine, [bare(BASE)])
        assert told.unkept_tokens == unkept


def test_a_closed_engine_holds_no_prefix(plain: Path) -> None:
    gc.collect()
    before = mx.get_active_memory()
    engine = open_engine(plain, prefix_cache_bytes=PLENTY)
    answers(engine, [bare(BASE)])
    assert mx.get_active_memory() - before > 0.9 * engine.nbytes()
    engine.close()
    gc.collect()
    assert mx.get_active_memory() - before < 1000


def test_a_broken_prefix_cannot_break_a_row_twice(plain: Path) -> None:
    engine = open_engine(plain, prefix_cache_bytes=PLENTY)
    (expected,) = answers(engine, [bare(BASE)])
    for key, kept in engine.prefixes._entries.items():
        short = [(keys[..., :3], values) for keys, values in kept.layers]
        engine.prefixes._entries[key] = replace(kept, layers=short)
    (told,) = answers(engine, [bare(BASE)])
    assert (told.ids, told.cached_tokens) == (expected.ids, 0)


def test_kv_that_is_no_number_is_not_kept(tmp_path: Path) -> None:
    folder = write_chat(tmp_path)
    spoil(folder, "model.layers.0.self_attn.v_proj.weight", float("inf"))
    engine = open_engine(folder, prefix_cache_bytes=PLENTY)
    (told,) = answers(engine, [bare(BASE)])
    assert "not a number" in (told.error or "")
    assert engine.prefixes.nbytes == 0


@pytest.mark.parametrize("speculate_rows", [0, 4])
def test_an_answer_that_becomes_no_number_is_not_kept(plain: Path, speculate_rows: int) -> None:
    engine = open_engine(plain, prefix_cache_bytes=PLENTY, speculate_rows=speculate_rows)

    def end(logits: mx.array, _: mx.array, cache: Any) -> mx.array:
        logits = mx.where(mx.arange(logits.shape[-1]) == 300, 1e4, logits)
        return logits * mx.nan if cache[0].lengths.longest > len(BASE) + 100 else logits

    watch(engine, after=end)
    (told,) = answers(engine, [bare(BASE, max_tokens=150)])
    assert "not a number" in (told.error or "")
    assert len(told.ids) > BLOCK
    assert engine.prefixes.count_known([*BASE, *told.ids]) == len(BASE) // BLOCK * BLOCK


def batch(length: int) -> RaggedKVCache:
    """Make one layer's cache of a row that has read `length` tokens; each has its place as KV."""
    places = mx.arange(length, dtype=mx.float32).reshape(1, 1, length, 1)
    return RaggedKVCache.of(places, -places)


prompts = st.lists(
    st.lists(st.integers(0, 1), min_size=1, max_size=6).map(
        lambda bits: [bit for bit in bits for _ in range(BLOCK)]
    ),
    min_size=1,
    max_size=12,
)


@given(prompts, st.integers(0, 8))
@settings(max_examples=60)
def test_kept_blocks_are_bounded_and_within_reach(prompts: list[list[int]], blocks: int) -> None:
    """A block never goes before those that follow it, which nobody would find again."""
    block = 2 * 4 * BLOCK + 8 * (BLOCK + 1)
    prefixes = PrefixCache([KVCache()], PrefixPool(blocks * block))  # type: ignore[no-untyped-call]
    for prompt in prompts:
        prefixes.store(prompt, [batch(len(prompt))], 0)
        assert prefixes.nbytes == block * len(prefixes._entries) <= blocks * block
        numbers = {0, *(kept.number for kept in prefixes._entries.values())}
        assert all(key[0] in numbers for key in prefixes._entries)
        known, layers = prefixes.take(prompt)
        assert known == prefixes.count_known(prompt) == min(len(prompt), blocks * BLOCK)
        if layers is not None:
            assert layers[0].keys.flatten().tolist() == list(range(known))


def test_routing_keys_live_as_long_as_the_kv_that_they_name(folder: Path) -> None:
    names = [bytes([i]) for i in range(6)]
    engine = open_engine(folder, prefix_cache_bytes=PLENTY)
    routing_keys = RoutingKeys(names, share=0.96)  # 384 tokens: six blocks
    who = replace(caller(), routing_keys=routing_keys)
    answers(engine, [replace(bare(BASE), caller=who)])
    assert list(engine.routing_keys()) == names
    assert not engine.routing_keys(1), "an adapter has read nothing"
    Steps(engine).change(clear_prefixes=True)
    assert not engine.routing_keys()


def test_names_end_where_their_share_of_the_prompt_does() -> None:
    assert RoutingKeys([b"a", b"b"], 0.5).ends(100) == [(25, b"a"), (50, b"b")]
    assert not RoutingKeys().ends(100)
