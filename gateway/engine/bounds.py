"""What a device bears, besides its memory: buffers alive, the largest of them, seconds at a time.

A pass that goes beyond is refused by MLX, or ended by macOS, with all that it has computed.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import mlx.core as mx

from gateway.engine.device import Device

# Where `iogpu.rsrc_limit` says nothing: mlx/backend/metal/device_info.cpp. Kept for reuse or alive,
# every buffer counts; beyond it MLX raises "Resource limit (499000) exceeded" (mlx #3849).
METAL_BUFFERS: Final = 499_000
KEPT_SHARE: Final = 0.5  # of the buffers, for prefixes; the others are weights, rows and passes
# Of one evaluation. macOS ends a command buffer after about five seconds, or sooner to draw the
# screen (exo #1620, omlx #1387, mlx #3267); Apple documents no number.
PASS_S: Final = 1.0


@dataclass(slots=True)
class KeptBuffers:
    """How many arrays are kept of prompts, of all models together, and the most that may be."""

    limit: float = math.inf
    count: int = 0


@dataclass(frozen=True, slots=True)
class Bounds:
    """A device's bounds; None where it has none."""

    buffer_bytes: int | None = None  # of the largest buffer
    # A pass that took longer is followed by one that is evaluated in parts.
    pass_s: float | None = None
    kept: KeptBuffers = field(default_factory=KeptBuffers)


def read_bounds(device: Device, info: Mapping[str, object]) -> Bounds:
    """Return the bounds of a device; `info` is mlx's device_info of it. Only Metal states any."""
    if device is not Device.METAL:
        return Bounds()
    buffers, largest = info.get("resource_limit"), info.get("max_buffer_length")
    limit = KEPT_SHARE * (buffers if isinstance(buffers, int) else METAL_BUFFERS)
    return Bounds(largest if isinstance(largest, int) else None, PASS_S, KeptBuffers(limit))


class LayerGroups:
    """Evaluates passes of a model in as many parts as the last one took times `pass_s`.

    A part is a group of layers. Nothing that a pass computes depends on it.
    """

    def __init__(self, pass_s: float | None) -> None:
        self._pass_s = pass_s
        self._parts = 1

    @contextmanager
    def applied(self, model: Any) -> Iterator[None]:
        """While entered, one pass of a model is built and evaluated, and timed."""
        if self._pass_s is None:
            yield
            return
        started = time.perf_counter()
        layers = [layer for layer in getattr(model, "layers", ()) if layer is not None]
        with _evaluating(layers, -(-len(layers) // self._parts)):
            yield
        self._parts = max(1, math.ceil((time.perf_counter() - started) / self._pass_s))


@contextmanager
def _evaluating(layers: list[Any], size: int) -> Iterator[None]:
    """While entered, evaluate the output of every `size`th layer as soon as it is built.

    Python looks `__call__` up on the class, so that is where it is replaced: on the lane's thread,
    where nothing else runs a model meanwhile.
    """
    if size >= len(layers):
        yield
        return
    ends = {id(layer) for layer in layers[size - 1 : -1 : size]}
    calls = {kind: kind.__call__ for kind in {type(layer) for layer in layers}}

    def evaluating(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            output = original(layer, *args, **kwargs)
            if id(layer) in ends:
                mx.eval(output)
            return output

        return call

    try:
        for kind, original in calls.items():
            kind.__call__ = evaluating(original)
        yield
    finally:
        for kind, original in calls.items():
            kind.__call__ = original
