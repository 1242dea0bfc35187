"""Configs of families in the catalogue, with the keys that their published files have."""

from copy import deepcopy
from math import inf
from typing import Any

import pytest

from benchmarks.tiny_models import tiny_config
from gateway.engine.models.configs import classes_of
from gateway.engine.models.context import list_limits, lower_context
from gateway.engine.models.corrections import correct
from gateway.engine.models.notes import list_notes, verified_by
from gateway.registry.short_names import read_facts

COMMON: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.0",
    "use_cache": True,
    "quantization": {"group_size": 64, "bits": 4},
}
QWEN3 = {
    **COMMON,
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
HYBRID = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
QWEN3_5_TEXT = {
    **COMMON,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "layer_types": HYBRID * 8,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 16,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
    "partial_rotary_factor": 0.25,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "vocab_size": 248320,
}
SLIDING = ["sliding_attention"] * 5 + ["full_attention"]
GEMMA = {
    **COMMON,
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 262208,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": QWEN3,
    "qwen3_next": {
        **{key: QWEN3_5_TEXT[key] for key in QWEN3_5_TEXT if not key.startswith("mtp_")},
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "model_type": "qwen3_next",
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "output_router_logits": False,
        "rope_scaling": None,
        "rope_theta": 5000000,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 512,
        "use_sliding_window": False,
    },
    "qwen3_5": {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "image_token_id": 248056,
        "model_type": "qwen3_5",
        "text_config": QWEN3_5_TEXT,
        "tie_word_embeddings": True,
        "vision_config": {"model_type": "qwen3_5", "depth": 24},
    },
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe",
        "text_config": {
            **QWEN3_5_TEXT,
            "model_type": "qwen3_5_moe_text",
            "moe_intermediate_size": 512,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.001,
            "shared_expert_intermediate_size": 512,
        },
        "tie_word_embeddings": False,
        "vision_config": {"model_type": "qwen3_5_moe", "depth": 27},
    },
    "gemma3_text": {
        **GEMMA,
        "attn_logit_softcapping": None,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": None,
        "model_type": "gemma3_text",
        "num_hidden_layers": 26,
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10000,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    },
    "gemma4": {
        "boa_token_id": 256000,
        "eoa_token_index": 258883,
        "model_type": "gemma4",
        "text_config": {
            **GEMMA,
            "attention_k_eq_v": True,
            "enable_moe_block": False,
            "expert_intermediate_size": None,
            "final_logit_softcapping": 30.0,
            "global_head_dim": 512,
            "hidden_size_per_layer_input": 0,
            "layer_types": SLIDING * 10,
            "model_type": "gemma4_text",
            "num_experts": None,
            "num_global_key_value_heads": 4,
            "num_hidden_layers": 60,
            "num_kv_shared_layers": 0,
            "pad_token_id": 0,
            "rope_parameters": {
                "full_attention": {
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 1000000.0,
                    "rope_type": "proportional",
                },
                "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
            },
            "sliding_window": 1024,
            "top_k_experts": None,
            "use_bidirectional_attention": "vision",
            "use_double_wide_mlp": False,
            "vocab_size_per_layer_input": 262144,
        },
        "tie_word_embeddings": True,
        "vision_config": {"model_type": "gemma4_vision"},
    },
    "gpt_oss": {
        **COMMON,
        "attention_bias": True,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072,
        "model_type": "gpt_oss",
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "output_router_logits": False,
        "quantization_config": {"quant_method": "mxfp4"},
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "vocab_size": 201088,
    },
    "glm4_moe": {
        **COMMON,
        "attention_bias": True,
        "first_k_dense_replace": 1,
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "max_position_embeddings": 131072,
        "model_type": "glm4_moe",
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 96,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 46,
        "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1,
        "pad_token_id": 151329,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "use_qk_norm": False,
        "vocab_size": 151552,
    },
    "glm4_moe_lite": {
        **COMMON,
        "first_k_dense_replace": 1,
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "kv_lora_rank": 512,
        "max_position_embeddings": 202752,
        "model_type": "glm4_moe_lite",
        "moe_intermediate_size": 1536,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 20,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 47,
        "num_key_value_heads": 20,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 1.0,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "routed_scaling_factor": 1.8,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "v_head_dim": 256,
        "vocab_size": 154880,
    },
    "llama": {
        **COMMON,
        "head_dim": 128,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 24,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "vocab_size": 128256,
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_family_of_the_catalogue_is_read_whole(name: str) -> None:
    """No line in the log, no lowered context, and no refusal."""
    config = CONFIGS[name]
    stated = (config.get("text_config") or config)["max_position_embeddings"]
    assert list_limits(config) == []
    assert lower_context(config, None) == stated
    assert list_notes(config, None) == []
    classes_of(deepcopy(config))


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [("gpt_bigcode", "activation_function", "gelu"), ("gpt_neox", "hidden_act", "gelu_fast")],
)
def test_one_form_of_gelu_is_served_for_another(kind: str, key: str, value: str) -> None:
    """StarCoder's and GPT-NeoX-20B's files name other forms than transformers' defaults."""
    config = {**tiny_config(kind), key: value}
    classes, arguments = classes_of(config)
    correct(classes(arguments.from_dict(config)), config, {}, None)


def test_every_family_of_the_catalogue_is_equal_to_transformers() -> None:
    families = {facts.architecture for _, _, facts in read_facts()}
    assert len(families) > 10
    assert {verified_by({"model_type": kind}) for kind in families} == {"transformers"}


def test_numbers_of_another_type_leave_a_familys_defaults() -> None:
    """transformers' classes insist on types."""
    config = {**tiny_config("granitemoehybrid"), "router_aux_loss_coef": 0}
    del config["time_step_limit"]
    classes_of(config)
    assert config["time_step_limit"] == [0.0, inf]


def test_llama_4_and_dbrx_are_read_as_they_were_published() -> None:
    config = tiny_config("llama4")
    config["text_config"] |= {"attn_temperature_tuning": 4, "no_rope_layers": []}
    classes_of(config)
    config = tiny_config("dbrx")
    config["attn_config"]["rope_theta"] = 500000
    for key in ("rope_parameters", "rope_theta"):
        config.pop(key, None)
    classes_of(config)


def test_yarns_original_context_is_the_configs_where_the_scaling_has_none() -> None:
    config = {**tiny_config("llama"), "rope_scaling": {"type": "yarn", "factor": 2.0}}
    config["rope_scaling"]["beta_fast"] = None
    classes_of(config)
    expected = {"original_max_position_embeddings": 4096, "type": "yarn", "factor": 2.0}
    assert config["rope_scaling"] == expected
    config |= {"rope_scaling": {"type": "yarn", "factor": 2.0}}
    config |= {"original_max_position_embeddings": 512}
    classes_of(config)
    assert config["rope_scaling"]["original_max_position_embeddings"] == 512
