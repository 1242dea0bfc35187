"""A chat model's folder → its engine."""

from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_config

from gateway.engine.backend import Device
from gateway.engine.chat import ChatTokenizer, load_chat_tokenizer
from gateway.engine.decoders import open_decoder, parameters
from gateway.engine.generation import GenerationEngine
from gateway.engine.grammar.compiling import GrammarTokenizer
from gateway.engine.grammar.indexes import Runner
from gateway.engine.grammar.shaping import Shape
from gateway.engine.grammar.structured import Structured
from gateway.engine.weights import Checkpoint, at_once, read_in_slices


def load_generation_in_steps(
    folder: Path,
    *,
    name: str,
    device: Device,
    dtype: str | None,
    max_context: int | None,
    chat_template: str | None,
    template_args: Mapping[str, Any],
    shape: Shape | None = None,
    run: Runner | None = None,
    prefix_cache_bytes: int = 0,
) -> Generator[GenerationEngine | None]:
    """Load a chat model that mlx-lm knows, a step for each slice of its weights and for each of
    its tokenizers, which hold the GIL. On the lane.

    Others may have the lane between two steps. They give None, and the last one the engine;
    whoever stops before that must close the generator, on the lane too.

    `max_context` only ever lowers the model's own limit, unless the model states none. `shape`
    tightens the schemas that answers are held to. `run`, where given, makes outlines_core the
    compiler of grammars, in a process that it ends in time. `prefix_cache_bytes` bounds the KV
    kept of prompts, for others that begin alike; 0 keeps none. Raises ModelLoadFailed saying
    what is wrong.
    """
    checkpoint = Checkpoint(name, folder)
    model, config = open_decoder(checkpoint, device=device, dtype=dtype)
    if not all(hasattr(layer, "merge") for layer in make_prompt_cache(model)):
        raise checkpoint.failed(
            f"mlx-lm cannot batch the KV cache of `{config.get('model_type')}` models"
        )
    yield from read_in_slices(checkpoint, parameters(model))
    chat = load_chat_tokenizer(
        folder,
        name=name,
        eos_ids=load_config(folder).get("eos_token_id"),
        chat_template=chat_template,
        template_args=template_args,
    )
    yield None
    vocab_size = int(_text_config(config).get("vocab_size") or chat.backend.get_vocab_size())
    structured = _structured(checkpoint, chat, vocab_size, shape or Shape(), run)
    yield GenerationEngine(
        name,
        model,
        chat,
        structured,
        max_context=_context(checkpoint, config, max_context),
        vocab_size=vocab_size,
        prefix_cache_bytes=prefix_cache_bytes,
    )


load_generation = at_once(load_generation_in_steps)


def _structured(
    checkpoint: Checkpoint,
    chat: ChatTokenizer,
    vocab_size: int,
    shape: Shape,
    run: Runner | None,
) -> Structured:
    try:
        tokenizer = GrammarTokenizer(
            chat.tokenizer,
            vocab_size=vocab_size,
            eos_ids=chat.eos_ids,
            marks=chat.call_ids,
            backend="llguidance" if run is None else "outlines_core",
        )
    except ValueError as error:
        raise checkpoint.failed(f"its tokenizer cannot serve grammars: {error}") from error
    form = chat.call_format(tokenizer.tokens.is_special_token)
    return Structured(tokenizer, shape, form, run)


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Multimodal models keep their language model's sizes apart."""
    text: Mapping[str, Any] = config.get("text_config") or config
    return text


def _context(checkpoint: Checkpoint, config: Mapping[str, Any], lowered: int | None) -> int:
    own = _text_config(config).get("max_position_embeddings")
    limits = [int(limit) for limit in (own, lowered) if limit]
    if not limits:
        raise checkpoint.failed(
            "its config has no max_position_embeddings; set `max_context:` in models.yaml"
        )
    return min(limits)
