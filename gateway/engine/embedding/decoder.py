"""Embedding models built on a decoder (Qwen3-Embedding, EmbeddingGemma), run by mlx-lm."""

from collections.abc import Generator, Iterator, Mapping
from math import sqrt
from typing import Any, Final

import mlx.core as mx
from mlx.nn.layers.base import Module

from gateway.engine.device import Device
from gateway.engine.embedding.pooling import INSIDE
from gateway.engine.models.checkpoint import Checkpoint
from gateway.engine.models.configs import classes_of
from gateway.engine.models.context import LLAMAS, ignored_window, text_context
from gateway.engine.models.decoders import (
    floating_dtype,
    open_decoder,
    parameters,
)
from gateway.engine.models.folder import join_names
from gateway.engine.models.missing_kernels import Report, replace_missing

SAME_AS: Final = {"eurobert": "llama"}  # mlx-lm's architecture, if its name differs
# For each key of config.json: the value for causal attention, and the families that may have other
# values.
_AHEAD: Final = {
    "is_causal": (True, LLAMAS),
    "use_bidirectional_attention": (False, ("gemma3_text",)),
    "bidirectional": (False, ()),
}


class BothWays:
    """Replaces a layer's cache, so that tokens attend to earlier and to later tokens."""

    offset = 0

    def __init__(self, mask: mx.array | None) -> None:
        self._mask = mask

    def make_mask(
        self, tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | None:
        """Return a mask of shape (rows or 1, 1, tokens or 1, tokens); None hides nothing."""
        seen = None if self._mask is None else self._mask[:, None, None, :]
        if window_size is None or tokens <= window_size // 2 + 1:
            return seen
        # A token sees half a window to either side (transformers, configuration_gemma3.py).
        distance = mx.abs(mx.arange(tokens)[:, None] - mx.arange(tokens)[None])[None, None]
        near = distance <= window_size // 2
        if seen is None:
            return near
        # A row without visible tokens would become NaN, so padding tokens see themselves.
        return (near & seen) | (distance == 0)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values


class _LayerCall:
    """Stands for a layer: notes the arguments of a call, and returns `result` or its first one."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.state: mx.array | None = None
        self.result: mx.array | None = None

    def __call__(self, state: mx.array, *args: Any, **named: Any) -> mx.array:
        self.state, self.args, self.named = state, args, named
        return state if self.result is None else self.result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


class Decoder:
    """A decoder without a head: maps ids, (rows, tokens), to states, (rows, tokens, dimensions)."""

    def __init__(
        self, checkpoint: Checkpoint, raw: Mapping[str, Any], device: Device, dtype: str | None
    ) -> None:
        self.padding_id = 0
        self._rounding: float | None = None
        with checkpoint.reading_config():
            _check_plain(checkpoint, raw)
            self._looks_ahead = _looks_ahead(checkpoint, raw, ignored_window(raw))
            self.vocabulary = int(raw["vocab_size"])
            self.max_tokens = text_context(raw)
            self.dimensions = int(raw["hidden_size"])
            if raw.get("model_type") == "gemma3_text":
                rounded: Any = mx.array(sqrt(self.dimensions), mx.bfloat16).item()
                self._rounding = sqrt(self.dimensions) / rounded
        model, _ = open_decoder(
            checkpoint,
            device=device,
            dtype=dtype,
            context=self.max_tokens,
            classes=_headless_classes,
        )
        self._model = model
        self._states: Any = getattr(model, "model", None)
        if self._states is None:
            raise checkpoint.failed("its architecture gives no hidden states")
        with checkpoint.blame():
            probed = self._hidden(mx.zeros((1, 1), dtype=mx.int32), None).shape
        if probed != (1, 1, self.dimensions):
            raise checkpoint.failed(f"its hidden states have shape {probed}")
        self._is_chain = self._calls_in_a_chain()

    def __call__(
        self, tokens: mx.array, mask: mx.array | None, types: mx.array | None = None
    ) -> Iterator[mx.array]:
        if not self._is_chain:
            yield self._hidden(tokens, mask)
            return
        calls = self._calls(tokens, mask)
        state: Any = calls[0].state
        for call in calls:
            state = call.layer(state, *call.args, **call.named)
            yield state
        calls[-1].result = state
        yield self._hidden(tokens, mask, calls)

    def parameters(self) -> list[mx.array]:
        return parameters(self._model)

    def replace_missing(self, name: str, device: Device, report: Report | None) -> Generator[None]:
        """Replace layers that the device has no kernel for, in steps."""
        return replace_missing(name, self._model, device, floating_dtype(self._model), report)

    def _calls(self, tokens: mx.array, mask: mx.array | None) -> list[_LayerCall]:
        """Return the calls that mlx-lm's forward makes of the layers, without making them."""
        calls = [_LayerCall(layer) for layer in self._states["layers"]]
        self._hidden(tokens, mask, calls)
        return calls

    def _calls_in_a_chain(self) -> bool:
        """Return True if each layer gets what the one before it returned."""
        try:
            calls = self._calls(mx.zeros((1, 1), dtype=mx.int32), None)
        except Exception:  # the layers are another module's, or return more than a state
            return False
        return calls[0].state is not None and all(one.state is calls[0].state for one in calls)

    def _hidden(
        self, tokens: mx.array, mask: mx.array | None, calls: list[_LayerCall] | None = None
    ) -> mx.array:
        layers = self._states.layers
        arguments: dict[str, Any] = {}
        if self._looks_ahead:
            arguments["cache"] = [BothWays(mask)] * len(layers)
        if self._rounding is not None:
            # mlx-lm rounds this factor of Gemma's embeddings to bfloat16; transformers doesn't.
            arguments["input_embeddings"] = self._states.embed_tokens(tokens) * self._rounding
        if calls is None:
            states = self._states(tokens, **arguments)
        else:
            self._states.layers = calls
            try:
                states = self._states(tokens, **arguments)
            finally:
                self._states.layers = layers
        assert isinstance(states, mx.array)
        return states


def _check_plain(checkpoint: Checkpoint, raw: Mapping[str, Any]) -> None:
    """Refuse what has a decoder's model_type, but is more than this decoder."""
    kind, code = str(raw.get("model_type")), (raw.get("auto_map") or {}).get("AutoModel") or ""
    names = [str(name) for name in (*(raw.get("architectures") or ()), code.rpartition(".")[2])]
    plain = [kind.replace("_", "") + end for end in ("model", "lmheadmodel")]
    strange = [n for n in names if n.endswith("Model") and n.lower() not in plain]
    if "vocab_size" not in raw and "text_config" in raw:  # it reads more than texts
        strange += names
    if raw.get("task_names"):
        strange.append(f"with adapters for {join_names(raw['task_names'])}")
    if strange:
        raise checkpoint.failed(f"its architecture, {strange[0]}, is not served as a `{kind}`")


def _looks_ahead(checkpoint: Checkpoint, raw: Mapping[str, Any], window: int | None) -> bool:
    kind = raw.get("model_type")
    is_ahead = kind == "eurobert"
    for key, (causal, kinds) in _AHEAD.items():
        if raw.get(key) in (causal, None):
            continue
        if kind not in kinds:
            raise checkpoint.failed(f"config.json: {key} {raw[key]} is not supported for `{kind}`")
        is_ahead = True
    if is_ahead and window is not None:
        raise checkpoint.failed(f"a `{kind}` that looks ahead in sliding windows is not supported")
    return is_ahead


def _headless_classes(config: dict[str, Any]) -> tuple[type[Module], type]:
    config["model_type"] = SAME_AS.get(config["model_type"], config["model_type"])
    for key in _AHEAD:  # `BothWays` makes the masks instead
        config.pop(key, None)
    whole, arguments = classes_of(config)

    class Headless(whole):  # type: ignore[misc, valid-type]
        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            weights = {n: a for n, a in weights.items() if not n.startswith(INSIDE)}
            # Some embedding checkpoints are saved without the prefix `model.`.
            if not any(name.startswith("model.") for name in weights):
                weights = {f"model.{name}": array for name, array in weights.items()}
            if hasattr(whole, "sanitize"):
                weights = super().sanitize(weights)
            self.pop("lm_head", None)  # removed only now: gemma3's `sanitize` needs it
            return {n: a for n, a in weights.items() if not n.startswith("lm_head.")}

    return Headless, arguments
