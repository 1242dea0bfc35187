"""A tower that fails ends the rows whose images it was to encode, and no others."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from gateway.engine.device import DeviceBounds
from gateway.engine.generation.engine import GenerationEngine
from gateway.engine.vision.parts import Grid, Work
from tests.engine.generation.harness import PLENTY, Passing, Rows, answers, exchange, ids, spoil
from tests.engine.vision.harness import (
    CAT,
    DOG,
    TALL,
    WIDE,
    alone,
    open_seeing,
    see,
    sight_of,
    write_seeing,
)

LONG = "It lies on the mat and purrs. " * 3
TALL_GRID = (12, 4)  # rows and columns of patches
Change = Callable[[mx.array], mx.array]


@dataclass
class Failing:
    """A tower that fails at images of one size, after its first layer, a number of times."""

    tower: Any
    change: Change | None = None  # made to the features instead of an error
    left: int = 1000

    def encode(self, patches: mx.array, grid: Grid) -> Work:
        is_failing = grid == TALL_GRID and self.left > 0
        work = self.tower.encode(patches, grid)
        if is_failing and self.change is None:
            next(work)
            yield
            self.left -= 1
            raise RuntimeError("this tower leans")
        features: mx.array = yield from work
        return self.change(features) if is_failing and self.change is not None else features

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tower, name)


@pytest.fixture(params=[None, 1e-9], ids=["at once", "in parts"])
def engine(folder: Path, request: pytest.FixtureRequest) -> Iterator[GenerationEngine]:
    bounds = DeviceBounds(pass_s=request.param)
    engine = open_seeing(folder, prefix_cache_bytes=PLENTY, bounds=bounds)
    yield engine
    engine.close()


def fail(engine: GenerationEngine, change: Change | None = None, left: int = 1000) -> None:
    sight = sight_of(engine)
    sight._tower = Failing(sight._tower, change, left)


JOBS = [
    see("What is @?", CAT),
    see(f"How high is @? {LONG}", TALL),
    see("How are you?"),
    see("Is @ larger than @?", WIDE, TALL),
    see("Who is @?", DOG),
]
FAILS = (1, 3)


@pytest.mark.parametrize("change", [None, lambda features: features * float("nan")])
def test_rows_whose_images_fail_end_alone(engine: GenerationEngine, change: Change | None) -> None:
    alone_ids = [ids(alone(engine, job))[0] for job in JOBS]
    sight_of(engine)._kept.clear()
    engine._clear_prefixes()
    fail(engine, change)
    batch = Rows(engine)
    rows = [batch.add(job)[0] for job in JOBS]
    batch.finish()
    for number, row in enumerate(rows):
        answer = batch.answers[row]
        assert (answer.error is not None) == (number in FAILS)
        assert answer.ids == ([] if number in FAILS else alone_ids[number])
        if answer.error is not None:
            assert ("not finite" if change else "leans") in answer.error
    assert batch.faults
    assert engine._sequences.is_batched
    assert not batch.count


def test_rows_that_decode_are_not_read_again_as_a_tower_fails(engine: GenerationEngine) -> None:
    [expected] = ids(alone(engine, JOBS[2]))
    fail(engine)
    batch = Rows(engine)
    [text] = batch.add(JOBS[2])
    while not batch.is_decoding:
        batch.hear(batch.prefill())
    batch.hear(batch.decode())
    [image] = batch.add(JOBS[1])
    while batch.answers[image].error is None:
        batch.hear(batch.prefill())
        assert not batch.is_reading or batch.result.reading == {image}
    batch.finish()
    assert batch.answers[text].ids == expected


def test_an_error_that_is_nobodys_is_made_good(engine: GenerationEngine) -> None:
    expected = [ids(alone(engine, job))[0] for job in JOBS]
    sight_of(engine)._kept.clear()
    engine._clear_prefixes()
    fail(engine, left=1)
    told = answers(engine, JOBS[:4])
    assert ids(told) == expected[:4]


def test_a_fault_of_the_decoder_reads_rows_with_images_again(engine: GenerationEngine) -> None:
    """Their features are gone by then, from the row and perhaps from those kept."""
    expected = [ids(alone(engine, job))[0] for job in JOBS[:4]]
    engine._clear_prefixes()
    sight_of(engine)._kept.clear()
    model = engine._model
    for at in (1, 2, 5):
        exchange(engine, Passing(model, at))
        batch = Rows(engine)
        rows = [batch.add(job)[0] for job in JOBS[:4]]
        for _ in range(3):
            batch.step()
        sight_of(engine)._kept.clear()
        batch.finish()
        assert len(batch.faults) == 1
        assert [batch.answers[row].ids for row in rows] == expected


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_vl"])
def test_weights_that_are_no_numbers_end_rows_with_images_and_nothing_is_kept(
    tmp_path: Path, name: str
) -> None:
    folder = write_seeing(name, tmp_path / "model")
    spoil(folder, "model.visual.merger.linear_fc2.bias", float("nan"), 3)
    engine = open_seeing(folder, prefix_cache_bytes=PLENTY)
    told = answers(engine, [see(f"What is @? {LONG}", CAT), see("Hello")])
    assert "not finite" in str(told[0].error)
    assert told[1].ends
    assert sight_of(engine)._kept.nbytes == 0
    [params] = engine.prepare(see(f"What is @? {LONG}", CAT))
    assert engine.prefixes.count_known(params.prompt, (0, "")) == 0
    assert not engine._sequences._prefill.seqs
    engine.close()


def test_a_fault_leaves_no_features_behind(engine: GenerationEngine) -> None:
    """They may have caused it, as cached KV may."""
    told = ids(alone(engine, see("What is @?", CAT)))
    fail(engine, left=1)
    rows = Rows(engine)
    rows.add(see(f"How high is @? {LONG}", TALL))
    ids(rows.finish())
    sight = sight_of(engine)
    encoded = sight.encoded
    assert ids(alone(engine, see("What is @?", CAT))) == told
    assert sight.encoded == encoded + 1
