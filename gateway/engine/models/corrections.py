"""Corrections of faults in mlx-lm's classes. docs/upstream.md says how to reproduce the faults."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import mlx.core as mx
from mlx.nn.layers import activations
from mlx.nn.layers.base import Module
from mlx_lm.models.switch_layers import SwitchGLU

from gateway.engine.models.family_defaults import default_of
from gateway.engine.models.ropes import correct_ropes
from gateway.engine.models.unread import reader_of

Activation = Callable[[mx.array], mx.array]
_ACTIVATIONS: Final[Mapping[str, Activation]] = {
    "gelu": activations.gelu,
    **dict.fromkeys(("gelu_fast", "gelu_new", "gelu_pytorch_tanh"), activations.gelu_approx),
    "relu": activations.relu,
    "relu2": activations.relu2,
    **dict.fromkeys(("silu", "swish"), activations.silu),
}
_ROUTER_BIAS: Final = "model.layers.{}.mlp.moe_statics.e_score_correction_bias"


def correct(
    model: Any, text: Mapping[str, Any], weights: Mapping[str, mx.array], context: int | None
) -> None:
    """Correct the faults of an mlx-lm model for texts of up to `context` tokens.

    `text` is the language model's config. Must run on the lane. Raises ValueError for faults that
    cannot be corrected.
    """
    reads = reader_of(type(model))
    correct_ropes(model, text, reads, context)
    _correct_activation(model, text, reads)
    kind = text.get("model_type")
    if kind in ("ernie4_5_moe", "jamba"):
        _correct_routers(model, weights)
    elif kind == "falcon_h1":
        _scale_keys(model, float(text["key_multiplier"]))
    elif kind == "minicpm3" and text.get("tie_word_embeddings"):
        # transformers scales the head's input, which is the norm's output, also for a tied head.
        model.model.norm.weight *= text["dim_model_base"] / text["hidden_size"]


class GatedMLP(Module):
    """A gated MLP, (…, width) to (…, width), with the activation that the config states."""

    def __init__(self, mlp: Any, activation: Activation) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # its stub has no types
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self._activation = activation

    def __call__(self, x: mx.array) -> mx.array:
        gated: mx.array = self.down_proj(self._activation(self.gate_proj(x)) * self.up_proj(x))
        return gated


class Gate(Module):
    """A module that computes activation(gate) * x, for mlx-lm's SwitchGLU."""

    def __init__(self, activation: Activation) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # its stub has no types
        self._activation = activation

    def __call__(self, x: mx.array, gate: mx.array) -> mx.array:
        return self._activation(gate) * x


def _correct_activation(model: Any, text: Mapping[str, Any], reads: Callable[[str], bool]) -> None:
    """Give MLPs the activation of the config if their class ignores the key."""
    for key in ("hidden_act", "hidden_activation"):
        built_in = _ACTIVATIONS.get(str(default_of(text, key)[1]))
        stated = text.get(key)
        is_own = text.get("model_type") == "gpt_oss"  # transformers ignores the key, too
        if stated is None or built_in is None or is_own or reads(key):
            continue
        activation = _ACTIVATIONS.get(str(stated))
        if activation is built_in:
            continue
        found = [*_gated(model)]
        is_alike = {built_in, activation} == {activations.gelu, activations.gelu_approx}
        if activation is None or not (found or is_alike):
            raise ValueError(f"{key} `{stated}` is not supported for `{text['model_type']}`")
        for owner, name, mlp in found:
            if isinstance(mlp, SwitchGLU):
                mlp.activation = Gate(activation)
            else:
                owner[name] = GatedMLP(mlp, activation)


def _gated(model: Any) -> Iterator[tuple[Any, str, Any]]:
    for module in model.modules():
        for name, child in module.items():
            if isinstance(child, Module) and {"gate_proj", "up_proj", "down_proj"} <= child.keys():
                yield module, name, child


class Mixture(Module):
    """A mixture whose experts are chosen and weighted as in transformers."""

    def __init__(self, mixture: Any, bias: mx.array | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # its stub has no types
        dict.update(self, mixture)
        self._is_jamba = "router" in mixture
        self._chosen: int = mixture.num_experts_per_tok if self._is_jamba else mixture.k
        self._bias = bias  # always float32, as in transformers

    def __call__(self, x: mx.array) -> mx.array:
        router = self.router if self._is_jamba else self.gate
        logits = router(x).astype(mx.float32)
        # mlx-lm takes Jamba's softmax over the chosen experts, transformers over all.
        scores = mx.softmax(logits, axis=-1) if self._is_jamba else self.gate_act(logits)
        ranks = scores if self._bias is None else scores + self._bias
        chosen = mx.argpartition(-ranks, kth=self._chosen - 1, axis=-1)[..., : self._chosen]
        shares = mx.take_along_axis(scores, chosen, axis=-1)
        if not self._is_jamba:
            shares = shares / mx.maximum(shares.sum(axis=-1, keepdims=True), 1e-12)
        y: mx.array = self.switch_mlp(x, chosen)
        y = (y * shares[..., None]).sum(axis=-2).astype(y.dtype)
        return y + self.shared_experts(x) if self.get("shared_experts") else y


def _correct_routers(model: Any, weights: Mapping[str, mx.array]) -> None:
    """Replace ERNIE 4.5's and Jamba's mixtures.

    mlx-lm drops the biases for choosing ERNIE's experts (https://arxiv.org/abs/2408.15664).
    """
    for index, layer in enumerate(model.layers):
        name = "feed_forward" if "feed_forward" in layer else "mlp"
        if "switch_mlp" in layer[name]:
            bias = weights.get(_ROUTER_BIAS.format(index))
            if bias is not None:
                bias = bias.reshape(-1).astype(mx.float32)
            layer[name] = Mixture(layer[name], bias)


def _scale_keys(model: Any, multiplier: float) -> None:
    """Scale Falcon-H1's attention scores by `key_multiplier`, as in transformers.

    mlx-lm looks for arrays named `key_proj` to scale, but the files name them `k_proj`.
    """
    for layer in model.layers:
        layer.self_attn.scale *= multiplier
