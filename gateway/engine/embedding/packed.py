"""BERT layers on a CPU with AVX-512: weights packed once, and numpy between the products.

A call of cblas_sgemm packs the weight anew, which takes a third of its time at 17 to 68 rows.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_float, c_int, c_long, c_void_p
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from itertools import pairwise, product
from typing import Final

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from gateway.engine.blas import BLAS, OPENBLAS
from gateway.engine.device import single_threaded_blas
from gateway.engine.models.encoder_kernels import GELU_P, GELU_Q

Floats = npt.NDArray[np.float32]
# pack_weight(inputs, outputs, weight, inputs of the whole, packed), pack_rows(inputs, rows, x, …)
# and add_product(outputs, rows, inputs, 1, packed weight, packed rows, sums, outputs of the whole).
Kernels = tuple[Callable[..., int], Callable[..., int], Callable[..., int]]

# The kernels are no public interface, so only those of the pinned wheel are called.
_WHEEL: Final = "0.3.26.0.4"
CORES: Final = ("SkylakeX", "Cooperlake", "SapphireRapids")
_COPIED: Final = (c_long, c_long, c_void_p, c_long, c_void_p)
_MULTIPLIED: Final = (*(c_long,) * 3, c_float, *(c_void_p,) * 3, c_long)
_OF_SGEMM: Final = (*(c_int,) * 6, c_float, *(c_void_p, c_int) * 2, c_float, c_void_p, c_int)
# Inputs and outputs of a block, which stays in the processor's second cache.
BLOCK: Final = 384
# Multiply-adds of a product for which numpy's OpenBLAS wakes no other thread.
ON_ONE_THREAD: Final = 1 << 18
# Scores that are computed at once, which stay in the second cache.
SCORES: Final = 1 << 18
# Tokens times layers that a thread computes at once, as a wait for it takes some 0.1 ms.
WORTH_A_WAIT: Final = 256
# Multiply-adds of a layer for one row, from which on threads divide the row's tokens.
WORTH_SHARING: Final = 200_000_000
GELU_BLOCK: Final = 1 << 15


@cache
def find_kernels() -> Kernels | None:
    """Return the functions of the wheel's OpenBLAS for this processor, or None."""
    words = (BLAS.config or "").split()
    core = next((word.upper() for word in words if word in CORES), None)
    if OPENBLAS is None or BLAS.kind != "wheel" or core is None:
        return None
    names = [f"mlx_gateway_sgemm_{part}_{core}" for part in ("incopy", "oncopy", "kernel")]
    wheels = [wheel.version for wheel in metadata.distributions(name="scipy-openblas32")]
    if wheels != [_WHEEL] or not all(hasattr(OPENBLAS, name) for name in names):
        return None
    pack_weight, pack_rows, add_product = (getattr(OPENBLAS, name) for name in names)
    pack_weight.argtypes = pack_rows.argtypes = _COPIED
    add_product.argtypes, OPENBLAS.cblas_sgemm.argtypes = _MULTIPLIED, _OF_SGEMM
    kernels = pack_weight, pack_rows, add_product
    return kernels if are_right(kernels) else None


def are_right(kernels: Kernels) -> bool:
    """Compare their products with numpy's. Must run on the lane."""
    draw = np.random.default_rng(0).standard_normal
    for rows, inputs, outputs in ((1, 3, 5), (17, 390, 401), (64, 64, 64)):
        x, weight = (draw((count, inputs), np.float32) for count in (rows, outputs))
        sums = np.ones((rows, outputs), np.float32)
        pack_dense(mx.array(weight).T, None, kernels)(x, sums)
        if not np.allclose(sums, 1 + x @ weight.T, atol=1e-5 * inputs):
            return False
    return True


