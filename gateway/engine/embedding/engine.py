"""One embedding model: texts → token ids → vectors."""

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from gateway.engine.device import Device
from gateway.engine.embedding.encoder import (
    Encoder,
    EncoderEngine,
    open_encoder,
    read_max_tokens,
    read_transformer_settings,
)
from gateway.engine.embedding.pooling import Recipe, pool, read_recipe, shorten, unit
from gateway.engine.embedding.tokenizer import TextTokenizer, load_text_tokenizer
from gateway.engine.models.checkpoint import Checkpoint, read_in_slices

if TYPE_CHECKING:
    from gateway.engine.models.missing_kernels import Report

Vectors = npt.NDArray[np.float32]


class EmbeddingEngine(EncoderEngine):
    """One loaded embedding model. Call it only on the thread that loaded it, but for `encode`."""

    result = "vector"

    def __init__(
        self,
        name: str,
        encoder: Encoder,
        tokenizer: TextTokenizer,
        recipe: Recipe,
        *,
        device: Device,
        max_tokens: int,
        prompts: Mapping[str, str],
        default_prompt_name: str | None,
    ) -> None:
        super().__init__(name, encoder, device=device, max_tokens=max_tokens)
        self.tokenizer = tokenizer
        self.dimensions = encoder.dimensions
        self.prompts = prompts
        self.default_prompt_name = default_prompt_name
        self._recipe = recipe

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenise, special tokens included. Safe on any thread."""
        return self.tokenizer.encode(texts)

    def encode_start(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenise as far as `truncate` keeps. More ids than `max_tokens` mean a longer text."""
        return self.tokenizer.encode_start(texts, self.max_tokens)

    def truncate(self, tokens: Sequence[int], limit: int | None = None) -> list[int]:
        """Cut one input to `limit`, or to `max_tokens`, as sentence-transformers would."""
        return self.tokenizer.truncate(tokens, limit or self.max_tokens)

    def shorten(self, vectors: Vectors, dimensions: int) -> Vectors:
        """Keep the first `dimensions` of each vector, normalised again if the model does."""
        return shorten(vectors, dimensions, normalize=self._recipe.normalize)

    def embed(self, rows: Sequence[Sequence[int]]) -> Vectors:
        """Return (rows, dimensions): each row's vector, whatever the other rows are.

        A row is the token ids of one text, special tokens included. Raises ContextLengthExceeded
        and BadRequest for a row the model cannot read; EngineFailed, naming the model and the row,
        for a vector that is not finite.
        """
        return self._run(rows, self.dimensions)

    def probe(self) -> None:
        """Embed a word of no caller's. Raises what the device does."""
        self.embed(self.encode(["Hello"]))

    def _finish(self, hidden: mx.array, counts: mx.array, mask: mx.array | None) -> mx.array:
        vectors = pool(hidden, counts, mask, self._recipe.pooling)
        if self._recipe.normalize:
            return unit(vectors)
        return vectors


def load_embedding_in_steps(
    folder: Path,
    *,
    name: str,
    device: Device,
    dtype: str | None = None,
    pooling: str | None = None,
    normalize: bool | None = None,
    max_context: int | None = None,
    prompts: Mapping[str, str] | None = None,
    report: "Report | None" = None,
) -> Generator[EmbeddingEngine | None]:
    """Load an embedding model from a folder of safetensors. Raises ModelLoadFailed.

    There is a step for the tokenizer and one for each slice of the weights, as in
    `load_generation_in_steps`: the last yields the engine.

    `pooling` (mean, cls, last) and `normalize` are needed if the folder has no modules.json, and
    win if it has one. `max_context` can only lower the model's own limit. `prompts`, if there are
    any, replace the model's own. `report` is called with a decoder's quantised weights that become
    floating, since the device has no kernel for them.
    """
    checkpoint = Checkpoint(name, folder)
    recipe = read_recipe(checkpoint, pooling, normalize)
    inner = checkpoint.inside(recipe.transformer)
    saved = checkpoint.read_object("config_sentence_transformers.json")
    limits = read_transformer_settings(inner, "feature-extraction", "token_embeddings")
    tokenizer = load_text_tokenizer(inner, lower_case=bool(limits.get("do_lower_case")))
    yield None
    encoder = open_encoder(inner, inner.read_object("config.json"), device, dtype)
    yield from read_in_slices(inner, encoder.parameters())
    # Of a decoder alone; no other needs mlx-lm, which takes a second.
    if hasattr(encoder, "replace_missing"):
        yield from encoder.replace_missing(name, device, report)
    yield EmbeddingEngine(
        name,
        encoder,
        tokenizer,
        recipe,
        device=device,
        max_tokens=read_max_tokens(inner, encoder.max_tokens, limits, max_context),
        prompts=prompts or {key: text or "" for key, text in (saved.get("prompts") or {}).items()},
        default_prompt_name=saved.get("default_prompt_name"),
    )
