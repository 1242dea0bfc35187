"""Files as transformers 5 saves them, and as the hub's originals are."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors.numpy import load_file, save_file

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
    "longcat_flash": ("norm_topk_prob",),
    "mimo_v2_flash": ("topk_group",),
    "qwen3_vl_text": ("head_dim",),
    "qwen3_vl_moe_text": ("num_experts", "head_dim"),
}
# Keys that only originals have.
OWN: Final[dict[str, dict[str, Any]]] = {
    "lfm2": {"block_dim": 128, "block_ff_dim": 192},
    "gemma4_unified_text": {"hidden_size_per_layer_input": 0},
    "glm_moe_dsa": {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1},
    "longcat_flash": {
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
    },
    "qwen3_vl_moe_text": {"norm_topk_prob": True},
    "solar_open": {"intermediate_size": 192, "first_k_dense_replace": 0},
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
FLAT: Final = {"qwen2_vl", "qwen2_5_vl"}  # the text's keys are at the top
FULL: Final = "full_attention"
MAMBA: Final = {"linear_attention": "mamba", "full_attention": "attention"}


class NotWritten(Exception):
    """Originals have no keys that say this."""


def as_original(saved: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Return a config as the hub's originals have it, of the one that transformers 5 saved.

    Raises NotWritten.
    """
    found = dict(saved)
    if isinstance(found.get("text_config"), dict):
        text = config if config.model_type.endswith("_text") else config.text_config
        text = as_original(found["text_config"], text)
        text.setdefault("tie_word_embeddings", found.get("tie_word_embeddings", False))
        found["text_config"] = text
        if found["model_type"] in FLAT:
            return {**found.pop("text_config"), **found}
        return found
    kind = found["model_type"]
    if kind == "modernbert":
        found.update(_rotation_of_modernbert(found.pop("rope_parameters")))
        del found["layer_types"]
    elif kind not in NEWER:
        found.update(_rotation(found.pop("rope_parameters", None) or {}))
    found.update({key: written(config, key) for key in WRITTEN.get(kind, ())})
    found.update(OWN.get(kind, {}))
    found.update(_worked_out(kind, found, config))
    return found


def _rotation_of_modernbert(rope: Mapping[str, Any]) -> dict[str, Any]:
    if any(part.get("rope_type", "default") != "default" for part in rope.values()):
        raise NotWritten("no key says how a rotation is scaled")
    return {
        "global_rope_theta": rope["full_attention"]["rope_theta"],
        "local_rope_theta": rope["sliding_attention"]["rope_theta"],
        "global_attn_every_n_layers": 3,
    }


def _worked_out(kind: str, found: dict[str, Any], config: Any) -> dict[str, Any]:
    """Return the originals' keys that have another name or meaning in transformers 5."""
    types = list(getattr(config, "layer_types", None) or [])
    rope = found.get("rope_scaling") or {}
    match kind:
        case "phi3" | "phimoe" if "original_max_position_embeddings" in rope:
            return {
                "original_max_position_embeddings": rope.pop("original_max_position_embeddings")
            }
        case "qwen3_next" | "qwen3_5_text" | "qwen3_5_moe_text" if FULL in types:
            return {"full_attention_interval": types.index(FULL) + 1}
        case "lfm2" | "lfm2_moe":
            return {"full_attn_idxs": [at for at, each in enumerate(types) if each == FULL]}
        case "exaone_moe":
            return {"is_moe_layer": [each == "sparse" for each in config.mlp_layer_types]}
        case "gpt_neox":
            return {
                "rotary_emb_base": found.get("rope_theta", 10000),
                "rotary_pct": found.get("partial_rotary_factor", 0.25),
            }
        case "minimax" | "minimax_m2":
            factor = found.get("partial_rotary_factor", 1.0)
            return {"rotary_dim": int(config.head_dim * factor)}
        case "minimax_m3_vl_text":
            factor = config.rope_parameters.get("partial_rotary_factor", 1.0)
            return {"rotary_dim": int(config.head_dim * factor)}
        case "dbrx":
            return {"attn_config": {**found["attn_config"], "rope_theta": found["rope_theta"]}}
        case "solar_open":
            return {"partial_rotary_factor": found.get("partial_rotary_factor", 1.0)}
        case "granitemoehybrid":
            return {"layer_types": [MAMBA.get(each, each) for each in types]}
        case "gemma4_text" | "gemma4_unified_text":
            own = found.pop("per_layer_config", None) or {}
            wide = next((each["head_dim"] for each in own.values() if "head_dim" in each), None)
            return {"global_head_dim": wide or config.head_dim}
        case "kimi_linear":
            order = [*enumerate(types, start=1)]
            return {
                "rope_theta": 10000.0,
                "first_k_dense_replace": config.mlp_layer_types.count("dense"),
                "mla_use_nope": True,
                "linear_attn_config": {
                    "kda_layers": [at for at, each in order if each != FULL],
                    "full_attn_layers": [at for at, each in order if each == FULL],
                    "num_heads": config.linear_num_heads,
                    "head_dim": config.linear_head_dim,
                    "short_conv_kernel_size": config.linear_conv_kernel_dim,
                },
            }
        case "mimo_v2_flash":
            return {
                "hybrid_layer_pattern": [int(each != FULL) for each in types],
                "moe_layer_freq": [int(each == "sparse") for each in config.mlp_layer_types],
                "add_swa_attention_sink_bias": True,
                "add_full_attention_sink_bias": False,
                "sliding_window_size": config.sliding_window,
                "n_shared_experts": None,
                "topk_method": "noaux_tc",
                "scoring_func": "sigmoid",
                "layernorm_epsilon": config.rms_norm_eps,
                "swa_rope_theta": found.get("rope_local_base_freq", 10000.0),
                "swa_num_attention_heads": config.num_attention_heads,
                "swa_num_key_value_heads": 2 * config.num_key_value_heads,
                "swa_head_dim": config.head_dim,
                "swa_v_head_dim": config.v_head_dim,
            }
    return {}


