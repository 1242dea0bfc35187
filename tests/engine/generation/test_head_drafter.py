"""Drafts by a model's own MTP head: fewer passes, and never another answer."""

import os
import shutil
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from gateway.engine.drafts.head_drafter import HeadDrafter
from gateway.engine.drafts.prompt_lookup import PromptLookup
from gateway.engine.generation.engine import GenerationEngine
from gateway.engine.kv.layers import StatesCache, batch_of_one, go_back, make_batch_caches
from gateway.jobs.chat import Sampling
from tests.checkpoints import AFTER_LAST, HEADED, add_head, write_chat
from tests.engine.generation.half_right import assert_likeliest, let_drafts_be_half_right
from tests.engine.generation.harness import PLENTY, Batch, answer_at_random, open_engine

pytestmark = pytest.mark.slow

GREEDY = Sampling(temperature=0, ignore_eos=True)
LONG = "a b c d e f g. " * 20


@pytest.fixture(scope="module", params=[HEADED, AFTER_LAST], ids=["hybrid", "plain"])
def right(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose head guesses nearly all tokens."""
    return add_head(write_chat(tmp_path_factory.mktemp("right"), **request.param), is_right=True)


@pytest.fixture(scope="module")
def random(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_head(write_chat(tmp_path_factory.mktemp("random"), **HEADED))


@pytest.fixture(autouse=True)
def _without_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptLookup, "draft", lambda *_: ())


def ask(count: int, **job: Any) -> list[tuple[str, dict[str, Any]]]:
    whole = {"sampling": GREEDY, "max_tokens": 60, **job}
    return [(f"{'ab ' * i}Question {i}", whole) for i in range(count)]


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_a_head_that_is_right_saves_passes(right: Path, rows: int) -> None:
    expected, passes = answer_at_random(open_engine(right), ask(rows))
    found, fewer = answer_at_random(open_engine(right, speculate_rows=4), ask(rows))
    assert all(other.says_as(one) for one, other in zip(expected, found, strict=True))
    accepted, drafted = (sum(getattr(p, k) for p in fewer) for k in ("accepted", "drafted"))
    assert accepted > 0.7 * drafted
    assert len(fewer) < len(passes) / (2 if rows < 4 else 1.5)


def test_a_sampled_answer_is_the_same_with_a_head(right: Path) -> None:
    job = {"sampling": Sampling(temperature=0.3, seed=4, top_k=20, ignore_eos=True)}
    expected, _ = answer_at_random(open_engine(right), ask(3, **job))
    found, passes = answer_at_random(open_engine(right, speculate_rows=4), ask(3, **job))
    assert all(other.says_as(one) for one, other in zip(expected, found, strict=True))
    assert any(each.accepted for each in passes)


def test_a_head_drafts_on_after_a_draft_that_was_right_in_part(
    right: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states of the accepted tokens are those of the pass that was undone."""
    guess = HeadDrafter._guess

    def spoil(drafter: HeadDrafter, feeds: Any, length: int) -> list[list[int]]:
        drafts = guess(drafter, feeds, length)
        return [[*draft[:-1], 1] if length > 1 else draft for draft in drafts]

    monkeypatch.setattr(HeadDrafter, "_guess", spoil)
    _, passes = answer_at_random(open_engine(right, speculate_rows=4), ask(1, max_tokens=150))
    after = [later for one, later in pairwise(passes) if 0 < one.accepted < one.drafted]
    assert len(after) > 10
    assert sum(each.accepted for each in after) > 0.7 * len(after)


@pytest.mark.parametrize("config", [HEADED, AFTER_LAST], ids=["hybrid", "plain"])
def test_a_guess_is_made_of_the_states_and_the_kv_of_the_model_alone(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is so in a crowd, after drafts that were right in part, and behind a kept prefix."""
    folder = add_head(write_chat(tmp_path, **config))
    engine = open_engine(folder, speculate_rows=4, prefix_cache_bytes=PLENTY)
    model = engine._model

    def check(context: list[int], tokens: Sequence[int]) -> None:
        cache = batch_of_one(make_batch_caches(model))
        model(mx.array([context[:-1]]), cache=cache)
        states, kv = cache[-2:]
        hidden, last = states[0], context[-1]
        for token in tokens:
            hidden = model.guess(hidden, mx.array([[last]]), kv)
            assert_likeliest(model.score(hidden)[0, 0], token)
            last = token

    jobs = [(LONG * 2, {"sampling": GREEDY, "max_tokens": 30}), *ask(2)]
    expected, _ = answer_at_random(open_engine(folder), jobs)
    let_drafts_be_half_right(monkeypatch, HeadDrafter, model, check)
    for _ in range(2):
        found, passes = answer_at_random(engine, jobs)
        assert all(other.says_as(one) for one, other in zip(expected, found, strict=True))
        assert sum(0 < one.accepted < one.drafted for one in passes) > 10
    assert found[0].cached_tokens > 0


def test_a_row_that_joined_after_a_rollback_may_leave_while_the_next_pass_runs() -> None:
    """How many tokens are known of each row is that of the rows before."""
    linear, states, other = (StatesCache(1) for _ in range(3))
    for each in (linear, states, other):
        each.cache = [mx.zeros((1, 1, 4))]
        each.hold()
    states.recent = mx.zeros((1, 3, 4))
    go_back([linear, states], [1], [3])
    assert states.known == (2,)
    states.extend(other)
    linear.extend(other)
    for each in (linear, states):
        each.hold()
    states.recent = mx.ones((2, 3, 4))
    states.filter([1])
    linear.filter([1])
    go_back([linear, states], [2], [3])
    assert states.known == (1,)


def test_a_plain_models_head_goes_on_from_the_state_of_the_last_accepted_token() -> None:
    """A row that joined while the pass ran keeps its own state."""
    states, other = StatesCache(1), StatesCache(1)
    states.cache, other.cache = [mx.full((2, 1, 4), 9.0)], [mx.full((1, 1, 4), 7.0)]
    states.hold()
    states.recent = mx.arange(6).reshape(2, 3, 1) * mx.ones(4)
    states.extend(other)
    go_back([states], [1, 0, 0], [3, 3, 0])
    [state] = states.cache
    assert state is not None
    assert state[:, 0, 0].tolist() == [1, 9, 7]
    assert states.earlier is None
    assert states.recent is None


def test_a_kept_prefix_has_the_heads_kv(right: Path) -> None:
    engine = open_engine(right, prefix_cache_bytes=PLENTY, speculate_rows=4)
    counts = []
    for _ in range(2):
        answers, passes = answer_at_random(engine, [(LONG, {"sampling": GREEDY, "max_tokens": 40})])
        counts.append([(each.drafted, each.accepted) for each in passes if each.drafted])
    assert answers[0].cached_tokens > 0
    assert counts[0] == counts[1]


def test_a_random_head_changes_no_answer_and_rests(random: Path) -> None:
    expected, _ = answer_at_random(open_engine(random), ask(3))
    found, passes = answer_at_random(open_engine(random, speculate_rows=4), ask(3))
    assert all(other.says_as(one) for one, other in zip(expected, found, strict=True))
    assert 0 < sum(each.drafted for each in passes) < 60


@pytest.mark.parametrize("rows", [1, 4])
def test_a_head_that_rests_makes_no_guess_and_no_wider_pass(random: Path, rows: int) -> None:
    """All that it does then is to add a token to its KV in each pass."""
    counts = []
    for engine in (open_engine(random), open_engine(random, speculate_rows=4)):
        head, calls = getattr(engine._model.language_model, "mtp", None), Counter[str]()
        if head is not None:
            for name in ("self_attn", "mlp"):
                watch(head.layers[0], name, calls)
        steps = Batch(engine)
        for job in ask(rows, max_tokens=20):
            steps.ask(*job)
        while steps.is_reading:
            steps.hear(steps.prefill(512))
        calls.clear()
        sizes = []
        while steps.is_decoding:
            steps.hear(steps.change(kind="decode", drafters=()))
            sizes.append((steps.size.rows, steps.size.drafted))
        counts.append((sizes, calls))
    (expected, _), (found, calls) = counts
    assert found == expected
    assert 0 < calls["self_attn"] <= len(found)
    assert not calls["mlp"]


def watch(layer: Any, name: str, calls: Counter[str]) -> None:
    """Count the calls of a layer's module."""
    module = layer[name]

    class Watched(type(module)):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return super().__call__(*args, **kwargs)

    module.__class__ = Watched


def test_a_head_that_fails_is_not_asked_again(right: Path) -> None:
    expected, _ = answer_at_random(open_engine(right), ask(2))
    engine = open_engine(right, speculate_rows=4)
    drafter, calls = engine._drafts.sources[-1], list[mx.array]()
    assert isinstance(drafter, HeadDrafter)
    guess = drafter._model.guess

    def fail(hidden: mx.array, tokens: mx.array, kv: Any) -> mx.array:
        calls.append(guess(hidden, tokens, kv))  # the KV has grown
        raise ValueError("no more")

    drafter._model.guess = fail
    batch = Batch(engine)
    rows = [batch.ask(*job) for job in ask(2)]
    batch.finish()
    assert all(batch.answers[row].says_as(one) for row, one in zip(rows, expected, strict=True))
    [fault] = batch.faults
    assert fault.message == "mtp head, off now: ValueError: no more"
    assert len(calls) == 1
    assert [each.name for each in engine._drafts.sources] == ["prompt_lookup"]


def test_a_guess_that_cannot_be_computed_fails_no_pass(right: Path, tmp_path: Path) -> None:
    """Its KV, in which the guess is written, is the running answers' too."""
    expected, _ = answer_at_random(open_engine(right), ask(2))
    engine = open_engine(right, speculate_rows=4)
    drafter = engine._drafts.sources[-1]
    assert isinstance(drafter, HeadDrafter)
    guess, file = drafter._model.guess, tmp_path / "cut.safetensors"
    mx.save_safetensors(str(file), {"zeros": mx.zeros((1, 1, 64))})
    opened: Any = mx.load(str(file))
    os.truncate(file, file.stat().st_size - 100)  # it is read when it is evaluated
    drafter._model.guess = lambda hidden, *rest: guess(hidden + opened["zeros"], *rest)
    batch = Batch(engine)
    rows = [batch.ask(*job) for job in ask(2)]
    batch.finish()
    assert all(batch.answers[row].says_as(one) for row, one in zip(rows, expected, strict=True))
    [fault] = batch.faults
    assert fault.message.startswith("mtp head, off now: RuntimeError")


def test_a_head_whose_guesses_are_not_numbers_is_named(random: Path, tmp_path: Path) -> None:
    """Its KV keeps prompts out of the prefix cache, so it tells how to leave it out."""
    weights: Any = mx.load(str(random / "model.safetensors"))
    broken = {name: each * (mx.nan if ".mtp.fc." in name else 1) for name, each in weights.items()}
    shutil.copytree(random, tmp_path / "broken")
    mx.save_safetensors(str(tmp_path / "broken" / "model.safetensors"), broken)
    expected, _ = answer_at_random(open_engine(random), ask(2))
    batch = Batch(open_engine(tmp_path / "broken", speculate_rows=4))
    rows = [batch.ask(*job) for job in ask(2)]
    batch.finish()
    assert all(batch.answers[row].says_as(one) for row, one in zip(rows, expected, strict=True))
    [fault] = batch.faults
    assert fault.message.startswith("mtp head, off now: ")
    assert "`mtp_head: false`" in fault.message


def test_a_head_takes_part_in_the_engines_size(right: Path) -> None:
    on, off = open_engine(right, speculate_rows=4), open_engine(right)
    weights: Any = mx.load(str(right / "model.safetensors"))
    marks = (".mtp.", ".layers.2.")
    head = sum(each.nbytes for name, each in weights.items() if any(m in name for m in marks))
    assert on.nbytes() - off.nbytes() == head
    assert on.facts.kv_cost.token > off.facts.kv_cost.token


@pytest.mark.parametrize("options", [{"speculate_rows": 4, "has_head": False}, {}])
def test_a_head_can_be_left_out(right: Path, options: dict[str, Any]) -> None:
    engine: GenerationEngine = open_engine(right, **options)
    assert "mtp_head" not in engine.facts.drafters
    assert len(make_prompt_cache(engine._model)) == len(engine._model.layers)
