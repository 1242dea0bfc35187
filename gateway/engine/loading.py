"""A chat model's folder → its engine."""

import json
import math
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mlx_lm.utils import load_config

from gateway.engine.backend import Device
from gateway.engine.chat import ChatTokenizer, load_chat_tokenizer
from gateway.engine.decoders import open_decoder, parameters
from gateway.engine.generation import GenerationEngine
from gateway.engine.grammar.shaping import Shape
from gateway.engine.grammar.structured import Structured
from gateway.engine.grammar.tokenizer import Backend, GrammarTokenizer
from gateway.engine.grammar.trial import Sandbox
from gateway.engine.weights import Checkpoint, read_in_slices


@dataclass(frozen=True, slots=True)
class ChatSetup:
    """What a chat model needs beside its weights."""

    config: Mapping[str, Any]
    chat: ChatTokenizer
    structured: Structured
    max_context: int
    vocab_size: int


def read_chat_setup(
    folder: Path,
    *,
    name: str,
    max_context: int | None,
    chat_template: str | None,
    template_args: Mapping[str, Any],
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    shape: Shape | None = None,
    structured_backend: Backend = "llguidance",
    sandbox: Sandbox | None = None,
    template_sandbox: Sandbox | None = None,
) -> ChatSetup:
    """Read a chat model's config, tokenizer and template, and prepare its grammars.

    Takes seconds and no MLX: for a thread beside the lane's. A tokenizer that grammars cannot
    read leaves the model without them.

    `max_context` only ever lowers the model's own limit, unless the model states none. `shape`
    tightens the schemas that answers are held to. Grammars are compiled in the `sandbox` first,
    which outlines_core cannot do without, and templates are rendered in the other. `tool_parser`
    and `reasoning_parser` name the forms of its calls and of its thinking; absent, they are
    inferred. Raises ModelLoadFailed.
    """
    checkpoint = Checkpoint(name, folder)
    with checkpoint.blamed():
        config = load_config(folder)
    chat = load_chat_tokenizer(
        folder,
        name=name,
        eos_ids=config.get("eos_token_id"),
        chat_template=chat_template,
        template_args=template_args,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        sandbox=template_sandbox,
    )
    vocab_size = int(_text_config(config).get("vocab_size") or chat.backend.get_vocab_size())
    return ChatSetup(
        config,
        chat,
        _structured(chat, vocab_size, shape or Shape(), structured_backend, sandbox),
        max_context=_context(checkpoint, config, max_context),
        vocab_size=vocab_size,
    )


def load_generation_in_steps(
    folder: Path,
    *,
    name: str,
    device: Device,
    dtype: str | None,
    setup: ChatSetup,
    prefix_cache_bytes: int = 0,
) -> Generator[GenerationEngine | None]:
    """Load a chat model that mlx-lm knows, a step for each slice of its weights. On the lane.

    Others may have the lane between two steps. They give None, and the last one the engine;
    whoever stops before that must close the generator, on the lane too.

    `prefix_cache_bytes` bounds the KV kept of prompts, for others that begin alike; 0 keeps none.
    Raises ModelLoadFailed saying what is wrong.
    """
    checkpoint = Checkpoint(name, folder)
    model, _ = open_decoder(checkpoint, device=device, dtype=dtype)
    yield from read_in_slices(checkpoint, parameters(model))
    yield GenerationEngine(
        name,
        model,
        setup.chat,
        setup.structured,
        max_context=setup.max_context,
        vocab_size=setup.vocab_size,
        prefix_cache_bytes=prefix_cache_bytes,
        sampling_defaults=sampling_defaults(folder),
    )


def load_generation(
    folder: Path,
    *,
    name: str,
    device: Device,
    dtype: str | None = None,
    prefix_cache_bytes: int = 0,
    max_context: int | None = None,
    chat_template: str | None = None,
    template_args: Mapping[str, Any] = MappingProxyType({}),
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    shape: Shape | None = None,
    structured_backend: Backend = "llguidance",
    sandbox: Sandbox | None = None,
    template_sandbox: Sandbox | None = None,
) -> GenerationEngine:
    """Load a chat model at once, where nobody else needs the thread."""
    setup = read_chat_setup(
        folder,
        name=name,
        max_context=max_context,
        chat_template=chat_template,
        template_args=template_args,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        shape=shape,
        structured_backend=structured_backend,
        sandbox=sandbox,
        template_sandbox=template_sandbox,
    )
    steps = load_generation_in_steps(
        folder,
        name=name,
        device=device,
        dtype=dtype,
        setup=setup,
        prefix_cache_bytes=prefix_cache_bytes,
    )
    return next(engine for engine in steps if engine is not None)


def _structured(
    chat: ChatTokenizer,
    vocab_size: int,
    shape: Shape,
    backend: Backend,
    sandbox: Sandbox | None,
) -> Structured:
    try:
        tokenizer = GrammarTokenizer(
            chat.tokenizer,
            vocab_size=vocab_size,
            eos_ids=chat.eos_ids,
            marks=chat.call_ids,
            backend=backend,
        )
    except ValueError as error:
        return Structured(None, shape, None, sandbox, problem=str(error))
    form = chat.call_format(tokenizer.tokens.is_special_token)
    return Structured(tokenizer, shape, form, sandbox)


# What vLLM takes from generation_config.json (ModelConfig.get_diff_sampling_param), and what makes
# a value usable. As there, `do_sample: false` is not read: greedy answers are asked for by a
# temperature, and many files say false for no more reason than that it is the format's default.
_SAMPLING: Mapping[str, Callable[[float], bool]] = {
    "temperature": lambda value: 0 <= value <= 2,
    "top_p": lambda value: 0 < value <= 1,
    "top_k": lambda value: value >= 0 and value == int(value),
    "min_p": lambda value: 0 <= value <= 1,
    "repetition_penalty": lambda value: 0 < value <= 10,
}


def sampling_defaults(folder: Path) -> dict[str, float]:
    """Return what generation_config.json says of sampling, where it makes sense."""
    try:
        said = json.loads((folder / "generation_config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(said, dict):
        return {}
    numbers = {name: said[name] for name in _SAMPLING if type(said.get(name)) in (int, float)}
    usable = {
        name: value
        for name, value in numbers.items()
        if math.isfinite(value) and _SAMPLING[name](value)
    }
    return {name: int(value) if name == "top_k" else value for name, value in usable.items()}


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
