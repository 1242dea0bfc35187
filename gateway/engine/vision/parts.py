"""The work of a tower in parts, so that other work gets the lane in between."""

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, ClassVar, Final

import mlx.core as mx
import numpy as np
from mlx.nn.layers.activations import gelu, gelu_approx, silu
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear

from gateway.engine.device import evaluate
from gateway.engine.models.encoder_kernels import (
    Activation,
    attend_by_numpy,
    gelu_by_numpy,
    silu_by_numpy,
)
from gateway.engine.vision.patches import CHANNELS
from gateway.engine.vision.tower_numbers import TowerNumbers

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
ACTIVATIONS: Final[Mapping[str, Activation]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_pytorch_tanh": gelu_approx,
}
# Functions for float32 on a CPU, where mlx computes exp and tanh slowly.
_BY_NUMPY: Final = ((silu, silu_by_numpy), (gelu_approx, gelu_by_numpy))


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


class Attention(Module):
    """Attention among patches. Its arrays have the names of most families."""

    input_names: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj")
    output_name = "o_proj"

    def __init__(
        self, numbers: TowerNumbers, *, has_bias: bool = False, linear: Any = Linear
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernel: Kernel = attend
        self._heads, self._scale = numbers.heads, numbers.head**-0.5
        width = numbers.heads * numbers.head
        for name in self.input_names:
            each = 3 * width // len(self.input_names)
            self[name] = linear(numbers.hidden, each, bias=has_bias)
        self[self.output_name] = linear(width, numbers.hidden, bias=has_bias)

    def project(self, x: mx.array, angles: Angles) -> mx.array:
        """Return queries and keys, rotated, and values, (3, heads, patches, size)."""
        parts = mx.stack([self.q_proj(x), self.k_proj(x), self.v_proj(x)])
        heads = parts.reshape(3, len(x), self._heads, -1).transpose(0, 2, 1, 3)
        return rotate(heads, angles) if angles[0].size else heads

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, window: int | None
    ) -> mx.array:
        """Return (patches, hidden). With `window`, groups of patches attend to themselves."""
        heads, count, size = queries.shape
        parts = queries * self._scale, keys, values
        if window is not None:
            queries, keys, values = (each.reshape(-1, window, size) for each in parts)
            parts = queries, keys, values
        attended = self.kernel(*parts).reshape(heads, count, size)
        output: mx.array = self[self.output_name](attended.swapaxes(0, 1).reshape(count, -1))
        return output


class Layer(Module):
    """A layer of a tower, whose parts have the `names` of a family."""

    # The norm before attention, attention, the norm before the products, and these.
    names: ClassVar[tuple[str, str, str, str]]

    def __init__(self, norms: Sequence[Module], attention: Module, mlp: Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        for name, module in zip(self.names, (norms[0], attention, norms[1], mlp), strict=True):
            self[name] = module

    def project(self, x: mx.array, angles: Angles) -> mx.array:
        """Return rotated queries and keys, and values, (3, heads, patches, size)."""
        first, attention, _, _ = (self[name] for name in self.names)
        projected: mx.array = attention.project(first(x), angles)
        return projected

    def attend(
        self, x: mx.array, queries: mx.array, keys: mx.array, values: mx.array, window: int | None
    ) -> mx.array:
        """Return the layer's output, (patches, hidden), for some queries."""
        _, attention, second, mlp = (self[name] for name in self.names)
        x = x + attention.attend(queries, keys, values, window)
        output: mx.array = x + mlp(second(x))
        return output


class Layers(Module):
    """The layers of a tower that names them so."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layers = [*layers]


class PartedTower(Module):
    """A tower that encodes one image at a time, in steps."""

    depth = 1  # features of a token
    projection: ClassVar[str]  # the name of the projection of patches, a matrix product

    def __init__(self, numbers: TowerNumbers, unused: tuple[str, ...] = ()) -> None:
        """`unused` are beginnings and ends of the names of arrays that are not read."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers, self.dtype = numbers, mx.float32
        self._unused = unused
        self._heads, self._merged = numbers.heads, numbers.merge**2
        self._light = Pace(4, 128, MOST_PATCHES)  # in patches
        self._heavy = Pace(LEAST_SCORES, 1 << 18, MOST_SCORES)  # in scores

    @property
    def token_bytes(self) -> int:
        """Return the most bytes that an image's token takes while it is encoded and read."""
        numbers = self.numbers
        width = max(numbers.hidden, numbers.heads * numbers.head)
        return self.dtype.size * (width * self._merged * HELD + numbers.output * self.depth)

    def arrange(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Return a checkpoint's arrays by the tower's names, its convolution as a matrix."""
        named = {
            name: each
            for name, each in arrays.items()
            if not (name.startswith(self._unused) or name.endswith(self._unused))
        }
        kernel = named.get(self.projection)
        if isinstance(kernel, mx.array) and kernel.ndim > 2:
            # (hidden, channels, …, rows, columns), but mlx-vlm has channels last.
            if kernel.shape[1] != CHANNELS or kernel.shape[-1] != self.numbers.patch:
                kernel = mx.moveaxis(kernel, -1, 1)
            named[self.projection] = kernel.reshape(len(kernel), -1)
        return named

    def compute_on_cpu(self) -> None:
        """Use the functions for float32 on a CPU."""
        for module in self.modules():  # type: ignore[no-untyped-call]
            if hasattr(module, "kernel"):
                module.kernel = attend_by_numpy
            for slow, quick in _BY_NUMPY:
                if getattr(module, "activation", None) is slow:
                    module.activation = quick

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


def turn(places: Sequence[Any], numbers: TowerNumbers) -> mx.array:
    """Return the angles of patches at two places each, (patches, 2, a quarter of a head)."""
    half = numbers.head // 2
    frequencies = 1.0 / numbers.theta ** (mx.arange(0, half, 2) / half)
    return mx.array(np.stack(places, 1).astype(np.float32))[..., None] * frequencies


class Mlp(Module):
    """Two products with an activation between them."""

    names = ("fc1", "fc2")

    def __init__(self, numbers: TowerNumbers) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.activation = ACTIVATIONS[numbers.activation]
        first, second = self.names
        self[first] = Linear(numbers.hidden, numbers.inner)
        self[second] = Linear(numbers.inner, numbers.hidden)

    def __call__(self, x: mx.array) -> mx.array:
        first, second = (self[name] for name in self.names)
        output: mx.array = second(self.activation(first(x)))
        return output


class GatedMlp(Module):
    """Two products of a patch, one of them activated, whose product is projected."""

    def __init__(
        self, numbers: TowerNumbers, *, has_bias: bool = False, linear: Any = Linear
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.activation = ACTIVATIONS[numbers.activation]
        self.gate_proj = linear(numbers.hidden, numbers.inner, bias=has_bias)
        self.up_proj = linear(numbers.hidden, numbers.inner, bias=has_bias)
        self.down_proj = linear(numbers.inner, numbers.hidden, bias=has_bias)

    def __call__(self, x: mx.array) -> mx.array:
        output: mx.array = self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
        return output
