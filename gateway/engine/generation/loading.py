"""A chat model's folder, or its GGUF file → its engine."""

import json
import math
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mlx_lm.utils import load_config

from gateway.engine.bounds import Bounds
from gateway.engine.device import Device
from gateway.engine.generation.draft_model import DraftModel, can_go_back
from gateway.engine.generation.engine import GenerationEngine
from gateway.engine.grammar.shaping import Shape
from gateway.engine.grammar.structured import Structured
from gateway.engine.grammar.tokenizer import GrammarTokenizer
from gateway.engine.grammar.trial import Sandbox
from gateway.engine.kv.quantized import quantize_kv
from gateway.engine.models.checkpoint import Checkpoint, Listing, measure_kv
from gateway.engine.models.context import lower_context, text_config
from gateway.engine.models.decoders import read_decoder
from gateway.engine.models.gguf.checkpoint import GgufCheckpoint, open_checkpoint
from gateway.engine.models.gguf.vocabulary import read_sampling, wrap_tokenizer
from gateway.engine.models.missing_kernels import Report
from gateway.engine.models.sharding import Share
from gateway.engine.prompting.chat_tokenizer import (
    ChatTokenizer,
    chat_tokenizer,
    load_chat_tokenizer,
    wrap_folder_tokenizer,
)


@dataclass(frozen=True, slots=True)
class ChatSetup:
    """What a chat model needs besides its weights, and the files that those are read from."""

    checkpoint: Checkpoint | GgufCheckpoint
    chat: ChatTokenizer
    structured: Structured
    max_context: int
    vocab_size: int
    sampling_defaults: Mapping[str, float]


def read_chat_setup(
    files: Path,
    *,
    name: str,
    max_context: int | None,
    chat_template: str | None,
    template_args: Mapping[str, Any],
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    split_special_tokens: bool = False,
    shape: Shape | None = None,
    sandbox: Sandbox | None = None,
    template_sandbox: Sandbox | None = None,
) -> ChatSetup:
    """Read a chat model's config, tokenizer and template, and prepare its grammars.

    `files` is its folder, or its GGUF file, which contains all of them.

    Takes seconds and no MLX: run it on a thread that is not the lane's. A tokenizer that the
    grammars cannot read leaves the model without grammars.

    `max_context` only ever lowers the model's own limit, unless the model states none. `shape`
    tightens the schemas that answers are held to, with the folder's own bounds where it has none.
    Grammars are compiled in `sandbox` first; templates are rendered in `template_sandbox`.
    `tool_parser` and `reasoning_parser` name the forms of its calls and of its thinking; without
    them, they are inferred. With `split_special_tokens`, control tokens in what callers send are
    letters. Raises ModelLoadFailed.
    """
    checkpoint = open_checkpoint(name, files)
    formats: dict[str, Any] = {
        "name": name,
        "chat_template": chat_template,
        "template_args": template_args,
        "tool_parser": tool_parser,
        "reasoning_parser": reasoning_parser,
        "split_special_tokens": split_special_tokens,
        "sandbox": template_sandbox,
    }
    if isinstance(checkpoint, GgufCheckpoint):
        config = checkpoint.config()
        wrapper = wrap_tokenizer(checkpoint)
        chat = chat_tokenizer(wrapper, model_type=config["model_type"], **formats)
        own = read_sampling(checkpoint.header.metadata)
    else:
        with checkpoint.blame():
            config = load_config(files)
        chat = load_chat_tokenizer(files, eos_ids=config.get("eos_token_id"), **formats)
        own = generation_config(files)
    vocab_size = int(text_config(config).get("vocab_size") or chat.backend.get_vocab_size())
    return ChatSetup(
        checkpoint,
        chat,
        _make_structured(chat, vocab_size, complete_shape(shape or Shape(), own), sandbox),
        max_context=_context(checkpoint, config, max_context),
        vocab_size=vocab_size,
        sampling_defaults=usable_sampling(own),
    )


@dataclass(frozen=True, slots=True)
class DraftSetup:
    """A checkpoint whose model drafts for another one; `vocab_size` tokens have embeddings."""

    checkpoint: Checkpoint | GgufCheckpoint
    vocab_size: int
    max_context: int
    dtype: str | None = None
    is_packed: bool = False
    is_fused: bool = False
    kv_bits: int | None = None


