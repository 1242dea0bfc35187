"""The head with which a model guesses the token after the next one (multi-token prediction).

mlx-lm drops the heads' weights: `mtp.*` of Qwen3.5, `model.mtp_layers.*` of MiMo and, in the layout
of DeepSeek V3, the layer after the last. A head's input is as in vLLM (qwen3_5_mtp.py, mimo_mtp.py,
deepseek_mtp.py): the embedding of a token, and the normed hidden state of the token before it.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from inspect import signature
from typing import Any, Final

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, KVCache

from gateway.engine.models.folder import join_names
from gateway.engine.models.head_names import (
    AFTER_LAST,
    NAMES,
    QWEN,
    head_names,
    is_later,
    later_layers,
    packed_modules,
)
from gateway.engine.models.hidden_states import keep_state
from gateway.engine.models.own_classes import Classes, Weights, stack_experts

# The modules of `MtpHead`, by their names in the files of other families.
_MODULES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("enorm", "token_layernorm"), "pre_fc_norm_embedding"),
    **dict.fromkeys(("hnorm", "hidden_layernorm"), "pre_fc_norm_hidden"),
    **dict.fromkeys(("eh_proj", "input_proj"), "fc"),
    **dict.fromkeys(("shared_head.norm", "final_layernorm"), "norm"),
}
_FIRST: Final = "model.layers.0."
_WHOLE: Final = "experts.gate_up_proj"
# The names of a head's norms whose kind the model's layers have too.
_LAYER_NORM: Final = re.compile(r"layers\.0\.(.*norm\.weight)")


class MtpHead(Module):
    """One layer of attention, which reads pairs of a token and the hidden state before it.

    Its KV has a place for each token. The first token has no state before it, so it is masked.
    """

    def __init__(self, text: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # its stub has no types
        args, layers = text.args, text.model.layers
        width, epsilon = args.hidden_size, args.rms_norm_eps
        self.pre_fc_norm_embedding = RMSNorm(width, epsilon)
        self.pre_fc_norm_hidden = RMSNorm(width, epsilon)
        self.fc = Linear(2 * width, width, bias=False)
        # A hybrid model's last layer of each interval has full attention.
        place = getattr(args, "full_attention_interval", len(layers) + 1) - 1
        kind = type(layers[-1])
        self.layers = [kind(args, place) if len(signature(kind).parameters) > 1 else kind(args)]
        self.norm = RMSNorm(width, epsilon)
        # Whether the states that the next guess is made from are normed.
        self.feeds_normed = NAMES.get(args.model_type) != AFTER_LAST

    def __call__(self, hidden: mx.array, embedded: mx.array, kv: Any) -> mx.array:
        """Return the hidden states, (rows, n, width), that the next tokens are guessed from."""
        mask = kv.make_mask(hidden.shape[1], return_array=True)
        mask = mask & (mx.arange(mask.shape[-1]) > 0)
        guessed: mx.array = self.layers[0](self._join(hidden, embedded), mask, kv)
        return self.norm(guessed) if self.feeds_normed else guessed

    def finish(self, hidden: mx.array) -> mx.array:
        """Return what the logits of a guess are made from."""
        finished: mx.array = hidden if self.feeds_normed else self.norm(hidden)
        return finished

    def follow(self, hidden: mx.array, embedded: mx.array, kv: Any) -> None:
        """Add pairs to the KV. Nothing else is computed, because nothing evaluates it."""
        layer: Any = self.layers[0]
        layer.self_attn(layer.input_layernorm(self._join(hidden, embedded)), cache=kv)

    def _join(self, hidden: mx.array, embedded: mx.array) -> mx.array:
        pair = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        joined: mx.array = self.fc(mx.concatenate(pair, axis=-1))
        return joined


class _Headed(Module):
    """A model that keeps its head's KV, and the hidden state of each row's last token.

    They are the last two of its caches.
    """

    head_fault = ""  # why the head is not used
    _is_checked = False

    @property
    def _text(self) -> Any:
        return getattr(self, "language_model", self)

    def __call__(
        self, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None
    ) -> mx.array:
        text = self._text
        given = {} if input_embeddings is None else {"input_embeddings": input_embeddings}
        hidden = text.model(inputs, cache, **given)
        if cache is not None and not self.head_fault:
            if input_embeddings is None:
                input_embeddings = text.model.embed_tokens(inputs)
            series = keep_state(cache[-2], hidden)
            text.mtp.follow(series[:, :-1], input_embeddings, cache[-1])
        return self._score(hidden)

    def guess(self, hidden: mx.array, tokens: mx.array, kv: Any) -> mx.array:
        """Return the head's states, (rows, n, width), after `tokens`, (rows, n)."""
        text = self._text
        states: mx.array = text.mtp(hidden, text.model.embed_tokens(tokens), kv)
        return states

    def score(self, states: mx.array) -> mx.array:
        """Return the logits, (rows, n, vocabulary), of the head's states."""
        return self._score(self._text.mtp.finish(states))

    def _score(self, hidden: mx.array) -> mx.array:
        text = self._text
        output = text.lm_head if "lm_head" in text else text.model.embed_tokens.as_linear
        logits: mx.array = output(hidden)
        return logits

    def make_cache(self) -> list[Any]:
        kv: Any = KVCache  # untyped in mlx-lm
        parent: Any = super()
        has_own = hasattr(parent, "make_cache")
        layers = parent.make_cache() if has_own else [kv() for _ in self.layers]
        return layers if self.head_fault else [*layers, ArraysCache(1), kv()]

    def name_head(self, own: Weights, packing: dict[str, Any] | None) -> dict[str, mx.array]:
        """Return a head's weights by their names in the model; none if they don't fit it."""
        text = self._text
        if not self._is_checked:  # mlx-lm quantizes the head after this
            self._is_checked = True
            self.head_fault = _find_fault(own, text.mtp, is_quantized=packing is not None)
            if self.head_fault:
                text.pop("mtp")
        if self.head_fault:
            return {}
        prefix = "mtp." if text is self else "language_model.mtp."
        if packing is not None:  # mlx-lm looks these up after this
            packing |= _find_packing(own, text.mtp, prefix)
        return {f"{prefix}{name}": array for name, array in own.items()}


