"""Translate a GGUF file's metadata and tensors to mlx-lm's config and weight names.

A key that changes the computation is translated or refused.
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md describes the keys, llama.cpp's
convert_hf_to_gguf.py the tensors.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from gateway.engine.models.gguf.header import GgufError, Header, quote

ARCHITECTURES: Final = ("llama", "qwen2", "qwen3")
ROPE_FACTORS: Final = "rope_freqs.weight"  # divisors of the frequencies in Llama 3.1's rotations
_MOST: Final = (1 << 31) - 1
# Keys without effect.
_IDLE: Final = frozenset({"vocab_size", "tensor_data_layout", "rope.scaling.finetuned"})
# Values without effect.
_NEUTRAL: Final[Mapping[str, Any]] = {
    "attention.causal": True,
    "rope.scale_linear": 1.0,
    "rope.scaling.factor": 1.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
}


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """The file's tensor that holds a weight, and the weight's shape."""

    tensor: str
    shape: tuple[int, ...]


def read_config(header: Header) -> dict[str, Any]:
    """Return a config with config.json's keys. Raises GgufError for a key that cannot be served."""
    metadata = header.metadata
    kind, pieces = metadata.get("general.type", "model"), metadata.get("split.count", 1)
    version = metadata.get("general.quantization_version", 2)
    name = metadata.get("general.architecture")
    if kind != "model":
        raise GgufError(f"general.type is {kind!r:.60}: it holds no model")
    if pieces not in (0, 1):
        raise GgufError(
            f"it is one of {pieces!r:.60} pieces: join them with `llama-gguf-split --merge`"
        )
    if name not in ARCHITECTURES:
        raise GgufError(
            f"its architecture is {name!r:.60}; those served from GGUF files are "
            f"{', '.join(ARCHITECTURES)}"
        )
    if version != 2:
        raise GgufError(f"general.quantization_version is {version!r:.60}; only 2 is read here")
    keys = _Keys(metadata, name)
    config = {"model_type": name, **_sizes(keys), **_rotations(keys, header)}
    embeddings = header.tensors.get("token_embd.weight")
    if embeddings is None:
        raise GgufError("weights are missing: token_embd.weight")
    config |= {
        "vocab_size": embeddings.shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        **_biases(name, header),
    }
    _check_heads(name, config)
    keys.refuse_rest()
    return config


def places(config: Mapping[str, Any], header: Header) -> dict[str, TensorPlace]:
    """Return the tensor of each mlx-lm weight. Raises GgufError for tensors that don't fit."""
    # A malicious number of layers would fill memory below.
    if config["num_hidden_layers"] > len(header.tensors):
        raise GgufError(f"it has no tensors for {config['num_hidden_layers']:,} layers")
    expected = dict(_expected(config))
    listed = set(header.tensors)
    if config["model_type"] == "llama":
        listed.discard(ROPE_FACTORS)  # not a weight
    expected_tensors = {place.tensor for place in expected.values()}
    for what, names in (
        ("weights are missing", expected_tensors - listed),
        ("weights are unknown", listed - expected_tensors),
    ):
        if names:
            examples = ", ".join(map(quote, sorted(names)[:5]))
            rest = f" and {len(names) - 5:,} more" if len(names) > 5 else ""
            raise GgufError(f"{what}: {examples}{rest}")
    for place in expected.values():
        shape = header.tensors[place.tensor].shape
        if shape != place.shape:
            raise GgufError(f"{place.tensor} is {shape}, where the metadata asks for {place.shape}")
    return expected


