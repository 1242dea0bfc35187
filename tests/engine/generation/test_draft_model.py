"""Drafts by a smaller model: fewer passes of the larger one, and never another answer."""

import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from benchmarks.steps import Steps
from gateway.engine.drafts.draft_model import CHUNK, MOST_AHEAD, DraftModel
from gateway.engine.drafts.prompt_lookup import PromptLookup
from gateway.engine.generation.engine import GenerationEngine
from gateway.errors import ModelLoadFailed
from gateway.jobs.chat import Sampling
from gateway.jobs.steps import DraftCost
from tests.checkpoints import HYBRID, SLIDING, STATEFUL, teach_thinking, write_chat
from tests.engine.generation.harness import (
    ECHO,
    JOBS,
    PLENTY,
    PROMPTS,
    Answer,
    Batch,
    Watched,
    answer_at_random,
    open_engine,
)

pytestmark = pytest.mark.slow

GREEDY = Sampling(temperature=0, ignore_eos=True)
SEEDED = Sampling(temperature=1.0, seed=4, ignore_eos=True)
LONG = "a b c " * 140  # more tokens than a chunk has
ALL_JOBS: list[dict[str, Any]] = [
    *JOBS,
    {"sampling": GREEDY, "max_tokens": 90},
    {"sampling": SEEDED, "max_tokens": 60, "stop": ["e", "at"]},
    {"sampling": Sampling(temperature=0, min_tokens=20), "max_tokens": 50},
]


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    return write_chat(folder, seed=1, num_hidden_layers=1, vocab_size=4200)


@pytest.fixture(scope="module")
def plain(folder: Path) -> GenerationEngine:
    return open_engine(folder)


@pytest.fixture(params=["twin", "stranger"])
def drafted(request: pytest.FixtureRequest, folder: Path, stranger: Path) -> Path:
    return folder if request.param == "twin" else stranger


def watch(engine: GenerationEngine, fails_after: int | None = None) -> list[int]:
    """Return a list that gathers the padded tokens of each pass of the engine's draft model.

    The model fails after `fails_after` passes.
    """
    model, read = engine._drafts.sources[-1], list[int]()
    assert isinstance(model, DraftModel)

    def note(tokens: mx.array) -> None:
        if fails_after == len(read):
            raise ValueError("no more")
        read.append(tokens.size)

    model._model = Watched(model._model, note, None)
    return read


@cache
def answered(
    plain: GenerationEngine, seed: int
) -> tuple[list[tuple[str, dict[str, Any]]], list[Answer]]:
    """Draw jobs, and have them answered without a draft model."""
    chance = random.Random(seed)
    jobs = [
        (chance.choice([*PROMPTS, ECHO, LONG]), chance.choice(ALL_JOBS))
        for _ in range(chance.randint(3, 9))
    ]
    jobs.append(("Hi", {"sampling": GREEDY, "max_tokens": 60}))
    return jobs, answer_at_random(plain, jobs, seed)[0]