def written(config: Any, key: str) -> Any:
    """Return a value that originals write out, though a config may leave it to be worked out."""
    if key == "head_dim" and getattr(config, key, None) is None:
        return config.hidden_size // config.num_attention_heads
    return getattr(config, key, None)


def _rotation(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys at the top of a config that mean the same as `rope_parameters`."""
    found: dict[str, Any] = {}
    if "full_attention" in rope or "sliding_attention" in rope:
        local = rope.get("sliding_attention") or {}
        if local.get("rope_type", "default") != "default":
            raise NotWritten("no key says how a window's rotation is scaled")
        if "rope_theta" in local:
            found["rope_local_base_freq"] = local["rope_theta"]
        rope = rope.get("full_attention") or {}
        if rope.get("partial_rotary_factor") != local.get("partial_rotary_factor"):
            raise NotWritten("one key says how much of each head is rotated in all layers")
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


def rewrite_weights(kind: str, folder: Path) -> None:
    """Give tensors the names that originals have, where transformers 5 saves other ones."""
    if kind == "gpt2":
        rename(folder, lambda name: name.removeprefix("transformer."))
    elif kind == "gpt_oss":
        turn_experts(folder, r"experts\.\w+_proj", ".weight")
    elif kind == "qwen3_vl_moe":
        turn_experts(folder, r"experts\.\w+_proj", "")
    elif kind == "kimi_k25":
        blocks = "language_model.model.blocks", "language_model.model.layers"
        rename(folder, lambda name: name.replace(*blocks).replace("model.mm_", "mm_"))
    elif kind == "kimi_linear":
        dense = re.compile(r"block_sparse_moe(?=\.(gate|up|down)_proj)")
        rename(folder, lambda name: dense.sub("mlp", name))
    elif kind == "longcat_flash":  # experts of zero have no weights
        rename(folder, lambda name: "" if re.search(r"experts\.[89]\.", name) else name)
    elif kind == "muse_glimmer":
        rename(folder, lambda name: name.removeprefix("model.") if ".vision_" in name else name)
    elif kind.startswith("qwen3_5_moe"):
        fuse_experts(folder)


def fuse_experts(folder: Path) -> None:
    """Make one tensor of a layer's experts: (experts, gate's outputs and up's, inputs)."""
    place = folder / "model.safetensors"
    weights = load_file(place)
    parts: dict[str, dict[str, list[Any]]] = {}
    for name in sorted(weights, key=lambda name: [int(n) for n in re.findall(r"\d+", name)]):
        if expert := re.fullmatch(r"(.*experts)\.\d+\.(\w+)_proj\.weight", name):
            parts.setdefault(expert[1], {}).setdefault(expert[2], []).append(weights.pop(name))
    for name, own in parts.items():
        gate, up, down = (np.stack(own[each]) for each in ("gate", "up", "down"))
        weights[f"{name}.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        weights[f"{name}.down_proj"] = down
    save_file(weights, place, {"format": "pt"})


def turn_experts(folder: Path, pattern: str, ending: str) -> None:
    """Swap inputs and outputs of the tensors whose names end so, and give names an ending."""
    place = folder / "model.safetensors"
    weights = load_file(place)
    for name in [each for each in weights if re.search(pattern + "$", each)]:
        weights[name + ending] = np.ascontiguousarray(weights.pop(name).swapaxes(1, 2))
    save_file(weights, place, {"format": "pt"})


def rename(folder: Path, new: Callable[[str], str]) -> None:
    """Give the tensors of a folder other names; those without one are dropped."""
    place = folder / "model.safetensors"
    weights = {new(name): array for name, array in load_file(place).items()}
    weights.pop("", None)
    save_file(weights, place, {"format": "pt"})
