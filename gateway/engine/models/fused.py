"""Projections that read the same input, computed as one product: q, k and v; gate and up.

One wide product reads the input once and starts one kernel where narrow ones start two or three.
A GPU may gain by that in short passes, which `doctor --engine` shows; a CPU did not.
"""

from collections.abc import Generator, Sequence
from itertools import accumulate
from typing import Any, Final

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear

from gateway.engine.models.missing_kernels import quantization_of

# What mlx-lm's attention and MLP modules call with one and the same input.
_GROUPS: Final = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_ARRAYS: Final = ("weight", "bias", "scales", "biases")  # whose first axis is the outputs


class _Product:
    """One product of several projections, each of which takes its part of it once."""

    def __init__(self, linear: Module, widths: Sequence[int]) -> None:
        self._linear: Any = linear
        self._stops = [*accumulate(widths)][:-1]
        self._input: mx.array | None = None
        self._parts: dict[int, mx.array] = {}

    def take(self, index: int, x: mx.array) -> mx.array:
        """Return a part of the product with `x`, which is computed for the first that asks."""
        if x is not self._input or index not in self._parts:
            parts = mx.split(self._linear(x), self._stops, axis=-1)
            self._input, self._parts = x, dict(enumerate(parts))
        part = self._parts.pop(index)
        if not self._parts:
            self._input = None
        return part


class FusedProjection(Module):
    """A projection that is part of a product. The first holds the weights of all, as `fused`."""

    def __init__(self, product: _Product, index: int, fused: Module | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # its stub has no types
        self._product = product
        self._index = index
        if fused is not None:
            self.fused = fused

    def __call__(self, x: mx.array) -> mx.array:
        """Project (…, inputs) → (…, outputs)."""
        return self._product.take(self._index, x)


def fuse_projections(model: Any) -> Generator[None, None, int]:
    """Fuse what can be fused in mlx-lm's model, a group a step; return the number of groups.

    Results differ from those of the separate products by rounding. A projection whose number
    format is like no other's of its group stays as it is. On the lane.
    """
    count = 0
    for module in model.modules():
        for group in _GROUPS:
            for names in _alike(module, group):
                parts = [module[name] for name in names]
                widths = [part.weight.shape[0] for part in parts]
                fused = _concatenate(parts)
                product = _Product(fused, widths)
                for index, name in enumerate(names):
                    module[name] = FusedProjection(product, index, None if index else fused)
                count += 1
                yield
    return count


def _alike(module: Module, group: Sequence[str]) -> list[list[str]]:
    """Return which of these projections of a module can be one, if it has them."""
    forms: dict[tuple[Any, ...], list[str]] = {}
    for name in group:
        part = module.get(name)
        if type(part) in (Linear, QuantizedLinear):
            forms.setdefault(_form(part), []).append(name)
    return [names for names in forms.values() if len(names) > 1]


def _form(part: Any) -> tuple[Any, ...]:
    """Return what projections must share: their arrays' types, inputs, and quantisation."""
    arrays = [(name, part[name].dtype, part[name].shape[1:]) for name in _ARRAYS if name in part]
    return type(part), *arrays, *quantization_of(part)


def _concatenate(parts: Sequence[Any]) -> Module:
    """Return one module with the arrays of all, in the place of the first."""
    fused: Module = parts[0]
    for name in _ARRAYS:
        if name in fused:
            fused[name] = mx.concatenate([part[name] for part in parts])
    mx.eval(dict(fused))
    return fused
