"""Loading of chat models from a folder or a GGUF file."""

import json
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_config

from gateway.engine.answers.response_template import ResponseTemplate
from gateway.engine.device import Device, DeviceBounds
from gateway.engine.drafts.draft_model import DraftModel
from gateway.engine.drafts.head_drafter import HeadDrafter
from gateway.engine.drafts.shared_kv_drafter import SharedKvDrafter
from gateway.engine.generation.engine import GenerationEngine
from gateway.engine.generation.prepare import ChatSetup
from gateway.engine.grammar.schema_bounds import Shape
from gateway.engine.grammar.structured import StructuredOutput
from gateway.engine.grammar.tokenizer import GrammarTokenizer
from gateway.engine.kv.layers import batch_of_one, can_batch, can_go_back, make_batch_caches
from gateway.engine.kv.prefix_cache import PrefixPool
from gateway.engine.kv.quantized import quantize_kv
from gateway.engine.models import gemma4_assistant
from gateway.engine.models.checkpoint import Checkpoint, Listing, reading_tokenizer, reads_target
from gateway.engine.models.context import lower_context
from gateway.engine.models.counts import text_config
from gateway.engine.models.decoders import Numbers, read_decoder
from gateway.engine.models.gguf.checkpoint import GgufCheckpoint, open_checkpoint
from gateway.engine.models.gguf.vocabulary import named_ends, read_sampling, wrap_tokenizer
from gateway.engine.models.missing_kernels import Report
from gateway.engine.models.mtp_head import uses_head
from gateway.engine.models.notes import list_notes, verified_by
from gateway.engine.models.sharding import RankShare
from gateway.engine.prompting.chat_template import TemplateRefusal
from gateway.engine.prompting.chat_tokenizer import (
    ChatFormats,
    ChatTokenizer,
    chat_tokenizer,
    count_alike,
    wrap_folder_tokenizer,
)
from gateway.engine.prompting.thoughts import (
    ANSWERING,
    ARGUMENTS,
    CALLING,
    FUNCTION,
    THOUGHT,
    THOUGHT_KEY,
    Turn,
    may_show_thoughts,
    trial_job,
)
from gateway.engine.sandbox_worker import Sandbox
from gateway.engine.tokenizer_parts import check_growth
from gateway.engine.vision.prompts import read_image_format
from gateway.engine.vision.sight import Sight
from gateway.engine.vision.towers import open_tower
from gateway.errors import BadRequest
from gateway.jobs.chat import Calling, Sampling
from gateway.jobs.steps import SequenceParams


def read_chat_setup(
    files: Path,
    *,
    name: str,
    max_context: int | None,
    formats: ChatFormats | None = None,
    shape: Shape | None = None,
    sandbox: Sandbox | None = None,
    image_sandbox: Sandbox | None = None,  # None turns images off
    image_secret: bytes | None = None,  # the key for image ids
) -> ChatSetup:
    """Read a chat model's config, tokenizer and template, and prepare its grammars.

    `max_context` can only lower the model's limit, or set a missing one. `shape` tightens the JSON
    Schemas of answers. Takes seconds and doesn't use MLX, so don't run it on the lane. Raises
    ModelLoadFailed.
    """
    checkpoint, formats = open_checkpoint(name, files), formats or ChatFormats()
    if reads_target(checkpoint):
        raise checkpoint.failed(
            "it only guesses tokens for a chat model of Gemma 4: name it as that model's `draft:` "
            "in models.yaml"
        )
    with reading_tokenizer(checkpoint):
        config, wrapper = _read_tokenizer(checkpoint, files)
        kind = str(config.get("model_type"))
        chat = chat_tokenizer(wrapper, formats, name=name, model_type=kind)
        reader = _find_reader(wrapper, chat, formats)
        is_read = reader is not None and reader.problem is None
        unread: list[str] = []
        try:
            if not is_read and chat.trial_error is None:
                unread = [each for each in unread_formats(chat) if getattr(formats, each) != "none"]
        except BadRequest as error:  # rendering took too much time or memory
            chat.trial_error = str(error)
    if isinstance(checkpoint, GgufCheckpoint):
        generation = read_sampling(checkpoint.header.metadata)
    else:
        generation = generation_config(files)
    vocab_size = int(text_config(config).get("vocab_size") or chat.backend.get_vocab_size())
    rows = max((each.shape[0] for each in checkpoint.tensors().values() if each.shape), default=0)
    if vocab_size > rows:  # grammar tables have vocab_size entries: refuse an inflated value
        raise checkpoint.failed(
            f"vocab_size is {vocab_size:,}, but no weight has more than {rows:,} rows"
        )
    shape = (shape or Shape()).completed(generation.get("structured"))
    limit = _context(checkpoint, config, max_context)
    notes: list[str] = []
    images = None
    if isinstance(checkpoint, Checkpoint):
        notes += list_notes(config, max_context)
        if image_sandbox is not None:
            images = read_image_format(checkpoint, image_sandbox, limit, notes.append, image_secret)
    return ChatSetup(
        checkpoint,
        chat,
        _make_structured(chat, vocab_size, shape, sandbox),
        max_context=limit,
        vocab_size=vocab_size,
        sampling_defaults=usable_sampling(generation),
        unread_formats=unread,
        notes=notes,
        verified=verified_by(config),
        reader=reader,
        images=images,
    )


