"""EmbeddingGemma 2's text model, made of mlx-lm's layers of Gemma 4.

Source: transformers, models/embedding_gemma2/modeling_embedding_gemma2.py.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf, sqrt
from typing import Any, Final

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx_lm.models.gemma4_text import DecoderLayer, ModelArgs

from gateway.engine.device import Device
from gateway.engine.embedding.decoder import BothWays, Decoder
from gateway.engine.models.checkpoint import Checkpoint
from gateway.engine.models.configs import complete
from gateway.engine.models.context import text_context
from gateway.engine.models.counts import text_config
from gateway.engine.models.decoders import open_decoder

TEXT: Final = "embedding_gemma2_text"
_SLIDING: Final = "sliding_attention"
_FULL: Final = "full_attention"
_GELU: Final = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")
_TOWERS: Final = re.compile(r"(model\.)?(vision_tower|embed_vision|audio_tower|embed_audio)\.")
# What stands around a name: a whole model's prefixes, and a part of each layer.
_AROUND: Final = re.compile(r"^(model\.)?(language_model\.)?(model\.)?|(?<=\.)ple_block\.")
# Keys of tokens that stand for images and sound, with transformers' defaults.
_MEDIA: Final = {"image_token_id": 258_880, "video_token_id": 258_884, "audio_token_id": 258_881}
# What Gemma 4's layers can do and this model's don't.
_PLAIN: Final = {
    **dict.fromkeys(("global_head_dim", "num_kv_shared_layers"), 0),
    **dict.fromkeys(("attention_k_eq_v", "enable_moe_block", "use_double_wide_mlp"), False),
}


@dataclass(frozen=True, slots=True)
class TextArgs:
    """The settings that affect results."""

    layers: tuple[Any, ...]  # mlx-lm's arguments of each layer
    dimensions: int
    window: int  # the largest distance between tokens that see each other in sliding layers
    padding_id: int
    media: tuple[int, ...]  # tokens that are read as padding

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "TextArgs":
        """Read config.json, of the whole model or of its text model. Raises ValueError."""
        text = dict(text_config(config))
        kind = text.setdefault("model_type", TEXT)
        complete(text)
        if kind != TEXT or text["hidden_activation"] not in _GELU or text.get("attention_bias"):
            names = ("model_type", "hidden_activation", "attention_bias")
            stated = ", ".join(f"{name} {text.get(name)!r:.40}" for name in names)
            raise ValueError(f"not supported in EmbeddingGemma 2: {stated}")
        window = int(text["sliding_window"])
        if window < 0:
            raise ValueError(f"sliding_window is {window}, not from 0 on")
        media = {**_MEDIA, **config} if config.get("model_type") != TEXT else {}
        return cls(
            layers=tuple(_layers(text)),
            dimensions=int(text["embedding_dim"]),
            window=window,
            padding_id=int(text.get("pad_token_id") or 0),
            media=tuple(int(media[key]) for key in _MEDIA if media.get(key) is not None),
        )


def _layers(text: Mapping[str, Any]) -> Iterator[Any]:
    """Yield mlx-lm's arguments of each layer, by transformers' rules for the keys."""
    count, every = int(text["num_hidden_layers"]), int(text.get("sliding_window_pattern", 6))
    regular = [_FULL if index % every == 0 else _SLIDING for index in range(1, count + 1)]
    types = list(text.get("layer_types") or regular)
    if count < 1 or every < 1 or len(types) != count or not {*types} <= {_SLIDING, _FULL}:
        raise ValueError(f"{count} layers cannot have the layer_types {types!r:.80}")
    types[-1] = _FULL
    for kind in {*types}:
        rope = text["rope_parameters"][kind]
        if rope.get("rope_type", "default") != "default" or not 0 < rope["rope_theta"] < inf:
            raise ValueError(f"rope_parameters of {kind} are not supported: {rope!r:.80}")
    wide = {
        "head_dim": text.get("global_head_dim", 512),
        "num_key_value_heads": text.get("num_global_key_value_heads", 1),
    }
    own = text.get("per_layer_config")
    if own is None:
        own = {index: wide for index, kind in enumerate(types) if kind == _FULL}
    own = {int(index): changes for index, changes in own.items()}
    for changes in own.values():
        if not changes.keys() <= wide.keys():
            raise ValueError(f"per_layer_config is not supported: {changes!r:.80}")
    for index in range(count):
        yield ModelArgs.from_dict({**text, **_PLAIN, "layer_types": types, **own.get(index, {})})


class PerLayerInputs(Module):
    """Maps embeddings, (…, width), to each layer's own input, (…, layers, own width)."""

    def __init__(self, args: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # its stub has no types
        width, own = args.hidden_size, args.hidden_size_per_layer_input
        self.per_layer_model_projection = Linear(width, args.num_hidden_layers * own, bias=False)
        self.per_layer_projection_norm = RMSNorm(own, eps=args.rms_norm_eps)
        self._shape = (args.num_hidden_layers, own)

    def __call__(self, x: mx.array) -> mx.array:
        projected = self.per_layer_model_projection(x) * x.shape[-1] ** -0.5
        normed: mx.array = self.per_layer_projection_norm(
            projected.reshape(*x.shape[:-1], *self._shape)
        )
        return normed


class TextModel(Module):
    """The embeddings, the layers, and the projection of their states to the vectors' dimensions."""

    def __init__(self, args: TextArgs) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # its stub has no types
        first = args.layers[0]
        self.args = args
        self.embed_tokens = Embedding(first.vocab_size, first.hidden_size)
        self.ple = PerLayerInputs(first)
        self.layers = [DecoderLayer(each, index) for index, each in enumerate(args.layers)]
        self.norm = RMSNorm(first.hidden_size, eps=first.rms_norm_eps)
        self.embedding_projection = Linear(first.hidden_size, args.dimensions, bias=False)

    def sanitize(self, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
        return {_AROUND.sub("", n): a for n, a in weights.items() if not _TOWERS.match(n)}

    def __call__(self, tokens: mx.array, mask: mx.array | None) -> Iterator[mx.array]:
        """Yield the states after each layer, and finally the projected states."""
        for medium in self.args.media:
            tokens = mx.where(tokens == medium, self.args.padding_id, tokens)
        seen, length = BothWays(mask), tokens.shape[1]
        masks = {
            _SLIDING: seen.make_mask(length, window_size=2 * self.args.window),
            _FULL: seen.make_mask(length),
        }
        x: mx.array = self.embed_tokens(tokens)
        x = x * sqrt(x.shape[-1])
        inputs = self.ple(x)
        for index, layer in enumerate(self.layers):
            x, *_ = layer(x, masks[layer.layer_type], per_layer_input=inputs[:, :, index])
            yield x
        yield self.embedding_projection(self.norm(x))


class EmbeddingGemma2(Decoder):
    """The text model as an encoder: ids, (rows, tokens), to states, (rows, tokens, dimensions)."""

    def __init__(
        self, checkpoint: Checkpoint, raw: Mapping[str, Any], device: Device, dtype: str | None
    ) -> None:
        with checkpoint.reading_config():
            args = TextArgs.from_dict(raw)
            self.max_tokens = text_context(raw)
        self._model, _ = open_decoder(
            checkpoint, device=device, dtype=dtype, context=self.max_tokens, classes=_classes
        )
        self.vocabulary = int(args.layers[0].vocab_size)
        self.dimensions, self.padding_id = args.dimensions, args.padding_id

    def __call__(
        self, tokens: mx.array, mask: mx.array | None, types: mx.array | None = None
    ) -> Iterator[mx.array]:
        yield from self._model(tokens, mask)


def _classes(config: dict[str, Any]) -> tuple[type[Module], type]:
    packed = config.get("quantization")
    if packed:
        config["quantization"] = {_AROUND.sub("", key): value for key, value in packed.items()}
    return TextModel, TextArgs
