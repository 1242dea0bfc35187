"""Keys of config.json and arrays that change answers in transformers, and that nothing reads here.

What is told apart: a key that mlx-lm's class doesn't read and that is as transformers has it where
it is missing changes nothing, as the class has that built in; any other value is refused, if the
key is known to change answers, and named otherwise.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from typing import Any, Final

from gateway.engine.models.family_defaults import is_default
from gateway.engine.models.reads import architecture, reader_of

# Keys whose other values change logits in silence: docs/architectures.md has where that was seen.
CHANGES: Final = re.compile(
    r"activation_function|attention_chunk_size|attention_in_multiplier|attn_scale|clip_qkv"
    r"|attn_temperature_tuning|\w+_softcapping|first_k_dense_replace|floor_scale|(mlp_layer|indexer)_types"
    r"|(full_attn|linear_attn|mlp)_(alpha|beta)_factor|interleave_moe_layer_step|kda_\w+"
    r"|(rms|layer)?_?norm_(eps|epsilon)|(mamba|mlp)_hidden_act|mlp_only_layers|moe_layers"
    r"|moe_apply_router_weight_on_input|moe_norm_min|n_group|no_rope_layer_interval"
    r"|norm_topk_prob|query_pre_attn_scalar|rope_interleave|routed_scaling_factor|scale_attn_\w+|swiglu_\w+"
    r"|time_step_limit|topk_group|use_bidirectional_attention"
)
# What a class reads, and computes otherwise than transformers: the values that are right.
_RIGHT: Final[Mapping[str, Mapping[str, tuple[Any, ...]]]] = {
    "falcon_h1": {"attention_in_multiplier": (1.0,)},
    "granitemoehybrid": {"mamba_n_groups": (1,)},
}
# Keys that change no answer: of training, of the tokenizer, of other tasks, of how files are kept.
_INERT: Final = re.compile(
    r"_.*|.*(dropout|pdrop|token_id|token_index|_config|loss_coef|loss|init|initializer)\w*"
    r"|architectures|auto_map|.*dtype|id2label|label2id|max_position_embeddings|max_window_layers"
    r"|model_type|num_(nextn|mtp)\w*|pretraining_tp|problem_type|quantization\w*|residual_in_fp32"
    r"|rope_\w+|output_\w+|sliding_window\w*|time_step_\w+|tie_word_embeddings|transformers_version"
    r"|use_(cache|sliding_window|mamba_kernels|mambapy|associative_scan)|hidden_act\w*"
    r"|partial_rotary_factor|(num|n)_\w+|layer_types|intermediate_size|per_layer_config|router_jitter_noise|input_jitter_noise|rescale\w+"
    r"|chunk_size|\w+_chunk_size|num_logits_to_keep|summary_\w+|expand|\w+_expand|head_dim"
)
# Arrays that a language model has no place for, or that are computed anew.
_SPARE: Final = re.compile(
    r"(^|.*\.)(visual|vision\w*|audio\w*|\w*(projector|tower|embedder)|mtp\w*|embed_(audio|vision)"
    r"|rotary_emb|lm_head|attn\.(bias|masked_bias)|\w*(scale_inv|input_scale|weight_scale\w*))(\..*|$)"
)
_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.)")
_MOST_GROUPS: Final = 16


def check_keys(text: Mapping[str, Any], model_class: type) -> None:
    """Raise ValueError for a key of a language model's config whose value a class passes over, or
    computes otherwise, if answers would be others than transformers'.
    """
    for key in _unread(text, reader_of(model_class)):
        if CHANGES.fullmatch(key):
            raise ValueError(f"{key} {text[key]!r:.60} is not supported for `{text['model_type']}`")
    for key, right in _RIGHT.get(architecture(model_class), {}).items():
        if text.get(key, right[0]) not in right:
            raise ValueError(f"{key} {text[key]!r:.60} is not supported for `{text['model_type']}`")


def list_unread(text: Mapping[str, Any], model_class: type) -> list[str]:
    """List the keys that nothing reads and that are not as transformers has them, but for those
    that are known to change no answer.
    """
    return [key for key in _unread(text, reader_of(model_class)) if not _INERT.fullmatch(key)]


def _unread(text: Mapping[str, Any], reads: Callable[[str], bool]) -> Iterator[str]:
    for key, value in text.items():
        if value is not None and not reads(key) and not is_default(text, key):
            yield key


def list_dropped(
    found: Mapping[str, tuple[int, ...]], kept: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """List the kinds of arrays, by names and shapes in the files, that a class has dropped: those
    whose numbers are missing among what it kept under other names.
    """
    gone = _sizes({name: shape for name, shape in found.items() if name not in kept})
    new = _sizes({name: shape for name, shape in kept.items() if name not in found})
    spare = [name for name in gone if _SPARE.fullmatch(name)]
    missing = sum(gone.values()) - sum(new.values()) - sum(gone[name] for name in spare)
    others = sorted(gone.keys() - spare)
    if missing <= 0 or len(others) > _MOST_GROUPS:
        return []
    for count in range(1, len(others) + 1):
        for chosen in combinations(others, count):
            if sum(gone[name] for name in chosen) == missing:
                return list(chosen)
    return []


def _sizes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Return how many numbers there are of each kind of array: layers and experts are not told
    apart.
    """
    sizes: dict[str, int] = {}
    for name, shape in shapes.items():
        size = 1
        for length in shape:
            size *= length
        kind = _NUMBER.sub("*", name)
        sizes[kind] = sizes.get(kind, 0) + size
    return sizes
