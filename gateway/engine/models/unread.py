"""Keys and arrays of a model that mlx-lm's class doesn't read.

An unread key is harmless if it has transformers' default value. Otherwise it is refused if it
changes answers, or named in a note.
"""

import ast
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx_lm.models

from gateway.engine.models.checkpoint import TOWER
from gateway.engine.models.counts import MOST_LAYERS
from gateway.engine.models.family_defaults import is_default

_FOLDER = Path(mlx_lm.models.__path__[0])
_PREFIX = "mlx_lm.models."
_OTHERS = ("base", "cache")  # modules of mlx-lm that define no part of a model
# Keys that change logits unless they have the default (sources: docs/architectures.md).
CHANGES: Final = re.compile(
    r"activation_function|attention_in_multiplier|clip_qkv|\w+_softcapping|first_k_dense_replace"
    r"|(full_attn|linear_attn|mlp)_(alpha|beta)_factor|interleave_moe_layer_step|kda_\w+"
    r"|(rms|layer)?_?norm_(eps|epsilon)|(mamba|mlp)_hidden_act|mlp_only_layers|moe_layers"
    r"|moe_apply_router_weight_on_input|moe_norm_min|n_group|no_rope_layer_interval|norm_topk_prob"
    r"|query_pre_attn_scalar|rope_interleave|routed_scaling_factor|scale_attn_\w+|swiglu_\w+"
    r"|time_step_limit|topk_group|use_bidirectional_attention|(mlp_layer|indexer)_types"
)
_GELU: Final[dict[str, tuple[Any, ...]]] = {"hidden_activation": ()}
_SILU: Final[dict[str, tuple[Any, ...]]] = {"hidden_act": ()}
# Keys that a class uses differently from transformers, with the values for which both agree. An
# empty tuple stands for transformers' default.
_RIGHT: Final[Mapping[str, Mapping[str, tuple[Any, ...]]]] = {
    "falcon_h1": {
        "attention_in_multiplier": (1.0,),
        "hidden_act": (),
        "time_step_limit": ([0.0, math.inf], None),
    },
    "gemma3n": _GELU,
    "gemma4": _GELU,
    "gemma4_text": _GELU,
    "glm4_moe_lite": {"rms_norm_eps": (1e-5,)},  # some norms have a fixed epsilon
    "gpt_bigcode": {"multi_query": (True,)},
    "phimoe": {"num_experts_per_tok": (2,)},
    "qwen2_moe": {"layer_types": ()},
    "recurrent_gemma": {"hidden_activation": (), "rope_theta": (), "partial_rotary_factor": ()},
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_next"), _SILU),
    "granitemoehybrid": {"hidden_act": (), "mamba_n_groups": (1,)},
    "jamba": _SILU,
    "kimi_linear": {"hidden_act": (), "rms_norm_eps": (1e-5,), "tie_word_embeddings": (False,)},
    "llama4": {"rms_norm_eps": (1e-5,), "no_rope_layers": (), "layer_types": ()},
    "longcat_flash": _SILU,
    "mamba2": {"layer_norm_epsilon": (1e-5,), "n_groups": (1,)},
}
# Keys that change no answer.
_INERT: Final = re.compile(
    r"_.*|\w*bias|attention_chunk_size|attn_temperature_tuning|attn_scale|floor_scale|layer_types"
    r"|.*(dropout|pdrop|token_id|token_index|_config|loss|init)\w*|(num|n)_\w+|intermediate_size"
    r"|architectures|auto_map|.*dtype|id2label|label2id|max_position_embeddings|max_seq_len|max_window_layers"
    r"|model_type|num_(nextn|mtp)\w*|pretraining_tp|problem_type|quantization\w*|residual_in_fp32"
    r"|rope_\w+|output_\w+|sliding_window\w*|time_step_\w+|tie_word_embeddings|transformers_version"
    r"|use_(cache|sliding_window|mamba_kernels|mambapy|associative_scan)|hidden_act\w*"
    r"|partial_rotary_factor|per_layer_config|moe_shared_expert_overlap|(router|input)_jitter_noise|rescale\w+"
    r"|chunk_size|\w+_chunk_size|num_logits_to_keep|summary_\w+|expand|\w+_expand|head_dim"
)
# Arrays that a language model doesn't use.
_SPARE: Final = re.compile(
    rf"(^|.*\.)({TOWER}|rotary_emb|lm_head|attn\.(bias|masked_bias)"
    r"|\w*(scale_inv|input_scale|weight_scale\w*))(\..*|$)"
)
_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.)")
_MOST_KINDS: Final = 12
# Biases that only choose experts.
_BIAS: Final = re.compile(r"e_score_correction_bias|expert_bias")


