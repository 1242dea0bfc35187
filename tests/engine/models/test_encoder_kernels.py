"""The functions that numpy computes for towers on a CPU."""

import mlx.core as mx
import numpy as np

from gateway.engine.models.encoder_kernels import attend_by_numpy, gelu_by_numpy


def test_numbers_beyond_float32_are_no_warning() -> None:
    """pytest's settings make a warning an error."""
    huge = mx.full((1, 2, 4), 3e38)
    mx.eval(attend_by_numpy(huge, huge, huge))
    assert gelu_by_numpy(huge).tolist() == huge.tolist()


def test_attention_by_numpy_leaves_its_arguments_alone() -> None:
    rng = np.random.default_rng(0)
    given = [rng.standard_normal((3, 5, 8)).astype(np.float32) for _ in range(3)]
    arrays = [mx.array(each) for each in given]
    found = attend_by_numpy(*arrays)
    right = mx.fast.scaled_dot_product_attention(*(each[None] for each in arrays), scale=1.0)[0]
    assert np.abs(np.array(found) - np.array(right)).max() < 1e-6
    assert all(np.array_equal(each, array) for each, array in zip(given, arrays, strict=True))
