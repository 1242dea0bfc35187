"""The context of a chat model, as its files state it and models.yaml lowers it; without mlx."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gateway.engine.models.counts import check_counts
from gateway.engine.models.gguf.architectures import read_config
from gateway.engine.models.gguf.header import read_header
from gateway.registry import is_gguf


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


def read_context(files: Path, lowered: int | None) -> int | None:
    """Return the context of a model's folder or GGUF file; None if it cannot be read."""
    try:
        if is_gguf(files.name):
            return lower_context(read_config(read_header(files)), lowered)
        config = json.loads((files / "config.json").read_text(encoding="utf-8"))
        check_counts(config)
        return lower_context(config, lowered)
    except (OSError, ValueError, TypeError, AttributeError):
        return None  # the load says what is wrong
