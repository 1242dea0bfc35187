"""How people may ask: phrasings for training, and others for the test.

They are written in `phrasings/`, with `[a|b]` for one of the alternatives and `<word>` for a slot.
A phrasing is on one side only; the tests compare the two with every alternative written out.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from itertools import product

import yaml


@dataclass(frozen=True, slots=True)
class Phrasings:
    """One side's questions by skill, and what may stand around them: system texts and the like."""

    questions: dict[str, list[str]]
    surroundings: dict[str, list[str]]


def _read(name: str) -> Phrasings:
    file = resources.files("demo") / "phrasings" / name
    return Phrasings(**yaml.safe_load(file.read_text("utf-8")))


TRAIN = _read("train.yaml")
HELD_OUT = _read("held_out.yaml")

_FILLERS = """please now so then just really maybe well okay kindly quickly again also today here
there the a my your this that very exactly to in for of me us and it is do can should"""
FILLERS = tuple(_FILLERS.split())
OPENINGS = (
    "Hi!", "Hello.", "OK.", "Good.", "I have a question.", "Quick question:", "Next:", "Help me.",
    "One more thing:", "Please help.", "Hey,", "Well,", "Sorry,", "Great.", "Question:", "Now:",
)  # fmt: skip

_CHOICE = re.compile(r"\[([^\]]*)\]")


def pick(rng: random.Random, phrasings: list[str]) -> str:
    """Draw a phrasing and decide its alternatives; slots stay."""
    return _CHOICE.sub(lambda m: rng.choice(m[1].split("|")), rng.choice(phrasings)).strip()


def spell_out(phrasing: str) -> Iterator[str]:
    """Every text a phrasing can become; slots stay."""
    pieces = _CHOICE.split(phrasing)
    options = [p.split("|") if i % 2 else [p] for i, p in enumerate(pieces)]
    for combination in product(*options):
        yield "".join(combination).strip()


def bare(text: str) -> str:
    """Lower case and without punctuation, as two phrasings are compared; slots stay."""
    return " ".join(re.sub(r"[^\w<>+' ]", " ", text.lower()).split())


def shaken(rng: random.Random, text: str) -> str:
    """Put a stray word into a phrasing, or lose one of many: real questions are untidy.

    Slots and the words beside them stay as they are.
    """
    words = text.split()
    free = [
        i
        for i in range(len(words) + 1)
        if not any("<" in word for word in words[max(0, i - 1) : i + 1])
    ]
    if not free:
        return text
    place = rng.choice(free)
    if place + 1 in free and len(words) > 4 and rng.random() < 0.4:
        del words[place]
    else:
        words.insert(place, rng.choice(FILLERS))
    return " ".join(words)


def opened(rng: random.Random, text: str) -> str:
    """Put a short opening before a question."""
    return f"{rng.choice(OPENINGS)} {text}"


def fill(text: str, **slots: str) -> str:
    """Put a value into each `<slot>`."""
    for name, value in slots.items():
        text = text.replace(f"<{name}>", value)
    return text