def with_head(
    classes: Classes, config: Mapping[str, Any], found: Weights, *, is_used: bool
) -> Classes:
    """Return the classes of a model with the head whose weights are in `found`.

    If not `is_used`, these weights are dropped.
    """
    base, arguments = classes
    packing, later = config.get("quantization"), later_layers(config)
    # Emptied once it is read: the class lives on after its model, until Python collects garbage.
    head = {own: found[name] for name, own in head_names(config, found).items()}
    is_qwen = NAMES[config["model_type"]] == QWEN

    class Headless(base):  # type: ignore[misc, valid-type]  # chosen at run time
        def sanitize(self, weights: Weights) -> Weights:
            rest = {name: each for name, each in weights.items() if not is_later(name, later)}
            return super().sanitize(rest)  # type: ignore[no-any-return]

    class Model(_Headed, Headless):
        def __init__(self, args: Any) -> None:
            super().__init__(args)  # type: ignore[call-arg, no-untyped-call]
            self._text.mtp = MtpHead(self._text)

        def sanitize(self, weights: Weights) -> Weights:
            kept = dict(super().sanitize(weights))
            stored, own = dict(head), dict[str, mx.array]()
            head.clear()
            if not stored:
                return kept
            with suppress(IndexError, KeyError, ValueError):  # arrays of odd shapes are no head
                if is_qwen:
                    convs = (each.shape for n, each in weights.items() if "conv1d.weight" in n)
                    is_raw = any(shape[-1] != 1 for shape in convs)
                    own = _add_ones(_stack(stored), kept, is_raw=is_raw)
                else:  # the class splits and stacks these as it does those of its own layers
                    layer = {f"{_FIRST}{name}": each for name, each in stored.items()}
                    own = _rename(super().sanitize(layer))
            return kept | self.name_head(own, packing)

    return Model if is_used else Headless, arguments


