"""Tokens read ahead of their choice: fewer passes, and never another answer."""

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.steps import Steps
from gateway.engine.drafts.prompt_lookup import PromptLookup
from gateway.engine.generation.engine import GenerationEngine
from gateway.engine.generation.sequence import Sequence
from gateway.engine.kv.layers import StatesCache
from gateway.jobs.chat import Grammar, Sampling
from gateway.jobs.steps import Pass, SequenceParams
from tests.checkpoints import HYBRID, SLIDING, STATEFUL, write_chat
from tests.engine.generation.harness import (
    ECHO,
    GREEDY,
    JOBS,
    PLENTY,
    PROMPTS,
    Answer,
    Batch,
    answer_at_random,
    finish,
    job,
    join,
    open_engine,
    watch,
)

FOREVER = Sampling(temperature=0, ignore_eos=True)
FIXED = Grammar(
    "regex", r"[ab] is the answer to this question, and so is [ab], which comes after it"
)


@pytest.fixture(scope="module")
def plain(folder: Path) -> GenerationEngine:
    return open_engine(folder)


@pytest.fixture(scope="module")
def ahead(folder: Path) -> GenerationEngine:
    return open_engine(folder, speculate_rows=8)


@pytest.mark.parametrize("seed", range(2))
def test_answers_are_those_without_reading_ahead(
    plain: GenerationEngine, ahead: GenerationEngine, seed: int
) -> None:
    chance = random.Random(seed)
    jobs = [
        (chance.choice([*PROMPTS, ECHO]), chance.choice(JOBS)) for _ in range(chance.randint(1, 8))
    ]
    jobs.append((ECHO, {"sampling": GREEDY, "max_tokens": 60}))
    jobs.append((ECHO, {"sampling": GREEDY, "max_tokens": 60, "grammar": FIXED}))
    expected, passes = answer_at_random(plain, jobs, seed)
    found, fewer = answer_at_random(ahead, jobs, seed)
    for one, other, asked in zip(expected, found, jobs, strict=True):
        assert other.says_as(one), asked
    assert any(each.forced for each in fewer)
    assert not any(each.forced or each.drafted for each in passes)


def test_each_forced_token_saves_a_pass(plain: GenerationEngine, ahead: GenerationEngine) -> None:
    jobs = [("Hi", {"sampling": GREEDY, "max_tokens": 99, "grammar": FIXED, "logprobs": 1})]
    [expected], passes = answer_at_random(plain, jobs)
    [found], fewer = answer_at_random(ahead, jobs)
    assert found.says_as(expected)
    forced = sum(each.forced for each in fewer)
    assert len(fewer) == len(passes) - forced
    assert forced > expected.tokens / 2
    assert found.chosen.count(0.0) >= forced


def forget(engine: GenerationEngine) -> GenerationEngine:
    """Make the next token depend on the last one alone, so that answers run in a circle."""
    for layer in engine._model.layers:
        for part in (layer.self_attn.o_proj, layer.mlp.down_proj):
            part.weight = mx.zeros_like(part.weight)
    return engine


@pytest.mark.parametrize("rows", [1, 8])
def test_what_repeats_is_read_several_tokens_at_once(folder: Path, rows: int) -> None:
    warm = Sampling(temperature=0.05, seed=7, ignore_eos=True)
    kinds = [FOREVER, warm, replace(warm, top_k=9, seed=8)]
    jobs = [
        (PROMPTS[i % 4], {"sampling": kinds[i % 3], "max_tokens": 120 - i}) for i in range(rows)
    ]
    told = []
    for speculate_rows in (0, 8):
        engine = forget(open_engine(folder, speculate_rows=speculate_rows))
        told.append(answer_at_random(engine, jobs))
    (expected, passes), (found, fewer) = told
    assert all(other.says_as(one) for one, other in zip(expected, found, strict=True))
    accepted = sum(each.accepted for each in fewer)
    assert accepted > 20 * rows
    assert accepted <= sum(each.drafted for each in fewer)
    assert len(fewer) < len(passes)
    assert rows > 1 or len(fewer) == len(passes) - accepted


