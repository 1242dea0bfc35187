"""Translates config.json to the keys of mlx-lm's classes, with transformers' defaults."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from mlx_lm.utils import _get_classes

from gateway.engine.models.checkpoint import MISSING_PACKAGE
from gateway.engine.models.counts import text_config
from gateway.engine.models.family_defaults import ROPE_KEYS, family, resolve
from gateway.engine.models.own_classes import OWN, Classes, Make
from gateway.engine.models.unread import check_keys

# Arguments that mlx-lm's classes require, by family. transformers has the values in its code.
_CONSTANTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "apertus": {"mlp_bias": False, "post_norm": False, "qk_norm": True},
    "glm_moe_dsa": {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1},
    "minimax_m2": {"shared_intermediate_size": 0},
    "qwen3_vl_moe_text": {"norm_topk_prob": True},
    "solar_open": {"first_k_dense_replace": 0, "intermediate_size": 0, "use_qk_norm": False}
    | {"partial_rotary_factor": 1.0},
}
# Arguments of mlx-lm's classes, by family, and the key of config.json that has the value.
_EQUALS: Final = {"gpt2": {"n_ctx": "n_positions"}, "lfm2": {"block_dim": "hidden_size"}}
# mlx-lm's names of layer types, by transformers 5's names.
_HYBRID: Final = {"linear_attention": "mamba", "full_attention": "attention"}
_LAYERS: Final = {"granitemoehybrid": _HYBRID, "jamba": _HYBRID}
# mlx-lm's keys for the interval between layers with full attention, by family.
_PATTERNS: Final = {
    **dict.fromkeys(("cohere2", "gemma3_text"), "sliding_window_pattern"),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), "full_attention_interval"),
}
_ALIASES: Final = {"ministral": "llama", "qwen3_5_text": "qwen3_5"}


def write_for_mlx_lm(config: dict[str, Any]) -> None:
    """Add the keys that mlx-lm's classes read, with the values of transformers 5's keys.

    Raises ValueError for values that the classes have no key for.
    """
    # If a key were missing, a class would use its default and answer wrongly without an error.
    rope = config.get("rope_parameters") or {}
    local, rope = rope.get("sliding_attention") or {}, rope.get("full_attention") or rope
    own = {key: rope.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    own["rope_local_base_freq"] = local.get("rope_theta")
    kind = rope.get("rope_type", "default")
    if kind != "default":
        own["rope_scaling"] = {"type": kind, **rope}
    config.update({key: value for key, value in own.items() if value and config.get(key) is None})
    scaling = config.get("rope_scaling") or {}
    if isinstance(scaling, dict) and "yarn" in (scaling.get("type"), scaling.get("rope_type")):
        whole = config.get("original_max_position_embeddings") or config.get(
            "max_position_embeddings", 4096
        )
        stated = {key: value for key, value in scaling.items() if value is not None}
        config["rope_scaling"] = {"original_max_position_embeddings": whole, **stated}
    if rope:
        config.setdefault("rope_scaling", None)  # some classes require it
    for number in (config.get("rope_theta"), (config.get("rope_scaling") or {}).get("factor")):
        if number is not None and not (isinstance(number, int | float) and 0 < number < math.inf):
            raise ValueError(f"rope_theta or a factor is {number!r:.40}, not a positive number")
    inner = config.get("attn_config") or {}  # only DBRX has it
    if rope.get("rope_theta") and inner.get("rope_theta", rope["rope_theta"]) != rope["rope_theta"]:
        raise ValueError("rope_theta is not the same as in attn_config")
    if str(config.get("model_type")).startswith("minimax_m") and rope and "head_dim" in config:
        share = rope.get("partial_rotary_factor") or 1.0
        config["rotary_dim"] = int(config["head_dim"] * share)
    is_odd = local.get("attention_factor") is not None or not local.get("truncate", True)
    is_scaled = local.get("rope_type", "default") != "default"
    name = str(config.get("model_type"))
    theta, share = config.get("rope_theta"), config.get("partial_rotary_factor")
    is_moved = name == "olmo3" and (config.get("rope_local_base_freq") or theta) != theta
    if name == "recurrent_gemma" and ((theta or 1e4) != 1e4 or (share or 0.5) != 0.5):
        raise ValueError(f"rope_parameters are not supported for `{name}`: {rope}")
    if is_odd or is_moved or (is_scaled and name.startswith(("gemma3", "olmo3"))):
        raise ValueError(f"rope_parameters of sliding_attention are not supported: {local}")
    _write_layers(config)


def _write_layers(config: dict[str, Any]) -> None:
    """Rewrite transformers' list of layer types in the form that mlx-lm's class reads.

    Raises ValueError if the class needs full attention at a fixed interval and the list differs.
    """
    kind, types = config.get("model_type"), config.get("layer_types")
    mixtures = config.get("mlp_layer_types")
    if kind == "exaone_moe" and mixtures:
        config.setdefault("is_moe_layer", [each == "sparse" for each in mixtures])
    if kind == "gemma4_text" and config.get("per_layer_config"):  # transformers 5.23 or later
        wide = next(iter(config["per_layer_config"].values()))
        config.setdefault("global_head_dim", wide.get("head_dim", config.get("head_dim")))
        config.setdefault("num_global_key_value_heads", wide.get("num_key_value_heads"))
    if not types:
        return
    names = _LAYERS.get(str(kind), {})
    config["layer_types"] = [names.get(each, each) for each in types]
    if kind == "ministral" and "full_attention" not in types:
        # The class needs a layer with full attention. context.py keeps texts within the window.
        del config["layer_types"]
    elif kind == "exaone4" and "sliding_attention" in types:
        config["sliding_window_pattern"] = "".join(
            "G" if each == "full_attention" else "L" for each in types
        )
    elif kind in _PATTERNS:
        whole = [index for index, name in enumerate(types) if name == "full_attention"]
        config[_PATTERNS[kind]] = pattern = whole[0] + 1 if whole else len(types) + 1
        if whole != [*range(pattern - 1, len(types), pattern)] or not whole:
            raise ValueError("layer_types: full_attention must repeat at a fixed interval")


def complete(config: dict[str, Any], arguments: type | None = None) -> None:
    """Add the keys that a config lacks, with the values that transformers would use.

    A list is added only if mlx-lm's class has an argument with its name.
    """
    kind = family(config)
    aliases, resolved = resolve(config)
    listed = {field.name: field for field in fields(arguments or _Nothing)}
    others = {**aliases, **_EQUALS.get(kind, {})}
    own = {key: resolved[name] for key, name in others.items() if name in resolved}
    if not config.keys() & (ROPE_KEYS | {"attn_config"}):
        config["rope_parameters"] = resolved.get("rope_parameters")
    for key, value in {**resolved, **own, **_CONSTANTS.get(kind, {})}.items():
        is_plain = isinstance(value, bool | int | float | str)
        is_listed = key in listed and (isinstance(value, list) or key == "rope_parameters")
        if config.get(key) is None and (is_plain or is_listed):
            config[key] = value
    head = listed.get("head_dim")
    if head and head.default is not None and "hidden_size" in config and not config.get("head_dim"):
        config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]


@dataclass
class _Nothing: ...


def classes_of(config: dict[str, Any]) -> Classes:
    """Return the classes of a model and its arguments, and translate `config` for them in place.

    Raises ValueError for a config that no class supports.
    """
    kind = config.get("model_type")
    try:
        make: Make = OWN.get(str(kind), _get_classes)
        classes = make({**config, "model_type": _ALIASES.get(str(kind), kind)})
    except SystemExit as error:
        raise ValueError(MISSING_PACKAGE) from error
    check_keys(text_config(config), classes[0])
    complete(config, classes[1])
    write_for_mlx_lm(config)
    inner = config.get("text_config")
    if inner:
        inner.setdefault("tie_word_embeddings", config.get("tie_word_embeddings"))
        complete(inner)
        write_for_mlx_lm(inner)
    return classes
