"""Sampled rows in the engine: the same answer, whatever runs beside them and however it is read."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from gateway.engine.generation.engine import GenerationEngine
from gateway.jobs import Sampling
from tests.checkpoints import SLIDING, STATEFUL, write_chat
from tests.engine.generation.test_engine import TEXTS, Run, answers, job, newest, open_engine
from tests.engine.generation.ties import assert_alike

# Random weights say anything: half of what top_p keeps is beyond the first window.
WIDE = Sampling(temperature=50.0, top_p=0.97, seed=11)


@pytest.fixture(scope="module", params=[{}, SLIDING, STATEFUL], ids=["plain", "sliding", "states"])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GenerationEngine]:
    engine = open_engine(
        write_chat(tmp_path_factory.mktemp("model"), vocab_size=3000, **request.param)
    )
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def no_fault(engine: GenerationEngine) -> Iterator[None]:
    """A pass that throws is made again, row by row: its answers are right, and slow."""
    yield
    assert engine._faults.take() == []


def whole(engine: GenerationEngine, text: str, **more: Any) -> Any:
    """Answer with every token sorted from the first step on."""
    run = Run(engine)
    run.join(job(text, WIDE, **more))
    sampler = newest(engine).sampler
    while not sampler.is_certain:
        sampler.widen()
    (answer,) = run.finish()
    return answer


def test_a_window_that_was_too_small_changes_no_token_and_no_logprob(
    engine: GenerationEngine,
) -> None:
    """The token is chosen again, and the pass that read the wrong one is taken back."""
    run = Run(engine)
    run.join(job(TEXTS[0], WIDE, logprobs=2))
    sampler = newest(engine).sampler
    assert not sampler.is_certain
    (answer,) = run.finish()
    assert sampler.is_certain, "the test's window must have been too small"
    expected = whole(engine, TEXTS[0], logprobs=2)
    assert answer.ids == expected.ids
    assert answer.text == expected.text
    told = [each.chosen.logprob for each in answer.logprobs]
    assert told == pytest.approx([each.chosen.logprob for each in expected.logprobs], abs=1e-4)


def test_neighbours_are_not_touched_by_a_row_whose_window_was_too_small(
    engine: GenerationEngine,
) -> None:
    """Greedy, seeded, held by a window or not: each says what it says alone."""
    others = [
        Sampling(temperature=0),
        Sampling(seed=1),
        Sampling(seed=2, top_k=20, top_p=0.8, temperature=0.7),
        Sampling(seed=3, top_p=0.9),
        Sampling(temperature=0, presence_penalty=1.0, frequency_penalty=0.5),
    ]
    jobs = [job(text, each) for text, each in zip(TEXTS, others, strict=True)]
    alone = [answers(engine, [each])[0].ids for each in jobs]
    expected = whole(engine, TEXTS[1], max_tokens=30).ids
    jobs.insert(2, job(TEXTS[1], WIDE, max_tokens=30))
    together = [each.ids for each in answers(engine, jobs)]
    assert_alike(engine, jobs, together, [*alone[:2], expected, *alone[2:]])


def test_a_row_that_joins_late_and_one_that_leaves_change_no_choice(
    engine: GenerationEngine,
) -> None:
    """Tokens that may have to be chosen again are so across joins and leaves."""
    run = Run(engine)
    (leaving,) = run.join(job(TEXTS[2], WIDE))
    (first,) = run.join(job(TEXTS[0], WIDE))
    run.step()
    (second,) = run.join(job(TEXTS[1], WIDE))
    run.step()
    engine.leave(leaving)
    run.finish()
    jobs = [job(text, WIDE) for text in TEXTS[:2]]
    found = [run.answers[row].ids for row in (first, second)]
    assert_alike(engine, jobs, found, [whole(engine, text).ids for text in TEXTS[:2]])


def test_an_answer_of_one_token_is_right_though_its_window_was_too_small(
    engine: GenerationEngine,
) -> None:
    """It ends before any decode step."""
    jobs = [job(text, WIDE, max_tokens=1) for text in TEXTS]
    found = [answers(engine, [each])[0].ids for each in jobs]
    assert_alike(engine, jobs, found, [whole(engine, text, max_tokens=1).ids for text in TEXTS])


@pytest.mark.parametrize("stop", ["preempt", "park"])
@pytest.mark.parametrize(
    "sampling", [WIDE, Sampling(seed=4), Sampling(seed=5, top_k=30, top_p=0.9)]
)
def test_a_row_that_made_way_draws_what_it_would_have(
    engine: GenerationEngine, sampling: Sampling, stop: str
) -> None:
    """Read again or only kept aside, penalties and all: a place has one random number."""
    sampling = replace(sampling, frequency_penalty=0.7, repetition_penalty=1.3)
    jobs = [job(TEXTS[0], sampling), job(TEXTS[2], Sampling(seed=1))]
    expected = [answers(engine, [each])[0].ids for each in jobs]
    run = Run(engine)
    row, _ = [run.join(each)[0] for each in jobs]
    for pause in (1, 2, 3):
        for _ in range(pause):
            run.step()
        getattr(engine, stop)(row)
        run.step()
        engine.resume(row)
    run.finish()
    assert_alike(engine, jobs, [answer.ids for answer in run.answers.values()], expected)