@dataclass(frozen=True, slots=True)
class PackedDense:
    """A linear layer whose weight is packed."""

    weight: mx.array
    bias: mx.array
    inputs: int
    # Each block's first input, inputs, first output, outputs and address.
    blocks: list[tuple[int, int, int, int, int]]
    kernels: Kernels

    def __call__(self, x: Floats, sums: Floats) -> Floats:
        """Add the layer's outputs for `x` to `sums`; both are contiguous."""
        _, pack_rows, add_product = self.kernels
        sums += np.asarray(self.bias)
        packed = np.empty(len(x) * min(BLOCK, self.inputs), np.float32)
        begin, at, end = x.ctypes.data, packed.ctypes.data, sums.ctypes.data
        width = sums.shape[1]
        for first, depth, output, count, weight in self.blocks:
            if output == 0:
                pack_rows(depth, len(x), begin + 4 * first, self.inputs, at)
            add_product(count, len(x), depth, 1.0, weight, at, end + 4 * output, width)
        return sums


def pack_dense(matrix: mx.array, bias: mx.array | None, kernels: Kernels) -> PackedDense:
    """Copy a layer's weight, (inputs, outputs), into packed blocks. Must run on the lane."""
    weight = np.ascontiguousarray(np.asarray(matrix.T))
    outputs, inputs = weight.shape
    packed = mx.zeros((weight.size + 15,))
    start = -(np.asarray(packed).ctypes.data // 4) % 16  # begins a cache line
    packed = packed[start : start + weight.size]  # shares the memory
    mx.eval(packed)
    at, blocks = np.asarray(packed).ctypes.data, []
    for first in range(0, inputs, BLOCK):
        depth = min(BLOCK, inputs - first)
        for output in range(0, outputs, BLOCK):
            count = min(BLOCK, outputs - output)
            begin = weight.ctypes.data + 4 * (output * inputs + first)
            kernels[0](depth, count, begin, inputs, at)
            blocks.append((first, depth, output, count, at))
            at += 4 * depth * count
    bias = mx.zeros((outputs,)) if bias is None else bias
    return PackedDense(packed, bias, inputs, blocks, kernels)


@dataclass(frozen=True, slots=True)
class NormInPlace:
    """Layer normalization of rows, in place."""

    weight: mx.array
    bias: mx.array | None
    epsilon: float

    def __call__(self, x: Floats) -> None:
        x -= np.einsum("ij->i", x)[:, None] / x.shape[1]
        variance = np.einsum("ij,ij->i", x, x) / x.shape[1] + np.float32(self.epsilon)
        x *= 1 / np.sqrt(variance)[:, None]
        x *= np.asarray(self.weight)
        if self.bias is not None:
            x += np.asarray(self.bias)


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """A BertLayer with GELU, without gate and rotation, on float32 arrays of numpy."""

    qkv: PackedDense
    attention_out: PackedDense
    attention_norm: NormInPlace
    up: PackedDense
    down: PackedDense
    norm: NormInPlace
    heads: int

    @property
    def weights(self) -> int:
        return sum(each.weight.size for each in (self.qkv, self.attention_out, self.up, self.down))

    def zeros(self, x: Floats) -> Floats:
        return np.zeros((len(x), 3 * x.shape[1]), np.float32)

    def project(self, x: Floats, qkv: Floats) -> None:
        """Add queries, keys and values of (tokens, dimensions) to `qkv`. Safe on any thread."""
        with np.errstate(all="ignore"):
            self.qkv(x, qkv)

    def finish(
        self, x: Floats, qkv: Floats, bias: Floats | None, rows: int, part: slice = slice(None)
    ) -> None:
        """Map (rows * tokens, dimensions) in place, or a part of one row's tokens.

        Safe on any thread, as `project` is.
        """
        split = qkv.reshape(rows, len(qkv) // rows, 3, self.heads, -1)
        q, k, v = split.transpose(2, 0, 3, 1, 4)
        mixed = np.empty(split[:, part, 0].shape, np.float32)
        x = x[part]
        with np.errstate(all="ignore"):
            attend(q[:, :, part], k, v, bias, mixed.transpose(0, 2, 1, 3))
            self.attention_out(mixed.reshape(x.shape), x)
            self.attention_norm(x)
            between = self.up(x, np.zeros((len(x), self.down.inputs), np.float32))
            gelu(between)
            self.down(between, x)
            self.norm(x)


class PackedLayers:
    """Packed layers, and the threads that run them."""

    def __init__(self, threads: int) -> None:
        self.layers: list[PackedLayer] = []
        self._threads = threads
        # They start with the first pass, and end when the model is gone.
        self._workers = ThreadPoolExecutor(threads)

    def __call__(self, x: mx.array, bias: mx.array | None, rows: int) -> Iterator[mx.array]:
        """Map (rows * tokens, dimensions); yield x for each layer before, so that passes go on."""
        hidden, scores = np.array(x), None if bias is None else np.array(bias)
        if rows == 1 and len(hidden) * self.layers[0].weights >= WORTH_SHARING:
            for layer in self.layers:
                self._share(layer, hidden, scores)
                yield x
            yield mx.array(hidden)
            return
        count = max(1, WORTH_A_WAIT // len(hidden))
        for first in range(0, len(self.layers), count):
            layers = self.layers[first : first + count]
            running = self._workers.submit(run_layers, layers, hidden, scores, rows)
            for _ in layers:
                yield x
            running.result()
        yield mx.array(hidden)

    def _share(self, layer: PackedLayer, x: Floats, bias: Floats | None) -> None:
        """Let each thread compute some of one row's tokens."""
        qkv = layer.zeros(x)
        edges = np.linspace(0, len(x), self._threads + 1, dtype=int)
        parts = [slice(*pair) for pair in pairwise(edges)]
        with single_threaded_blas():
            list(self._workers.map(lambda part: layer.project(x[part], qkv[part]), parts))
            list(self._workers.map(lambda part: layer.finish(x, qkv, bias, 1, part), parts))


def run_layers(layers: Sequence[PackedLayer], x: Floats, bias: Floats | None, rows: int) -> None:
    for layer in layers:
        qkv = layer.zeros(x)
        layer.project(x, qkv)
        layer.finish(x, qkv, bias, rows)


def attend(q: Floats, k: Floats, v: Floats, bias: Floats | None, mixed: Floats) -> None:
    """Write to `mixed` what `attend_base2` returns."""
    rows, heads, queries, size = q.shape
    tokens = k.shape[2]
    if queries * tokens * size <= ON_ONE_THREAD:
        weights = soften(np.matmul(q, k.swapaxes(-1, -2)), bias)
        np.matmul(weights, v, out=mixed)
        return
    count = max(16, SCORES // (heads * tokens))
    for row, first in product(range(rows), range(0, queries, count)):
        block = slice(first, first + count)
        weights = np.empty((heads, len(q[row, 0, block]), tokens), np.float32)
        for head in range(heads):
            multiply(q[row, head, block], k[row, head].T, weights[head])
        soften(weights, None if bias is None else bias[row])
        for head in range(heads):
            multiply(weights[head], v[row, head], mixed[row, head, block])


def multiply(a: Floats, b: Floats, c: Floats) -> None:
    """Write a @ b to `c` by mlx's OpenBLAS: numpy's would wake its own threads."""
    assert OPENBLAS is not None
    transposed = 112 if b.strides[0] == 4 else 111
    shape = (*a.shape, b.shape[1])
    leading = [max(array.strides) // 4 for array in (a, b, c)]
    OPENBLAS.cblas_sgemm(
        *(101, 111, transposed, shape[0], shape[2], shape[1], 1.0, a.ctypes.data, leading[0]),
        *(b.ctypes.data, leading[1], 0.0, c.ctypes.data, leading[2]),
    )


def soften(scores: Floats, bias: Floats | None) -> Floats:
    """Replace scores by the softmax of base 2 of scores + bias."""
    if bias is not None:
        scores += bias
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp2(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores


def gelu(x: Floats) -> None:
    """Replace a contiguous array by what encoder_kernels' function of this name returns."""
    for start in range(0, x.size, GELU_BLOCK):
        half = x.reshape(-1)[start : start + GELU_BLOCK]
        half *= 0.5
        size = np.abs(half)
        power = size * GELU_Q[0]
        for coefficient in GELU_Q[1:3]:
            power += coefficient
            power *= size
        power += GELU_Q[3]
        for constant in GELU_P:
            np.square(power, out=power)
            power += constant
        for _ in range(4):
            np.square(power, out=power)
        half += size
        size /= power
        half -= size
