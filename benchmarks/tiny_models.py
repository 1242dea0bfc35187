"""A small config for each of mlx-lm's architectures, as far as the names of its fields tell."""

import dataclasses
import importlib
import pkgutil
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

WINDOW: Final = 24  # shorter than the prompts that are tried
ZEROS: Final = 0.5  # how wide weights are drawn that a class begins with zeros

VALUES: Final[dict[str, Any]] = {
    **dict.fromkeys(("vocab_size", "num_vocab"), 320),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "model_dim", "hidden_dim"), 64),
    **dict.fromkeys(
        ("intermediate_size", "n_inner", "ffn_hidden_size", "ff_intermediate_size"), 96
    ),
    **dict.fromkeys(("intermediate_size_mlp", "shared_intermediate_size", "block_ff_dim"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4),
    "num_transformer_layers": 4,
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_heads"), 2),
    "num_attention_groups": 2,
    "head_dim": 16,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "block_size"), 4096),
    **dict.fromkeys(("model_max_length", "max_context_length", "max_sequence_length"), 4096),
    **dict.fromkeys(("rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon"), 1e-5),
    **dict.fromkeys(("layernorm_epsilon", "post_norm_eps"), 1e-5),
    **dict.fromkeys(("rope_theta", "rotary_emb_base", "rope_local_base_freq"), 10000.0),
    "swa_rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "partial_rotary_factor": 0.5,
    "rotary_pct": 0.5,
    "rotary_dim": 8,
    "tie_word_embeddings": False,
    **dict.fromkeys(
        ("attention_bias", "mlp_bias", "use_bias", "conv_bias", "mamba_proj_bias"), False
    ),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "experts_per_token"), 2),
    **dict.fromkeys(("num_experts_per_token", "top_k_experts", "moe_top_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "moe_hidden_size"), 32),
    **dict.fromkeys(("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "num_shared_expert"), 1),
    **dict.fromkeys(("n_group", "topk_group", "decoder_sparse_step"), 1),
    "n_groups": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "moe_layer_freq": 1,
    "mlp_only_layers": [],
    "zero_expert_num": 1,
    "zero_expert_type": "identity",
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size"), WINDOW),
    "sliding_window_pattern": 2,
    "attention_chunk_size": 48,
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("index_head_dim",), 16),
    "index_n_heads": 2,
    "index_topk": 256,
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state"), 16),
    **dict.fromkeys(("conv_kernel", "mamba_d_conv", "linear_conv_kernel_dim", "conv1d_width"), 4),
    "conv_L_cache": 3,
    "mamba_expand": 2,
    "time_step_rank": 8,
    "time_step_limit": [0.0, 100.0],
    "use_conv_bias": True,
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 32),
    "layer_group_size": 2,
    "group_norm_size": 2,
    **dict.fromkeys(("logits_scaling", "attention_multiplier", "embedding_multiplier"), 1.0),
    **dict.fromkeys(("residual_multiplier", "output_multiplier"), 1.0),
    "query_pre_attn_scalar": 16,
    "dim_model_base": 64,
    **dict.fromkeys(("scale_depth", "scale_emb"), 1.0),
    **dict.fromkeys(("a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim"), 16),
    "decay_low_rank_dim": 16,
    "num_kv_reuse_layers": 1,
    "num_kv_shared_layers": 0,
    "interleave_moe_layer_step": 1,
    "use_qk_norm": True,
    **dict.fromkeys(("mla_scale_q_lora", "mla_scale_kv_lora"), True),
}
_YARN: Final = {
    "type": "yarn",
    "factor": 2.0,
    "original_max_position_embeddings": 2048,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
}
_LLAMA4: Final = {
    **_YARN,
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "llama_4_scaling_beta": 0.1,
}
_ATTENTION: Final = ["sliding_attention", "full_attention"]
# What names alone do not say. `text_config` is the same once more, for the model inside.
SPECIAL: Final[dict[str, dict[str, Any]]] = {
    "afm7": {"num_layers": 3},
    "deepseek_v2": {"rope_scaling": _YARN},
    "hunyuan": {
        "use_cla": False,
        "use_mixed_mlp_moe": True,
        "cla_share_factor": 2,
        "rope_scaling": {"alpha": 1.0, "factor": 1.0, "type": "dynamic"},
    },
    "kimi_k3": {
        "linear_attn_config": {
            "full_attn_layers": [2, 4],
            "kda_layers": [1, 3],
            "num_heads": 2,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
        },
        "hidden_act": "situ",
        "activation_situ_beta": 1.0,
        "activation_situ_linear_beta": 1.0,
        "num_shared_experts": 1,
    },
    "mellum": {
        "layer_types": _ATTENTION * 2,
        "rope_parameters": {kind: {"rope_theta": 10000.0} for kind in _ATTENTION},
    },
    "spark2_5": {
        "layer_types": _ATTENTION * 2,
        "rope_parameters": {kind: {"rope_theta": 10000.0} for kind in _ATTENTION},
    },
    "minicpm3": {
        "rope_scaling": {
            "type": "longrope",
            "original_max_position_embeddings": 4096,
            "short_factor": [1.0] * 4,
            "long_factor": [1.0] * 4,
        },
    },
    "ministral3": {"rope_parameters": _LLAMA4, "layer_types": None},
    "mistral4": {"rope_parameters": _LLAMA4},
    "minimax_m3_vl": {
        "moe_layer_freq": [0, 1, 1, 1],
        "rope_parameters": None,
        "index_n_heads": None,
        "dense_intermediate_size": 96,
        "intermediate_size": 32,
        "shared_intermediate_size": 32,
    },
    "muse_spark": {
        "num_shared_experts": 0,
        "layer_rope_theta": [10000.0] * 4,
        "layer_types": _ATTENTION * 2,
    },
    "plamo": {"n_shared_head": 2},
    "qwen": {"kv_channels": 16},
    "baichuan_m1": {"conv_window": 2, "sliding_window_layers": [1, 3]},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
    },
    "exaone_moe": {
        "layer_types": _ATTENTION * 2,
        "is_moe_layer": [False, True, True, True],
    },
    "afmoe": {"layer_types": _ATTENTION * 2},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128},
    "gemma3n": {
        "layer_types": _ATTENTION * 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "intermediate_size": [96] * 4,
        "vocab_size_per_layer_input": 320,
        "hidden_size_per_layer_input": 8,
        "altup_num_inputs": 2,
        "altup_active_idx": 0,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "laurel_rank": 8,
        "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": None,
    },
    "gpt_oss": {"layer_types": _ATTENTION * 2},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"] * 2,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "shared_intermediate_size": 96,
    },
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
    },
    "kimi_linear": {
        "linear_attn_config": {
            "full_attn_layers": [2, 4],
            "kda_layers": [1, 3],
            "num_heads": 2,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
        },
    },
    "lfm2": {
        "block_dim": 64,
        "block_multiple_of": 1,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [0, 2],
    },
    "lfm2_moe": {"num_dense_layers": 1, "full_attn_idxs": [0, 2], "use_expert_bias": True},
    "llama4": {"num_experts_per_tok": 1},
    "llama4_text": {"num_experts_per_tok": 1, "no_rope_layers": [1, 1, 1, 0]},
    "longcat_flash_ngram": {
        "ngram_vocab_size_ratio": 3,
        "emb_neighbor_num": 3,
        "emb_split_num": 2,
    },
    "longcat_flash": {"attention_method": "MLA"},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1, 0, 1],
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "swa_v_head_dim": 16,
        "v_head_dim": 16,
        "head_dim": 16,
    },
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {
        "block_configs": [
            {
                "attention": {"n_heads_in_group": 2, "no_op": False, "replace_with_linear": False},
                "ffn": {"ffn_mult": 1.5, "no_op": False, "replace_with_linear": False},
            }
        ]
        * 4,
    },
    "nemotron_h": {
        "hybrid_override_pattern": "M*-M",
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
    },
    "openelm": {
        "ffn_multipliers": [1.0, 1.5, 1.5, 2.0],
        "ffn_dim_divisor": 16,
        "num_query_heads": [4] * 4,
        "num_kv_heads": [2] * 4,
    },
    "phi3small": {"dense_attention_every_n_layers": 2, "gegelu_limit": 20.0},
    "recurrent_gemma": {
        "logits_soft_cap": 30.0,
        "block_types": ["recurrent", "attention"],
        "_block_types": ["recurrent", "attention"],
    },
    "rwkv7": {"head_dim": 32},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "qwen3_5": {"full_attention_interval": 2},
    "qwen3_5_moe": {"full_attention_interval": 2},
    "qwen3_next": {"full_attention_interval": 2},
    "step3p5": {
        "layer_types": ["full_attention", "sliding_attention"] * 2,
    },
    "cohere2": {"sliding_window_pattern": 2},
    "exaone4": {"sliding_window_pattern": "LG"},
    "minimax": {"num_local_experts": 4, "attn_type_list": [1, 1, 1, 1]},
    "olmo3": {"layer_types": _ATTENTION * 2},
    "gemma4_text": {
        "layer_types": _ATTENTION * 2,
        "vocab_size_per_layer_input": 320,
        "hidden_size_per_layer_input": 8,
    },
}
TEXTUAL: Final = (  # what its inner model is, where that has no other name to be known by
    ("gemma3", "gemma3_text"),
    ("gemma4", "gemma4_text"),
    ("mistral3", "llama"),
    ("pixtral", "llama"),
    ("kimi_vl", "deepseek_v3"),
    ("kimi_k25", "deepseek_v3"),
    ("kimi_k3", "deepseek_v3"),
    ("lfm2-vl", "lfm2"),
    ("qwen2_vl", "qwen2"),
    ("qwen3_vl", "qwen3"),
    ("qwen3_vl_moe", "qwen3_moe"),
    ("llama4", "llama4_text"),
)


