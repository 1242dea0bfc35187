"""Rotary positions on a CPU: mlx's own numbers, to the last bit."""

from contextlib import suppress
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.engine.kv.cache import share_lengths
from gateway.engine.models import rotations
from gateway.engine.models.rotations import rotate, share_positions, sharing_rotations

own_rope: Any = rotations._own_rope
FREQS = mx.array([1.0, 3.0, 7.5, 100.0])
GIVEN: dict[str, Any] = {"traditional": False, "base": 10_000.0, "scale": 1.0}


def normal(*shape: int) -> mx.array:
    return mx.array(np.random.default_rng(0).normal(size=shape).astype(np.float32))


@given(
    rows=st.integers(1, 3),
    tokens=st.integers(1, 5),
    half=st.integers(1, 5),
    rest=st.integers(0, 3),
    traditional=st.booleans(),
    numbers=st.sampled_from([{"base": 10_000.0}, {"base": 5e5}, {"base": None, "freqs": FREQS}]),
    scale=st.sampled_from([1.0, 0.25, 1 / 3]),
    places=st.lists(st.integers(0, 100_000), min_size=3, max_size=3),
    are_equal=st.booleans(),
    is_view=st.booleans(),
)
def test_rows_are_turned_as_mlx_turns_them(
    rows: int,
    tokens: int,
    half: int,
    rest: int,
    traditional: bool,
    numbers: dict[str, Any],
    scale: float,
    places: list[int],
    are_equal: bool,
    is_view: bool,
) -> None:
    if "freqs" in numbers:
        half = len(FREQS)
    x = normal(rows, tokens, 2, 2 * half + rest).swapaxes(1, 2)
    x = x if is_view else mx.contiguous(x)
    with sharing_rotations():
        offset = places[0] if are_equal else share_positions(mx.array(places[:rows]))
        given = {**numbers, "traditional": traditional, "scale": scale, "offset": offset}
        expected = own_rope(x, 2 * half, **given)
        for _ in range(2):  # the second time of the table that the first has made
            assert mx.array_equal(rotate(x, 2 * half, **given), expected)


@pytest.mark.parametrize("counts", [(7, 7, 7), (7, 9, 40)])
def test_layers_share_a_table_until_the_rows_have_grown(
    counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Mock(side_effect=rotations._make_table)
    monkeypatch.setattr(rotations, "_make_table", make)
    lengths = share_lengths(counts)
    for passes, at in ((1, lengths), (2, lengths), (3, lengths.plus(1))):
        with sharing_rotations():
            for x in (normal(3, 2, 1, 8), normal(3, 1, 1, 8), normal(3, 2, 1, 8)):
                expected = own_rope(x, 8, **GIVEN, offset=at.offset)
                assert mx.array_equal(rotate(x, 8, **GIVEN, offset=at.offset), expected)
        assert make.call_count == passes
        assert rotate(x, 8, **GIVEN, offset=at.offset).shape == x.shape
        assert make.call_count == passes, "no pass is built"


def test_positions_that_may_be_written_to_make_no_table() -> None:
    """mlx-lm's own caches have such: the next layer's may be the same array, changed."""
    x, offset = normal(2, 1, 1, 8), mx.array([3, 5])
    with sharing_rotations():
        before = rotate(x, 8, **GIVEN, offset=offset)
        offset += 1
        after = rotate(x, 8, **GIVEN, offset=offset)
    assert mx.array_equal(after, own_rope(x, 8, **GIVEN, offset=offset))
    assert not mx.array_equal(after, before)


def test_a_pass_that_fails_leaves_no_table() -> None:
    x, before = normal(1, 1, 1, 8), mx.get_active_memory()
    with suppress(ValueError), sharing_rotations():
        mx.eval(rotate(x, 8, **GIVEN, offset=4))
        raise ValueError("broken")
    assert mx.get_active_memory() == before


@pytest.mark.parametrize("x", [normal(2, 1, 1, 8).astype(mx.bfloat16), normal(2, 3, 8)])
def test_other_types_and_shapes_are_left_to_mlx(x: mx.array) -> None:
    with sharing_rotations():
        turned = rotate(x, 8, **GIVEN, offset=4)
    assert mx.array_equal(turned, own_rope(x, 8, **GIVEN, offset=4))
