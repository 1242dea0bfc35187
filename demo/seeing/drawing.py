"""Scenes with a few shapes or a digit, and their pictures."""

import math
import random
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

SIDE: Final = 96  # pixels
SHAPES: Final = ("circle", "square", "triangle", "cross")
COLOURS: Final = {
    "red": (215, 40, 40),
    "green": (40, 160, 60),
    "blue": (45, 80, 215),
    "yellow": (235, 205, 30),
    "purple": (145, 50, 170),
    "black": (25, 25, 25),
}
_CELL: Final = SIDE // 3
_JITTER: Final = 7  # pixels around the middle of a cell
_RADIUS: Final = (8.0, 13.0)
_FINE: Final = 2  # a picture is drawn so many times as large
_MOST_NOISE: Final = 4.0  # standard deviation, of 255
_NOISE: Final = np.random.RandomState(0).standard_normal(1 << 19).astype(np.float32)
# Strokes on a grid of 2 × 4, from the top left.
_DIGITS: Final[dict[str, list[list[tuple[float, float]]]]] = {
    "0": [[(0, 0), (2, 0), (2, 4), (0, 4), (0, 0)]],
    "1": [[(0.2, 0.8), (1, 0), (1, 4)]],
    "2": [[(0, 0.5), (0.5, 0), (1.6, 0), (2, 0.6), (2, 1.4), (0, 4), (2, 4)]],
    "3": [[(0, 0), (2, 0), (0.9, 1.7), (2, 2.4), (2, 3.5), (1.4, 4), (0, 4)]],
    "4": [[(1.4, 4), (1.4, 0), (0, 2.7), (2, 2.7)]],
    "5": [[(2, 0), (0, 0), (0, 1.8), (1.5, 1.8), (2, 2.4), (2, 3.5), (1.5, 4), (0, 4)]],
    "6": [[(1.8, 0), (0.4, 1.4), (0, 2.6), (0, 4), (2, 4), (2, 2.2), (0, 2.2)]],
    "7": [[(0, 0), (2, 0), (0.7, 4)]],
    "8": [[(0, 0), (2, 0), (2, 4), (0, 4), (0, 0)], [(0, 2), (2, 2)]],
    "9": [[(2, 1.8), (0, 1.8), (0, 0), (2, 0), (2, 1.6), (0.4, 4)]],
}


@dataclass(frozen=True, slots=True)
class Thing:
    """A shape, or a digit, in a picture."""

    name: str
    colour: str
    x: float  # pixels from the left edge to its middle
    y: float
    radius: float


@dataclass(frozen=True, slots=True)
class Scene:
    """What a picture shows."""

    things: tuple[Thing, ...]

    @property
    def is_digit(self) -> bool:
        return self.things[0].name in _DIGITS


def digit_scene(rng: random.Random) -> Scene:
    """Return a scene with one digit of 48 to 68 pixels near the middle."""
    radius = rng.uniform(24, 34)
    x, y = (SIDE / 2 + rng.uniform(-8, 8) for _ in range(2))
    return Scene((Thing(rng.choice([*_DIGITS]), rng.choice([*COLOURS]), x, y, radius),))


def shapes_scene(rng: random.Random, *, least: int, most: int, are_distinct: bool) -> Scene:
    """Return a scene of some shapes; distinct ones share no shape and no colour."""
    count = rng.randint(least, most)
    names = rng.sample(SHAPES, count) if are_distinct else rng.choices(SHAPES, k=count)
    colours = [*COLOURS]
    chosen = rng.sample(colours, count) if are_distinct else rng.choices(colours, k=count)
    things = []
    for cell, name, colour in zip(rng.sample(range(9), count), names, chosen, strict=True):
        x, y = (_CELL * (place + 0.5) + rng.uniform(-_JITTER, _JITTER) for place in divmod(cell, 3))
        things.append(Thing(name, colour, x, y, rng.uniform(*_RADIUS)))
    return Scene(tuple(things))


def paint(scene: Scene, rng: random.Random) -> NDArray[np.uint8]:
    """Return a scene's picture, (SIDE, SIDE, 3)."""
    shade = rng.randint(205, 255)
    paper = tuple(min(255, shade + rng.randint(-8, 8)) for _ in range(3))
    image = Image.new("RGB", (SIDE * _FINE, SIDE * _FINE), paper)
    draw = ImageDraw.Draw(image)
    for thing in scene.things:
        red, green, blue = (_near(rng, value) for value in COLOURS[thing.colour])
        if thing.name in _DIGITS:
            _draw_digit(draw, thing, (red, green, blue), rng)
        else:
            _draw_shape(draw, thing, (red, green, blue), rng)
    pixels = np.asarray(image.reduce(_FINE), np.float32)
    start = rng.randrange(len(_NOISE) - pixels.size)
    noise = _NOISE[start : start + pixels.size].reshape(pixels.shape)
    noisy = pixels + noise * np.float32(rng.uniform(0, _MOST_NOISE))
    return np.clip(np.rint(noisy), 0, 255).astype(np.uint8)


def _near(rng: random.Random, value: int) -> int:
    return max(0, min(255, value + rng.randint(-20, 20)))


def _draw_shape(
    draw: ImageDraw.ImageDraw, thing: Thing, ink: tuple[int, int, int], rng: random.Random
) -> None:
    x, y, r = (value * _FINE for value in (thing.x, thing.y, thing.radius))
    turn = rng.uniform(-0.25, 0.25)  # radians

    def around(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
        cos, sin = math.cos(turn) * r, math.sin(turn) * r
        return [(x + a * cos - b * sin, y + a * sin + b * cos) for a, b in points]

    match thing.name:
        case "circle":
            draw.ellipse((x - r, y - r, x + r, y + r), fill=ink)
        case "square":
            draw.polygon(around([(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)]), fill=ink)
        case "triangle":
            draw.polygon(around([(0, -1.05), (1.05, 0.85), (-1.05, 0.85)]), fill=ink)
        case _:
            for a, b in ((1.05, 0.33), (0.33, 1.05)):
                draw.polygon(around([(-a, -b), (a, -b), (a, b), (-a, b)]), fill=ink)


def _draw_digit(
    draw: ImageDraw.ImageDraw, thing: Thing, ink: tuple[int, int, int], rng: random.Random
) -> None:
    size = thing.radius * _FINE / 2
    lean = rng.uniform(-0.15, 0.15)
    width = max(2, round(size * rng.uniform(0.3, 0.5)))
    for stroke in _DIGITS[thing.name]:
        points = [
            (thing.x * _FINE + (a - 1 - lean * (b - 2)) * size, thing.y * _FINE + (b - 2) * size)
            for a, b in stroke
        ]
        draw.line(points, fill=ink, width=width, joint="curve")
        for a, b in (points[0], points[-1]):
            half = width / 2
            draw.ellipse((a - half, b - half, a + half, b + half), fill=ink)
