"""A model for images is trained as the gateway runs it, and the trained one answers rightly."""

from dataclasses import fields
from typing import Final, cast

from gateway import engine  # noqa: F401  (OpenBLAS before mlx)

# isort: split
import random
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer

from benchmarks.loading import load_generation
from demo.seeing.batches import Batches
from demo.seeing.drawing import COLOURS, SHAPES, paint
from demo.seeing.evaluate import VISION
from demo.seeing.forward import GRID, TOKENS, as_patches, features, loss_at, places
from demo.seeing.questions import TASKS, Question, sample_texts, scene_for
from demo.seeing.tokens import train_tokenizer
from demo.seeing.train import (
    axes_of,
    config,
    load_weights,
    new_model,
    patches_of,
    save,
)
from gateway.engine.device import Device
from gateway.engine.models.checkpoint import Checkpoint
from gateway.engine.vision.patches import read_qwen
from tests.engine.generation.harness import GREEDY, Rows
from tests.engine.vision.golden import read_tower, whole
from tests.engine.vision.harness import see
from tests.sandboxes import sandbox

PICTURES: Final = VISION / "pictures"
SEED: Final = 4
# A picture, a question, its answer and its possible answers.
ASKED: Final = (
    ("shapes.png", "Which colour is the circle?", "purple", " ".join(COLOURS)),
    ("shapes.png", "Is the circle left or right of the square?", "right", "left right"),
    ("count.png", "How many shapes are there?", "3", "1 2 3 4"),
    ("count.png", "Which shape is yellow?", "cross", " ".join(SHAPES)),
    ("digit.webp", "Which digit is it?", "6", "0 1 2 3 4 5 6 7 8 9"),
    ("pair.jpg", "Is the triangle left or right of the cross?", "left", "left right"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model as training does before its first step."""
    mx.random.seed(SEED)
    tokenizer = train_tokenizer(sample_texts())
    settings = config(tokenizer.get_vocab())
    folder = tmp_path_factory.mktemp("demo-vision") / "model"
    save(new_model(settings), settings, tokenizer, folder)
    return folder


def test_the_gateways_tower_gives_the_features_that_training_gives(folder: Path) -> None:
    tower = read_tower(folder, "float32")
    settings = read_qwen(Checkpoint("demo-vision", folder))
    rng = random.Random(5)
    pictures = [paint(scene_for(task, rng)[0], rng) for task in TASKS]
    trained = features(tower, mx.array(as_patches(pictures, settings)), mx.array(places()))
    found = np.stack([np.array(each) for each in trained], 1).reshape(len(pictures), TOKENS, 2, -1)
    for picture, expected in zip(pictures, found, strict=True):
        work = tower.encode(mx.array(settings.to_patches(picture)), (GRID, GRID))
        # Training computes the mergers' GELU by its tanh formula.
        np.testing.assert_allclose(np.array(whole(work)), expected, atol=5e-3, rtol=5e-3)


def ask_all(folder: Path) -> list[str]:
    """Return a model's answers to all questions, which share a batch."""
    with sandbox("image") as pillow:
        loaded = load_generation(
            folder, name="demo-vision", device=Device.CPU, dtype="float32", image_sandbox=pillow
        )
        rows = Rows(loaded)
        for file, question, *_ in ASKED:
            rows.add(see(f"@{question}", (PICTURES / file).read_bytes(), sampling=GREEDY))
        told = [answer.text for answer in rows.finish()]
        loaded.close()
    return told


def test_the_trained_model_answers_rightly_about_pictures_of_each_format() -> None:
    assert ask_all(VISION) == [answer for _, _, answer, _ in ASKED]


def test_the_gateway_answers_as_training_would_before_its_first_step(folder: Path) -> None:
    told = ask_all(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    settings = config(tokenizer.get_vocab())
    model = new_model(settings)
    load_weights(model, folder)
    text, axes = model.language_model.args, axes_of(settings)
    batches = Batches(tokenizer, patches_of(), text, axes, seed=0)
    for (file, question, _, answers), answer in zip(ASKED, told, strict=True):
        rgb = np.asarray(Image.open(PICTURES / file).convert("RGB"))
        losses: dict[str, float] = {}
        for each in {*answers.split(), answer}:
            batch = batches.pack([rgb], [[Question("", question, each)]])
            arrays = [mx.array(getattr(batch, part.name)) for part in fields(batch)]
            losses[each] = cast(float, loss_at(model, *arrays).item())
        assert min(losses, key=lambda each: losses[each]) == answer