def read_draft_setup(
    files: Path,
    *,
    name: str,
    target: ChatSetup,
    dtype: str | None = None,
    is_packed: bool = False,
    is_fused: bool = False,
    kv_bits: int | None = None,
) -> DraftSetup:
    """Read the config and the tokenizer of a model that is to draft for `target`.

    Takes seconds and no MLX, as `read_chat_setup` does. Raises ModelLoadFailed, naming both models,
    unless they have the same vocabulary.
    """
    checkpoint = open_checkpoint(name, files)
    if isinstance(checkpoint, GgufCheckpoint):
        config, wrapper = checkpoint.config(), wrap_tokenizer(checkpoint)
    else:
        with checkpoint.blame():
            config = load_config(files)
        wrapper = wrap_folder_tokenizer(files, name=name)
    backend: Any = wrapper.backend_tokenizer
    theirs, own = backend.get_vocab(), target.chat.backend.get_vocab()
    if theirs != own:
        differing = {token for token, _ in theirs.items() ^ own.items()}
        raise target.checkpoint.failed(
            f"its draft {name!r} has another vocabulary: {len(differing):,} tokens differ, as "
            f"{min(differing)!r}. A draft must have the same tokenizer: see `draft:` in models.yaml"
        )
    vocab_size = int(text_config(config).get("vocab_size") or backend.get_vocab_size())
    max_context = _context(checkpoint, config, target.max_context)
    return DraftSetup(checkpoint, vocab_size, max_context, dtype, is_packed, is_fused, kv_bits)


def load_generation_in_steps(
    setup: ChatSetup,
    *,
    device: Device,
    dtype: str | None,
    is_packed: bool = False,
    is_fused: bool = False,
    kv_bits: int | None = None,
    prefix_cache_bytes: int = 0,
    speculate_rows: int = 0,
    draft: DraftSetup | None = None,
    share: Share | None = None,
    bounds: Bounds | None = None,
    report: Report | None = None,
) -> Generator[GenerationEngine | None]:
    """Load a chat model that mlx-lm knows, one step for each slice of its weights. On the lane.

    Other work may have the lane between two steps. Each step yields None, and the last one the
    engine; a caller that stops before it must close the generator, on the lane too.

    `is_packed` leaves weights quantised on a CPU too, as `must_stay_packed` decides. If the model
    `is_fused`, projections of one input are one product. KV is kept in `kv_bits`, if given.
    `prefix_cache_bytes` bounds the KV kept of prompts, for others that begin alike; 0 keeps none.
    In batches of up to `speculate_rows`, tokens may be read ahead of their choice, also by the
    model of `draft`, whose prompts' KV has its part of `prefix_cache_bytes`.
    With a `share` it is this rank's part of the model, whose calls every rank must make. `bounds`
    are the device's, with what is kept of all models' prompts. `report` is called with quantised
    weights that become floating, since the device has no kernel for them.
    Raises ModelLoadFailed saying what is wrong.
    """
    model = yield from read_decoder(
        setup.checkpoint,
        device=device,
        dtype=dtype,
        is_packed=is_packed,
        is_fused=is_fused,
        share=share,
        report=report,
    )
    if kv_bits is not None:
        quantize_kv(setup.checkpoint, model, kv_bits, is_shared=share is not None)
    if share is not None and share.parallel == "pipeline":
        prefix_cache_bytes = 0  # ranks have other layers, so they would keep other prompts
    draft_model = None
    if draft is not None:
        other = yield from read_decoder(
            draft.checkpoint,
            device=device,
            dtype=draft.dtype,
            is_packed=draft.is_packed,
            is_fused=draft.is_fused,
            report=report,
        )
        if draft.kv_bits is not None:
            quantize_kv(draft.checkpoint, other, draft.kv_bits)
        for each, checkpoint in ((model, setup.checkpoint), (other, draft.checkpoint)):
            if not can_go_back(each):
                raise setup.checkpoint.failed(
                    f"{checkpoint.name!r} has sliding windows or states, which cannot go back to "
                    f"before a draft; it cannot have or be `draft: {draft.checkpoint.name}`"
                )
        tokens = measure_kv(other).token, measure_kv(model).token
        draft_bytes = prefix_cache_bytes * tokens[0] // max(1, sum(tokens))
        draft_model = DraftModel(
            other,
            vocab_size=min(draft.vocab_size, setup.vocab_size),
            max_context=draft.max_context,
            prefix_cache_bytes=draft_bytes,
            kept=bounds.kept if bounds is not None else None,
        )
        prefix_cache_bytes -= draft_bytes
    yield GenerationEngine(
        setup.checkpoint.name,
        model,
        setup.chat,
        setup.structured,
        max_context=setup.max_context,
        vocab_size=setup.vocab_size,
        prefix_cache_bytes=prefix_cache_bytes,
        speculate_rows=speculate_rows,
        draft_model=draft_model,
        sampling_defaults=setup.sampling_defaults,
        bounds=bounds,
    )