def names() -> list[str]:
    """List the modules of mlx-lm that hold a model."""
    models = importlib.import_module("mlx_lm.models")
    found = []
    for each in pkgutil.iter_modules(models.__path__):
        source = Path(models.__path__[0], f"{each.name}.py").read_text(encoding="utf-8")
        if "class Model(" in source and "class ModelArgs" in source:
            found.append(each.name)
    return found


def tiny_config(name: str) -> dict[str, Any]:
    """Return a config for a small model of an architecture.

    Values follow the meaning of the names where that is plain, and else transformers.
    """
    from gateway.engine.models.configs import complete  # it needs mlx

    module = importlib.import_module(f"mlx_lm.models.{name}")
    config = {**_filled(module, module.ModelArgs, name), "model_type": name}
    for part in filter(None, (config, config.get("text_config"))):
        complete(part)
    return config


def tiny_model(config: Mapping[str, Any], width: float = 3) -> Any:
    """Make a model with random weights, the same each time.

    They are wide, so that the likeliest token is likeliest by far and depends on its past. Weights
    that a class begins with zeros are random too: with zeros for a convolution, a shift or a norm,
    nothing that a state holds would reach the logits.
    """
    import mlx.core as mx  # not when configurations alone are wanted
    from mlx.utils import tree_flatten, tree_unflatten
    from mlx_lm.utils import _get_classes

    mx.random.seed(0)
    classes: Any = _get_classes(dict(config))
    model = classes[0](classes[1].from_dict(dict(config)))
    weights: list[tuple[str, mx.array]] = []
    named: Any = tree_flatten(model.parameters())
    for key, array in named:
        is_floating = mx.issubdtype(array.dtype, mx.floating)
        if is_floating and not mx.any(array != 0).item():
            array = ZEROS * mx.random.normal(array.shape, array.dtype)
        elif array.ndim > 1:
            array = width * array
        weights.append((key, array))
    model.update(tree_unflatten(weights))
    mx.eval(model.parameters())
    return model


