"""The keys of a config that are changed, and their other values."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks.reference.configs import EXPERT, INNER, KV_HEADS, LAYERS, SIZES

WINDOW: Final = 24  # narrower than the prompt, and than its prefill
ORIGINAL: Final = 32  # a scaled rope's own context, shorter than the prompt
FACTOR: Final = 4.0
YARN: Final = {
    "rope_type": "yarn",
    "factor": FACTOR,
    "original_max_position_embeddings": ORIGINAL,
}

SCALED: Final = {
    *("rope_type", "type", "factor", "original_max_position_embeddings", "truncate"),
    *("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow"),
    *("low_freq_factor", "high_freq_factor", "short_factor", "long_factor"),
}
# Keys that matter to training, running or naming a model, and to no answer.
IRRELEVANT: Final = re.compile(
    r"dropout|pdrop|initializer|_init_|variance|aux_loss|jitter|token_id|use_cache|^output_|"
    r"^return_|kernels|mambapy|associative_scan|logits_to_keep|pretraining_tp|^summary_|loss|"
    r"cross_attention|is_decoder|nextn|^mtp_|max_length|cache_dtype|rescale_prenorm|^_|"
    r"chunk_size|^model_type$|architectures|label|problem_type|transformers_version|dtype|"
    r"is_encoder_decoder|_in_fp32|upcast|block_size|multiple_of|auto_adjust|linear_dt|a_log_m|"
    r"time_step_(init|floor|rank)|max_position|n_positions|max_seq_len|image|patch_size|"
    r"num_channels|moe_shared_expert_overlap|^attn_implementation|sparse_pred|full_attn_idxs"
)
# Values of keys whose name is the pattern, tried in turn for the first that has one.
INTEGERS: Final[dict[str, tuple[Any, ...]]] = {
    r"sliding_window|attention_window_size|attention_chunk_size|local_attention": (WINDOW,),
    r".*experts_per_tok(en)?|moe_topk|moe_k|top_k_experts": (3,),
    r"first_k_dense_replace|num_dense_layers|moe_layer_start_index": (0, 2),
    r"moe_layer_end_index": (2,),
    r"max_window_layers": (2,),
    r"decoder_sparse_step|moe_layer_interval|interleave_moe_layer_step": (2,),
    r"(attn|expert)_layer_period|global_attn_every_n_layers|no_rope_layer_interval": (2, 3),
    r"layer_group_size|full_attention_interval|sliding_window_pattern": (2,),
    r"expert_layer_offset|attn_layer_offset": (0,),
    r"n_shared_experts|num_shared_experts|moe_num_shared_experts": (2,),
    r"num_kv_shared_layers": (2,),
    r"num_key_value_heads": (1, 4),
    r"head_dim|global_head_dim|query_pre_attn_scalar": (64,),
    r"rotary_dim": (8,),
    r"index_topk|index_topk_blocks": (16,),
    r"q_lora_rank": (None,),
    r".*(factor|multiplier|scale|emb)|pad_vocab": (3,),
    r"dim_model_base": (32,),
    r"n_groups|mamba_n_groups": (2,),
    r"conv_kernel|conv_L_cache|.*d_conv|.*conv_kernel_(dim|size)|conv1d_width": (5,),
    r"altup_active_idx": (1,),
}
NONES: Final[dict[str, tuple[Any, ...]]] = {
    r"sliding_window": (WINDOW,),
    r".*softcapping|.*soft_cap": (5.0,),
    r"clip_qkv": (0.5,),
    r"use_bidirectional_attention": (True,),
    r"position_embedding_type": ("rope",),
    r"q_lora_rank": (64,),
    r"swiglu_limits.*": ([0.5] * LAYERS,),
    r"moe_latent_size": (32,),
    r"head_dim": (64,),
}
STRINGS: Final[dict[str, tuple[str, ...]]] = {
    r"position_embedding_type": ("rope", "nope"),
    r"topk_method": ("greedy", "group_limited_greedy", "noaux_tc"),
    r"classifier_pooling": ("cls", "mean"),
    r"scoring_func": ("softmax", "sigmoid"),
    r"sliding_window_pattern": ("LG",),
}
# The first layer's other kind, where all layers are of one.
KINDS: Final = {"full_attention": "sliding_attention", "sparse": "dense", "dense": "sparse"}
# Changes of several keys at once, and those that are seen beside others alone.
TOGETHER: Final[dict[str, dict[str, Any]]] = {
    "n_group": {"n_group": 2, "topk_group": 1},
    "num_expert_group": {"num_expert_group": 2, "topk_group": 1},
}
BESIDE: Final[dict[str, dict[str, Any]]] = {
    "use_sliding_window": {"sliding_window": WINDOW, "max_window_layers": 2},
    "max_window_layers": {"sliding_window": WINDOW, "use_sliding_window": True},
    "layer_types": {"sliding_window": WINDOW, "attention_chunk_size": WINDOW},
    "topk_method": {"n_group": 2, "topk_group": 1},
}
SHAPES: Final[dict[str, dict[str, dict[str, Any]]]] = {
    "dbrx": {
        "clipped": {"attn_config": {"kv_n_heads": KV_HEADS, "clip_qkv": 0.5, "rope_theta": 10000.0}}
    },
    "gemma3n_text": {
        "shared": {
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_hidden_layers": 6,
            "intermediate_size": [INNER] * 6,
            "activation_sparsity_pattern": [0.9] * 2 + [0.0] * 4,
            "num_kv_shared_layers": 2,
        }
    },
    "gemma4_text": {
        "mixture": {
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": EXPERT,
        },
        "shared": {
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 2,
        },
        "one for keys and values": {
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "num_global_key_value_heads": 1,
            "global_head_dim": 64,
        },
    },
    "gpt_oss": {
        "the originals' rotation": {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "max_position_embeddings": 131072,
        }
    },
    "granitemoehybrid": {
        "dense": {"num_local_experts": 0, "num_experts_per_tok": 0},
    },
    "nemotron_h": {
        "mixtures": {"layers_block_type": ["mamba", "moe", "attention", "moe"]},
        "dense": {"layers_block_type": ["mamba", "mlp", "attention", "mlp"]},
    },
}


@dataclass(frozen=True)
class Change:
    """Keys that one row changes, and those that it is compared with to be seen at all."""

    wanted: dict[str, Any] = field(default_factory=dict)
    beside: dict[str, Any] = field(default_factory=dict)


def changes(fields: Mapping[str, Any]) -> dict[str, Change]:
    """Return the changes of a config's fields by their names; the base is the first."""
    found = {"": Change()}
    for name, value in fields.items():
        if name in ("rope_parameters", "rope_scaling") or is_disputed(name, fields):
            continue
        for other in others(name, value):
            beside = {k: v for k, v in BESIDE.get(name, {}).items() if k in fields}
            found[f"{name}={_brief(other)}"] = Change({**beside, name: other}, beside)
    for name, together in TOGETHER.items():
        if together.keys() <= fields.keys():
            found[name] = Change(together)
    for name, shape in SHAPES.get(str(fields.get("model_type")), {}).items():
        found[name] = Change(shape)
    rope = fields.get("rope_parameters")
    if isinstance(rope, dict):
        found.update(rotations(rope, fields))
    return found


