"""Sampled rows in the engine: the same answer, whatever runs beside them and however it is read."""

from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.steps import Steps
from gateway.engine.generation.engine import GenerationEngine
from gateway.jobs.chat import Sampling
from tests.checkpoints import SLIDING, STATEFUL, write_chat
from tests.engine.generation.harness import TEXTS, Rows, job, newest, open_engine

# Random weights say anything: half of what top_p keeps is beyond the first window.
WIDE = Sampling(temperature=50.0, top_p=0.97, seed=11)


@pytest.fixture(scope="module", params=[{}, SLIDING, STATEFUL], ids=["plain", "sliding", "states"])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> GenerationEngine:
    return open_engine(
        write_chat(tmp_path_factory.mktemp("model"), vocab_size=3000, **request.param)
    )


@pytest.fixture(autouse=True)
def no_fault(engine: GenerationEngine) -> Iterator[None]:
    """A pass that throws is made again, row by row: its answers are right, and slow."""
    steps = Steps(engine)
    yield
    assert steps.faults == []


def whole(engine: GenerationEngine, text: str, **more: Any) -> Any:
    """Answer with every token sorted from the first step on."""
    run = Rows(engine)
    run.add(job(text, WIDE, **more))
    sampler = newest(engine).sampler
    while not sampler.is_certain:
        sampler.widen()
    (answer,) = run.finish()
    return answer


def test_a_window_that_was_too_small_changes_no_token_or_logprob(engine: GenerationEngine) -> None:
    run = Rows(engine)
    run.add(job(TEXTS[0], WIDE, logprobs=2))
    sampler = newest(engine).sampler
    assert not sampler.is_certain
    (answer,) = run.finish()
    assert sampler.is_certain, "the test's window must have been too small"
    expected = whole(engine, TEXTS[0], logprobs=2)
    assert answer.ids == expected.ids
    assert answer.text == expected.text
    told = [each.chosen.logprob for each in answer.logprobs]
    assert told == pytest.approx([each.chosen.logprob for each in expected.logprobs], abs=1e-4)