class _Keys:
    """Reads one architecture's keys, and remembers which were read."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self._metadata = metadata
        self._prefix = f"{architecture}."
        self._read: set[str] = set()

    def integer(self, key: str, default: int | None = None) -> int:
        """Return an integer from 1 to 2^31 - 1."""
        value = self._found(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST:
            raise self._unusable(key, value)
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """Return a finite number above 0."""
        value = self._found(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._unusable(key, value)
        if not (math.isfinite(value) and value > 0):
            raise self._unusable(key, value)
        return float(value)

    def get(self, key: str) -> Any:
        self._read.add(key)
        return self._metadata.get(self._prefix + key)

    def refuse_rest(self) -> None:
        """Raise GgufError for a key that was not read and might change the computation."""
        for key in self._metadata:
            short = key.removeprefix(self._prefix)
            if short == key or short in self._read or short in _IDLE:
                continue
            value = self._metadata[key]
            if value and value != _NEUTRAL.get(short):
                raise GgufError(f"{quote(key)} is {value!r:.60}, which is not served here")

    def _found(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise GgufError(f"its metadata has no {self._prefix}{key}")
        return value

    def _unusable(self, key: str, value: Any) -> GgufError:
        return GgufError(f"{self._prefix}{key} is {value!r:.60}, which makes no sense")


def _sizes(keys: _Keys) -> dict[str, Any]:
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    head = keys.integer("attention.key_length", max(1, hidden // heads))
    if keys.integer("attention.value_length", head) != head:
        raise GgufError("its keys and values are of different lengths, which is not served here")
    context = keys.integer("context_length")
    # Windows have no effect in texts no longer than the window.
    window = keys.get("attention.sliding_window")
    if window:
        context = min(context, keys.integer("attention.sliding_window"))
    return {
        "hidden_size": hidden,
        "num_hidden_layers": keys.integer("block_count"),
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head,
        "rms_norm_eps": keys.positive("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": context,
    }


def _rotations(keys: _Keys, header: Header) -> dict[str, Any]:
    """Return the rotary keys. GGUF reorders llama's weights for traditional rotations."""
    name = header.metadata["general.architecture"]
    return {
        "rope_theta": keys.positive("rope.freq_base", 10_000.0),
        "rope_traditional": name == "llama",
        "rope_dims": keys.integer("rope.dimension_count", _MOST),
        "rope_scaling": _scaling(keys, header),
    }


def _scaling(keys: _Keys, header: Header) -> dict[str, Any] | None:
    kind = keys.get("rope.scaling.type") or "none"
    if kind == "none":
        return None
    if ROPE_FACTORS in header.tensors or kind not in ("linear", "yarn"):
        raise GgufError(f"its rope.scaling.type is {kind!r:.60}, which is not served here")
    scaling = {"type": kind, "factor": keys.positive("rope.scaling.factor")}
    if kind == "yarn":
        original = keys.integer("rope.scaling.original_context_length")
        scaling |= {
            "original_max_position_embeddings": original,
            "beta_fast": keys.positive("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": keys.positive("rope.scaling.yarn_beta_slow", 1.0),
        }
    else:
        keys.get("rope.scaling.original_context_length")
    return scaling


def _biases(name: str, header: Header) -> dict[str, Any]:
    if name != "llama":
        return {}
    return {
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
    }


def _check_heads(name: str, config: dict[str, Any]) -> None:
    heads, kv_heads, head = (
        config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    if heads % kv_heads:
        raise GgufError(f"{heads} heads cannot share {kv_heads} heads of keys and values")
    if config.pop("rope_dims") not in (head, _MOST) or head % 2:
        raise GgufError("it rotates a part of each head, which is not served here")
    if name == "qwen2" and heads * head != config["hidden_size"]:
        raise GgufError(f"{heads} heads of {head} do not make {config['hidden_size']} dimensions")


def _expected(config: Mapping[str, Any]) -> Iterator[tuple[str, TensorPlace]]:
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", TensorPlace("token_embd.weight", (vocabulary, hidden))
    yield "model.norm.weight", TensorPlace("output_norm.weight", (hidden,))
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", TensorPlace("output.weight", (vocabulary, hidden))
    for layer in range(config["num_hidden_layers"]):
        for name, (tensor, shape) in _layer(config).items():
            yield f"model.layers.{layer}.{name}", TensorPlace(f"blk.{layer}.{tensor}", shape)


def _layer(config: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    hidden, inner, head = (config[key] for key in ("hidden_size", "intermediate_size", "head_dim"))
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    attention = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden)}
    feed = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    groups = (
        (
            "self_attn",
            "attn",
            attention,
            config.get("attention_bias", config["model_type"] == "qwen2"),
        ),
        ("mlp", "ffn", feed, config.get("mlp_bias")),
    )
    weights: dict[str, tuple[str, tuple[int, ...]]] = {
        "input_layernorm.weight": ("attn_norm.weight", (hidden,)),
        "post_attention_layernorm.weight": ("ffn_norm.weight", (hidden,)),
        "self_attn.o_proj.weight": ("attn_output.weight", (hidden, queries)),
    }
    for module, prefix, projections, has_bias in groups:
        for projection, shape in projections.items():
            name, tensor = f"{module}.{projection}_proj", f"{prefix}_{projection}"
            weights[f"{name}.weight"] = (f"{tensor}.weight", shape)
            if has_bias:
                weights[f"{name}.bias"] = (f"{tensor}.bias", shape[:1])
    if config["model_type"] == "qwen3":
        for projection in ("q", "k"):
            tensor = f"attn_{projection}_norm.weight"
            weights[f"self_attn.{projection}_norm.weight"] = (tensor, (head,))
    return weights