def test_an_answer_ends_where_it_must_though_more_was_read(
    plain: GenerationEngine, ahead: GenerationEngine
) -> None:
    for most in (1, 2, 3, 7, 12, 19):
        for more in ({}, {"grammar": FIXED}, {"stop": ["e"]}):
            jobs = [(ECHO, {"sampling": GREEDY, "max_tokens": most, **more})]
            [expected], _ = answer_at_random(plain, jobs)
            [found], _ = answer_at_random(ahead, jobs)
            assert found.says_as(expected), (most, more)


def repeating(folder: Path, speculate_rows: int = 8) -> tuple[GenerationEngine, SequenceParams]:
    """Return an engine, and a sequence whose prompt begins with its answer, of which no token comes
    twice.
    """
    engine = forget(open_engine(folder, speculate_rows=speculate_rows))
    steps = Steps(engine)
    [row] = engine.prepare(job("Hi", FOREVER, max_tokens=40))
    join(steps, row)
    steps.prefill(512)
    assert engine._sequences._running is not None
    [answer] = engine._sequences._running.seqs
    finish(steps)
    assert len(set(answer.tokens)) == 40
    return engine, replace(row, prompt=[*answer.tokens, *row.prompt])


def answer(engine: GenerationEngine, row: SequenceParams) -> tuple[Answer, list[Pass]]:
    batch, passes = Batch(engine), list[Pass]()
    heard = batch.answers[join(batch, row)] = Answer()
    while batch.is_busy:
        batch.step()
        passes.append(batch.size)
    return heard, passes


@pytest.mark.parametrize("place", [12, 17, 22])
def test_tokens_chosen_after_an_answers_end_saved_no_pass(folder: Path, place: int) -> None:
    engine, row = repeating(folder)
    stop = replace(row.sampling, stop_token_ids=frozenset([row.prompt[place]]))
    found, passes = answer(engine, replace(row, sampling=stop))
    assert found.tokens == place + 1
    assert any(each.accepted for each in passes)
    for each in passes:
        assert each.tokens == each.rows + each.accepted + each.forced


@pytest.mark.parametrize("place", [12, 17, 22])
def test_what_comes_before_a_fault_inside_a_draft_is_told(folder: Path, place: int) -> None:
    told = []
    for speculate_rows in (0, 8):
        engine, row = repeating(folder, speculate_rows)
        end = len(row.prompt) + place

        def spoil(logits: mx.array, tokens: mx.array, cache: Any, end: int = end) -> mx.array:
            width = tokens.shape[1]
            places = mx.array(cache[0].offset).reshape(-1, 1) - width + mx.arange(width)
            return mx.where((places < end)[:, :, None], logits, mx.nan)

        watch(engine, after=spoil)
        found, passes = answer(engine, row)
        assert found.error
        told.append(found)
    assert any(each.accepted for each in passes)
    assert told[1].says_as(told[0])


def test_more_rows_than_allowed_read_nothing_ahead(folder: Path) -> None:
    engine = open_engine(folder, speculate_rows=2)
    batch = Batch(engine)
    formed = {"sampling": GREEDY, "max_tokens": 40, "grammar": FIXED}
    rows = [batch.ask(ECHO, formed) for _ in range(3)]
    while batch.is_reading:
        batch.hear(batch.prefill(512))
    batch.hear(batch.decode())
    assert (batch.size.rows, batch.size.forced) == (3, 0)
    batch.leave(rows.pop())
    batch.hear(batch.decode())
    assert batch.size.rows == 2
    assert batch.size.forced > 0


