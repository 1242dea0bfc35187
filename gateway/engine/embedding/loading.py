"""Loads an embedding model from its folder."""

from collections.abc import Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gateway.engine.device import Device
from gateway.engine.embedding.bert import Bert, arrays_of
from gateway.engine.embedding.colbert import (
    MarkedTokenizer,
    document_limit,
    mark,
    read_settings,
)
from gateway.engine.embedding.engine import (
    EmbeddingEngine,
    open_encoder,
    read_encoder_context,
    read_max_tokens,
    read_transformer_settings,
)
from gateway.engine.embedding.modernbert import ModernBert
from gateway.engine.embedding.outputs import Head, TokenVectors, open_m3_heads, open_splade
from gateway.engine.embedding.pooling import Recipe, read_projections, read_recipe
from gateway.engine.embedding.tokenizer import TextTokenizer, load_text_tokenizer
from gateway.engine.models.checkpoint import Checkpoint, read_in_slices
from gateway.jobs.embed import Output

if TYPE_CHECKING:
    from gateway.engine.models.missing_kernels import Report

# Values of transformer_task and module_output_name.
_TASK: Final = ("feature-extraction", "token_embeddings")
_SPLADE_TASK: Final = ("fill-mask", "token_embeddings")


def read_embedding_context(
    folder: Path, max_context: int | None, pooling: str | None, normalize: bool | None
) -> int:
    """Return the `max_tokens` of a folder's engine. Raises ModelLoadFailed."""
    checkpoint = Checkpoint(folder.name, folder)
    recipe = read_recipe(checkpoint, pooling, normalize)
    inner = checkpoint.inside(recipe.transformer)
    limits = _read_settings(inner, recipe)
    if recipe.pooling == "tokens":
        limits |= document_limit(read_settings(checkpoint, recipe))
    return read_encoder_context(inner, limits, max_context)


def _read_settings(inner: Checkpoint, recipe: Recipe) -> dict[str, Any]:
    if recipe.pooling == "splade":
        return read_transformer_settings(inner, *_SPLADE_TASK)
    return read_transformer_settings(inner, *_TASK, is_colbert=recipe.pooling == "tokens")


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
    """Load an embedding model from a folder of safetensors; the last step yields the engine.

    `pooling` (mean, cls, last), `normalize` and non-empty `prompts` override the folder's settings.
    `max_context` can only lower the model's limit. `report` is called with quantized weights that
    the device has no kernel for. Raises ModelLoadFailed.
    """
    checkpoint = Checkpoint(name, folder)
    recipe = read_recipe(checkpoint, pooling, normalize)
    inner = checkpoint.inside(recipe.transformer)
    saved = checkpoint.read_object("config_sentence_transformers.json")
    limits = _read_settings(inner, recipe)
    colbert = read_settings(checkpoint, recipe) if recipe.pooling == "tokens" else None
    if colbert is not None:
        limits |= document_limit(colbert)
    tokenizer: TextTokenizer | MarkedTokenizer
    tokenizer = plain = load_text_tokenizer(inner, lower_case=bool(limits.get("do_lower_case")))
    yield None
    if (inner.folder / "adapter_config.json").is_file():
        raise inner.failed("its folder has a LoRA adapter, which is not added to embedding models")
    config = inner.read_object("config.json")
    encoder = open_encoder(inner, config, device, dtype)
    projections = read_projections(checkpoint, recipe, encoder.dimensions)
    heads: dict[Output, Head] = {}
    if recipe.pooling == "splade":
        said = {} if recipe.head is None else checkpoint.inside(recipe.head).config()
        heads["sparse"] = open_splade(inner, config, said, device, encoder)
    elif colbert is None:
        heads = open_m3_heads(inner, encoder.dimensions, plain.token_id)
    max_tokens = read_max_tokens(inner, encoder.max_tokens, limits, max_context)
    if colbert is not None:
        if not isinstance(encoder, Bert | ModernBert):
            raise inner.failed(f"ColBERT of `{config['model_type']}` is not supported")
        tokenizer = mark(inner, plain, colbert, max_tokens)
        size = projections[-1].dense.weight.shape[1] if projections else encoder.dimensions
        heads = {"multi_vector": TokenVectors(projections, tokenizer.kept, int(size))}
        projections = []
        if not colbert.are_tokens:  # these prompts are the markers
            prompts = prompts or {}
            saved |= {"prompts": {}, "default_prompt_name": None}
    parts = [*projections, *heads.values()]
    yield from read_in_slices(inner, [*encoder.parameters(), *arrays_of(parts)])
    if isinstance(encoder, Bert):
        yield from encoder.pack_in_steps()
    # Decoder isn't imported here: mlx-lm takes a second to import.
    if hasattr(encoder, "replace_missing"):
        yield from encoder.replace_missing(name, device, report)
    yield EmbeddingEngine(
        name,
        encoder,
        tokenizer,
        recipe,
        projections,
        heads,
        device=device,
        max_tokens=max_tokens,
        prompts=prompts or {key: text or "" for key, text in (saved.get("prompts") or {}).items()},
        default_prompt_name=saved.get("default_prompt_name"),
    )