def uses_head(model: Any) -> bool:
    """Return True if a loaded model has a head that fits it."""
    return getattr(model, "head_fault", None) == ""


def _rename(found: Weights) -> dict[str, mx.array]:
    """Return the weights of another family's head by their names in `MtpHead`."""
    own = {}
    for name, array in found.items():
        module, _, part = name.removeprefix(_FIRST).rpartition(".")
        if module == "input_proj":  # it takes the hidden state first
            array = mx.roll(array, array.shape[-1] // 2, -1)
        own[f"{_MODULES.get(module, f'layers.0.{module}')}.{part}"] = array
    return own


def _stack(found: Weights) -> dict[str, mx.array]:
    """Return the weights of Qwen3.5's head with all experts in one array."""
    own = dict(stack_experts(found))
    for name in [name for name in own if name.endswith(_WHOLE)]:
        start, whole = name.removesuffix(_WHOLE), own.pop(name)
        half = whole.shape[-2] // 2
        own[f"{start}switch_mlp.gate_proj.weight"] = whole[..., :half, :]
        own[f"{start}switch_mlp.up_proj.weight"] = whole[..., half:, :]
        down = own.pop(f"{start}experts.down_proj", None)
        if down is not None:
            own[f"{start}switch_mlp.down_proj.weight"] = down
    return own


def _find_fault(own: Weights, head: MtpHead, *, is_quantized: bool) -> str:
    packed, expected = packed_modules(own), _shapes(head)
    extra = {f"{each}.{part}" for each in packed for part in ("scales", "biases")}
    unfit = {
        name
        for name in expected.keys() & own.keys()
        if name.rpartition(".")[0] not in packed
        and (own[name].shape != expected[name] or not mx.issubdtype(own[name].dtype, mx.floating))
    }
    unfit |= expected.keys() ^ (own.keys() - extra)
    unfit |= {
        module
        for module in packed
        if not is_quantized or _read_packing(own, module, expected.get(f"{module}.weight")) is None
    }
    return f"it lacks or has others than these: {join_names(unfit)}" if unfit else ""


def _shapes(head: MtpHead) -> dict[str, tuple[int, ...]]:
    module: Any = head
    named: Any = tree_flatten(module.parameters())
    return {name: array.shape for name, array in named}


def _find_packing(own: Weights, head: MtpHead, prefix: str) -> dict[str, dict[str, int]]:
    """Return how each packed module is packed, which need not be as the model's modules are."""
    shapes = _shapes(head)
    found = {
        each: _read_packing(own, each, shapes[f"{each}.weight"]) for each in packed_modules(own)
    }
    return {f"{prefix}{module}": packing for module, packing in found.items() if packing}


def _read_packing(
    own: Weights, module: str, shape: tuple[int, ...] | None
) -> dict[str, int] | None:
    """Return how a module of this shape is packed; None if its arrays don't fit.

    Without biases, the dict is empty, because mlx-lm finds the mode.
    """
    weight, scales, biases = (
        own.get(f"{module}.{part}") for part in ("weight", "scales", "biases")
    )
    if shape is None or weight is None or scales is None:
        return None
    if biases is None:
        return {} if scales.dtype == mx.uint8 else None
    try:
        bits, group = weight.shape[-1] * 32 // shape[-1], shape[-1] // scales.shape[-1]
        whole = mx.dequantize(weight, scales, biases, group_size=group, bits=bits)
    except (IndexError, ValueError, ZeroDivisionError):
        return None
    return {"group_size": group, "bits": bits} if whole.shape == shape else None


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
