"""The context of a model, as its files state it and models.yaml lowers it; without mlx."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from gateway.engine.models.counts import check_counts
from gateway.engine.models.gguf.architectures import read_config
from gateway.engine.models.gguf.header import read_header
from gateway.registry import is_gguf

PAIR_TOKENS: Final = 8192  # a pair's, unless models.yaml has another limit; as in Qwen3's card
# The decoders whose class of mlx-lm lets every token see all before it.
LLAMAS: Final = ("eurobert", "llama", "mistral", "qwen2", "qwen3")


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's part of the config: multimodal models nest it."""
    text: Mapping[str, Any] = config.get("text_config") or config
    return text


def full_attention_share(config: Mapping[str, Any]) -> float:
    """Return the share of the layers whose KV grows by the token: the others have windows, or
    states.
    """
    layers = config.get("layer_types")
    if layers:
        return float(layers.count("full_attention") / len(layers))
    # Gemma's name, and Qwen's: one layer of so many.
    every: int = config.get("sliding_window_pattern") or config.get("full_attention_interval") or 1
    return 1 / every


def lower_context(config: Mapping[str, Any], lowered: int | None) -> int | None:
    """Return the tokens that a prompt and its answer may have in all; None if nobody says."""
    stated = text_config(config).get("max_position_embeddings")
    return min((int(limit) for limit in (stated, lowered) if limit), default=None)


def pair_context(config: Mapping[str, Any], lowered: int | None) -> int:
    """Return the tokens of a pair that a causal model with this config scores by labels."""
    positions = int(config.get("max_position_embeddings") or PAIR_TOKENS)
    return min(positions, lowered or PAIR_TOKENS)


def read_context(
    files: Path, lowered: int | None, limit: Callable[..., int | None] = lower_context
) -> int | None:
    """Return the context of a model's folder or GGUF file, by one of the functions above; None if
    nobody says. Raises anything for files that are wrong.
    """
    if is_gguf(files.name):
        return limit(read_config(read_header(files)), lowered)
    config = json.loads((files / "config.json").read_text(encoding="utf-8"))
    check_counts(config)
    return limit(config, lowered)


def text_context(config: Mapping[str, Any]) -> int:
    """Return the tokens of a text that a decoder with this config embeds."""
    positions, window = int(config["max_position_embeddings"]), ignored_window(config)
    # In texts that are no longer than the window each token sees all before it.
    return positions if window is None else min(positions, window)


def ignored_window(config: Mapping[str, Any]) -> int | None:
    """Return how many tokens a token sees, where mlx-lm's class would let it see all."""
    kind = config.get("model_type")
    is_sliding = "sliding_attention" in (config.get("layer_types") or ())
    if kind not in LLAMAS or not (
        kind == "mistral" or is_sliding or config.get("use_sliding_window")
    ):
        return None
    window = config.get("sliding_window", 4096)  # transformers' default
    if window is None or int(window) >= int(config["max_position_embeddings"]):
        return None
    return int(window)
