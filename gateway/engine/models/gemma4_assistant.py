"""The drafter of Gemma 4 (its "assistant"), which guesses tokens from its target's state.

Source: transformers' `Gemma4AssistantForCausalLM`, with the same names. It has no KV: each layer
reads that of the target's last layer of its type. All tokens of a draft have the same position.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx_lm.models import gemma4_text
from mlx_lm.models.base import BaseModelArgs
from mlx_lm.models.cache import ArraysCache

from gateway.engine.models.hidden_states import keep_state

KvOfTypes = Mapping[str, tuple[mx.array, mx.array, mx.array | None]]  # keys, values and mask


@dataclass
class ModelArgs(BaseModelArgs):
    """The keys of config.json that the drafter needs."""

    model_type: str
    text_config: dict[str, Any]
    backbone_hidden_size: int
    use_ordered_embeddings: bool = False
    num_centroids: int = 2048
    centroid_intermediate_top_k: int = 32
    tie_word_embeddings: bool = True


class _Decoder(Module):
    def __init__(self, args: gemma4_text.ModelArgs) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # its stub has no types
        self.embed_tokens = Embedding(args.vocab_size, args.hidden_size)
        layers = range(args.num_hidden_layers)
        self.layers: list[Any] = [gemma4_text.DecoderLayer(args, i) for i in layers]
        self.norm = RMSNorm(args.hidden_size, args.rms_norm_eps)


class _Centroids(Module):
    """The lists of tokens, of equal length, that share a centroid."""

    def __init__(self, args: ModelArgs, width: int, vocab_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.centroids = Linear(width, args.num_centroids, bias=False)
        self.token_ordering = mx.zeros((vocab_size,), mx.int32)


_Text: Any = gemma4_text.Model  # untyped; its keys of config.json are the drafter's


class Model(_Text):  # type: ignore[misc]
    """A drafter. Raises ValueError for a config that transformers' class refuses."""

    def __init__(self, args: ModelArgs) -> None:
        Module.__init__(self)  # type: ignore[no-untyped-call]
        arguments: Any = gemma4_text.ModelArgs  # its `from_dict` is untyped
        text: gemma4_text.ModelArgs = arguments.from_dict(args.text_config)
        if not args.tie_word_embeddings or text.enable_moe_block:
            raise ValueError("a drafter of Gemma 4 has tied embeddings and no experts")
        text.num_kv_shared_layers = text.num_hidden_layers
        self.args, self.text = args, text
        self.model = _Decoder(text)
        self.pre_projection = Linear(2 * args.backbone_hidden_size, text.hidden_size, bias=False)
        self.post_projection = Linear(text.hidden_size, args.backbone_hidden_size, bias=False)
        if args.use_ordered_embeddings:
            if args.num_centroids < 1 or text.vocab_size % args.num_centroids:
                raise ValueError("num_centroids does not divide vocab_size")
            if not 0 < args.centroid_intermediate_top_k <= args.num_centroids:
                raise ValueError("centroid_intermediate_top_k is not in 1 … num_centroids")
            self.masked_embedding = _Centroids(args, text.hidden_size, text.vocab_size)

    @property
    def layers(self) -> Sequence[Any]:
        return self.model.layers

    def __call__(self, inputs: mx.array, kv: KvOfTypes, offset: int | mx.array) -> mx.array:
        """Return states, (rows, 1, width).

        `inputs` are the target's embeddings and states, (rows, 1, 2 × the target's width), and
        `offset` the position of each row's token.
        """
        h: mx.array = self.pre_projection(inputs)
        for layer in self.layers:
            keys, values, mask = kv[layer.layer_type]
            h, _, _ = layer(h, mask, shared_kv=(keys, values), offset=offset)
        normed: mx.array = self.model.norm(h)
        return normed

    def score(self, states: mx.array) -> mx.array:
        """Return the logits, (rows, 1, vocabulary); those of unlikely lists are -inf."""
        embed: Any = self.model.embed_tokens
        if not self.args.use_ordered_embeddings:
            return embed.as_linear(states)  # type: ignore[no-any-return]
        ordered, top_k = self.masked_embedding, self.args.centroid_intermediate_top_k
        likely = mx.argpartition(ordered.centroids(states), -top_k, axis=-1)[..., -top_k:]
        lists = ordered.token_ordering.reshape(self.args.num_centroids, -1)
        tokens = lists[likely].flatten(-2)
        logits = (embed(tokens) @ states[..., None]).squeeze(-1)
        others = mx.full((*states.shape[:-1], self.text.vocab_size), -mx.inf, logits.dtype)
        return mx.put_along_axis(others, tokens, logits, axis=-1)

    def sanitize(self, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
        return {name: each for name, each in weights.items() if not name.startswith("lm_head.")}


def text_model(target: Any) -> Any:
    """Return the part of a Gemma 4 model that reads text; None if it is another model."""
    text = getattr(target, "language_model", target)
    return text if isinstance(text, gemma4_text.Model) else None


def keep_states(target: Any) -> None:
    """Let a model of Gemma 4 keep each row's last hidden state, in the last of its caches.

    Other models stay as they are.
    """
    text = text_model(target)
    if text is None:
        return
    decoder, outer = type(text.model), type(target)

    class Decoder(decoder):  # type: ignore[misc, valid-type]  # chosen at run time
        def __call__(self, inputs: Any, cache: Any = None, **given: Any) -> mx.array:
            if cache is None:
                return super().__call__(inputs, **given)  # type: ignore[no-any-return]
            hidden: mx.array = super().__call__(inputs, cache[:-1], **given)
            keep_state(cache[-1], hidden)
            return hidden

    class Target(outer):  # type: ignore[misc, valid-type]
        def make_cache(self) -> list[Any]:
            return [*super().make_cache(), ArraysCache(1)]

    text.model.__class__, target.__class__ = Decoder, Target


def shared_layers(text: Any) -> dict[str, int]:
    """Return the index of the last layer with KV of its own, for each type of layer."""
    own = text.args.num_hidden_layers - text.args.num_kv_shared_layers
    return {layer.layer_type: index for index, layer in enumerate(text.layers[:own])}


def find_misfit(drafter: Model, target: Any) -> str:
    """Return why a drafter can't guess for a model; "" if it can."""
    text, args = text_model(target), drafter.args
    if text is None:
        return "it is not a model of Gemma 4"
    if args.use_ordered_embeddings:  # MLX reads and writes beyond an array's end without an error
        ordering = drafter.masked_embedding.token_ordering
        is_token = (ordering >= 0) & (ordering < drafter.text.vocab_size)
        if not mx.issubdtype(ordering.dtype, mx.integer) or not is_token.all().item():
            return "masked_embedding.token_ordering names what are no tokens"
    pairs = {
        "backbone_hidden_size": (args.backbone_hidden_size, text.args.hidden_size),
        "vocab_size": (drafter.text.vocab_size, text.args.vocab_size),
    }
    own = shared_layers(text)
    for layer in drafter.layers:
        kind, reader = layer.layer_type, layer.self_attn
        if kind not in own:
            return f"it has no KV of {kind}"
        kept = text.layers[own[kind]].self_attn
        pairs[f"head_dim of {kind}"] = reader.head_dim, kept.head_dim
        pairs[f"num_key_value_heads of {kind}"] = reader.n_kv_heads, kept.n_kv_heads
    for name, (one, other) in pairs.items():
        if one != other:
            return f"{name} is {one}, but the model has {other}"
    return ""
