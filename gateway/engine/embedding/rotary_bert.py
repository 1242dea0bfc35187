"""BERT with rotary positions: nomic-bert, GTE and jina-embeddings-v3.

Source: transformers, models/nomic_bert, gte and jina_embeddings_v3.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any, ClassVar, Final

import mlx.core as mx

from gateway.engine.embedding.bert import Bert, BertConfig, read_config
from gateway.engine.models.checkpoint import Checkpoint

# Patterns of weight names and their names in BERT (transformers' conversion_mapping.py); several
# names split an array.
_NAMES: Final = (
    (r"^(nomic_bert|gte|new|roberta)\.", ""),
    (r"^emb_ln\.", "embeddings.LayerNorm."),
    (r"^encoder\.layers\.", "encoder.layer."),
    (
        r"\.(attn\.Wqkv|mixer\.Wqkv|attention\.qkv_proj)\.",
        *(".attention.self.query.", ".attention.self.key.", ".attention.self.value."),
    ),
    (r"\.(attn\.out_proj|mixer\.out_proj|attention\.o_proj)\.", ".attention.output.dense."),
    (r"\.(norm1|attn_ln)\.", ".attention.output.LayerNorm."),
    (r"\.(norm2|mlp_ln)\.", ".output.LayerNorm."),
    (r"\.mlp\.up_gate_proj\.", ".intermediate.dense.", ".intermediate.gate."),
    (r"\.mlp\.fc11?\.", ".intermediate.dense."),
    (r"\.mlp\.fc12\.", ".intermediate.gate."),
    (r"\.mlp\.(down_proj|fc2)\.", ".output.dense."),
)
# nomic-bert's older keys of config.json, and their current names.
_FORMER_KEYS: Final = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "activation_function": "hidden_act",
    "rotary_emb_base": "rope_theta",
}
_SERVED: Final = {
    "num_experts": (None, 0, 1),
    "logn_attention_scale": (None, False),
    "rotary_scaling_factor": (None,),
    "rotary_emb_fraction": (None, 1),
    "rotary_emb_interleaved": (None, False),
    "rotary_emb_scale_base": (None,),
    "prenorm": (None, False),
    "causal": (None, False),
    "scale_attn_weights": (None, True),
    "scale_attn_by_inverse_layer_idx": (None, False),
}


class RotaryBert(Bert):
    """BERT whose queries and keys are rotated by their positions."""

    theta: ClassVar[float]  # the default base of the rotations
    is_gated: ClassVar = True
    unbiased: ClassVar[tuple[str, ...]] = ()

    def _position_vectors(self, tokens: mx.array) -> mx.array:
        return self._positions

    @classmethod
    def _read_config(cls, checkpoint: Checkpoint, raw: Mapping[str, Any]) -> BertConfig:
        for key, served in _SERVED.items():
            if raw.get(key) not in served:
                raise checkpoint.failed(f"config.json: {key} {raw[key]} is not supported")
        keys = {_FORMER_KEYS.get(key, key): value for key, value in raw.items()}
        keys.pop("position_embedding_type", None)  # GTE's is `rope`
        if keys.get("hidden_act") == "swiglu":
            keys["hidden_act"] = "silu"
        config = read_config(checkpoint, keys)
        if config.dimensions % (2 * config.heads):
            raise checkpoint.failed("config.json: hidden_size / num_attention_heads is not even")
        with checkpoint.reading_config():
            theta, factor = cls._read_rope(checkpoint, keys, config.dimensions // config.heads)
        if not (0 < theta < inf and 0 < factor < inf):
            raise checkpoint.failed("config.json: rope_theta or a factor is not a positive number")
        return replace(
            config, theta=theta, factor=factor, is_gated=cls.is_gated, unbiased=cls.unbiased
        )

    @classmethod
    def _read_rope(
        cls, checkpoint: Checkpoint, keys: Mapping[str, Any], size: int
    ) -> tuple[float, float]:
        """Return the base of the rotations and the divisor of positions."""
        rope = keys.get("rope_parameters") or keys.get("rope_scaling") or {}
        kind = rope.get("rope_type") or rope.get("type") or "default"
        theta = float(rope.get("rope_theta") or keys.get("rope_theta") or cls.theta)
        if kind == "default":
            return theta, 1.0
        if kind == "linear":
            return theta, float(rope["factor"])
        # Sources: https://kexue.fm/archives/9706, and vLLM's
        # layers/rotary_embedding/ntk_scaling_rope.py.
        if kind == "ntk" and rope.get("mixed_b") is None:
            return theta * rope["factor"], rope["factor"] ** (2 / size)
        raise checkpoint.failed(f"config.json: rope_type `{kind}` is not supported")

    @classmethod
    def _bert_names(cls, arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
        named = dict(arrays)
        for pattern, *parts in _NAMES:
            for name in [name for name in named if re.search(pattern, name)]:
                rows = mx.split(named.pop(name), len(parts))
                for part, array in zip(parts, rows, strict=True):
                    named[re.sub(pattern, part, name)] = array
        return named


class NomicBert(RotaryBert):
    """nomic-embed-text: gated, and no linear layer has a bias."""

    theta = 1000.0
    unbiased = ("attention.", "intermediate.", "output.")


class Gte(RotaryBert):
    """GTE's v1.5 and multilingual models: gated, and some linear layers have no bias."""

    theta = 160_000.0
    unbiased = ("intermediate.",)


class JinaV3(RotaryBert):
    """jina-embeddings-v3 without its task adapters: not gated."""

    theta = 20_000.0
    is_gated = False
