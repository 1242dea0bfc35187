"""Gemma's decoders: scaled features, and masks in which an image's tokens see one another."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from gateway.engine.models.counts import text_config
from gateway.engine.vision.reading import Parts, Row, SeeingDecoder

Blocks = NDArray[np.int32]  # (rows, tokens): a number for each image, and 0 for text


class Gemma3Decoder(SeeingDecoder):
    """A decoder of Gemma 3, in which an image's tokens see one another in all layers."""

    keeps_whole = True

    def __init__(self, model: Any, config: dict[str, Any]) -> None:
        super().__init__(model, config)
        text = text_config(config)
        self._pad = int(text.get("pad_token_id") or 0)
        # mlx-lm multiplies embeddings by a bfloat16, whatever their own type.
        self._scale = mx.array(text["hidden_size"] ** 0.5, mx.bfloat16).astype(mx.float32)
        self._is_open = [True] * len(model.layers)

    def fit(self, features: mx.array, dtype: mx.Dtype) -> mx.array:
        return (features.astype(mx.float32) / self._scale).astype(dtype)

    def embed(self, tokens: Sequence[int]) -> mx.array:
        return super().embed(tokens).astype(mx.float32) * self._scale

    @contextmanager
    def seeing(
        self,
        rows: Sequence[Row],
        parts: Sequence[Parts],
        starts: Sequence[int],
        width: int,
        cache: Sequence[Any],
    ) -> Iterator[None]:
        blocks = np.zeros((len(parts), width), np.int32)
        for row, pieces in zip(blocks, parts, strict=True):
            for number, (place, _) in enumerate(pieces, 1):
                row[place] = number
        opened = [x for x, is_open in zip(cache, self._is_open, strict=False) if is_open]
        try:
            for layer in opened:
                layer.make_mask = _overlaid(layer, layer.make_mask, blocks)
            yield
        finally:
            for layer in opened:
                del layer.make_mask


class Gemma4Decoder(Gemma3Decoder):
    """A decoder of Gemma 4: its large models are like Gemma 3, in layers with windows only."""

    def __init__(self, model: Any, config: dict[str, Any]) -> None:
        super().__init__(model, config)
        text = text_config(config)
        self._scale = mx.array(float(text["hidden_size"] ** 0.5))
        kinds = [layer.layer_type for layer in model.layers]
        self.keeps_whole = text.get("use_bidirectional_attention") == "vision"
        self._is_open = [self.keeps_whole and kind == "sliding_attention" for kind in kinds]
        self.window = text.get("sliding_window")

    def fit(self, features: mx.array, dtype: mx.Dtype) -> mx.array:
        scale = self._scale.astype(dtype).astype(mx.float32)  # mlx-lm's, in the embeddings' type
        return (features.astype(mx.float32) / scale).astype(dtype)

    def ids(self, tokens: mx.array, parts: Sequence[Parts]) -> mx.array:
        """Return tokens with padding in place of images, for the embeddings of each layer."""
        padded = mx.array(tokens)
        for i, pieces in enumerate(parts):
            for place, _ in pieces:
                padded[i, place] = self._pad
        return padded


def _overlaid(cache: Any, make: Callable[..., Any], blocks: Blocks) -> Callable[..., Any]:
    """Return a cache's `make_mask` that opens each image of a pass to its own earlier tokens.

    Earlier tokens of an image need no change: causal masks and windows decide about them.
    """
    rows, width = blocks.shape

    def make_mask(
        N: int,  # noqa: N803
        return_array: bool = False,
        window_size: int | None = None,
    ) -> Any:
        mask = make(N, return_array=True, window_size=window_size)
        if mask is None or width == 1:
            return mask
        keys = mask.shape[-1]
        # mlx-lm's caches end with the pass's tokens, and rows of the gateway's begin at place 0.
        lengths = getattr(cache, "lengths", None)
        known = np.full(rows, keys - width) if lengths is None else np.array(lengths.counts)
        # The keys among which each row has the pass's tokens, and their indices among those.
        low, high = int(known.min()), min(keys, int(known.max()) + width)
        index = np.arange(low, high) - known[:, None]
        inside = (index >= 0) & (index < width)
        of_keys = np.take_along_axis(blocks, np.clip(index, 0, width - 1), 1) * inside
        is_later = index[:, None] > np.arange(width)[:, None]
        seen = (of_keys[:, None] == blocks[..., None]) & (blocks[..., None] > 0) & is_later
        mask = mx.broadcast_to(mask, (rows, 1, width, keys))
        opened = mask[..., low:high] | mx.array(seen)[:, None]
        return mx.concatenate([mask[..., :low], opened, mask[..., high:]], axis=-1)

    return make_mask
