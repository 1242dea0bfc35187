"""Engines loaded in one go, for a thread that serves nothing else."""

from collections.abc import Generator
from pathlib import Path
from typing import Any, TypeVar

from gateway.engine.device import Device
from gateway.engine.embedding.cross_encoder import CrossEncoderEngine, load_cross_encoder_in_steps
from gateway.engine.embedding.engine import EmbeddingEngine, load_embedding_in_steps
from gateway.engine.generation.engine import GenerationEngine
from gateway.engine.generation.loading import (
    load_generation_in_steps,
    read_chat_setup,
    read_draft_setup,
)
from gateway.engine.generation.prepare import ChatSetup
from gateway.engine.grammar.shaping import Shape
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
    draft: Path | None = None,  # the folder or GGUF file of its draft model
    **options: Any,  # of the template and the formats, and of the engine
) -> GenerationEngine:
    """Load a chat model, all of it."""
    formats: Any = {key: options.pop(key) for key in ChatFormats.__annotations__ if key in options}
    setup = read_chat_setup(
        files, name=name, max_context=max_context, shape=shape, sandbox=sandbox, **formats
    )
    return load_weights(setup, device=device, draft=draft, **options)


def load_weights(
    setup: ChatSetup, *, device: Device, draft: Path | None = None, **options: Any
) -> GenerationEngine:
    """Load a chat model whose other files are read already."""
    if draft is not None:
        options["draft"] = read_draft_setup(draft, name=draft.name, target=setup)
    return run_steps(load_generation_in_steps(setup, device=device, **options))
