"""Classes for model families and checkpoint layouts that mlx-lm has no class for."""

import re
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Final

import mlx.core as mx
from mlx.nn.layers.activations import relu2
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear

from gateway.engine.models import gemma4_assistant
from gateway.engine.models.checkpoint import ASSISTANTS

Classes = tuple[Any, Any]  # a model's class and its arguments' class
Make = Callable[[dict[str, Any]], Classes]
Weights = Mapping[str, mx.array]
# The prefix of arrays in files that have only a language model.
_OUTER: Final = re.compile(r"^model\.(?!language_model|(vision|audio)_tower|embed_(audio|vision))")
_EXPERT: Final = re.compile(r"(.*\.mlp\.)experts\.(\d+)\.(gate|up|down)_proj\.weight")


def _module(name: str) -> Any:
    return import_module(f"mlx_lm.models.{name}")


def _renaming(name: str, rename: Callable[[Weights], Weights]) -> Make:
    """Return a maker of mlx-lm's classes whose model renames weights before `sanitize`."""

    def make(_: dict[str, Any]) -> Classes:
        module = _module(name)

        class Model(module.Model):  # type: ignore[misc, name-defined]  # chosen at run time
            def sanitize(self, weights: Weights) -> Weights:
                renamed: Weights = rename(weights)
                return super().sanitize(dict(renamed))  # type: ignore[no-any-return]

        return Model, module.ModelArgs

    return make


def _transpose_experts(weights: Weights) -> Weights:
    """Undo transformers' renaming and transposing of gpt-oss's experts."""
    whole = (".experts.gate_up_proj", ".experts.down_proj")
    return {
        f"{name}.weight" if name.endswith(whole) else name: (
            array.swapaxes(1, 2) if name.endswith(whole) else array
        )
        for name, array in weights.items()
    }


def stack_experts(weights: Weights) -> Weights:
    """Stack the arrays of all experts, which transformers saves one by one."""
    kept: dict[str, mx.array] = {}
    found: dict[str, dict[int, mx.array]] = {}
    for name, array in weights.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            kept[name] = array
        else:
            stacked = f"{match[1]}switch_mlp.{match[3]}_proj.weight"
            found.setdefault(stacked, {})[int(match[2])] = array
    for name, experts in found.items():
        kept[name] = mx.stack([experts[index] for index in sorted(experts)])
    return kept


def _move_language_model(weights: Weights) -> Weights:
    """Rename LFM2-VL's arrays as in transformers 4, and transpose kernels as in mlx-lm."""
    inner, moved = re.compile(r"^model\.language_model\."), {}
    for name, array in weights.items():
        if name.endswith("conv.conv.weight") and array.shape[-1] > array.shape[1]:
            array = array.transpose(0, 2, 1)
        moved[inner.sub("language_model.model.", name).removeprefix("model.")] = array
    return moved


def _turn_experts(weights: Weights) -> Weights:
    """Transpose experts to the layout of Qwen3-VL's original files: (experts, inputs, outputs)."""
    turned = dict(weights)
    for name, down in weights.items():
        whole = name.removesuffix("down_proj") + "gate_up_proj"
        if name.endswith(".experts.down_proj") and down.shape[2] * 2 == weights[whole].shape[1]:
            turned[name], turned[whole] = down.swapaxes(1, 2), weights[whole].swapaxes(1, 2)
    return turned


def _gemma3n(_: dict[str, Any]) -> Classes:
    """Return Gemma 3n's classes without the projections that transformers 5 doesn't save.

    Layers that use another layer's KV need no key and value projections.
    """
    gemma3n = _module("gemma3n")
    unused = ("k_proj", "v_proj", "k_norm")

    class Model(gemma3n.Model):  # type: ignore[misc, name-defined]  # chosen at run time
        def __init__(self, args: Any) -> None:
            super().__init__(args)
            self._first = len(self.layers) - args.text_config["num_kv_shared_layers"]
            for layer in self.layers[self._first :]:
                for name in unused:
                    del layer.self_attn[name]

        def sanitize(self, weights: Weights) -> Weights:
            kept = {}
            for name, array in weights.items():
                match = re.search(r"\.layers\.(\d+)\.self_attn\.(\w+)\.", name)
                if not (match and int(match[1]) >= self._first and match[2] in unused):
                    kept[_OUTER.sub("model.language_model.", name)] = array
            return super().sanitize(kept)  # type: ignore[no-any-return]

    return Model, gemma3n.ModelArgs


def _gemma3n_text(config: dict[str, Any]) -> Classes:
    model, arguments = _gemma3n(config)

    class ModelArgs(arguments):  # type: ignore[misc, valid-type]  # chosen at run time
        @classmethod
        def from_dict(cls, params: dict[str, Any]) -> Any:
            return arguments(model_type=params["model_type"], text_config=params)

    return model, ModelArgs


class SquaredMLP(Module):
    """Two projections with a squared ReLU in between, as in transformers' models/arcee."""

    def __init__(self, width: int, inner: int, bias: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # its stub has no types
        self.up_proj = Linear(width, inner, bias=bias)
        self.down_proj = Linear(inner, width, bias=bias)

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = self.down_proj(relu2(self.up_proj(x)))
        return y


def _arcee(_: dict[str, Any]) -> Classes:
    llama = _module("llama")

    class Model(llama.Model):  # type: ignore[misc, name-defined]  # chosen at run time
        def __init__(self, args: Any) -> None:
            super().__init__(args)
            for layer in self.layers:
                layer.mlp = SquaredMLP(args.hidden_size, args.intermediate_size, args.mlp_bias)

    return Model, llama.ModelArgs


def _gemma4_assistant(_: dict[str, Any]) -> Classes:
    return gemma4_assistant.Model, gemma4_assistant.ModelArgs


OWN: Final[Mapping[str, Make]] = {
    "arcee": _arcee,
    **dict.fromkeys(ASSISTANTS, _gemma4_assistant),
    "gemma3n": _gemma3n,
    "gemma3n_text": _gemma3n_text,
    "gpt_oss": _renaming("gpt_oss", _transpose_experts),
    "lfm2_vl": _renaming("lfm2-vl", _move_language_model),
    "qwen3_vl_moe": _renaming("qwen3_vl_moe", _turn_experts),
    "qwen3_5_moe": _renaming("qwen3_5_moe", stack_experts),
    "qwen3_5_moe_text": _renaming("qwen3_5_moe", stack_experts),
}
