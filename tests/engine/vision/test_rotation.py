"""Positions of rows and columns, which turn tokens of text as the rope that they replace."""

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.rope_utils import initialize_rope

from gateway.engine.vision.rotation import Positions, Rotation

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "factor": 8.0}
ROPES: dict[str, tuple[int, dict[str, Any] | None]] = {
    "plain": (32, None),
    "of a part of the head": (16, None),
    "yarn": (32, YARN),
    "yarn with a scale of its own": (32, {**YARN, "mscale": 2.0, "mscale_all_dim": 0.5}),
    "linear": (32, LINEAR),
}
SECTIONS = {16: [4, 2, 2], 32: [6, 5, 5]}


def rope_of(name: str) -> tuple[Any, int]:
    dims, scaling = ROPES[name]
    return initialize_rope(dims, 10_000.0, False, scaling, 4096), dims


def numbers() -> mx.array:
    """Return (rows, heads, tokens, size) of random numbers."""
    return mx.random.normal((2, 3, 5, 32), key=mx.random.key(1))


@pytest.mark.parametrize("name", ROPES)
def test_points_of_text_turn_as_the_rope_does(name: str) -> None:
    rope, dims = rope_of(name)
    positions = Positions()
    rotation = Rotation(rope, SECTIONS[dims], positions)
    offsets = mx.array([7, 900])
    expected = rope(numbers(), offset=offsets)
    assert mx.array_equal(rotation(numbers(), offset=offsets), expected)
    points = (offsets[:, None] + mx.arange(5))[..., None] * mx.ones(3, mx.int32)
    positions.place(points)
    assert mx.allclose(rotation(numbers(), offset=offsets), expected, atol=1e-4)
    positions.place()
    assert mx.array_equal(rotation(numbers(), offset=offsets), expected)


@pytest.mark.parametrize("offset", [10, mx.array([10, 20])])
def test_shifts_of_rows_move_the_rope(offset: int | mx.array) -> None:
    rope, dims = rope_of("plain")
    positions = Positions()
    rotation = Rotation(rope, SECTIONS[dims], positions)
    positions.place(shifts=mx.array([-3, 0]))
    places = offset + mx.array([-3, 0])
    assert mx.array_equal(rotation(numbers(), offset=offset), rope(numbers(), offset=places))


def test_each_pair_turns_by_the_axis_of_its_section() -> None:
    """The pairs are interleaved, as transformers has them: time, row, column, time, …"""
    rope, dims = rope_of("plain")
    sections = [8, 5, 3]
    positions = Positions()
    rotation = Rotation(rope, sections, positions)
    expected_axes = [0] * (dims // 2)
    for axis in (1, 2):
        for number in range(sections[axis]):
            expected_axes[axis + 3 * number] = axis
    x = mx.ones((1, 1, 1, dims))
    still = mx.zeros((1, 1, 3), mx.int32)
    for axis in range(3):
        points = mx.array(still)
        points[..., axis] = 5
        positions.place(points)
        turned = rotation(x)[0, 0, 0]
        moved = [bool((turned[i] != 1).item()) for i in range(dims // 2)]
        assert moved == [each == axis for each in expected_axes]


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 64},
        {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16,
         "original_max_position_embeddings": 64},
    ],
)  # fmt: skip
def test_a_rope_of_another_kind_is_refused(scaling: dict[str, Any]) -> None:
    rope = initialize_rope(32, 10_000.0, False, scaling, 4096)
    with pytest.raises(ValueError, match=type(rope).__name__):
        Rotation(rope, [6, 5, 5], Positions())


def test_a_rope_of_neighbours_is_refused() -> None:
    with pytest.raises(ValueError, match="RoPE"):
        Rotation(initialize_rope(32, 10_000.0, True, None, 4096), [6, 5, 5], Positions())
