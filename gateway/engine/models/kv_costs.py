"""The KV that a sequence costs in a loaded model."""

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import mlx.core as mx

from gateway.jobs.steps import KvCost


def measure_kv(model: Any) -> KvCost:
    """Return a sequence's KV cost, from the shapes of the caches after one token and after two.

    The passes that fill the caches are built, but never evaluated.
    """
    one, two = list(_plain(_read(model, 1))), list(_plain(_read(model, 2)))
    layers = [_layer_cost(*both) for both in zip(one, two, strict=True)]
    windows = list(chain.from_iterable(layer.windows for layer in layers))
    by_most: dict[int, int] = {}
    if windows:
        windows.append(max(windows))
    for token, window in windows:
        by_most[window] = by_most.get(window, 0) + token
    tokens, constants = [layer.token for layer in layers], [layer.constant for layer in layers]
    # A pass also holds a copy of one layer's KV, dequantized if the KV is quantized.
    working = [*tokens, *(getattr(cache, "unpacked_token_bytes", 0) for cache in one)]
    return KvCost(
        token=sum(tokens) + max(working, default=0),
        windows=tuple((token, window) for window, token in by_most.items()),
        constant=sum(constants) + max(constants, default=0),
        plane=max((layer.plane for layer in layers), default=0),
        states=sum(layer.constant + sum(map(math.prod, layer.windows)) for layer in layers),
    )


def _read(model: Any, tokens: int) -> list[Any]:
    from mlx_lm.models.cache import make_prompt_cache  # takes a second; encoders don't need it

    cache: list[Any] = make_prompt_cache(model)
    model(mx.zeros((1, tokens), dtype=mx.int32), cache=cache)
    return cache


def _plain(caches: Sequence[Any]) -> Iterator[Any]:
    from mlx_lm.models.cache import CacheList

    for cache in caches:
        if isinstance(cache, CacheList):
            yield from _plain(cache.caches)
        else:
            yield cache


def _layer_cost(one: Any, two: Any) -> KvCost:
    """Return a layer's cost, from its caches after one token and after two.

    Keys and values are allocated for many tokens at a time, so one token's cost follows from
    shapes.
    """
    both = getattr(one, "keys", None), getattr(one, "values", None)
    planes: Sequence[Any] = getattr(one, "planes", both)
    if all(isinstance(plane, mx.array) and plane.ndim == 4 for plane in planes):
        sizes = [plane.nbytes // max(1, plane.shape[2]) for plane in planes]
        token, plane = sum(sizes), max(sizes)
        window = getattr(one, "max_size", None) or getattr(one, "chunk_size", None)
        if window is None:
            return KvCost(token, plane=plane)
        return KvCost(windows=((token, int(window)),), plane=plane)
    token = max(0, int(two.nbytes) - int(one.nbytes))
    return KvCost(token, constant=max(0, int(one.nbytes) - token))
