"""The sizes of tiny models of each architecture: keys and values of transformers' configs."""

from typing import Any, Final

VOCABULARY: Final = 512
HIDDEN: Final = 128
INNER: Final = 192
LAYERS: Final = 4
HEADS: Final = 4
KV_HEADS: Final = 2
HEAD_DIM: Final = 32
EXPERTS: Final = 8
EXPERT: Final = 64
WIDE: Final = 4096  # a window or a context that no prompt reaches

# Whatever a config class has of these.
SIZES: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "lru_width"), HIDDEN),
    **dict.fromkeys(
        (
            "intermediate_size",
            "ffn_hidden_size",
            "n_inner",
            "intermediate_size_mlp",
            "dense_intermediate_size",
            "shared_intermediate_size",
            "block_ff_dim",
        ),
        INNER,
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), HEADS),
    "num_key_value_heads": KV_HEADS,
    **dict.fromkeys(("head_dim", "global_head_dim", "query_pre_attn_scalar"), HEAD_DIM),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), WIDE),
    **dict.fromkeys(("sliding_window", "attention_window_size", "attention_chunk_size"), WIDE),
    **dict.fromkeys(
        (
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "expert_ffn_hidden_size",
            "expert_intermediate_size",
            "moe_hidden_size",
            "share_expert_dim",
        ),
        EXPERT,
    ),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS
    ),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2
    ),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "n_groups"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    "zero_expert_num": 2,
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 64),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 32),
    "qk_head_dim": 64,
    "linear_num_key_heads": 2,
    "index_n_heads": 8,  # fewer make whole scores zero, and ties are broken in any way
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 32),
    "index_head_dim": 64,
    "index_topk": 2048,
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 32),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 16),
    "mamba_n_groups": 1,
    "mamba_d_ssm": 256,
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), 16),
    **dict.fromkeys(("time_step_rank", "mamba_dt_rank"), 8),
    "hidden_size_per_layer_input": 32,
    "laurel_rank": 16,
    "rotary_dim": 16,
    "dim_model_base": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
    # Towers that see or hear, which no row asks anything.
    "depth": 1,
    "num_heads": HEADS,
    **dict.fromkeys(("embed_dim", "out_hidden_size", "vision_output_dim"), HIDDEN),
    **dict.fromkeys(("projector_input_dim", "projector_output_dim"), HIDDEN),
    "patch_size": 14,
    "image_size": 56,
}
TOWER: Final = {"num_hidden_layers": 1}
_SLIDING: Final = ["sliding_attention"] * 3 + ["full_attention"]
_LINEAR: Final = ["linear_attention", "full_attention"] * 2

_ROBERTA: Final = {"pad_token_id": 1, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
_SECTIONS: Final = {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [4, 6, 6]}
_YARN: Final = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
_LONG: Final = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0 + 0.05 * at for at in range(16)],
    "long_factor": [1.0 + 0.5 * at for at in range(16)],
}