def _filled(module: types.ModuleType, arguments: Any, name: str) -> dict[str, Any]:
    special = SPECIAL.get(name, {})
    found: dict[str, Any] = {}
    hints = typing.get_type_hints(arguments, vars(module))
    for field in dataclasses.fields(arguments):
        if field.name == "text_config":
            found[field.name] = _text_config(module, name)
        elif field.name == "model_type":
            found[field.name] = name
        elif field.name in special:
            found[field.name] = special[field.name]
        elif field.name in VALUES:
            found[field.name] = VALUES[field.name]
        elif field.default is field.default_factory is dataclasses.MISSING:
            found[field.name] = _guess(hints.get(field.name))
    return {**found, **special}


def _text_config(module: types.ModuleType, name: str) -> dict[str, Any]:
    names = ("TextArgs", "TextConfig", "TextModelArgs")
    inner = next((getattr(module, each) for each in names if hasattr(module, each)), None)
    if inner is not None and dataclasses.is_dataclass(inner):
        return _filled(module, inner, name)
    if name == "prism_hadamard_qwen35":
        return dict(tiny_config("qwen3_5")["text_config"])
    whole = tiny_config(dict(TEXTUAL).get(name, name.removesuffix("_vl").removesuffix("_moe")))
    return dict(whole.get("text_config", whole))


def _guess(kind: Any) -> Any:
    if kind in (int, bool, float, str):
        return {int: 2, bool: False, float: 1.0, str: ""}[kind]
    return None
