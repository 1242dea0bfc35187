"""The head with which a model of Qwen3.5 guesses the token after the next one (multi-token
prediction).

mlx-lm drops the head's weights, `mtp.*`. The head's input is as in vLLM (qwen3_5_mtp.py): the
embedding of a token, and the normed hidden state of the token before it.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, KVCache
from mlx_lm.models.qwen3_5 import DecoderLayer

from gateway.engine.models.checkpoint import Checkpoint
from gateway.engine.models.folder import Tensor, join_names
from gateway.engine.models.own_classes import Classes, Weights, stack_experts

TYPES: Final = ("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text")
_OWN: Final = re.compile(r"(?:(?:language_)?model\.)*mtp\.(.+)")
_WHOLE: Final = "experts.gate_up_proj"
# The names of a head's norms whose kind the model's layers have too.
_LAYER_NORM: Final = re.compile(r"layers\.0\.(.*norm\.weight)")


class MtpHead(Module):
    """One layer of attention, which reads pairs of a token and the hidden state before it.

    Its KV has a place for each token. The first token has no state before it, so it is masked.
    """

    def __init__(self, args: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # its stub has no types
        width, epsilon = args.hidden_size, args.rms_norm_eps
        self.pre_fc_norm_embedding = RMSNorm(width, epsilon)
        self.pre_fc_norm_hidden = RMSNorm(width, epsilon)
        self.fc = Linear(2 * width, width, bias=False)
        self.layers = [DecoderLayer(args, args.full_attention_interval - 1)]
        self.norm = RMSNorm(width, epsilon)

    def __call__(self, hidden: mx.array, embedded: mx.array, kv: Any) -> mx.array:
        """Return the hidden states, (rows, n, width), that the next tokens are guessed from."""
        mask = kv.make_mask(hidden.shape[1], return_array=True)
        mask = mask & (mx.arange(mask.shape[-1]) > 0)
        guessed: mx.array = self.norm(self.layers[0](self._join(hidden, embedded), mask, kv))
        return guessed

    def follow(self, hidden: mx.array, embedded: mx.array, kv: Any) -> None:
        """Add pairs to the KV. Nothing else is computed, because nothing evaluates it."""
        layer: Any = self.layers[0]
        layer.self_attn(layer.input_layernorm(self._join(hidden, embedded)), cache=kv)

    def _join(self, hidden: mx.array, embedded: mx.array) -> mx.array:
        pair = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        joined: mx.array = self.fc(mx.concatenate(pair, axis=-1))
        return joined


def with_head(classes: Classes, found: Weights, *, is_quantized: bool) -> Classes:
    """Return the classes of a model with the head whose weights are in `found`."""
    base, arguments = classes

    class Model(base):  # type: ignore[misc, valid-type]  # chosen at run time
        """A model that keeps its head's KV, and the hidden state of each row's last token.

        They are the last two of its caches.
        """

        def __init__(self, args: Any) -> None:
            super().__init__(args)
            self.language_model.mtp = MtpHead(self.language_model.args)
            self.head_fault = ""  # why the head is not used
            self._is_checked = False

        def __call__(
            self, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None
        ) -> mx.array:
            text = self.language_model
            hidden = text.model(inputs, cache, input_embeddings=input_embeddings)
            if cache is not None and not self.head_fault:
                if input_embeddings is None:
                    input_embeddings = text.model.embed_tokens(inputs)
                _follow(text.mtp, hidden, input_embeddings, *cache[-2:])
            return self.score(hidden)

        def score(self, hidden: mx.array) -> mx.array:
            """Return the logits, (rows, n, vocabulary), of hidden states."""
            text = self.language_model
            is_tied = text.args.tie_word_embeddings
            logits: mx.array = (text.model.embed_tokens.as_linear if is_tied else text.lm_head)(
                hidden
            )
            return logits

        def guess(self, hidden: mx.array, tokens: mx.array, kv: Any) -> mx.array:
            """Return the head's states, (rows, n, width), after `tokens`, (rows, n)."""
            text = self.language_model
            states: mx.array = text.mtp(hidden, text.model.embed_tokens(tokens), kv)
            return states

        def make_cache(self) -> list[Any]:
            own: list[Any] = [] if self.head_fault else [ArraysCache(1), KVCache()]  # type: ignore[no-untyped-call]
            return [*super().make_cache(), *own]

        def sanitize(self, weights: Weights) -> Weights:
            kept: dict[str, mx.array] = super().sanitize(dict(weights))
            text = self.language_model
            own = _name(found)
            if not self._is_checked:
                self._is_checked = True
                self.head_fault = _find_fault(own, text.mtp, is_quantized=is_quantized)
                if self.head_fault:
                    text.pop("mtp")
            if self.head_fault:
                return kept
            is_raw = any("conv1d.weight" in n and a.shape[-1] != 1 for n, a in weights.items())
            own = _add_ones(own, kept, is_raw=is_raw)
            return kept | {f"language_model.mtp.{name}": array for name, array in own.items()}

    return Model, arguments


