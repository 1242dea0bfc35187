"""Questions through the batcher: judged, refused, cancelled, failed and late."""

import asyncio

import pytest

from gateway.errors import EngineFailed, Overloaded
from gateway.jobs.chat import GenerateJob, Question, Sampling
from gateway.jobs.steps import LabelStep, SequenceParams
from gateway.serving.generation.fan_out import score_labels
from gateway.serving.generation.queue import JobQueue
from tests.fakes import ScriptedChat, caller
from tests.serving.generation.harness import asking, batching, reached
from tests.waiting import until

pytestmark = pytest.mark.anyio


def judging(first: int, count: int, *, word: str = "q") -> GenerateJob:
    questions = [Question(first + i, f"{word}{i}", ["yes", "no"]) for i in range(count)]
    return GenerateJob(
        caller=caller(),
        messages=[{"role": "user", "content": "in"}],
        questions=questions,
        sampling=Sampling(),
        max_tokens=1,
    )


async def test_questions_leave_places_for_answers() -> None:
    """Those of one request may be thousands of rows, each of a long prompt."""
    engine = ScriptedChat()
    engine.gate.close()
    async with batching(engine, max_batch_size=8) as batcher:
        judging_many = asyncio.create_task(score_labels(batcher, [judging(0, 50)]))
        await reached(engine)
        assert engine.rows == 6
        waiting = batcher.tickets
        answer = asking(batcher, "hello")
        await until(lambda: batcher.tickets > waiting)
        engine.gate.open()
        assert await answer == "hello"
        assert not judging_many.done()
        await judging_many


async def test_cancelled_questions_leave_the_engine() -> None:
    engine = ScriptedChat()
    engine.gate.close()
    async with batching(engine, queue_limit=4) as batcher:
        task = asyncio.create_task(score_labels(batcher, [judging(0, 4)]))
        await reached(engine)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        engine.gate.open()
        judged, _ = await score_labels(batcher, [judging(0, 4)])
    assert len(judged) == 4
    assert engine.rows == 0


async def test_a_question_that_fails_ends_its_request_alone() -> None:
    async with batching(ScriptedChat()) as batcher:
        bad = score_labels(batcher, [judging(0, 2, word="poison")])
        good = score_labels(batcher, [judging(0, 2)])
        failed, judged = await asyncio.gather(bad, good, return_exceptions=True)
    assert isinstance(failed, EngineFailed)
    assert not isinstance(judged, BaseException)
    assert len(judged[0]) == 2


async def test_a_question_is_one_choice_however_many_steps_its_labels_have() -> None:
    """Its prompt is counted once too: its steps share it."""
    queue = JobQueue("m", max_tokens=190, max_choices=2)
    steps = [
        SequenceParams(
            prompt=[1] * 50,
            max_tokens=1,
            sampling=Sampling(),
            step=LabelStep(0, (), is_first=not i),
        )
        for i in range(40)
    ]
    async with queue.place(caller(), steps[:1]), queue.place(caller(), steps[1:20]):
        async with queue.place(caller(), steps[20:]), queue.place(caller(), steps[:1]):
            with pytest.raises(Overloaded):
                async with queue.place(caller(), steps[:1]):
                    raise AssertionError("a third question has no place")
