"""EmbeddingGemma 2's text model, made of mlx-lm's layers of Gemma 4.

Source: transformers, models/embedding_gemma2/modeling_embedding_gemma2.py.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf, sqrt
from typing import Any, Final, cast

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
_GELU: Final = "gelu_pytorch_tanh"
_TOWERS: Final = re.compile(r"(model\.)?(vision_tower|embed_vision|audio_tower|embed_audio)\.")
# Prefixes of names in a whole model, and the module of the per-layer inputs.
_AROUND: Final = re.compile(r"^(model\.)?(language_model\.)?(model\.)?(ple\.)?|(?<=\.)ple_block\.")
# Keys of tokens that stand for images and sound, with transformers' defaults.
_MEDIA: Final = {"image_token_id": 258_880, "video_token_id": 258_884, "audio_token_id": 258_881}
# Keys of Gemma 4's layers, with the values of this model's.
_PLAIN: Final = {
    **dict.fromkeys(("global_head_dim", "num_kv_shared_layers", "rope_traditional"), False),
    **dict.fromkeys(("attention_k_eq_v", "enable_moe_block"), False),
}


@dataclass(frozen=True, slots=True)
class TextArgs:
    """The settings that affect results."""

    layers: list[Any]  # mlx-lm's arguments of each layer
    dimensions: int
    window: int  # the largest distance between tokens that see each other in sliding layers
    padding_id: int
    media: list[int]  # tokens that are read as padding

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "TextArgs":
        """Read config.json, of the whole model or of its text model."""
        text = {"model_type": TEXT, **text_config(config)}
        complete(text)
        types = text["layer_types"] = [*text["layer_types"][:-1], _FULL]  # as in transformers
        served = {"model_type": TEXT, "hidden_activation": _GELU, "attention_bias": False}
        wrong = {key for key, value in served.items() if text[key] != value}
        wrong |= {"sliding_window"} if text["sliding_window"] < 0 else set()
        if len(types) != text["num_hidden_layers"] or not {*types} <= {_SLIDING, _FULL}:
            wrong.add("layer_types")
        for kind in types:
            rope = text["rope_parameters"].get(kind) or {}
            if rope.get("rope_type") != "default" or not 0 < rope["rope_theta"] < inf:
                wrong.add("rope_parameters")
        wide = {int(index): own for index, own in text["per_layer_config"].items()}
        if not {key for own in wide.values() for key in own} <= {"head_dim", "num_key_value_heads"}:
            wrong.add("per_layer_config")
        if wrong:
            stated = ", ".join(f"{key} {text[key]!r:.80}" for key in sorted(wrong))
            raise ValueError(f"not supported in EmbeddingGemma 2: {stated}")
        layers, make = [wide.get(i, {}) for i in range(len(types))], cast(Any, ModelArgs.from_dict)
        media = {**_MEDIA, **config} if config.get("model_type") != TEXT else {}
        return cls(
            layers=[make({**text, **_PLAIN, **own}) for own in layers],
            dimensions=int(text["embedding_dim"]),
            window=int(text["sliding_window"]),
            padding_id=int(text.get("pad_token_id") or 0),
            media=[int(media[key]) for key in _MEDIA if media.get(key) is not None],
        )


class TextModel(Module):
    """The embeddings, the layers, and the projection of their states to the vectors' dimensions."""

    def __init__(self, args: TextArgs) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # its stub has no types
        first, count = args.layers[0], len(args.layers)
        width, own = first.hidden_size, first.hidden_size_per_layer_input
        self.args = args
        self.embed_tokens = Embedding(first.vocab_size, width)
        self.per_layer_model_projection = Linear(width, count * own, bias=False)
        self.per_layer_projection_norm = RMSNorm(own, eps=first.rms_norm_eps)
        self.layers = [DecoderLayer(each, index) for index, each in enumerate(args.layers)]
        self.norm = RMSNorm(width, eps=first.rms_norm_eps)
        self.embedding_projection = Linear(width, args.dimensions, bias=False)

    def sanitize(self, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
        return {_AROUND.sub("", n): a for n, a in weights.items() if not _TOWERS.match(n)}

    def __call__(self, tokens: mx.array, mask: mx.array | None) -> Iterator[mx.array]:
        """Yield the states after each layer, and finally the projected states."""
        for medium in self.args.media:
            tokens = mx.where(tokens == medium, self.args.padding_id, tokens)
        seen, length = BothWays(mask), tokens.shape[1]
        near = seen.make_mask(length, window_size=2 * self.args.window)
        masks = {_SLIDING: near, _FULL: seen.make_mask(length)}
        x: mx.array = self.embed_tokens(tokens)
        x = x * sqrt(x.shape[-1])
        inputs = self.per_layer_model_projection(x) * x.shape[-1] ** -0.5
        inputs = self.per_layer_projection_norm(inputs.reshape(*x.shape[:2], len(self.layers), -1))
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
    packed = config.get("quantization") or {}
    config["quantization"] = {_AROUND.sub("", key): value for key, value in packed.items()} or None
    return TextModel, TextArgs
