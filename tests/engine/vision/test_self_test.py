"""The self-test of a model that reads images: an image in a batch, beside the same one alone."""

from pathlib import Path

import mlx.core as mx
import pytest

from benchmarks.loading import load_generation
from gateway.engine.device import Device
from gateway.engine.generation.engine import GenerationEngine
from gateway.engine.vision.rotation import Positions
from gateway.jobs.steps import Verdict
from tests.engine.vision.harness import write_seeing


def verdict_of(engine: GenerationEngine) -> Verdict:
    *_, verdict = engine.self_test()
    return verdict


def test_an_image_in_a_batch_is_read_as_alone(cold: GenerationEngine) -> None:
    verdict = verdict_of(cold)
    assert (verdict.images, verdict.problem, verdict.forbids_batches) == (True, "", False)


def test_positions_that_rows_exchange_end_batching(
    cold: GenerationEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Positions.place

    def exchange(
        positions: Positions, points: mx.array | None = None, shifts: mx.array | None = None
    ) -> None:
        place(positions, points if points is None else points[::-1], shifts)

    monkeypatch.setattr(Positions, "place", exchange)
    verdict = verdict_of(cold)
    assert (verdict.rows, verdict.images, verdict.forbids_batches) == (True, False, True)
    assert verdict.problem.startswith("images: logits")


def test_a_model_whose_images_are_left_unread_has_no_such_verdict(tmp_path: Path) -> None:
    folder = write_seeing("qwen3_vl", tmp_path / "blind")
    engine = load_generation(folder, name="blind", device=Device.CPU)
    assert (engine.facts.images, verdict_of(engine).images) == (None, None)
    engine.close()