def _find_reader(
    wrapper: TokenizerWrapper, chat: ChatTokenizer, formats: ChatFormats
) -> ResponseTemplate | None:
    """Return a parser made from `response_template`, or None if another format parses answers."""
    template = getattr(wrapper._tokenizer, "response_template", None)  # needs transformers 5.13
    sandbox = formats.template_sandbox
    is_known = chat.answers.reads_calls or chat.answers.reasoning.name != "none"
    is_named = formats.tool_parser or formats.reasoning_parser
    if template is None or sandbox is None or is_known or is_named:
        return None
    return ResponseTemplate(template, sandbox)


def read_tokenizer(files: Path, *, name: str, chat_template: str | None) -> Any:
    """Return a chat model's transformers tokenizer. Raises ModelLoadFailed."""
    _, wrapper = _read_tokenizer(open_checkpoint(name, files), files)
    if chat_template is not None:
        wrapper.chat_template = chat_template
    return wrapper._tokenizer


def _read_tokenizer(
    checkpoint: Checkpoint | GgufCheckpoint, files: Path
) -> tuple[dict[str, Any], TokenizerWrapper]:
    if isinstance(checkpoint, GgufCheckpoint):
        return checkpoint.config(), wrap_tokenizer(checkpoint)
    checkpoint.config()  # raises an error for impossible values
    with checkpoint.blame("config.json and generation_config.json: "):
        config = load_config(files)
    eos_ids = config.get("eos_token_id")
    listed = eos_ids if isinstance(eos_ids, list) else [eos_ids]
    if not all(each is None or (type(each) is int and each >= 0) for each in listed):
        raise checkpoint.failed(
            f"config.json or generation_config.json: eos_token_id isn't a token id: {eos_ids!r:.60}"
        )
    wrapper = wrap_folder_tokenizer(files, name=checkpoint.name, eos_ids=eos_ids)
    check_growth(wrapper.backend_tokenizer)
    # The files may name a wrong EOS token, so tokens with the usual names are added.
    wrapper.eos_token_ids |= named_ends(wrapper._tokenizer.get_added_vocab())
    return config, wrapper


@dataclass(frozen=True, slots=True)
class DraftSetup:
    """Everything about a draft model except its weights."""

    checkpoint: Checkpoint | GgufCheckpoint
    vocab_size: int  # tokens that have embeddings
    max_context: int
    numbers: Numbers

    @property
    def reads_target(self) -> bool:
        """Whether it reads its target's KV and states, as Gemma 4's drafter does."""
        return reads_target(self.checkpoint)


def read_draft_setup(files: Path, *, name: str, target: ChatSetup, numbers: Numbers) -> DraftSetup:
    """Read the config and tokenizer of a draft model for `target`.

    Raises ModelLoadFailed if the two vocabularies differ.
    """
    checkpoint = open_checkpoint(name, files)
    with reading_tokenizer(checkpoint):
        config, wrapper = _read_tokenizer(checkpoint, files)
    backend: Any = wrapper.backend_tokenizer
    vocabulary, expected = backend.get_vocab(), target.chat.backend.get_vocab()
    if vocabulary != expected:
        differing = {token for token, _ in vocabulary.items() ^ expected.items()}
        raise target.checkpoint.failed(
            f"its draft {name!r} has another vocabulary: {len(differing):,} tokens differ, such "
            f"as {min(differing)!r}. A draft needs the same tokenizer: see `draft:` in models.yaml"
        )
    vocab_size = int(text_config(config).get("vocab_size") or backend.get_vocab_size())
    context = _context(checkpoint, config, target.max_context)
    setup = DraftSetup(checkpoint, vocab_size, context, numbers)
    if setup.reads_target and numbers.kv_bits is not None:
        raise target.checkpoint.failed(
            f"its draft {name!r} has `kv_bits`, but no KV of its own: remove it from {name!r}"
        )
    return setup


