"""Prompts given back with their logprobs: equal to the model's own, however they are read."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from benchmarks.steps import Steps
from gateway.engine.generation.engine import GenerationEngine
from gateway.engine.generation.prompt_scoring import MOST_BYTES
from gateway.errors import ContextLengthExceeded
from gateway.jobs.chat import Delta, EchoedPrompt, GenerateJob
from tests.checkpoints import SLIDING, STATEFUL, write_chat
from tests.engine.generation.harness import (
    GREEDY,
    Passing,
    exchange,
    finish,
    join,
    open_engine,
    shapes,
    spoil,
)
from tests.fakes import caller

PROMPTS = ["Hello there!", "What is 2 + 2? " * 12, "日本語のテキスト 🙂", "a b c " * 60]


@pytest.fixture(scope="module", params=[{}, SLIDING, STATEFUL], ids=["plain", "sliding", "states"])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> GenerationEngine:
    folder = write_chat(tmp_path_factory.mktemp("model"), **request.param)
    return open_engine(folder, prefix_cache_bytes=1 << 24)


def echo(prompt: str | Sequence[int], **asked: Any) -> GenerateJob:
    return GenerateJob(
        caller=caller(),
        prompt=prompt,
        **{"sampling": GREEDY, "max_tokens": 0, "logprobs": 2, "echo": True, **asked},
    )


def told(
    engine: GenerationEngine, jobs: Sequence[GenerateJob], budget: int = 512
) -> list[list[Delta]]:
    steps = Steps(engine)
    rows = [join(steps, engine.prepare(each)[0]) for each in jobs]
    deltas = finish(steps, budget)
    return [[delta for delta in deltas if delta.id == row] for row in rows]


def echoed(deltas: Sequence[Delta]) -> EchoedPrompt:
    (prompt,) = [delta.prompt for delta in deltas if delta.prompt is not None]
    assert deltas[0].prompt is prompt, "it comes first"
    return prompt


def exact(engine: GenerationEngine, ids: Sequence[int]) -> Any:
    """Ask the model for all logits at once: (tokens, vocabulary) logprobs."""
    logits = engine._model(mx.array([ids]))[0].astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


def check(engine: GenerationEngine, job: GenerateJob, prompt: EchoedPrompt) -> None:
    assert job.logprobs
    ids = engine.prepare(job)[0].prompt
    expected = exact(engine, ids)
    assert len(prompt.texts) == len(ids)
    assert len(prompt.logprobs) == len(ids) - 1
    for place, scored in enumerate(prompt.logprobs):
        right = expected[place][ids[place + 1]]
        assert scored.chosen.logprob == pytest.approx(right, abs=2e-4)
        best = np.partition(expected[place], -job.logprobs)[-job.logprobs :]
        assert [each.logprob for each in scored.top] == pytest.approx(
            sorted(best, reverse=True), abs=2e-4
        )


@pytest.mark.parametrize("budget", [16, 100, 512])
def test_a_prompts_logprobs_are_the_models_own(engine: GenerationEngine, budget: int) -> None:
    jobs = [echo(prompt) for prompt in PROMPTS]
    for job, deltas in zip(jobs, told(engine, jobs, budget), strict=True):
        check(engine, job, echoed(deltas))
        assert [(each.text, each.tokens, each.finish_reason) for each in deltas] == [
            ("", 0, "length")
        ]
        assert "".join(echoed(deltas).texts) == job.prompt


def test_beside_rows_that_only_write_nothing_changes_for_either(engine: GenerationEngine) -> None:
    writing = [echo(prompt, echo=False, logprobs=None, max_tokens=9) for prompt in PROMPTS]
    alone = ["".join(each.text for each in told(engine, [job])[0]) for job in writing]
    going_on = [echo(prompt, max_tokens=9) for prompt in PROMPTS]
    scored = [echo(prompt) for prompt in PROMPTS]
    deltas = told(engine, [*writing, *going_on, *scored], budget=100)
    for job, each in zip([*going_on, *scored], deltas[4:], strict=True):
        check(engine, job, echoed(each))
    for text, first, second in zip(alone, deltas[:4], deltas[4:8], strict=True):
        assert "".join(each.text for each in first) == text
        assert "".join(each.text for each in second) == text
        assert len([scores for each in second for scores in each.logprobs]) > 0


def test_kept_prompts_hide_no_logprob(engine: GenerationEngine) -> None:
    text = "The same beginning, again and again. " * 8
    told(engine, [echo(text, echo=False, logprobs=None, max_tokens=2)])
    for _ in range(2):
        job = echo(text)
        deltas = told(engine, [job])[0]
        check(engine, job, echoed(deltas))
        assert deltas[0].cached_tokens == 0


def test_a_prompt_of_one_token_has_nothing_to_score(engine: GenerationEngine) -> None:
    for most in (0, 1):
        deltas = told(engine, [echo([5], max_tokens=most)])[0]
        assert (len(echoed(deltas).texts), list(echoed(deltas).logprobs)) == (1, [])
        assert deltas[-1].finish_reason == "length"


def test_a_choice_that_says_one_token_has_its_logprobs_too(engine: GenerationEngine) -> None:
    """lm-evaluation-harness asks so."""
    job = echo(PROMPTS[1], max_tokens=1, logprobs=1)
    (delta,) = told(engine, [job])[0]
    check(engine, job, echoed([delta]))
    (scores,) = delta.logprobs
    ids = engine.prepare(job)[0].prompt
    assert scores.chosen.logprob == pytest.approx(exact(engine, ids)[-1].max(), abs=2e-4)


def test_without_logprobs_token_ids_come_back_as_text(engine: GenerationEngine) -> None:
    ids = engine.prepare(echo("Hello there, 日本!"))[0].prompt
    prompt = echoed(told(engine, [echo(ids, logprobs=None)])[0])
    assert "".join(prompt.texts) == "Hello there, 日本!"
    assert list(prompt.logprobs) == []


def test_a_prompt_that_leaves_no_room_can_be_scored_but_not_continued(folder: Path) -> None:
    engine = open_engine(folder, max_context=64)
    assert len(echoed(told(engine, [echo([7] * 64)])[0]).logprobs) == 63
    with pytest.raises(ContextLengthExceeded):
        engine.prepare(echo([7] * 64, max_tokens=1))
    with pytest.raises(ContextLengthExceeded):
        engine.prepare(echo([7] * 65))


def test_special_tokens_are_shown_where_they_were_written(folder: Path) -> None:
    engine = open_engine(folder)
    token = 2
    content = engine.tokens.backend.get_added_tokens_decoder()[token].content
    prompt = echoed(told(engine, [echo([token, 70, 71, token])])[0])
    assert prompt.texts[0] == prompt.texts[-1] == content
    assert "".join(echoed(told(engine, [echo(f"a{content}b")])[0]).texts) == f"a{content}b"


def test_the_logits_of_a_whole_prompt_are_never_there_at_once(tmp_path: Path) -> None:
    """A prompt is read in passes of some hundred tokens if the vocabulary has a real size."""
    folder = write_chat(tmp_path, vocab_size=131_072, hidden_size=16, tie_word_embeddings=True)
    engine = open_engine(folder)
    passes = shapes(engine)
    jobs = [echo([5 + i % 900 for i in range(length)]) for length in (140, 20, 21)]
    deltas = told(engine, jobs, budget=4096)
    assert 0 < max(4 * rows * width * 131_072 for rows, width in passes) <= MOST_BYTES
    for job, each in zip(jobs, deltas, strict=True):
        check(engine, job, echoed(each))


@pytest.mark.parametrize("at", [1, 2, 3, 5])
def test_a_passing_fault_scores_no_token_twice(folder: Path, at: int) -> None:
    engine = open_engine(folder)
    model = engine._model
    exchange(engine, Passing(model, at))
    jobs = [echo(PROMPTS[1]), echo(PROMPTS[3], max_tokens=4)]
    deltas = told(engine, jobs, budget=50)
    exchange(engine, model)
    for job, each in zip(jobs, deltas, strict=True):
        check(engine, job, echoed(each))


def test_a_prompt_whose_logits_are_no_numbers_is_an_error(tmp_path: Path) -> None:
    """JSON has no word for them, and a guess would be worse."""
    folder = write_chat(tmp_path)
    spoil(folder, "model.norm.weight", math.nan)
    for most in (0, 3):
        (delta,) = told(open_engine(folder), [echo("abc", max_tokens=most)])[0]
        assert "not a number" in (delta.error or "")
