"""A context ends where mlx-lm's class would let a token see more than transformers does."""

import itertools
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
from mlx_lm.utils import MODEL_REMAPPING
from transformers import CONFIG_MAPPING

from gateway.engine.models.context import (
    SWITCHED,
    WINDOWED,
    ignored_window,
    list_limits,
    lower_context,
)
from gateway.engine.models.decoders import is_known
from gateway.engine.models.notes import list_notes
from gateway.engine.models.own_classes import OWN
from gateway.engine.models.unread import architecture, read_names

KNOWN: Any = CONFIG_MAPPING
POSITIONS = 131_072
LAYERS = 4
FULL, SLIDING = "full_attention", "sliding_attention"
# transformers' LlamaConfig and EuroBertConfig have no window, and mlx-lm's llama reads one.
NO_WINDOW = {"eurobert", "llama"}
# Families whose class, mlx-lm's llama or Ministral 3's, has a window if a config lists layers.
BY_LAYERS = {"ministral", "ministral3", "mistral", "smollm3"}
# Their configs nest those of the families with `_text`.
OUTER = {"qwen2_5_vl", "qwen2_vl"}
# transformers' class reads no window either.
UNUSED = {"nemotron_h"}
# Families whose transformers class has a window in all layers whatever `layer_types` says.
UNLISTED = {"minimax", "ministral3", "mistral", "mixtral", "phi3", "phimoe", "qwen3_moe"} | {
    "starcoder2"
}


def modules_of(kind: str) -> set[str]:
    """Return the names of mlx-lm's module for a family, or for that of which it is the text."""
    if kind in OWN:
        return {architecture(OWN[kind]({"model_type": kind})[0])}
    names = (kind, kind.removesuffix("_text"))
    return {MODEL_REMAPPING.get(name, name) for name in names if is_known(name)}


def test_families_whose_class_reads_no_window_are_those_of_the_tables() -> None:
    unread = set()
    for kind in KNOWN:
        reads = {name for module in modules_of(kind) for name in read_names(module)}
        if not reads or any("window" in name for name in reads):
            continue
        if any(each.name == "sliding_window" for each in fields(KNOWN[kind])):
            unread.add(kind)
    assert unread - UNUSED == {*WINDOWED, *SWITCHED} - NO_WINDOW - BY_LAYERS - OUTER


def texts() -> Iterator[dict[str, Any]]:
    """Make configs of all keys that may decide on windows; None is a key that is missing."""
    types = (None, [FULL] * LAYERS, [SLIDING] * LAYERS, [FULL, SLIDING] * (LAYERS // 2))
    for window, is_used, first, layers in itertools.product(
        (None, 24), (None, False, True), (None, 0, 2, 100), types
    ):
        keys: dict[str, Any] = {"sliding_window": window, "use_sliding_window": is_used}
        keys |= {"max_window_layers": first, "layer_types": layers}
        yield {key: value for key, value in keys.items() if value is not None}


@pytest.mark.parametrize("kind", sorted({*WINDOWED, *SWITCHED} - NO_WINDOW))
def test_no_context_is_longer_than_a_window_of_transformers(kind: str) -> None:
    size: dict[str, Any] = {"num_hidden_layers": LAYERS, "max_position_embeddings": POSITIONS}
    for keys in texts():
        text = KNOWN[kind](**size, **keys).get_text_config().to_dict()
        window, layers = text.get("sliding_window"), text.get("layer_types")
        if kind not in UNLISTED and layers and SLIDING not in layers:
            window = None
        if kind == "ministral" and layers and FULL in layers:
            window = None  # its class has such windows
        # A config as people write it, and as transformers saves it.
        for config in ({**size, **keys}, text):
            found = ignored_window({**config, "model_type": kind})
            assert found == window or (window or POSITIONS) > (found or POSITIONS), config
        if "layer_types" not in keys and "use_sliding_window" not in keys:
            assert found == window, keys


def window_of(kind: str) -> dict[str, Any]:
    switch = {"use_sliding_window": True, "max_window_layers": 0} if kind in SWITCHED else {}
    config: dict[str, Any] = {"model_type": kind, "num_hidden_layers": LAYERS, **switch}
    if kind in NO_WINDOW:
        config["layer_types"] = [FULL, SLIDING] * (LAYERS // 2)
    return {**config, "sliding_window": 512, "max_position_embeddings": POSITIONS}


@pytest.mark.parametrize("kind", sorted({*WINDOWED, *SWITCHED}))
def test_a_window_ends_the_context_until_max_context_raises_it_with_a_note(kind: str) -> None:
    config = window_of(kind)
    assert lower_context(config, None) == 512
    assert list_notes(config, None)[0].startswith("beyond 512 tokens, `sliding_window`")
    assert lower_context(config, 256) == 256
    assert not any("sliding_window" in note for note in list_notes(config, 256))
    assert lower_context(config, 4096) == 4096
    assert "`max_context:` allows 4,096" in list_notes(config, 4096)[0]
    assert lower_context(config, 10 * POSITIONS) == POSITIONS


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", ["longrope", "su"])
def test_factors_for_long_texts_end_the_context_at_the_original_one(kind: str, key: str) -> None:
    rope = {"type": kind, "rope_type": kind, "original_max_position_embeddings": 4096}
    config = {"model_type": "phi3", "max_position_embeddings": POSITIONS, key: rope}
    assert lower_context({**config, "sliding_window": None}, None) == 4096
    assert lower_context({**config, "sliding_window": 2048}, None) == 2048
    assert [each.key for each in list_limits({**config, "sliding_window": 2048})] == [
        "sliding_window",
        "long_factor",
    ]
    assert lower_context({**config, "max_position_embeddings": 4096}, None) == 4096
    assert not list_limits({**config, "max_position_embeddings": 4096})
    moved = {**config, key: {"type": kind}, "original_max_position_embeddings": 4096}
    assert lower_context(moved, None) == 4096
    nested = {"model_type": "phi3", "text_config": config}
    assert lower_context(nested, None) == 4096