def uncovered(fields: Mapping[str, Any]) -> list[str]:
    """Return the keys that no row changes, and that aren't sizes or known to change nothing."""
    return [
        name
        for name, value in fields.items()
        if not IRRELEVANT.search(name)
        and name not in SIZES
        and name not in ("rope_parameters", "rope_scaling", *TOGETHER, "topk_group")
        and not re.search(r"_size|_dim$|_rank|heads|num_layers|num_experts$|_expand|^expand$", name)
        and (is_disputed(name, fields) or not others(name, value))
    ]


def is_disputed(name: str, fields: Mapping[str, Any]) -> bool:
    """Return True for a key that transformers reads otherwise than a family's authors: NVIDIA's
    code and kernels bound a step by `time_step_limit` (modeling_nemotron_h.py of
    nvidia/NVIDIA-Nemotron-Nano-9B-v2), transformers by `time_step_min`.
    """
    return fields.get("model_type") == "nemotron_h" and name in ("time_step_limit", "time_step_min")


def others(name: str, value: Any) -> Sequence[Any]:
    """Return other values of a key; none for a key that matters to no answer."""
    if IRRELEVANT.search(name):
        return ()
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, str):
        if "act" in name:
            return ("gelu" if value == "silu" else "silu",)
        return [each for each in _named(STRINGS, name) if each != value]
    if isinstance(value, float):
        return (_other_float(name, value),)
    if isinstance(value, int):
        return [each for each in _named(INTEGERS, name) if each != value]
    if value is None:
        return _named(NONES, name)
    if isinstance(value, list | tuple):
        changed = _other_list(name, list(value))
        return [] if changed == list(value) else [changed]
    return ()


def _named(table: Mapping[str, Sequence[Any]], name: str) -> Sequence[Any]:
    return next((values for each, values in table.items() if re.fullmatch(each, name)), ())


