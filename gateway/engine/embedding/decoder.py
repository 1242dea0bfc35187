"""Embedding models built on a decoder (Qwen3-Embedding and its like), through mlx_lm's classes.

Attention is causal and padding is on the right, so padding never reaches a real token.
"""

from collections.abc import Generator, Iterator, Mapping
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.utils import _get_classes

from gateway.engine.device import Device
from gateway.engine.models.checkpoint import Checkpoint
from gateway.engine.models.decoders import floating_dtype, open_decoder, parameters
from gateway.engine.models.missing_kernels import Report, replace_missing


class Decoder:
    """A decoder without its head: (rows, tokens) ids to hidden states after the last norm.

    Its weights are read when its parameters are first evaluated.
    """

    def __init__(
        self, checkpoint: Checkpoint, raw: Mapping[str, Any], device: Device, dtype: str | None
    ) -> None:
        _refuse_bidirectional(checkpoint, raw)
        model, _ = open_decoder(checkpoint, device=device, dtype=dtype, classes=_headless_classes)
        self._model = model
        self._states = getattr(model, "model", None)
        self.padding_id = 0
        try:
            self.vocabulary = int(raw["vocab_size"])
            self.max_tokens = int(raw["max_position_embeddings"])
            self.dimensions = int(raw["hidden_size"])
            probed = self._hidden(mx.zeros((1, 1), dtype=mx.int32)).shape
        except KeyError as error:
            raise checkpoint.failed(f"config.json has no {error.args[0]}") from error
        except (TypeError, ValueError, AttributeError) as error:
            raise checkpoint.failed(f"its architecture gives no hidden states: {error}") from error
        if probed != (1, 1, self.dimensions):
            raise checkpoint.failed(f"its hidden states have shape {probed}")

    def __call__(
        self, tokens: mx.array, mask: mx.array | None, types: mx.array | None = None
    ) -> Iterator[mx.array]:
        """Yield the hidden states. `mask` is not needed: no token sees those after it."""
        yield self._hidden(tokens)

    def parameters(self) -> list[mx.array]:
        """List every array the decoder holds."""
        return parameters(self._model)

    def replace_missing(self, name: str, device: Device, report: Report | None) -> Generator[None]:
        """Replace layers that the device has no kernel for, in steps."""
        return replace_missing(name, self._model, device, floating_dtype(self._model), report)

    def _hidden(self, tokens: mx.array) -> mx.array:
        if self._states is None:
            raise ValueError("the mlx_lm class has no `model` below its head")
        states = self._states(tokens)
        assert isinstance(states, mx.array)
        return states


def _refuse_bidirectional(checkpoint: Checkpoint, raw: Mapping[str, Any]) -> None:
    """Raise for decoders that were retrained to look ahead: mlx_lm's classes are causal."""
    for key, causal in (
        ("is_causal", True),
        ("use_bidirectional_attention", False),
        ("bidirectional", False),
    ):
        if raw.get(key, causal) not in (causal, None):
            raise checkpoint.failed(f"config.json: {key} {raw[key]} is not supported")


def _headless_classes(config: dict[str, Any]) -> tuple[type[Module], type]:
    """Return mlx_lm's classes for this config, without the head and with uniform names.

    Embedding checkpoints are saved from the bare model: no head, and no `model.` before names.
    """
    whole, arguments = _get_classes(config)

    class Headless(whole):  # type: ignore[misc, valid-type]
        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            if not any(name.startswith("model.") for name in weights):
                weights = {f"model.{name}": array for name, array in weights.items()}
            if hasattr(whole, "sanitize"):
                weights = super().sanitize(weights)
            self.pop("lm_head", None)  # only now: gemma3's own would miss it
            return {n: a for n, a in weights.items() if not n.startswith("lm_head.")}

    return Headless, arguments