def load_generation(
    files: Path,
    *,
    name: str,
    device: Device,
    dtype: str | None = None,
    is_packed: bool = False,
    is_fused: bool = False,
    kv_bits: int | None = None,
    prefix_cache_bytes: int = 0,
    speculate_rows: int = 0,
    max_context: int | None = None,
    chat_template: str | None = None,
    template_args: Mapping[str, Any] = MappingProxyType({}),
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    split_special_tokens: bool = False,
    shape: Shape | None = None,
    sandbox: Sandbox | None = None,
    template_sandbox: Sandbox | None = None,
    draft: Path | None = None,
    bounds: Bounds | None = None,
) -> GenerationEngine:
    """Load a chat model in one go, for a thread that serves nothing else. `draft` is the folder or
    GGUF file of its draft model.
    """
    setup = read_chat_setup(
        files,
        name=name,
        max_context=max_context,
        chat_template=chat_template,
        template_args=template_args,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        split_special_tokens=split_special_tokens,
        shape=shape,
        sandbox=sandbox,
        template_sandbox=template_sandbox,
    )
    steps = load_generation_in_steps(
        setup,
        device=device,
        dtype=dtype,
        is_packed=is_packed,
        is_fused=is_fused,
        kv_bits=kv_bits,
        prefix_cache_bytes=prefix_cache_bytes,
        speculate_rows=speculate_rows,
        draft=(
            read_draft_setup(draft, name=draft.name, target=setup) if draft is not None else None
        ),
        bounds=bounds,
    )
    return next(engine for engine in steps if engine is not None)


def _make_structured(
    chat: ChatTokenizer, vocab_size: int, shape: Shape, sandbox: Sandbox | None
) -> Structured:
    try:
        tokenizer = GrammarTokenizer(
            chat.tokenizer,
            vocab_size=vocab_size,
            eos_ids=chat.eos_ids,
            marks=chat.call_ids,
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


def generation_config(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's generation_config.json; empty if it cannot be read."""
    try:
        own = json.loads((folder / "generation_config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return own if isinstance(own, dict) else {}


def usable_sampling(own: Mapping[str, Any]) -> dict[str, float]:
    """Return the usable sampling defaults of a checkpoint, under generation_config.json's names."""
    numbers = {name: own[name] for name in _SAMPLING if type(own.get(name)) in (int, float)}
    usable = {
        name: value
        for name, value in numbers.items()
        if math.isfinite(value) and _SAMPLING[name](value)
    }
    return {name: int(value) if name == "top_k" else value for name, value in usable.items()}


def complete_shape(shape: Shape, own: Mapping[str, Any]) -> Shape:
    """Return a shape, with the checkpoint's own bounds where it has none.

    They stand in generation_config.json under `structured`, under models.yaml's names: a model too
    small to end a string by itself is so wherever it is served.
    """
    stated = own.get("structured")
    bounds = stated if isinstance(stated, dict) else {}

    def bound(name: str, given: int | None) -> int | None:
        own = bounds.get(name)
        return own if given is None and type(own) is int and own >= 1 else given

    return replace(
        shape,
        max_string_chars=bound("max_string_chars", shape.max_string_chars),
        max_array_items=bound("max_array_items", shape.max_array_items),
    )


def _context(checkpoint: Listing, config: Mapping[str, Any], lowered: int | None) -> int:
    limit = lower_context(config, lowered)
    if limit is None:
        raise checkpoint.failed(
            "its config has no max_position_embeddings; set `max_context:` in models.yaml"
        )
    return limit
