"""The work of a tower in parts, so that other work gets the lane in between."""

import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final, Protocol

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear

from gateway.engine.device import evaluate
from gateway.engine.models.encoder_kernels import Activation

Grid = tuple[int, int]  # rows and columns of patches
Angles = tuple[mx.array, mx.array]  # cosines and sines, (patches, half a head)
Kernel = Callable[[mx.array, mx.array, mx.array], mx.array]  # queries, keys, values
Work = Generator[None, None, mx.array]
Runs = Sequence[tuple[int, int]]  # pairs of a window's patches, and the patches of all such windows

PART_S: Final = 0.05  # seconds
MOST_PATCHES: Final = 512  # the most patches of a part
# Attention scores of a part. Without a fused kernel, they need memory and time.
LEAST_SCORES: Final = 1 << 14
MOST_SCORES: Final = 1 << 25
HELD: Final = 8  # a layer's arrays that exist at once: input, projections and output


class Pace:
    """The size of parts of one kind of work, adapted to the time that parts take."""

    def __init__(self, least: int, first: int, most: int) -> None:
        self._least, self._most = least, most
        self._size = first

    def choose(self, cost: int, multiple: int) -> int:
        most = MOST_PATCHES // multiple
        return max(1, min(most, self._size // cost // multiple)) * multiple

    def note(self, seconds: float) -> None:
        if seconds > PART_S:
            self._size = max(self._least, self._size // 2)
        elif seconds < PART_S / 4:
            self._size = min(self._most, 2 * self._size)


class Layer(Protocol):
    """A layer of a tower."""

    def project(self, x: mx.array, angles: Angles) -> mx.array:
        """Return rotated queries and keys, and values, (3, heads, patches, size)."""

    def attend(
        self, x: mx.array, queries: mx.array, keys: mx.array, values: mx.array, window: int | None
    ) -> mx.array:
        """Return the layer's output, (patches, hidden), for some queries.

        With `window`, groups of `window` patches attend to themselves.
        """


class PartedTower(Module):
    """A tower that encodes one image at a time, in steps."""

    def __init__(self, heads: int, merged: int) -> None:
        """`merged` is a token's number of patches."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._heads, self._merged = heads, merged
        self._light = Pace(4, 128, MOST_PATCHES)  # in patches
        self._heavy = Pace(LEAST_SCORES, 1 << 18, MOST_SCORES)  # in scores

    def _pass_layer(
        self, layer: Layer, x: mx.array, angles: Angles, windows: Runs | None = None
    ) -> Work:
        def project(part: slice) -> mx.array:
            return layer.project(x[part], (angles[0][part], angles[1][part]))

        def attend(part: slice) -> mx.array:
            return layer.attend(x[part], queries[:, part], keys, values, None)

        queries, keys, values = yield from self._in_parts(len(x), project, axis=2)
        if windows is None:
            return (yield from self._in_parts(len(x), attend, keys=len(x)))
        outputs: list[mx.array] = []
        begin = 0
        for window, count in windows:

            def attend_near(part: slice, begin: int = begin, window: int = window) -> mx.array:
                place = slice(begin + part.start, begin + part.stop)
                near = queries[:, place], keys[:, place], values[:, place]
                return layer.attend(x[place], *near, window)

            outputs.append((yield from self._in_parts(count, attend_near, window, window)))
            begin += count
        return mx.concatenate(outputs)

    def _encode_tokens(
        self,
        count: int,
        embed: Callable[[slice], mx.array],
        layers: Sequence[Layer],
        angles: Angles,
        finish: Callable[[mx.array], mx.array],
    ) -> Work:
        """Embed `count` patches, pass them through the layers, and make a feature of each token."""
        x = yield from self._in_parts(count, embed)
        for layer in layers:
            x = yield from self._pass_layer(layer, x, angles)
        features = yield from self._in_parts(len(x), lambda part: finish(x[part]))
        return features[:, None]

    def _in_parts(
        self,
        count: int,
        work: Callable[[slice], mx.array],
        multiple: int | None = None,
        keys: int | None = None,  # keys that a patch attends to
        axis: int = 0,
    ) -> Work:
        """Do work on parts of `count` patches, without dividing a token, and join the outputs."""
        pace, cost = (self._light, 1) if keys is None else (self._heavy, keys * self._heads)
        outputs: list[mx.array] = []
        start = 0
        while start < count:
            size = pace.choose(cost, multiple or self._merged)
            began = time.perf_counter()
            outputs.append(work(slice(start, min(start + size, count))))
            evaluate(outputs[-1])
            pace.note(time.perf_counter() - began)
            start += size
            yield
        return mx.concatenate(outputs, axis=axis)


def attend(queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
    attended: mx.array = mx.fast.scaled_dot_product_attention(
        queries[None], keys[None], values[None], scale=1.0
    )
    return attended[0]


def attend_in(
    kernel: Kernel, queries: mx.array, keys: mx.array, values: mx.array, window: int | None
) -> mx.array:
    """Return (patches, hidden) of queries, (heads, patches, size), not scaled yet."""
    heads, count, size = queries.shape
    parts = queries * size**-0.5, keys, values
    if window is not None:
        queries, keys, values = (each.reshape(-1, window, size) for each in parts)
        parts = queries, keys, values
    return kernel(*parts).reshape(heads, count, size).transpose(1, 0, 2).reshape(count, -1)


def rotate(projected: mx.array, angles: Angles) -> mx.array:
    """Return queries, keys and values, (3, heads, patches, size), with the first two rotated."""
    first, second = mx.split(projected[:2].astype(mx.float32), 2, axis=-1)
    cosines, sines = angles
    halves = [first * cosines - second * sines, second * cosines + first * sines]
    turned = mx.concatenate(halves, axis=-1).astype(projected.dtype)
    return mx.concatenate([turned, projected[2:]])


def places(grid: Grid, merge: int) -> tuple[Any, Any]:
    """Return the row and column of each patch, ordered by token."""
    rows, columns = grid
    shape = rows // merge, merge, columns // merge, merge
    row, column = (each.reshape(shape).transpose(0, 2, 1, 3) for each in np.mgrid[:rows, :columns])
    return row.reshape(-1), column.reshape(-1)


class GatedMlp(Module):
    """Two products of a patch, one of them activated, whose product is projected."""

    def __init__(self, hidden: int, inner: int, *, bias: bool, activation: Activation) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.activation = activation
        self.gate_proj = Linear(hidden, inner, bias=bias)
        self.up_proj = Linear(hidden, inner, bias=bias)
        self.down_proj = Linear(inner, hidden, bias=bias)

    def __call__(self, x: mx.array) -> mx.array:
        output: mx.array = self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
        return output
