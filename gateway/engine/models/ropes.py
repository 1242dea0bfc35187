"""Corrections of rotary positions that mlx-lm computes otherwise than transformers 5.

The formulas are those of transformers' modeling_rope_utils.py. YaRN is described in
https://arxiv.org/abs/2309.00071, LongRoPE in https://arxiv.org/abs/2402.13753.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import mlx.core as mx
from mlx.nn.layers.positional_encoding import RoPE
from mlx_lm.models.rope_utils import Llama3RoPE, SuScaledRoPE, YarnRoPE, initialize_rope

_KINDS: Final = (Llama3RoPE, RoPE, SuScaledRoPE, YarnRoPE)
_DYNAMIC: Final = "DynamicNTKScalingRoPE"  # two of mlx-lm's classes have this name
_SCALED: Final = ("linear", "llama3", "longrope", "su", "yarn")


def rope_kind(text: Mapping[str, Any]) -> str:
    """Return the `rope_type` of a language model's config, or "default"."""
    scaling = text.get("rope_scaling") or {}
    return str(scaling.get("rope_type") or scaling.get("type") or "default")


def correct_ropes(
    model: Any, text: Mapping[str, Any], reads: Callable[[str], bool], context: int | None
) -> None:
    """Correct the rotations of an mlx-lm model for texts of up to `context` tokens.

    `text` is the language model's config, and `reads` tells whether the model's class reads a key.
    Raises ValueError for a scaling that would be computed wrongly.
    """
    found = list(_find(model))
    scaling, kind = text.get("rope_scaling") or {}, rope_kind(text)
    if text.get("model_type") == "glm":
        # mlx-lm's class rotates the whole head: https://github.com/ml-explore/mlx-lm/issues/1698
        share = text.get("partial_rotary_factor") or 0.5
        for _, _, rope in found:
            rope.dims = int(rope.dims * share)
    for owner, name, rope in found:
        if type(rope).__name__ == _DYNAMIC and kind == "dynamic":
            # Dynamic scaling has no effect within the context, and it cannot be batched.
            # InternLM3's class calls the plain base `original_base`.
            base = getattr(rope, "original_base", None) or rope.base
            owner[name] = RoPE(rope.dims, rope.traditional, base)
    if any(getattr(rope, "dims", 0) % 2 for _, _, rope in found):
        raise ValueError("an odd number of dimensions cannot be rotated")
    if not found and not (kind == "dynamic" and "alpha" in scaling):  # the class rotates by itself
        is_plain = kind == "yarn" and scaling.get("truncate", True)
        if kind != "default" and not (is_plain and scaling.get("attention_factor") is None):
            raise _unsupported(text)
    if kind not in _SCALED:
        return
    is_traditional = any(isinstance(rope, RoPE) and rope.traditional for _, _, rope in found)
    if kind in ("longrope", "su") and (is_traditional or reads("traditional=True")):
        raise _unsupported(text)  # SuScaledRoPE cannot pair neighbours
    if found and all(isinstance(rope, RoPE) and rope.scale == 1 for _, _, rope in found):
        _scale_plain(found, text, scaling)
        found = list(_find(model))
    for _, _, rope in found:
        if isinstance(rope, YarnRoPE) and kind == "yarn":
            _correct_yarn(rope, float(text.get("rope_theta") or 10_000.0), scaling)
        elif isinstance(rope, SuScaledRoPE):
            _correct_longrope(rope, text, scaling, context)


def _unsupported(text: Mapping[str, Any]) -> ValueError:
    return ValueError(f"rope_type {rope_kind(text)} is not supported for `{text['model_type']}`")


def _find(model: Any) -> Iterator[tuple[Any, str, Any]]:
    """Yield each rotation of a model as (module, name in the module, rotation)."""
    for module in model.modules():
        for name, child in module.items():
            if isinstance(child, _KINDS) or type(child).__name__ == _DYNAMIC:
                yield module, name, child


def _scale_plain(found: list[Any], text: Mapping[str, Any], scaling: Mapping[str, Any]) -> None:
    """Scale the rotations whose base is `rope_theta`: others belong to layers with windows."""
    theta = text.get("rope_theta") or 10_000.0
    plain = [each for each in found if math.isclose(each[2].base, theta)]
    if not plain or "qk_rope_head_dim" in text:  # MLA's attention would need scaling, too
        raise _unsupported(text)
    for owner, name, rope in plain:
        owner[name] = initialize_rope(
            rope.dims, rope.base, rope.traditional, dict(scaling), text["max_position_embeddings"]
        )


def _correct_yarn(rope: Any, base: float, scaling: Mapping[str, Any]) -> None:
    """Apply a config's attention factor and `truncate` to a YaRN rotation.

    https://github.com/vllm-project/vllm/pull/27722 describes `truncate`.
    """
    factor = float(scaling["factor"])

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    numerator, denominator = scaling.get("mscale"), scaling.get("mscale_all_dim")
    stated = scaling.get("attention_factor")
    if stated is not None:
        rope.mscale = float(stated)
    elif not (numerator and denominator):
        rope.mscale = mscale(1.0)
    if scaling.get("truncate", True):
        return
    original = scaling.get("original_max_position_embeddings", 4096)
    low, high = (
        rope.dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))
        for turns in (scaling.get("beta_fast") or 32, scaling.get("beta_slow") or 1)
    )
    low, high = max(low, 0.0), min(high, rope.dims - 1)
    places = mx.arange(rope.dims // 2, dtype=mx.float32)
    slowed = mx.clip((places - low) / max(high - low, 0.001), 0, 1)
    periods = base ** (mx.arange(0, rope.dims, 2, dtype=mx.float32) / rope.dims)
    rope._freqs = 1 / (slowed / (factor * periods) + (1 - slowed) / periods)


def _correct_longrope(
    rope: Any, text: Mapping[str, Any], scaling: Mapping[str, Any], context: int | None
) -> None:
    """Use the long factors, or the short ones if no text exceeds the original context."""
    original = rope.original_max_position_embeddings
    is_long = context is None or context > original
    base = float(text.get("rope_theta") or 10_000.0)
    periods = base ** (mx.arange(0, rope.dim, 2, dtype=mx.float32) / rope.dim)
    factors = scaling["long_factor" if is_long else "short_factor"]
    rope._freqs = mx.array(factors, dtype=mx.float32) * periods
    stated = scaling.get("long_mscale" if is_long else "short_mscale")
    stated = stated or scaling.get("attention_factor")
    if stated is not None:
        rope._scale = float(stated)
