"""Bounds for the sizes that a model's files state, checked before the sizes are used."""

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any, Final

MOST_LAYERS: Final = 1000
MOST_PARTS: Final = 1 << 14
MOST_WIDTH: Final = 1 << 24  # the largest vocabularies have 2^18 tokens
MOST_POSITIONS: Final = 131_072  # for models with a table of positions
MOST_CONTEXT: Final = (1 << 31) - 1

# The first pattern that matches a whole key gives its bounds.
_BOUNDS: Final = tuple(
    (re.compile(pattern), least, most)
    for pattern, least, most in (
        (r"\w*window\w*", -1, MOST_CONTEXT),
        (r"\w*(position|context|ctx|length)\w*", 0, MOST_CONTEXT),
        (r"(n|num)_(\w+_)?(layers?|loops?|blocks|inputs)", 0, MOST_LAYERS),
        (r"loop_num|\w+_iters|\w+_inputs|\w+_mult|depth|emb_(neighbor|split)_num", 0, MOST_LAYERS),
        (r"\w*(heads?|experts?|groups?|labels)(_per_\w+)?|\w*expert_num", 0, MOST_PARTS),
        (r"(n|num)_(vocab|inner|embd|channels|sink_tokens)|d_model", 0, MOST_WIDTH),
        (r"\w+_(size|dim|rank|width|kernel|channels)(_\w+)?", 0, MOST_WIDTH),
        (r"\w*(topk|top_k|conv|expand|expansion)\w*|mamba_\w+|moe_(k|capacity)", 0, MOST_WIDTH),
    )
)
# The names of mlx-lm's classes for the number of layers.
_DEPTHS: Final = frozenset(
    {"num_hidden_layers", "n_layers", "n_layer", "num_layers", "num_transformer_layers"}
)
_LAYER: Final = re.compile(r"^(.*?)(?:^|\.)(\d+)(?:\.|$)")
# A class has about 15 modules for the 10 arrays of a layer.
_MODULES: Final = 1000
_MODULES_PER_ARRAY: Final = 50


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's part of a config, which multimodal models nest."""
    text: Mapping[str, Any] = config.get("text_config") or config
    return text


def bound_of(key: str) -> tuple[int, int] | None:
    """Return the least and greatest value of a key; None for keys without bounds."""
    return next(((least, most) for name, least, most in _BOUNDS if name.fullmatch(key)), None)


def check_counts(config: Mapping[str, Any]) -> None:
    """Raise ValueError for the first number of a config that is beyond its bounds."""
    for key, value in config.items():
        bounds = bound_of(key)
        for item in _items(value):
            if isinstance(item, Mapping):
                check_counts(item)
            elif bounds is not None and isinstance(item, int | float):
                _check(key, item, *bounds)


def _items(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for item in value:
            yield from _items(item)
    else:
        yield value


def _check(key: str, number: float, least: int, most: int) -> None:
    if not least <= number <= most:  # false for NaN
        raise ValueError(f"{key} is {number!r:.40}, not from {least} to {most:,}")


def read_count(config: Mapping[str, Any], key: str, most: int) -> int:
    """Return a number of config.json, or 0. Raises ValueError above `most`."""
    number = config.get(key) or 0
    _check(key, number, 0, most)
    return int(number)


def check_depth(config: Mapping[str, Any], arguments: type, names: Iterable[str]) -> None:
    """Raise ValueError if a config states more layers than the arrays' names have."""
    # The number of layers, by the prefix of their arrays' names.
    depths: dict[str, int] = {}
    for match in filter(None, map(_LAYER.match, names)):
        depths[match[1]] = max(depths.get(match[1], 0), 1 + int(match[2][:9]))
    layers = sum(depths.values())
    text = config.get("text_config") or config
    # A multimodal model's class takes its language model's config as one argument.
    read = {field.name for field in fields(arguments)} if text is config else text.keys()
    for key in _DEPTHS & read & text.keys():
        depth = text[key]
        if isinstance(depth, int) and depth > layers:
            raise ValueError(f"{key} is {depth}, but the weights are those of {layers:,} layers")


@contextlib.contextmanager
def bounding_modules(arrays: int) -> Iterator[None]:
    """While entered, raise ValueError if a model has far more modules than the files have arrays.

    Must run on the lane, where nothing else makes modules meanwhile.
    """
    from mlx.nn.layers.base import Module

    most, made = _MODULES + _MODULES_PER_ARRAY * arrays, 0
    kind: Any = Module
    begin = kind.__init__

    def count(module: Any) -> None:
        nonlocal made
        made += 1
        if made > most:
            raise ValueError(f"it describes over {most:,} modules, but has only {arrays:,} weights")
        begin(module)

    kind.__init__ = count
    try:
        yield
    finally:
        kind.__init__ = begin
