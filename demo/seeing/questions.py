"""Questions about a scene, with their answers."""

import random
from collections import Counter
from dataclasses import dataclass
from typing import Final

from demo.seeing.drawing import SHAPES, Scene, digit_scene, shapes_scene

TASKS: Final = ("colour", "shape", "count", "digit", "side")
_APART: Final = 24.0  # pixels between two middles, for left or right of
_PHRASES: Final = {
    "colour": ("Which colour is the {}?", "What colour is the {}?"),
    "shape": ("Which shape is {}?", "What shape is {}?"),
    "count": ("How many shapes are there?", "How many shapes?"),
    "digit": ("Which digit is it?", "What digit is this?"),
    "side": ("Is the {} left or right of the {}?",),
}


@dataclass(frozen=True, slots=True)
class Question:
    """A question and its right answer."""

    task: str
    text: str
    answer: str


def find_questions(scene: Scene, rng: random.Random) -> dict[str, list[Question]]:
    """Return all questions about a scene by task."""
    found: dict[str, list[Question]] = {task: [] for task in TASKS}

    def ask(task: str, answer: str, *names: str) -> None:
        found[task].append(Question(task, rng.choice(_PHRASES[task]).format(*names), answer))

    if scene.is_digit:
        (thing,) = scene.things
        ask("digit", thing.name)
        ask("colour", thing.colour, "digit")
        return found
    names = Counter(thing.name for thing in scene.things)
    colours = Counter(thing.colour for thing in scene.things)
    named = [thing for thing in scene.things if names[thing.name] == 1]
    for thing in named:
        ask("colour", thing.colour, thing.name)
        for other in named:
            if abs(thing.x - other.x) >= _APART:
                ask("side", "left" if thing.x < other.x else "right", thing.name, other.name)
    for thing in scene.things:
        if colours[thing.colour] == 1:
            ask("shape", thing.name, thing.colour)
    ask("count", str(len(scene.things)))
    return found


def scene_for(
    task: str, rng: random.Random, most: int = len(SHAPES)
) -> tuple[Scene, dict[str, list[Question]]]:
    """Return a scene of at most so many shapes, about which a task's questions can be asked, with
    all its questions.
    """
    while True:
        if task == "digit":
            scene = digit_scene(rng)
        else:
            is_side = task == "side"
            are_distinct = is_side or rng.random() < 0.4
            least = 2 if is_side else 1
            scene = shapes_scene(rng, least=least, most=max(least, most), are_distinct=are_distinct)
        found = find_questions(scene, rng)
        if found[task]:
            return scene, found


def sample_texts() -> list[str]:
    """Return every phrase and answer, for the tokenizer to learn."""
    rng = random.Random(0)
    texts: set[str] = set()
    for _ in range(2000):
        for task in TASKS:
            for asked in scene_for(task, rng)[1].values():
                texts.update(text for each in asked for text in (each.text, each.answer))
    return sorted(texts)
