"""Loads mlx-lm's decoders, and evaluates long passes in groups of layers."""

import math
import re
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import MODEL_REMAPPING, load_model

from gateway.engine.device import Device, pick_dtype
from gateway.engine.models.checkpoint import Checkpoint, read_in_slices, reads_target
from gateway.engine.models.configs import classes_of
from gateway.engine.models.corrections import correct
from gateway.engine.models.counts import bounding_modules, check_depth, text_config
from gateway.engine.models.decoder_kernels import fuse_projections, use_cpu_kernels
from gateway.engine.models.gguf.checkpoint import GgufCheckpoint, read_gguf_decoder
from gateway.engine.models.head_names import has_mtp_head
from gateway.engine.models.missing_kernels import Report, replace_missing, widen
from gateway.engine.models.mtp_head import with_head
from gateway.engine.models.sharding import RankShare, shard
from gateway.engine.models.unread import list_lost
from gateway.registry import ChatSpec

_HEAD: Final = re.compile(r"(^|\.)(lm_head|embed_out)\.|^(model\.)?output\.")


def open_decoder(
    checkpoint: Checkpoint,
    *,
    device: Device,
    dtype: str | None,
    is_packed: bool = False,
    context: int | None = None,
    note: Callable[[str], None] | None = None,
    classes: Callable[[dict[str, Any]], tuple[Any, type]] = classes_of,
    has_head: bool = False,
) -> tuple[Any, dict[str, Any]]:
    """Return mlx-lm's model and the config. The weights are not read yet.

    If `has_head`, the model gets its MTP head, if the files have one that fits. `context` is the
    most tokens of a text. Must run on the lane. Raises ModelLoadFailed.
    """
    weights = checkpoint.weights()  # raises an error that names the file
    checkpoint.config()  # raises an error that names the key

    def bounded_classes(config: dict[str, Any]) -> tuple[Any, type]:
        # mlx-lm and transformers have different defaults, so the weights tell if the head is tied.
        if not reads_target(checkpoint):  # these may have a copy of what is tied
            config.setdefault("tie_word_embeddings", not any(map(_HEAD.search, weights)))
        chosen = classes(config)
        check_depth(config, chosen[1], weights)
        if has_mtp_head(config, weights):
            chosen = with_head(chosen, config, weights, is_used=has_head)
        return chosen

    about = "mlx-lm makes no model of config.json and these weights: "
    with checkpoint.blame(about), bounding_modules(len(weights)):
        model, config = load_model(checkpoint.folder, lazy=True, get_model_classes=bounded_classes)
        correct(model, text_config(config), weights, context)
        if note is not None:
            for sentence in list_lost(weights, model, text_config(config)):
                note(sentence)
            if getattr(model, "head_fault", ""):
                note(f"its MTP head is not used: {model.head_fault}")
        # Quantized weights are 10 to 50 times slower than float32 on a CPU.
        if device is Device.CPU and not is_packed:
            widen(model, floating_dtype(model))
        target = pick_dtype(device, dtype, floating_dtype(model))
        if target != floating_dtype(model):
            model.set_dtype(target)
    if device is Device.CPU:
        use_cpu_kernels(model)
    return model, config


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """The number formats of a chat model's weights and KV."""

    dtype: str | None = None  # None: the files' type
    is_packed: bool = False  # keep weights quantized on a CPU
    is_fused: bool = False  # fuse projections of the same input
    kv_bits: int | None = None

    @classmethod
    def of(cls, spec: ChatSpec, *, is_packed: bool) -> "Numbers":
        fused, bits = spec.fuse_projections, spec.kv_bits
        return cls(dtype=spec.weights_dtype, is_packed=is_packed, is_fused=fused, kv_bits=bits)


def read_decoder(
    checkpoint: Checkpoint | GgufCheckpoint,
    *,
    device: Device,
    numbers: Numbers,
    share: RankShare | None = None,
    report: Report | None = None,
    context: int | None = None,
    note: Callable[[str], None] | None = None,
    has_head: bool = False,
) -> Generator[None, None, Any]:
    """Read a folder or GGUF file in steps, and return mlx-lm's model. Raises ModelLoadFailed.

    `context` is the most tokens of a text. If `has_head`, a folder's MTP head is read. `note` is
    called with a sentence about each kind of unread weights, and `report` as in `replace_missing`.
    Must run on the lane.
    """
    if isinstance(checkpoint, GgufCheckpoint):
        if share is not None:
            raise checkpoint.failed("a GGUF file's model cannot be divided by `parallel:`")
        model = yield from read_gguf_decoder(
            checkpoint, device=device, dtype=numbers.dtype, is_packed=numbers.is_packed
        )
    else:
        model, _ = open_decoder(
            checkpoint,
            device=device,
            dtype=numbers.dtype,
            is_packed=numbers.is_packed,
            context=context,
            note=note,
            has_head=has_head,
        )
        if share is not None:
            shard(checkpoint, model, share)
        yield from read_in_slices(checkpoint, parameters(model))
    yield from replace_missing(checkpoint.name, model, device, floating_dtype(model), report)
    if numbers.is_fused:
        yield from fuse_projections(model)
    return model


def is_known(architecture: str) -> bool:
    module = MODEL_REMAPPING.get(architecture, architecture)
    return "." not in module and find_spec(f"mlx_lm.models.{module}") is not None


def parameters(model: Any) -> list[mx.array]:
    """List every array of a model. Arrays that the model computes itself come last."""
    named: Any = tree_flatten(model.parameters())
    own = [value for module in model.modules() for key, value in module.items() if key[0] == "_"]
    return [array for _, array in named] + [each for each in own if isinstance(each, mx.array)]


def floating_dtype(model: Any) -> mx.Dtype:
    dtypes = (array.dtype for array in parameters(model))
    return next((dtype for dtype in dtypes if mx.issubdtype(dtype, mx.floating)), mx.float32)


class LayerGroups:
    """Evaluates a pass in groups of layers, each in about `pass_s` seconds.

    If `pass_s` is None, passes are not divided.
    """

    def __init__(self, pass_s: float | None) -> None:
        self._pass_s = pass_s
        self._parts = 1

    @contextmanager
    def applied(self, model: Any) -> Iterator[None]:
        """While entered, evaluate the pass in groups."""
        if self._pass_s is None:
            yield
            return
        started = time.perf_counter()
        layers = [layer for layer in getattr(model, "layers", ()) if layer is not None]
        with _evaluating(layers, -(-len(layers) // self._parts)):
            yield
        self._parts = max(1, math.ceil((time.perf_counter() - started) / self._pass_s))


@contextmanager
def _evaluating(layers: list[Any], size: int) -> Iterator[None]:
    """While entered, evaluate the output of every `size`th layer as soon as it is built."""
    # Python finds `__call__` on the class, so the class is changed. Only the lane runs models.
    if size >= len(layers):
        yield
        return
    ends = {id(layer) for layer in layers[size - 1 : -1 : size]}
    calls = {kind: kind.__call__ for kind in {type(layer) for layer in layers}}

    def evaluating(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            output = original(layer, *args, **kwargs)
            if id(layer) in ends:
                mx.eval(output)
            return output

        return call

    try:
        for kind, original in calls.items():
            kind.__call__ = evaluating(original)
        yield
    finally:
        for kind, original in calls.items():
            kind.__call__ = original
