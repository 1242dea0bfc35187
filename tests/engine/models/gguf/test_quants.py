"""Blocks of quantized weights: the numbers that the package `gguf` makes of them, bit for bit."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from gateway.engine.models.gguf.quants import FLOATS, GROUP, PACKED_BITS, READ, dequantize, pack

# Written by tests/golden/make_gguf_numbers.py.
GOLDEN = np.load(Path(__file__).parents[3] / "golden" / "gguf" / "weights.npz")
KINDS = sorted(READ - FLOATS)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_the_package_gguf(kind: str) -> None:
    found = dequantize(kind, GOLDEN[f"{kind}.raw"])
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, GOLDEN[kind])


@pytest.mark.parametrize("kind", sorted(PACKED_BITS))
def test_packed_weights_stand_for_the_same_numbers(kind: str) -> None:
    packed = pack(kind, GOLDEN[f"{kind}.raw"])
    unpacked: Any = mx.dequantize(
        mx.array(packed.weight),
        mx.array(packed.scales),
        mx.array(packed.biases),
        group_size=GROUP,
        bits=PACKED_BITS[kind],
    )
    np.testing.assert_allclose(np.array(unpacked), GOLDEN[kind], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K"])
def test_float16_rounds_the_scales_of_the_newer_ones(kind: str) -> None:
    """These scales are products: they change by a two thousandth part at the most."""
    packed = pack(kind, GOLDEN[f"{kind}.raw"])
    for numbers in (packed.scales, packed.biases):
        np.testing.assert_allclose(numbers.astype(np.float16), numbers, rtol=2**-11, atol=2**-25)


def test_floating_weights_are_not_narrowed() -> None:
    """bfloat16 is the upper half of a float32; float16 has fewer digits than it."""
    numbers = np.array([[1.0, -2.5, 3e38, 1e-38, 0.0]], np.float32)
    np.testing.assert_array_equal(dequantize("F32", numbers.view(np.uint8)), numbers)
    upper = (numbers.view(np.uint32) >> 16).astype("<u2")
    as_mlx = np.array(mx.array(upper).view(mx.bfloat16).astype(mx.float32))
    np.testing.assert_array_equal(dequantize("BF16", upper.view(np.uint8)), as_mlx)
    halves = numbers[:, :2].astype("<f2")
    np.testing.assert_array_equal(dequantize("F16", halves.view(np.uint8)), numbers[:, :2])
