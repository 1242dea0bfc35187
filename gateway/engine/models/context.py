"""A model's context: the most tokens that it takes. This module must not import mlx."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gateway.engine.models.counts import check_counts, text_config
from gateway.engine.models.gguf.architectures import read_config
from gateway.engine.models.gguf.header import read_header
from gateway.registry import is_gguf

# The default limit of `pair_context`, from Qwen3's model card.
PAIR_TOKENS: Final = 8192
# The context in EmbeddingGemma 2's model card, by model_type: its files state 262,144 positions.
GEMMA2: Final = {"embedding_gemma2": 8192, "embedding_gemma2_text": 8192}
LLAMAS: Final = ("eurobert", "llama", "mistral", "qwen2", "qwen3")
POSITIONS: Final = ("max_position_embeddings", "max_seq_len", "n_positions")
# Families whose windows mlx-lm ignores, with transformers' default for `sliding_window`.
WINDOWED: Final = {
    "gemma2": 4096,
    "mistral": 4096,
    **dict.fromkeys(("minimax", "ministral3", "mixtral", "phi3", "phimoe", "starcoder2")),
}
# Families whose windows mlx-lm ignores; `_has_windows` decides whether a config has windows. The
# values are transformers' defaults for `max_window_layers`, or 0 if the key has no effect.
SWITCHED: Final = {
    "dots1": 62,
    "eurobert": 0,
    "llama": 0,
    "ministral": 0,
    "qwen2": 28,
    "qwen2_moe": 0,
    "qwen3": 28,
    "qwen3_moe": 0,
    "smollm3": 0,
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), 80),
}


def full_attention_share(config: Mapping[str, Any]) -> float:
    """Return the share of layers whose KV grows with every token."""
    layers = config.get("layer_types")
    if layers:
        return float(layers.count("full_attention") / len(layers))
    # Gemma's and Qwen's keys: every nth layer has full attention.
    every: int = config.get("sliding_window_pattern") or config.get("full_attention_interval") or 1
    return 1 / every


def lower_context(config: Mapping[str, Any], asked: int | None) -> int | None:
    """Return the most tokens of a prompt with its answer; None for no limit.

    `asked` replaces the limits of `list_limits`, but cannot exceed the context that the config
    states.
    """
    text = text_config(config)
    stated = next((text[key] for key in POSITIONS if text.get(key)), None)
    bound = asked or next((limit.tokens for limit in list_limits(config)), None)
    return min((int(tokens) for tokens in (stated, bound) if tokens), default=None)


@dataclass(frozen=True, slots=True)
class Limit:
    """A number of tokens above which mlx-lm's class ignores a key that the config has."""

    tokens: int
    key: str


def list_limits(config: Mapping[str, Any]) -> list[Limit]:
    text = text_config(config)
    found = [Limit(window, "sliding_window") for window in (ignored_window(text),) if window]
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    scaling = scaling.get("full_attention") or scaling
    if (scaling.get("rope_type") or scaling.get("type")) in ("longrope", "su"):
        original = scaling.get("original_max_position_embeddings") or text.get(
            "original_max_position_embeddings"
        )
        if original and int(original) < int(text.get("max_position_embeddings") or 0):
            # Longer texts need other factors from their first token on.
            found.append(Limit(int(original), "long_factor"))
    if config.get("model_type") == "llama4_text":
        found += [
            Limit(int(text.get(key) or 8192), key)  # transformers' default
            for key in ("attention_chunk_size", "floor_scale")
            if key != "floor_scale" or text.get("attn_temperature_tuning", True)
        ]
    return sorted(found, key=lambda limit: limit.tokens)


def pair_context(config: Mapping[str, Any], lowered: int | None) -> int:
    """Return the most tokens of a query and its document together, for a causal reranker."""
    positions = lower_context(config, lowered) or PAIR_TOKENS
    return min(positions, lowered or PAIR_TOKENS)


def read_context(
    files: Path, lowered: int | None, limit: Callable[..., int | None] = lower_context
) -> int | None:
    """Return the context of a model's folder or GGUF file. Faulty files may raise any exception."""
    return limit(read_files(files), lowered)


def read_files(files: Path) -> Mapping[str, Any]:
    if is_gguf(files.name):
        return read_config(read_header(files))
    config: Mapping[str, Any] = json.loads((files / "config.json").read_text(encoding="utf-8"))
    check_counts(config)
    return config


def text_context(config: Mapping[str, Any]) -> int:
    """Return the most tokens of a text that a decoder with this config embeds."""
    limits = [limit.tokens for limit in list_limits(config)]
    limits += [tokens for kind, tokens in GEMMA2.items() if kind == config.get("model_type")]
    return min([int(text_config(config)["max_position_embeddings"]), *limits])


def ignored_window(text: Mapping[str, Any]) -> int | None:
    """Return the window that transformers applies and mlx-lm's class ignores, or None."""
    kind, layers = str(text.get("model_type")), text.get("layer_types")
    if kind not in WINDOWED and not (kind in SWITCHED and _has_windows(kind, text, layers)):
        return None
    window = text.get("sliding_window", WINDOWED.get(kind, 4096))
    if window is None or int(window) >= int(text.get("max_position_embeddings") or 0):
        return None
    return int(window)


def _has_windows(kind: str, text: Mapping[str, Any], layers: Sequence[str] | None) -> bool:
    """Return True if transformers gives any layer a window."""
    if kind == "ministral":  # mlx-lm's class ignores windows if all layers have one
        return "full_attention" not in (layers or ())
    if layers and kind != "qwen3_moe":  # qwen3_moe's config has no list
        return "sliding_attention" in layers
    if not (kind == "dots1" or text.get("use_sliding_window")):
        return False
    # The remaining families have windows from layer `first` on.
    first = text.get("max_window_layers", SWITCHED[kind]) if SWITCHED[kind] else 0
    return int(first) < int(text.get("num_hidden_layers") or 0)