def _other_float(name: str, value: float) -> float:
    if "eps" in name:
        return 0.05
    if "limit" in name or "clip" in name:
        return 0.5
    if "softcap" in name or "soft_cap" in name:
        return 5.0
    return float(f"{value * 1.7:.4g}") if value else 0.5


def _other_list(name: str, value: list[Any]) -> list[Any]:
    if name == "mlp_only_layers":
        return [1]
    if name == "time_step_limit":
        return [0.3, 0.6]
    if name == "activation_sparsity_pattern":
        return [0.9] * len(value)
    if name == "no_rope_layers":
        return [1 - each for each in value]
    if name == "moe_layers":
        return value[1::2]
    if value and all(isinstance(each, float) for each in value):
        return [round(each * 1.7, 6) for each in value]
    if value and value.count(value[0]) == len(value):
        return [KINDS.get(value[0], value[0]), *value[1:]]
    return value[::-1]


def _brief(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(str(each)[:4] for each in value) + "]"
    return str(value)


def rotations(rope: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Change]:
    """Return the changes of `rope_parameters`, or of each layer type's part of it."""
    parts = {part: value for part, value in rope.items() if isinstance(value, dict)}
    if not parts:
        return dict(_rotations(rope, fields, ""))
    found = {}
    for part, own in parts.items():

        def of_part(keys: Mapping[str, Any], part: str = part) -> dict[str, Any]:
            own = keys.get("rope_parameters")
            return {**keys, "rope_parameters": {**rope, part: own}} if own else dict(keys)

        for name, change in _rotations(own, fields, f"{part.removesuffix('_attention')} "):
            found[name] = Change(of_part(change.wanted), of_part(change.beside))
    return found


def _rotations(
    own: Mapping[str, Any], fields: Mapping[str, Any], label: str
) -> Iterator[tuple[str, Change]]:
    theta = own.get("rope_theta") or 10000.0
    partial = own.get("partial_rotary_factor")
    # Some models have more keys there, for pictures for example.
    plain = {key: value for key, value in own.items() if key not in SCALED}
    plain |= {"rope_theta": theta, "rope_type": "default"}

    def keys(context: int | None = None, **rope: Any) -> dict[str, Any]:
        found: dict[str, Any] = {"rope_parameters": {**plain, **rope}}
        if context is not None:
            found["max_position_embeddings"] = context
        return found

    long = int(ORIGINAL * FACTOR)
    yarn = keys(long, **YARN)
    if own.get("rope_type", "default") != "default":
        yield f"{label}rope default", Change(keys())
    yield f"{label}rope_theta", Change(keys(rope_theta=theta * 50))
    yield f"{label}rope linear", Change(keys(rope_type="linear", factor=FACTOR))
    original = {"original_max_position_embeddings": ORIGINAL}
    dynamic = keys(ORIGINAL, rope_type="dynamic", factor=2.0, **original)
    yield f"{label}rope dynamic", Change(dynamic)
    yield f"{label}rope yarn", Change(yarn)
    for name, value in (
        ("truncate", {"truncate": False}),
        ("attention_factor", {"attention_factor": 0.7}),
        ("mscale", {"mscale": 1.0, "mscale_all_dim": 0.5}),
        ("beta_fast", {"beta_fast": 8.0}),
        ("beta_slow", {"beta_slow": 0.3}),
    ):
        yield f"{label}rope yarn, {name}", Change(keys(long, **YARN, **value), yarn)
    bands = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3 = keys(256, rope_type="llama3", factor=8.0, **bands, **original)
    yield f"{label}rope llama3", Change(llama3)
    width = fields.get("qk_rope_head_dim") or fields.get("head_dim")
    if width is None:
        width = fields.get("hidden_size", 0) // (fields.get("num_attention_heads") or 1)
    count = int(width * (partial or 1.0)) // 2
    factors = {
        "short_factor": [round(1.0 + 0.05 * at, 3) for at in range(count)],
        "long_factor": [round(1.0 + 0.5 * at, 3) for at in range(count)],
    }
    for context, where in ((ORIGINAL, "beyond"), (1024, "within")):
        longrope = keys(
            context * 4,
            rope_type="longrope",
            factor=FACTOR,
            **factors,
            original_max_position_embeddings=context,
        )
        if "original_max_position_embeddings" in fields:
            longrope["original_max_position_embeddings"] = context
        yield f"{label}rope longrope, {where} the original context", Change(longrope)
    other = 0.5 if partial != 0.5 else 0.25
    yield f"{label}partial_rotary_factor", Change(keys(partial_rotary_factor=other))