@pytest.mark.parametrize("seed", range(2))
def test_answers_are_those_without_a_draft_model(
    plain: GenerationEngine, folder: Path, drafted: Path, seed: int
) -> None:
    engine = open_engine(folder, 10_000_000, 8, draft=drafted)
    jobs, expected = answered(plain, seed)
    found, passes = answer_at_random(engine, jobs, seed)
    for one, other, job in zip(expected, found, jobs, strict=True):
        assert other.says_as(one), job
    assert any(each.drafted for each in passes)


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_a_draft_model_that_is_right_saves_passes(
    plain: GenerationEngine, folder: Path, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PromptLookup, "draft", lambda *_: ())
    engine = open_engine(folder, speculate_rows=4, draft=folder)
    jobs = [(f"Question {i}", {"sampling": GREEDY, "max_tokens": 120}) for i in range(rows)]
    expected, passes = answer_at_random(plain, jobs)
    found, fewer = answer_at_random(engine, jobs)
    assert all(other.says_as(one) for one, other in zip(expected, found, strict=True))
    accepted, drafted = (sum(getattr(p, k) for p in fewer) for k in ("accepted", "drafted"))
    assert accepted > 0.95 * drafted
    assert len(fewer) < len(passes) / (1 + min(MOST_AHEAD, 16 // rows - 1) / 2)


def test_a_long_prompt_is_read_in_chunks_beside_a_row(
    plain: GenerationEngine, folder: Path
) -> None:
    engine = open_engine(folder, speculate_rows=4, draft=folder)
    read = watch(engine)
    jobs = [(text, {"sampling": GREEDY, "max_tokens": 60}) for text in ("Hi", LONG)]
    expected, _ = answer_at_random(plain, jobs, 1)
    found, passes = answer_at_random(engine, jobs, 1)
    assert all(other.says_as(one) for one, other in zip(expected, found, strict=True))
    assert sum(read) > CHUNK
    assert max(read) <= CHUNK
    assert any(each.accepted for each in passes)


def test_a_prompt_that_begins_like_an_earlier_one_is_read_from_there_on(folder: Path) -> None:
    engine = open_engine(folder, prefix_cache_bytes=10_000_000, speculate_rows=4, draft=folder)
    read = watch(engine)
    for text in (LONG, LONG + "and more"):
        read.clear()
        answer_at_random(engine, [(text, {"sampling": GREEDY, "max_tokens": 30})])
    assert max(read) < CHUNK / 2
    Steps(engine).change(clear_prefixes=True)
    assert engine.prefixes.pool_bytes == 0


def test_rows_beyond_the_limit_get_no_drafts_and_the_model_catches_up(
    plain: GenerationEngine, folder: Path
) -> None:
    jobs = [("Hi", {"sampling": GREEDY, "max_tokens": 200})]
    [expected], _ = answer_at_random(plain, jobs)
    engine = open_engine(folder, speculate_rows=2, draft=folder)
    batch, read = Batch(engine), watch(engine)
    row = batch.ask(*jobs[0])
    for _ in range(5):
        batch.step()
    for text in ("a", "b"):
        batch.ask(text, {"sampling": GREEDY, "max_tokens": 50})
    read_before, drafted = len(read), []
    while len(batch.open) == 3:
        batch.step()
        drafted.append(batch.size.drafted)
        assert len(batch.open) < 3 or len(read) == read_before
    assert not any(drafted[1:]), "only what was launched before the others came"
    accepted = 0
    while batch.is_busy:
        batch.step()
        accepted += batch.size.accepted
    assert accepted > 50
    assert batch.answers[row].says_as(expected)


@pytest.mark.parametrize("passes", [0, 1, 9])
def test_a_draft_model_that_fails_is_dropped_and_fails_no_answer(
    plain: GenerationEngine, folder: Path, passes: int
) -> None:
    jobs = [("Hi", {"sampling": GREEDY, "max_tokens": 60})]
    [expected], _ = answer_at_random(plain, jobs)
    engine = open_engine(folder, speculate_rows=4, draft=folder)
    bytes_with = engine.nbytes()
    watch(engine, fails_after=passes)
    batch = Batch(engine)
    row = batch.ask(*jobs[0])
    batch.finish()
    assert batch.answers[row].says_as(expected)
    [fault] = batch.faults
    assert fault.message == "draft model, off now: ValueError: no more"
    assert engine.nbytes() < bytes_with


def test_nothing_is_drafted_near_the_end_of_the_draft_models_context(
    plain: GenerationEngine, folder: Path, tmp_path: Path
) -> None:
    """MLX reads positions beyond an array's end without a word."""
    short = write_chat(tmp_path / "short", max_position_embeddings=64)
    jobs = [("Hi", {"sampling": GREEDY, "max_tokens": 120})]
    [expected], _ = answer_at_random(plain, jobs)
    engine, ends = open_engine(folder, speculate_rows=4, draft=short), list[int]()
    model = engine._drafts.sources[-1]
    assert isinstance(model, DraftModel)

    def note(tokens: mx.array) -> None:
        ends.append(model._cache[0].size() + tokens.shape[1])

    model._model = Watched(model._model, note, None)
    [found], _ = answer_at_random(engine, jobs)
    assert found.says_as(expected)
    assert 32 < max(ends) <= 64


def test_weights_and_kv_are_counted(plain: GenerationEngine, folder: Path) -> None:
    engine = open_engine(folder, speculate_rows=4, draft=folder)
    assert engine.nbytes() == 2 * plain.nbytes()
    assert engine.facts.kv_cost == replace(
        plain.facts.kv_cost, draft=DraftCost(plain.facts.kv_cost.token, rows=4)
    )
    weights, sizes = plain.nbytes(), []
    for each in (plain, engine):
        batch = Batch(each)
        row = batch.ask("Hi", {"sampling": GREEDY, "max_tokens": 60})
        for _ in range(3):
            batch.step()
        sizes.append(each.nbytes())
        batch.leave(row)
    kv = sizes[0] - weights
    assert sizes[1] == 2 * (weights + kv)


def test_another_vocabulary_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    other = teach_thinking(write_chat(tmp_path / "other", seed=1), opens=False)
    with pytest.raises(ModelLoadFailed, match=r"tiny.*draft 'other'.*2 tokens differ.*'</think>'"):
        open_engine(folder, speculate_rows=4, draft=other)


def test_caches_that_cannot_go_back_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    other = write_chat(tmp_path / "other", **{**SLIDING, "sliding_window_pattern": 9})
    with pytest.raises(ModelLoadFailed, match="'other' uses a cache that cannot be rolled back"):
        open_engine(folder, speculate_rows=4, draft=other)
    with pytest.raises(ModelLoadFailed, match="'tiny' uses a cache that cannot be rolled back"):
        open_engine(other, speculate_rows=4, draft=folder)


@pytest.mark.parametrize("kind", [SLIDING, STATEFUL, HYBRID])
def test_windows_and_states_draft_and_are_drafted_for(
    tmp_path: Path, kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PromptLookup, "draft", lambda *_: ())
    base = write_chat(tmp_path / "base", **kind)
    others = {"rms_norm_eps": 1e-3, "norm_eps": 1e-3, "rope_theta": 8000.0}
    near = write_chat(tmp_path / "near", **{**kind, **others})
    jobs = [(text, {"sampling": GREEDY, "max_tokens": 50}) for text in (*PROMPTS[:3], LONG)]
    plain, drafted = open_engine(base), open_engine(base, PLENTY, 4, draft=near)
    cost = drafted.facts.kv_cost.draft
    assert cost.states >= 3 * plain.facts.kv_cost.constant
    assert cost.rows == 4
    expected, _ = answer_at_random(plain, jobs)
    for _ in range(2):  # the second time prompts are kept
        found, fewer = answer_at_random(drafted, jobs)
        assert all(other.says_as(one) for one, other in zip(expected, found, strict=True))
        assert 0 < sum(size.accepted for size in fewer) < sum(size.drafted for size in fewer)
    plain.close()
    drafted.close()
