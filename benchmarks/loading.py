"""Engines loaded in one go, for a thread that serves nothing else."""

from collections.abc import Callable, Generator
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar, cast

from gateway.engine.device import Device
from gateway.engine.embedding.cross_encoder import CrossEncoderEngine, load_cross_encoder_in_steps
from gateway.engine.embedding.engine import EmbeddingEngine
from gateway.engine.embedding.loading import load_embedding_in_steps
from gateway.engine.generation.engine import GenerationEngine
from gateway.engine.generation.loading import (
    load_generation_in_steps,
    read_chat_setup,
    read_draft_setup,
)
from gateway.engine.generation.prepare import ChatSetup
from gateway.engine.grammar.schema_bounds import Shape
from gateway.engine.models.decoders import Numbers
from gateway.engine.prompting.chat_tokenizer import ChatFormats
from gateway.engine.sandbox_worker import Sandbox

T = TypeVar("T")


def run_steps(steps: Generator[T | None]) -> T:
    """Run a loader whose last step yields the engine."""
    return next(engine for engine in steps if engine is not None)


def load_embedding(folder: Path, **options: Any) -> EmbeddingEngine:
    return run_steps(load_embedding_in_steps(folder, **options))


def load_cross_encoder(folder: Path, **options: Any) -> CrossEncoderEngine:
    return run_steps(load_cross_encoder_in_steps(folder, **options))


def load_generation(
    files: Path,
    *,
    name: str,
    device: Device,
    max_context: int | None = None,
    shape: Shape | None = None,
    sandbox: Sandbox | None = None,
    image_sandbox: Sandbox | None = None,
    draft: Path | None = None,  # the folder or GGUF file of its draft model
    **options: Any,  # options of the template and the formats, of numbers, and of the engine
) -> GenerationEngine:
    """Load a chat model, all of it."""
    setup = read_chat_setup(
        files,
        name=name,
        max_context=max_context,
        formats=_taken(ChatFormats, options),
        shape=shape,
        sandbox=sandbox,
        image_sandbox=image_sandbox,
    )
    return load_weights(setup, device=device, draft=draft, **options)


def load_weights(
    setup: ChatSetup, *, device: Device, draft: Path | None = None, **options: Any
) -> GenerationEngine:
    """Load a chat model whose other files are read already."""
    numbers = _taken(Numbers, options)
    if draft is not None:
        own = Numbers()
        options["draft"] = read_draft_setup(draft, name=draft.name, target=setup, numbers=own)
    return run_steps(load_generation_in_steps(setup, device=device, numbers=numbers, **options))


def _taken(kind: Callable[..., T], options: dict[str, Any]) -> T:
    """Make a dataclass of the options that are its fields, which are no others' then."""
    names = {each.name for each in fields(cast(Any, kind))} & options.keys()
    return kind(**{name: options.pop(name) for name in names})