def load_generation_in_steps(
    setup: ChatSetup,
    *,
    device: Device,
    numbers: Numbers,
    prefix_cache_bytes: int = 0,  # shared with the draft model
    prefixes: PrefixPool | None = None,  # a pool shared with other models
    speculate_rows: int = 0,  # the most rows of a batch that uses speculative decoding
    draft: DraftSetup | None = None,
    has_head: bool = True,  # whether the model's own MTP head drafts, if there is no draft model
    share: RankShare | None = None,  # this rank's part; all ranks must make the same calls
    bounds: DeviceBounds | None = None,
    report: Report | None = None,  # gets weights that are dequantized because a kernel is missing
) -> Generator[GenerationEngine | None]:
    """Load a chat model, one slice of its weights per step. The last step yields the engine.

    Run the steps, or close the generator early, on the lane. Raises ModelLoadFailed.
    """
    notes = [*setup.notes]
    has_head = has_head and speculate_rows > 0 and draft is None and share is None
    model = yield from _read_model(
        setup.checkpoint,
        numbers,
        device,
        share,
        report,
        setup.max_context,
        note=notes.append,
        has_head=has_head,
        keeps_states=draft is not None and draft.reads_target,
    )
    if share is not None and share.parallel == "pipeline":
        prefix_cache_bytes = 0  # ranks hold different layers, so their caches would differ
    bounds = bounds or DeviceBounds()
    prefixes = prefixes or PrefixPool(prefix_cache_bytes, bounds.kept)
    drafter = yield from _open_drafter(model, setup, draft, device, report, prefixes)
    sight = None
    if setup.images is not None and share is None:
        assert isinstance(setup.checkpoint, Checkpoint)
        tower = yield from open_tower(
            setup.checkpoint, device=device, dtype=numbers.dtype, is_packed=numbers.is_packed
        )
        with setup.checkpoint.blame("its images: "):
            images = setup.images
            sight = Sight(model, tower, setup.checkpoint.config(), images.patches, images.marks)
    yield GenerationEngine(
        model,
        replace(setup, notes=notes),
        prefixes=prefixes,
        speculate_rows=speculate_rows,
        drafter=drafter,
        bounds=bounds,
        sight=sight,
    )


def _open_drafter(
    model: Any,
    setup: ChatSetup,
    draft: DraftSetup | None,
    device: Device,
    report: Report | None,
    prefixes: PrefixPool,
) -> Generator[None, None, DraftModel | HeadDrafter | None]:
    """Load the draft model; without one, return the drafter of the model's own head, if any."""
    if draft is None:
        return HeadDrafter(model, vocab_size=setup.vocab_size) if uses_head(model) else None
    name, both = draft.checkpoint.name, [(model, setup.checkpoint)]
    draft_model = yield from _read_model(
        draft.checkpoint, draft.numbers, device, None, report, draft.max_context
    )
    if not draft.reads_target:
        both.append((draft_model, draft.checkpoint))
    elif misfit := gemma4_assistant.find_misfit(draft_model, model):
        raise setup.checkpoint.failed(f"its draft {name!r} does not fit it: {misfit}")
    for decoder, checkpoint in both:
        if not (can_batch(decoder) and can_go_back(batch_of_one(make_batch_caches(decoder)))):
            raise setup.checkpoint.failed(
                f"{checkpoint.name!r} uses a cache that cannot be rolled back after rejected "
                f"tokens, so it can neither have nor be `draft: {name}`"
            )
    vocab_size = min(draft.vocab_size, setup.vocab_size)
    if draft.reads_target:
        return SharedKvDrafter(draft_model, model, vocab_size=vocab_size)
    return DraftModel(
        draft_model, vocab_size=vocab_size, max_context=draft.max_context, prefixes=prefixes
    )


def _read_model(
    checkpoint: Checkpoint | GgufCheckpoint,
    numbers: Numbers,
    device: Device,
    share: RankShare | None,
    report: Report | None,
    context: int,
    note: Callable[[str], None] | None = None,
    has_head: bool = False,
    keeps_states: bool = False,
) -> Generator[None, None, Any]:
    model = yield from read_decoder(
        checkpoint,
        device=device,
        numbers=numbers,
        context=context,
        note=note,
        share=share,
        report=report,
        has_head=has_head,
    )
    if keeps_states:
        gemma4_assistant.keep_states(model)
    if numbers.kv_bits is not None:
        quantize_kv(checkpoint, model, numbers.kv_bits, is_shared=share is not None)
    return model