# Classes where sizes alone make no model, or one without its typical parts.
SPECIAL: Final[dict[str, dict[str, Any]]] = {
    "afmoe": {"layer_types": _SLIDING},
    "cohere2": {"layer_types": _SLIDING},
    "dbrx": {
        "ffn_config": {
            "ffn_hidden_size": EXPERT,
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "hidden_size": HIDDEN,
        },
        "attn_config": {"kv_n_heads": KV_HEADS, "clip_qkv": 8, "rope_theta": 10000.0},
    },
    "deepseek_v2": {"head_dim": 32, "rope_parameters": _YARN},
    "exaone4": {"layer_types": _SLIDING, "sliding_window_pattern": "LLLG"},
    "exaone_moe": {"layer_types": _SLIDING},
    "gemma3_text": {"layer_types": [*_SLIDING[1:]] * 2, "num_hidden_layers": 6},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": [INNER] * LAYERS,
        "activation_sparsity_pattern": [0.0] * LAYERS,
        "num_kv_shared_layers": 0,
    },
    "gemma4_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 0,
        "pad_token_id": 0,
    },
    "gemma4_unified_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 0,
        "pad_token_id": 0,
    },
    "glm4_moe_lite": {"head_dim": 64},
    "glm_moe_dsa": {"head_dim": 64},
    "gpt_oss": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
    },
    "gpt2": {"n_inner": None},
    "gpt_neox": {"intermediate_size": 4 * HIDDEN},
    "gptj": {"n_inner": None},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"] * 2,
        "position_embedding_type": "nope",
    },
    "laguna": {"num_attention_heads_per_layer": [HEADS] * LAYERS},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
    "kimi_linear": {
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "q_lora_rank": None,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4_text": {"num_local_experts": 4, "num_experts_per_tok": 1},
    "longcat_flash": {"head_dim": 32},
    "mamba2": {"num_heads": 8, "head_dim": 32},
    "minicpm3": {
        "rope_parameters": _LONG,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    },
    "minimax_m3_vl_text": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5000000.0,
            "partial_rotary_factor": 0.5,
        }
    },
    # keys.is_disputed has why.
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "moe", "mamba"],
        "time_step_min": 1e-9,  # its logarithm is taken
    },
    "olmo3": {"layer_types": _SLIDING},
    "olmo_hybrid": {"layer_types": _LINEAR},
    "phimoe": {"attention_bias": True, "lm_head_bias": True},
    "qwen2_5_vl_text": {"rope_parameters": _SECTIONS},
    "qwen2_vl_text": {"rope_parameters": _SECTIONS},
    "qwen3_5_moe_text": {"layer_types": _LINEAR},
    "qwen3_5_text": {"layer_types": _LINEAR},
    "qwen3_next": {"layer_types": _LINEAR},
    "qwen3_vl_moe_text": {"tie_word_embeddings": False},
    "recurrent_gemma": {"num_key_value_heads": 1},
    # Encoders, and a decoder that looks ahead.
    "bert": {"pad_token_id": 0},
    "camembert": _ROBERTA,
    "eurobert": {"pad_token_id": 0, "mask_token_id": 1},
    "gte": {"pad_token_id": 0, "type_vocab_size": 0},
    "jina_embeddings_v3": {"pad_token_id": 0},
    "modernbert": {
        **dict.fromkeys(("pad_token_id", "cls_token_id"), 0),
        "sep_token_id": 1,
        "local_attention": WIDE,
        "layer_types": [*_SLIDING[::-1][:3], "full_attention"],
    },
    "nomic_bert": {"pad_token_id": 0},
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
}


def tiny(kind: type[Any], **changes: Any) -> Any:
    """Return a small config of transformers' class, or of its text part, with some keys changed.

    Raises the errors of transformers' class.
    """
    parts = {
        name: tiny_part(kind, name, changes) for name in getattr(kind, "sub_configs", {}) or {}
    }
    if "text_config" in parts:
        tied = getattr(parts["text_config"], "tie_word_embeddings", False)
        return kind(**parts, tie_word_embeddings=changes.get("tie_word_embeddings", tied))
    return kind(**{**parts, **sizes_of(kind), **changes})


def tiny_part(kind: type[Any], name: str, changes: dict[str, Any]) -> Any:
    """Return a small config of a part: of the text with changes, of a tower without."""
    default = getattr(kind(), name)
    if default is None:
        return None
    own = type(default)
    if name == "text_config":
        return tiny(own, **changes)
    return own(**{**sizes_of(own), **{k: v for k, v in TOWER.items() if hasattr(default, k)}})


def sizes_of(kind: type[Any]) -> dict[str, Any]:
    """Return small values of the keys that a config class has, under any name."""
    default = kind()
    has = {*default.to_dict(), *getattr(kind, "attribute_map", {})}
    sizes = {key: value for key, value in SIZES.items() if key in has}
    if "qk_rope_head_dim" in has:
        sizes.pop("head_dim", None)
    if "kv_lora_rank" in has and "num_key_value_heads" in sizes:
        sizes["num_key_value_heads"] = HEADS
    if "layer_types" in default.to_dict():
        sizes["layer_types"] = None
    return {**sizes, **SPECIAL.get(default.model_type, {})}
