"""A decoder of mlx-lm's in which features can replace the embeddings of tokens."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np

from gateway.engine.models.counts import text_config
from gateway.engine.vision.layout import Layout, lay_out
from gateway.engine.vision.rotation import Positions, Rotation


@dataclass(slots=True, eq=False)
class Row:
    """The layout of a row's prompt and the features of its images."""

    layout: Layout | None = None  # None for a prompt without images
    # Pairs of the first token's index and features, (tokens, 1 + DeepStack layers, hidden).
    images: Sequence[tuple[int, mx.array]] = ()

    def shift(self, start: int) -> int:
        return 0 if self.layout is None else self.layout.at(start)

    def parts(self, start: int, width: int) -> Iterator[tuple[slice, mx.array]]:
        """Yield features among `width` tokens from `start` on, with their places there."""
        for first, features in self.images:
            begin, end = max(first, start), min(first + len(features), start + width)
            if begin < end:
                yield slice(begin - start, end - start), features[begin - first : end - first]


# Places among a pass's tokens, and the features to read there.
Parts: TypeAlias = Sequence[tuple[slice, mx.array]]


class SeeingDecoder:
    """A model that reads images in place of tokens, with its weights shared."""

    keeps_whole = False  # True if an image's tokens see one another, so one pass reads them all
    window: int | None = None  # most keys in layers where they do, or None for all

    def __init__(self, model: Any, config: dict[str, Any]) -> None:
        """Raises ValueError for an unsupported decoder."""
        self._model, self._inner = model, model.language_model.model

    def __call__(
        self, tokens: mx.array, rows: Sequence[Row], starts: Sequence[int], **options: Any
    ) -> mx.array:
        """Read tokens, (rows, n), that begin at the indices `starts` in their prompts."""
        width = tokens.shape[1]
        parts = [[*row.parts(at, width)] for row, at in zip(rows, starts, strict=True)]
        if not any(parts):
            with self.placed(rows, starts):
                return self._call(tokens, **options)
        embeddings: mx.array = self._inner.embed_tokens(tokens)
        deep: list[mx.array] = []
        for i, pieces in enumerate(parts):
            for place, features in pieces:
                features = self.fit(features, embeddings.dtype)
                embeddings[i, place] = features[:, 0]
                if not deep:
                    deep = [mx.zeros_like(embeddings) for _ in range(features.shape[1] - 1)]
                for number, layer in enumerate(deep, 1):
                    layer[i, place] = features[:, number]
        cache = options.get("cache") or ()
        seeing = self.seeing(rows, parts, starts, width, cache)
        with seeing, _adding(self._inner.layers[: len(deep)], deep):
            return self._call(self.ids(tokens, parts), input_embeddings=embeddings, **options)

    def fit(self, features: mx.array, dtype: mx.Dtype) -> mx.array:
        """Return features in place of embeddings."""
        return features.astype(dtype)

    def ids(self, tokens: mx.array, parts: Sequence[Parts]) -> mx.array:
        """Return the tokens that a pass is given besides its embeddings."""
        return tokens

    def lay_out(self, tokens: int, images: Iterable[tuple[int, tuple[int, int]]]) -> Layout:
        """Return a prompt's layout, for pairs of an image's first token and (rows, columns)."""
        return lay_out(tokens, ())

    def embed(self, tokens: Sequence[int]) -> mx.array:
        """Return the embeddings of tokens, (tokens, hidden)."""
        embeddings: mx.array = self._inner.embed_tokens(mx.array([*tokens]))
        return embeddings

    def end_rows(self, features: mx.array, rows: int, between: int, last: int) -> mx.array:
        """Return an image's features with the embedding of a token after each row of them."""
        ends = self.embed([*[between] * (rows - 1), last]).astype(features.dtype)
        in_rows = features.reshape(rows, -1, features.shape[-1])
        ended = mx.concatenate([in_rows, ends[:, None]], axis=1)
        return ended.reshape(-1, 1, features.shape[-1])

    @contextmanager
    def placed(self, rows: Sequence[Row], starts: Sequence[int]) -> Iterator[None]:
        """Inside the context, build passes of text tokens that begin at the indices `starts`."""
        yield

    @contextmanager
    def seeing(
        self,
        rows: Sequence[Row],
        parts: Sequence[Parts],
        starts: Sequence[int],
        width: int,
        cache: Sequence[Any],
    ) -> Iterator[None]:
        """Inside the context, build a pass of `width` tokens, with images among them."""
        yield

    def _call(self, tokens: mx.array, **options: Any) -> mx.array:
        logits: mx.array = self._model(tokens, **options)
        return logits


class QwenDecoder(SeeingDecoder):
    """A decoder of Qwen's, with M-RoPE instead of its rope."""

    def __init__(self, model: Any, config: dict[str, Any], *, is_interleaved: bool = True) -> None:
        """Raises ValueError for an unsupported kind of rope."""
        super().__init__(model, config)
        self._positions = Positions()
        rope = text_config(config).get("rope_parameters") or text_config(config)["rope_scaling"]
        sections = rope["mrope_section"]
        for layer in model.layers:
            if hasattr(layer, "self_attn"):
                attention = layer.self_attn
                attention.rope = Rotation(
                    attention.rope, sections, self._positions, is_interleaved=is_interleaved
                )

    def lay_out(self, tokens: int, images: Iterable[tuple[int, tuple[int, int]]]) -> Layout:
        return lay_out(tokens, images)

    @contextmanager
    def placed(self, rows: Sequence[Row], starts: Sequence[int]) -> Iterator[None]:
        shifts = [row.shift(at) for row, at in zip(rows, starts, strict=True)]
        self._positions.place(shifts=mx.array(shifts) if any(shifts) else None)
        try:
            yield
        finally:
            self._positions.place()

    @contextmanager
    def seeing(
        self,
        rows: Sequence[Row],
        parts: Sequence[Parts],
        starts: Sequence[int],
        width: int,
        cache: Sequence[Any],
    ) -> Iterator[None]:
        points = np.zeros((len(rows), width, 3), np.int32)
        for i, (row, start) in enumerate(zip(rows, starts, strict=True)):
            layout = row.layout
            if layout is None:
                points[i] = np.arange(start, start + width)[:, None]
            else:
                points[i] = layout.window(start, width)
        self._positions.place(mx.array(points))
        try:
            yield
        finally:
            self._positions.place()


@contextmanager
def _adding(layers: Sequence[Any], added: Sequence[mx.array]) -> Iterator[None]:
    """Inside the context, add an array to the output of each layer, for DeepStack."""
    # Python looks `__call__` up on the class, and only the lane's thread runs models.
    sums = {id(layer): each for layer, each in zip(layers, added, strict=True)}
    calls: dict[type, Callable[..., Any]] = {type(each): type(each).__call__ for each in layers}

    def adding(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            output = original(layer, *args, **kwargs)
            return output + sums[id(layer)] if id(layer) in sums else output

        return call

    try:
        for kind, original in calls.items():
            kind.__call__ = adding(original)  # type: ignore[method-assign]
        yield
    finally:
        for kind, original in calls.items():
            kind.__call__ = original  # type: ignore[method-assign]