def check_keys(text: Mapping[str, Any], model_class: type) -> None:
    """Raise ValueError for a key that makes mlx-lm's answers differ from transformers'."""
    for key in _unread(text, reader_of(model_class)):
        if CHANGES.fullmatch(key):
            raise ValueError(f"{key} {text[key]!r:.60} is not supported for `{text['model_type']}`")
    for key, right in _RIGHT.get(architecture(model_class), {}).items():
        if key in text and text[key] not in right and (right or not is_default(text, key)):
            raise ValueError(f"{key} {text[key]!r:.60} is not supported for `{text['model_type']}`")


def list_unread(text: Mapping[str, Any], model_class: type) -> list[str]:
    """List the keys that nothing reads and that might change answers."""
    return [key for key in _unread(text, reader_of(model_class)) if not _INERT.fullmatch(key)]


def _unread(text: Mapping[str, Any], reads: Callable[[str], bool]) -> Iterator[str]:
    for key, value in text.items():
        # Gemma 4's "vision" has no effect without images, and GELU's variants are nearly equal.
        is_same = (key, value) == ("use_bidirectional_attention", "vision") or (
            key == "activation_function" and str(value).startswith("gelu")
        )
        if value is not None and not (reads(key) or is_same or is_default(text, key)):
            yield key


def list_lost(found: Mapping[str, mx.array], model: Any, text: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each kind of array that nothing reads, or that the files lack."""
    if text.get("model_type") == "ernie4_5_moe" and not any(map(_BIAS.search, found)):
        yield "the files lack the biases that experts are chosen by: answers differ"
    for kind in list_dropped(found, model, text):
        yield f"nothing reads the weights {kind}"


def list_dropped(found: Mapping[str, mx.array], model: Any, text: Mapping[str, Any]) -> list[str]:
    """List the kinds of arrays that a class drops. Raises ValueError for experts' biases.

    The class renames arrays, so dropped kinds are found by size: their sizes add up to the missing
    numbers.
    """
    if not hasattr(model, "sanitize"):
        return []
    inner = getattr(model, "language_model", model)
    # mlx-lm's Gemma 3 takes the head of tied embeddings away, and fails if it is gone already.
    is_tied = isinstance(inner, dict) and "lm_head" not in inner
    if is_tied:
        inner["lm_head"] = None
    kept = model.sanitize(dict(found))
    if is_tied:
        inner.pop("lm_head", None)
    layers = int(text.get("num_hidden_layers") or MOST_LAYERS)
    gone = _sizes(found, kept, layers)
    missing = sum(gone.values()) - sum(_sizes(kept, found, MOST_LAYERS).values())
    kinds = sorted(gone)
    if missing <= 0 or len(kinds) > _MOST_KINDS:
        return []
    chosen = (each for count in range(1, len(kinds) + 1) for each in combinations(kinds, count))
    dropped = next((each for each in chosen if sum(gone[kind] for kind in each) == missing), ())
    if text.get("model_type") != "ernie4_5_moe":  # `correct` reads this family's biases
        for kind in dropped:
            if _BIAS.search(kind):
                raise ValueError(f"the weights {kind} are not supported")
    return [kind for kind in dropped if not _BIAS.search(kind)]


def _sizes(
    arrays: Mapping[str, mx.array], others: Mapping[str, mx.array], layers: int
) -> dict[str, int]:
    """Count the numbers in the arrays that are not in `others`, by name without indices."""
    sizes: dict[str, int] = {}
    for name, array in arrays.items():
        numbers = _NUMBER.findall(name)
        if name not in others and not _SPARE.fullmatch(name) and int(([*numbers, 0])[0]) < layers:
            kind = _NUMBER.sub("*", name)
            sizes[kind] = sizes.get(kind, 0) + array.size
    return sizes


def architecture(model_class: type) -> str:
    """Return the mlx-lm module of a model's class or its nearest base class."""
    modules = [each.__module__ for each in model_class.__mro__]
    return next((name[len(_PREFIX) :] for name in modules if name.startswith(_PREFIX)), "")


def reader_of(model_class: type) -> Callable[[str], bool]:
    return read_names(architecture(model_class)).__contains__


@cache
def read_names(module: str) -> frozenset[str]:
    """Return the attributes, strings and constant arguments in an mlx-lm module and its imports.

    Dataclass fields don't count, as they only store a value.
    """
    found: set[str] = set()
    waiting, seen = [module], set(_OTHERS)
    while waiting:
        name = waiting.pop()
        file = _FOLDER / f"{name}.py"
        if name in seen or not file.is_file():
            continue
        seen.add(name)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            found |= set(_names(node))
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                waiting += [node.module] if node.module else [each.name for each in node.names]
    return frozenset(found)


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        yield node.attr
    elif isinstance(node, ast.keyword) and node.arg and isinstance(node.value, ast.Constant):
        yield f"{node.arg}={node.value.value!r}"
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