def _make_structured(
    chat: ChatTokenizer, vocab_size: int, shape: Shape, sandbox: Sandbox | None
) -> StructuredOutput:
    try:
        tokenizer = GrammarTokenizer(
            chat.tokenizer,
            vocab_size=vocab_size,
            eos_ids=chat.answers.eos_ids,
            marks=chat.answers.call_ids,
        )
    except ValueError as error:
        return StructuredOutput(None, shape, None, sandbox, problem=str(error))
    form = chat.answers.call_format(tokenizer.tokens.is_special_token)
    return StructuredOutput(tokenizer, shape, form, sandbox)


# The fields that vLLM reads from generation_config.json (ModelConfig.get_diff_sampling_param), with
# tests for valid values. Like vLLM, we ignore `do_sample: false`, which many files have by default.
_SAMPLING: Mapping[str, Callable[[float], bool]] = {
    "temperature": lambda value: 0 <= value <= 2,
    "top_p": lambda value: 0 < value <= 1,
    "top_k": lambda value: value >= 0 and value == int(value),
    "min_p": lambda value: 0 <= value <= 1,
    "repetition_penalty": lambda value: 0 < value <= 10,
}


def generation_config(folder: Path) -> dict[str, Any]:
    """Return a folder's generation_config.json; {} if it can't be read."""
    try:
        content = json.loads((folder / "generation_config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    if isinstance(content, dict):
        return content
    return {}


def usable_sampling(config: Mapping[str, Any]) -> dict[str, float]:
    """Return the sampling defaults that have valid values, by field name."""
    usable: dict[str, float] = {}
    for name, is_usable in _SAMPLING.items():
        value: Any = config.get(name)
        if type(value) in (int, float) and math.isfinite(value) and is_usable(value):
            usable[name] = value
    if "top_k" in usable:
        usable["top_k"] = int(usable["top_k"])
    return usable


def _context(checkpoint: Listing, config: Mapping[str, Any], lowered: int | None) -> int:
    try:
        limit = lower_context(config, lowered)
    except Exception as error:  # the file's values may have any type
        raise checkpoint.failed(f"config.json: {error}") from error
    if limit is None:
        raise checkpoint.failed(
            "its config has no max_position_embeddings; set `max_context:` in models.yaml"
        )
    return limit


def unread_formats(chat: ChatTokenizer) -> list[str]:
    """Return which of `tool_parser` and `reasoning_parser` can't read the template's text. Slow."""
    unread = []
    if chat.template.has("tool_calls"):
        written, _, calls = _read_back(chat, CALLING)
        is_shown = all(str(each) in written for each in (FUNCTION.name, *ARGUMENTS.values()))
        if is_shown and calls != [(FUNCTION.name, ARGUMENTS)]:
            unread.append("tool_parser")
    for *earlier, last in ANSWERING if may_show_thoughts(chat.template) else ():
        written, thought, _ = _read_back(chat, [*earlier, {**last, THOUGHT_KEY: THOUGHT}])
        if THOUGHT in written and thought.strip() != THOUGHT:
            return [*unread, "reasoning_parser"]
    return unread


def _read_back(chat: ChatTokenizer, turns: Sequence[Turn]) -> tuple[str, str, list[Any]]:
    """Render turns; return the last turn's text, and the thought and calls parsed from it."""
    try:
        text = chat.try_out(lambda: chat.apply(trial_job(turns), is_asking=False))
        asked, opening = chat.try_out(lambda: chat.render(trial_job(turns[:-1])))
    except TemplateRefusal:
        return "", "", []
    begin = count_alike(text, asked)
    for mark in (*chat.answers.reasoning.starts, *chat.answers.reasoning.ends):
        place = asked.rfind(mark)
        if place < begin < place + len(mark):
            begin = place  # the common prefix ends inside a marker: start at the marker instead
    prompt = chat.begin(opening[: max(0, len(opening) - len(asked) + begin)], [])
    params = SequenceParams(
        prompt=prompt.ids,
        max_tokens=len(text),
        sampling=Sampling(),
        calling=Calling(functions=[FUNCTION]),
        is_thinking=prompt.is_thinking,
        may_think=prompt.may_think,
        opening=prompt.opening,
    )
    output = chat.answers.output_processor(params)
    ids = takewhile(lambda token: token not in chat.answers.eos_ids, chat.encode(text[begin:]))
    parts = [part for token in ids for part in output.push(token, None, is_shown_as_text=True)]
    parts += output.finish()
    calls = [(part.call.name, json.loads(part.call.arguments)) for part in parts if part.call]
    return text[begin:], "".join(part.reasoning for part in parts), calls