def has_mtp_head(config: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Return True if a model of a supported type has arrays of a head."""
    return config.get("model_type") in TYPES and any(map(_OWN.fullmatch, names))


def head_tensors(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """List the arrays of a checkpoint's head; there are none if its type is not supported."""
    tensors = checkpoint.all_tensors()
    has_head = has_mtp_head(checkpoint.config(), tensors)
    return {name: each for name, each in tensors.items() if has_head and _OWN.fullmatch(name)}


def uses_head(model: Any) -> bool:
    """Return True if a loaded model has a head that fits it."""
    return getattr(model, "head_fault", None) == ""


def _follow(head: MtpHead, hidden: mx.array, embedded: mx.array, states: Any, kv: Any) -> None:
    rows, tokens, width = hidden.shape
    before = mx.zeros((rows, 1, width), hidden.dtype) if states[0] is None else states[0]
    series = mx.concatenate([before, hidden], axis=1)
    head.follow(series[:, :-1], embedded, kv)
    if states.lengths is None:
        states[0] = mx.contiguous(series[:, -1:])
    else:  # the rows are padded
        ends = mx.clip(states.lengths, 0, tokens)[:, None, None]
        states[0] = mx.take_along_axis(series, ends, axis=1)
    # After a rollback, the next guess needs the states of the accepted tokens.
    states.recent = None if getattr(states, "earlier", None) is None else hidden
    states.advance(tokens)


def _name(found: Weights) -> dict[str, mx.array]:
    """Return a head's weights by their names in `MtpHead`."""
    matches = {_OWN.fullmatch(name): array for name, array in found.items()}
    own = dict(stack_experts({match[1]: array for match, array in matches.items() if match}))
    for name in [name for name in own if name.endswith(_WHOLE)]:
        start, whole = name.removesuffix(_WHOLE), own.pop(name)
        half = whole.shape[-2] // 2
        own[f"{start}switch_mlp.gate_proj.weight"] = whole[..., :half, :]
        own[f"{start}switch_mlp.up_proj.weight"] = whole[..., half:, :]
        down = own.pop(f"{start}experts.down_proj", None)
        if down is not None:
            own[f"{start}switch_mlp.down_proj.weight"] = down
    return own


def _find_fault(own: Mapping[str, mx.array], head: MtpHead, *, is_quantized: bool) -> str:
    packed = {name.removesuffix(".scales") for name in own if name.endswith(".scales")}
    module: Any = head
    named: Any = tree_flatten(module.parameters())
    expected = {name: array.shape for name, array in named}
    extra = {f"{each}.{part}" for each in packed for part in ("scales", "biases")}
    unfit = {
        name
        for name in expected.keys() & own.keys()
        if name.rpartition(".")[0] not in packed and own[name].shape != expected[name]
    }
    unfit |= expected.keys() ^ (own.keys() - extra)
    if packed and not is_quantized:
        unfit |= packed
    return f"it lacks or has others than these: {join_names(unfit)}" if unfit else ""


def _add_ones(own: Mapping[str, mx.array], kept: Weights, *, is_raw: bool) -> dict[str, mx.array]:
    """Add 1 to norms that are stored as in transformers, which multiplies by 1 + weight.

    Converters add it to a model's norms, but not always to its head's, which are therefore compared
    with the model's norms of the same kind.
    """
    added = dict(own)
    shifts: dict[str, bool] = {}
    for name, array in own.items():
        match = _LAYER_NORM.fullmatch(name)
        kind = match[1] if match else "model.norm.weight"
        like = [each for key, each in kept.items() if key.endswith(f".{kind}")]
        if name.endswith("norm.weight") and like:
            mean, usual = array.mean().item(), like[-1].mean().item()
            shifts[name] = is_raw or abs(mean + 1 - usual) < abs(mean - usual)
    for name in own:
        if "pre_fc_norm" in name:  # their means don't tell, so the layer's norm does
            shifts[name] = shifts.get("layers.0.input_layernorm.weight", is_raw)
    for name, is_shifted in shifts.items():
        if is_shifted:
            added[name] = own[name] + 1.0
    return added
