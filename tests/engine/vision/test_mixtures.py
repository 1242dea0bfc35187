"""Requests with and without images at once, each answered as it is alone."""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gateway.engine.device import DeviceBounds
from gateway.engine.generation.engine import GenerationEngine
from gateway.jobs.chat import GenerateJob, Sampling
from tests.checkpoints import add_head
from tests.engine.generation.harness import PLENTY, Rows
from tests.engine.vision.harness import (
    CAT,
    COW,
    DOG,
    FREE,
    LARGE,
    TALL,
    WIDE,
    alone,
    keep_features,
    open_seeing,
    see,
    sight_of,
    write_seeing,
)

SEEDS = {"qwen3_5": 2, "qwen3_vl": 1}
REQUESTS, MORE = 40, 100
MOST_ROWS = 8
IMAGES = (CAT, DOG, COW, TALL, WIDE, LARGE)
BEGINNINGS = ("You are a guide to animals, and you are brief. " * 3, "Look: ", "")
QUESTIONS = ("What is it?", "How many?", "Which colour has it?", "Is it asleep?")


def draw_job(chance: random.Random) -> GenerateJob:
    """Draw a job: of text alone, about one of two images, or about several."""
    count = chance.choice([0, 1, 1, 1, 2, 3])
    images = [chance.choice(IMAGES if count > 1 else IMAGES[:2]) for _ in range(count)]
    text = chance.choice(BEGINNINGS) + " and ".join("@" * count) + chance.choice(QUESTIONS)
    sampling = chance.choice(
        [FREE, FREE, Sampling(temperature=1.2, seed=chance.randrange(5), ignore_eos=True)]
    )
    salt, tokens = chance.choice(["", "", "a"]), chance.choice([1, 4, 12, 20])
    return see(text, *images, sampling=sampling, salt=salt, max_tokens=tokens)


def name_of(job: GenerateJob) -> tuple[Any, ...]:
    """Return the parts of a job on which its answer depends."""
    images = tuple(each.data for each in job.images)
    text = str(job.messages[0]["content"])
    for each in job.images:
        text = text.replace(each.word, "@")
    return text, images, job.sampling.seed, job.max_tokens


@dataclass
class Crowd:
    """Requests under way in an engine, which come, wait, and leave at random."""

    engine: GenerationEngine
    chance: random.Random
    batch: Rows = field(init=False)
    jobs: dict[int, GenerateJob] = field(default_factory=dict)
    stopped: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)
    events: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.batch = Rows(self.engine)

    @property
    def open(self) -> list[int]:
        return [row for row in self.batch.open if row not in self.left]

    def join(self) -> None:
        job = draw_job(self.chance)
        [row] = self.batch.add(job)
        self.jobs[row] = job

    def disturb(self) -> None:
        """Let a row wait, go on or leave, or forget something that is kept."""
        act = self.chance.choice(
            ["park", "preempt", "resume", "resume", "leave", "forget prompts", "forget features"]
        )
        rows = self.open
        if act == "forget prompts":
            self.batch.change(clear_prefixes=True)
        elif act == "forget features":
            sight_of(self.engine)._kept.clear()
        elif not rows:
            return
        elif act == "resume" and self.stopped:
            row = self.chance.choice(sorted(self.stopped))
            self.stopped.remove(row)
            self.batch.change(resuming=[row])
        elif act in ("park", "preempt"):
            row = self.chance.choice(rows)
            if row not in self.stopped:
                self.stopped.add(row)
                self.batch.change(**{"parking" if act == "park" else "preempting": [row]})
        elif act == "leave" and self.chance.random() < 0.2:
            row = self.chance.choice(rows)
            self.left.add(row)
            self.stopped.discard(row)
            self.batch.leave(row)
        self.events.append(act)

    def step(self) -> None:
        if self.batch.is_reading:
            self.batch.hear(self.batch.prefill(self.chance.choice([1, 7, 40, 130, 512])))
        self.batch.hear(self.batch.decode())

    def run(self, requests: int) -> None:
        while len(self.jobs) < requests or self.open:
            if len(self.jobs) < requests and len(self.open) < MOST_ROWS:
                self.join()
            if self.chance.random() < 0.15:
                self.disturb()
            self.step()
            if not self.batch.is_busy and len(self.open) in (len(self.stopped), MOST_ROWS):
                self.batch.change(resuming=sorted(self.stopped))
                self.stopped.clear()


def check(folder: Path, cold: GenerationEngine, seed: int, requests: int) -> GenerationEngine:
    """Compare a crowd's answers with those of each request alone.

    Engines of odd seeds keep prompts and features and read ahead; the others keep few. Return the
    engine, which is closed.
    """
    given: dict[str, Any] = {"prefix_cache_bytes": PLENTY, "speculate_rows": 4}
    if seed % 2 == 0:
        given = {"prefix_cache_bytes": 300_000, "bounds": DeviceBounds(pass_s=1e-9)}
    engine = open_seeing(folder, **given)
    if seed % 2 == 0:
        keep_features(engine, 6 * 64 * 4 * 4)
    crowd = Crowd(engine, random.Random(seed))
    crowd.run(requests)
    assert not crowd.batch.faults
    assert not engine._sequences._all()
    assert engine._sequences._prefill.nbytes == 0
    expected: dict[tuple[Any, ...], list[int]] = {}
    for job in crowd.jobs.values():
        if name_of(job) not in expected:
            expected[name_of(job)] = alone(cold, job)[0].ids
    for row, job in crowd.jobs.items():
        answer, right = crowd.batch.answers[row], expected[name_of(job)]
        assert answer.error is None
        assert answer.ids == (right[: len(answer.ids)] if row in crowd.left else right)
    # Answers tell images apart, and the crowd was disturbed, or this would show little.
    long = [tuple(ids) for (*_, tokens), ids in expected.items() if tokens >= 12]
    assert len({*long}) > 0.9 * len(long)
    assert len(crowd.left) < requests / 10
    assert {"park", "preempt", "resume", "leave"} <= {*crowd.events}
    engine.close()
    return engine


@pytest.mark.slow
def test_no_answer_of_forty_is_that_of_another_image(folder: Path, cold: GenerationEngine) -> None:
    """The soak below makes thousands."""
    check(folder, cold, SEEDS[folder.name], REQUESTS)


@pytest.mark.slow
def test_a_head_that_guesses_beside_images_changes_no_answer(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = write_seeing("qwen3_5", tmp_path_factory.mktemp("headed") / "model")
    cold = open_seeing(folder)
    engine = check(add_head(folder), cold, seed=3, requests=MORE)
    assert "mtp_head" in engine.facts.drafters
    cold.close()


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3, 13))
def test_no_answer_of_thousands_is_that_of_another_image(
    folder: Path, cold: GenerationEngine, seed: int
) -> None:
    check(folder, cold, seed, MORE)
