"""Positions of a prompt's tokens, against a plain account of transformers' `get_rope_index`."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.engine.vision.layout import Layout, lay_out

Point = tuple[int, int, int]
Image = tuple[int, int]  # rows and columns of tokens


@dataclass
class Prompt:
    """A prompt: the images in it, and the numbers of tokens of text before each and at the end."""

    images: list[Image]
    texts: list[int]  # one more than images

    @property
    def starts(self) -> list[int]:
        starts, at = [], 0
        for text, (rows, columns) in zip(self.texts, self.images, strict=False):
            starts.append(at + text)
            at += text + rows * columns
        return starts

    @property
    def tokens(self) -> int:
        return sum(self.texts) + sum(rows * columns for rows, columns in self.images)

    def lay_out(self) -> Layout:
        return lay_out(self.tokens, zip(self.starts, self.images, strict=True))

    def points(self, more: int = 0) -> list[Point]:
        """Return the positions one by one, as transformers counts them; `more` tokens follow.

        Text counts on by one from the largest number before it. An image's tokens have that next
        number as their time, and as the beginning of their rows and columns.
        """
        found: list[Point] = []
        following = 0
        for i, text in enumerate([*self.texts[:-1], self.texts[-1] + more]):
            for _ in range(text):
                found.append((following, following, following))
                following += 1
            if i < len(self.images):
                rows, columns = self.images[i]
                first = following
                for row in range(rows):
                    for column in range(columns):
                        found.append((first, first + row, first + column))
                        following = max(following, first + row + 1, first + column + 1)
        return found


prompts = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=4).flatmap(
    lambda images: st.builds(
        Prompt,
        st.just(images),
        st.lists(st.integers(0, 6), min_size=len(images) + 1, max_size=len(images) + 1),
    )
)


@pytest.mark.generator
@given(prompts, st.integers(0, 60), st.integers(1, 60))
def test_positions_are_those_of_transformers(prompt: Prompt, start: int, width: int) -> None:
    """Windows too: those within the prompt, across its end, and behind it."""
    layout = prompt.lay_out()
    expected = prompt.points(more=200)
    assert [tuple(each) for each in layout.points.tolist()] == expected[: prompt.tokens]
    window = layout.window(start, width)
    assert window.dtype == np.int32
    assert [tuple(each) for each in window.tolist()] == expected[start : start + width]


@pytest.mark.generator
@given(prompts, st.integers(0, 60))
def test_text_has_one_shift_up_to_the_next_image(prompt: Prompt, behind: int) -> None:
    """So a pass of text alone needs one number a row."""
    layout, expected = prompt.lay_out(), prompt.points(more=100)
    inside = {
        start + i
        for start, (rows, columns) in zip(prompt.starts, prompt.images, strict=True)
        for i in range(rows * columns)
    }
    for index in {*range(prompt.tokens)} - inside | {prompt.tokens + behind}:
        assert layout.at(index) == expected[index][0] - index


@pytest.mark.parametrize(
    ("prompt", "points", "shift"),
    [
        (Prompt([], [3]), [(0, 0, 0), (1, 1, 1), (2, 2, 2)], 0),
        (Prompt([(1, 2)], [0, 1]), [(0, 0, 0), (0, 0, 1), (2, 2, 2)], 0),
        (Prompt([(2, 1)], [1, 0]), [(0, 0, 0), (1, 1, 1), (1, 2, 1)], 0),
        (Prompt([(1, 1), (1, 1)], [0, 0, 0]), [(0, 0, 0), (1, 1, 1)], 0),
        (
            Prompt([(2, 2), (1, 3)], [0, 0, 1]),
            [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (2, 2, 2), (2, 2, 3), (2, 2, 4), (5,) * 3],
            -2,
        ),
    ],
    ids=["no image", "an image first", "an image last", "two of a token", "side by side"],
)
def test_images_stand_at_any_place(prompt: Prompt, points: list[Point], shift: int) -> None:
    layout = prompt.lay_out()
    assert [tuple(each) for each in layout.points.tolist()] == points
    assert layout.shift == shift
    assert layout.window(0, 0).shape == (0, 3)
    behind = len(points) + shift
    assert layout.window(len(points), 2).tolist() == [[behind] * 3, [behind + 1] * 3]


def test_a_prompt_of_a_hundred_images_is_laid_out() -> None:
    prompt = Prompt([(30, 40)] * 100, [2] * 101)
    assert len(prompt.lay_out().points) == prompt.tokens
    assert prompt.lay_out().shift == 202 + 100 * 40 - prompt.tokens
