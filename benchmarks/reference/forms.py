"""Files as transformers 5 saves them, and as the hub's originals are."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

FORMS: Final = ("v5", "hub")
# Keys that originals write out, where transformers 5 has another name or leaves a default out.
WRITTEN: Final[dict[str, tuple[str, ...]]] = {
    "qwen3_moe": ("num_experts", "head_dim"),
    "qwen3_next": ("num_experts",),
    "qwen2_moe": ("num_experts",),
    "olmoe": ("num_experts",),
    "mellum": ("num_experts",),
    "jamba": ("num_experts",),
    "glm4_moe": ("head_dim",),
    "exaone4": ("head_dim", "sliding_window_pattern"),
    "exaone_moe": ("head_dim",),
    "granitemoehybrid": ("layer_types",),
    "falcon_h1": ("head_dim",),
    "phimoe": ("attention_bias", "lm_head_bias"),
    "gemma4_text": ("global_head_dim",),
}
# Keys that only originals have.
OWN: Final[dict[str, dict[str, Any]]] = {
    "lfm2": {"block_dim": 128, "block_ff_dim": 192},
    "apertus": {"mlp_bias": False, "post_norm": False, "qk_norm": True},
    "minimax": {"shared_intermediate_size": 0},
    "minimax_m2": {"shared_intermediate_size": 0},
    "gpt2": {"n_ctx": 4096},
    "mamba2": {"intermediate_size": 256},
}


# Architectures that came after transformers 5: their originals are as it saves them.
NEWER: Final = {
    "gemma4_text",
    "gemma4_unified_text",
    "glm_moe_dsa",
    "laguna",
    "mellum",
    "minimax_m3_vl_text",
    "ministral3",
    "mistral4",
    "muse_glimmer_text",
    "muse_spark_text",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "step3p5",
}
MAMBA: Final = {"linear_attention": "mamba", "full_attention": "attention"}


class NotWritten(Exception):
    """Originals have no keys that say this."""


def as_original(saved: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Return a config as the hub's originals have it, of the one that transformers 5 saved.

    Raises NotWritten.
    """
    found = dict(saved)
    if isinstance(found.get("text_config"), dict):
        found["text_config"] = as_original(found["text_config"], config.text_config)
        return found
    kind = found["model_type"]
    if kind not in NEWER:
        found.update(_rotation(found.pop("rope_parameters", None) or {}))
    found.update({key: written(config, key) for key in WRITTEN.get(kind, ())})
    found.update(OWN.get(kind, {}))
    rope = found.get("rope_scaling") or {}
    if kind in ("phi3", "phimoe") and "original_max_position_embeddings" in rope:
        found["original_max_position_embeddings"] = rope.pop("original_max_position_embeddings")
    types = found.get("layer_types") or []
    if kind in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text") and "full_attention" in types:
        found["full_attention_interval"] = types.index("full_attention") + 1
    if kind.startswith("lfm2"):
        found["full_attn_idxs"] = [i for i, name in enumerate(types) if name == "full_attention"]
    if kind == "exaone_moe":
        sparse = found.get("mlp_layer_types") or config.mlp_layer_types
        found["is_moe_layer"] = [name == "sparse" for name in sparse]
    if kind == "gpt_neox":
        found["rotary_emb_base"] = found.get("rope_theta", 10000)
        found["rotary_pct"] = found.get("partial_rotary_factor", 0.25)
    if kind in ("minimax", "minimax_m2"):
        found["rotary_dim"] = int(config.head_dim * found.get("partial_rotary_factor", 1.0))
    return found


def written(config: Any, key: str) -> Any:
    """Return a value that originals write out, though a config may leave it to be worked out."""
    if key == "head_dim" and getattr(config, key, None) is None:
        return config.hidden_size // config.num_attention_heads
    return getattr(config, key, None)


def _rotation(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys at the top of a config that say what `rope_parameters` does."""
    found: dict[str, Any] = {}
    if "full_attention" in rope or "sliding_attention" in rope:
        local = rope.get("sliding_attention") or {}
        if local.get("rope_type", "default") != "default":
            raise NotWritten("no key says how a window's rotation is scaled")
        if "rope_theta" in local:
            found["rope_local_base_freq"] = local["rope_theta"]
        rope = rope.get("full_attention") or {}
    for key in ("rope_theta", "partial_rotary_factor"):
        if rope.get(key) is not None:
            found[key] = rope[key]
    kind = rope.get("rope_type", "default")
    if kind != "default":
        scaling = {key: value for key, value in rope.items() if key not in found}
        found["rope_scaling"] = {**scaling, "type": kind}
    elif found:
        found["rope_scaling"] = None
    return found


def rewrite_weights(config: Mapping[str, Any], folder: Path) -> None:
    """Give tensors the names that originals have, where transformers 5 saves other ones."""