@pytest.mark.parametrize("kind", [{}, SLIDING, STATEFUL, HYBRID])
def test_drafts_that_are_right_in_part_change_no_answer(
    kind: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of several lengths, one beside them forced by a grammar; states are rolled back."""
    folder, chance = write_chat(tmp_path, **kind), random.Random(1)
    on = replace(GREEDY, ignore_eos=True)
    jobs = [(text, {"sampling": on, "max_tokens": 40 + 9 * i}) for i, text in enumerate(PROMPTS)]
    jobs.append((ECHO, {"sampling": GREEDY, "max_tokens": 60, "grammar": FIXED}))
    plain = open_engine(folder)
    wholes: dict[tuple[int, ...], list[int]] = {}
    append = Sequence.append

    def watched(row: Sequence, token: int) -> Any:
        wholes[tuple(row.params.prompt)] = row.context
        return append(row, token)

    with monkeypatch.context() as watch:
        watch.setattr(Sequence, "append", watched)
        expected, _ = answer_at_random(plain, jobs)
    plain.close()

    def draft(_: PromptLookup, context: list[int], limit: int) -> list[int]:
        size = len(context)
        [rest] = [whole[size:] for whole in wholes.values() if whole[:size] == context]
        tokens = rest[: max(0, limit)]
        if tokens and chance.random() < 0.6:
            place = chance.randrange(len(tokens))
            tokens[place] = (tokens[place] + 1) % 300
        return tokens

    monkeypatch.setattr(PromptLookup, "draft", draft)
    for prefix_bytes in (0, PLENTY):
        ahead = open_engine(folder, prefix_bytes, 8)
        found, passes = answer_at_random(ahead, jobs)
        assert all(other.says_as(one) for one, other in zip(expected, found, strict=True))
        accepted = sum(size.accepted for size in passes)
        assert 20 < accepted < sum(size.drafted for size in passes)
        assert any(size.forced for size in passes)
        ahead.close()


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 7))
def test_a_draft_is_what_followed_the_same_tokens_before(context: list[int], most: int) -> None:
    lookup = PromptLookup()
    for end in range(1, len(context) + 1):
        some = context[:end]
        draft = list(lookup.draft(some, most))
        ends = [
            [at for at in range(size, end) if some[at - size : at] == some[end - size :]]
            for size in (3, 2)
            if end > size
        ]
        places = next((each for each in ends if each), [])
        assert draft == (some[places[-1] : places[-1] + most] if places else [])


def test_a_long_prompt_is_indexed_in_parts() -> None:
    lookup, context = PromptLookup(), [0, 1, 2, *range(10, 20_000), 0, 1]
    assert lookup.draft(context, 2) == [2, 10]
    context += [19_000, 19_001]
    drafts = [lookup.draft(context, 2) for _ in range(9)]
    assert drafts[0] == ()
    assert drafts[-1] == [19_002, 19_003]


def test_a_lookup_that_is_wrong_waits_longer_each_time() -> None:
    lookup, context, tried = PromptLookup(), [1, 2, 3, 4] * 8, []
    for _ in range(300):
        if lookup.draft(context, 1):
            tried.append(len(context))
            lookup.note(context, 0)
        context.append(context[-4])
    waits = [later - sooner for sooner, later in itertools.pairwise(tried)]
    assert waits == [1, 3, 7, 15, 31, 63, 64, 64]
    lookup.note(context, 1)
    assert lookup.draft(context, 1)


def test_a_row_that_leaves_with_a_draft_leaves_no_states_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(write_chat(tmp_path, **HYBRID), speculate_rows=8)
    batch = Batch(engine)
    drafted, other = (
        batch.ask(text, {"sampling": GREEDY, "max_tokens": 40}) for text in ("Hi", "a b c")
    )
    while batch.is_reading:
        batch.hear(batch.prefill(512))
    assert engine._sequences._running is not None
    prompt = next(row.params.prompt for row in engine._sequences._running.seqs if row.id == drafted)

    def draft(_: PromptLookup, context: list[int], limit: int) -> list[int]:
        return [1] * (limit > 0 and context[: len(prompt)] == list(prompt))

    monkeypatch.setattr(PromptLookup, "draft", draft)
    batch.hear(batch.decode())
    states = [layer for layer in engine._sequences._running.cache if isinstance(layer, StatesCache)]
    assert states
    assert all(layer.earlier is not None for layer in states)
    batch.leave(drafted)
    assert all(layer.earlier is None for layer in states)
    while batch.is_decoding:
        batch.hear(batch.decode())
    assert batch.answers[other].ends
