"""Conversation → prompt: the model's own template, rendered and encoded, on any thread."""

import inspect
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_tokenizer
from mlx_lm.utils import _tokenizer_defaults
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from gateway.engine.answers.answer_format import AnswerFormat
from gateway.engine.answers.detokenizer import Vocabulary, texts_of
from gateway.engine.answers.harmony import opens_answer
from gateway.engine.answers.output_parts import own_ids
from gateway.engine.answers.reasoning import ReasoningFormat, infer_reasoning, reasoning_format
from gateway.engine.answers.tool_formats import ToolFormat, infer_tools, tool_format
from gateway.engine.control_tokens import ControlTokens, Piece
from gateway.engine.prompting.chat_template import ChatTemplate, TemplateRefusal
from gateway.engine.prompting.thoughts import (
    THOUGHT_KEY,
    Form,
    Turn,
    find_form,
    trial_job,
)
from gateway.engine.sandbox_worker import Sandbox
from gateway.engine.vision.prompts import ImageFormat, place_images
from gateway.errors import BadRequest, ModelLoadFailed, Overloaded, Unavailable
from gateway.jobs import TokenIds
from gateway.jobs.chat import GenerateJob
from gateway.jobs.images import ImageSpan
from gateway.registry import ChatSpec

# Parameters of transformers' functions, which no request may set by `template_args`: its
# `chat_template` would run as a program.
RESERVED = frozenset(
    name
    for function in (PreTrainedTokenizerBase.apply_chat_template, render_jinja_template)
    for name in inspect.signature(function).parameters
) | {"messages"}


T = TypeVar("T")
TRIALS_S: Final = 30.0  # seconds for renderings of made-up turns, a few milliseconds each
MOST_ADDED: Final = 1 << 17  # each token takes transformers a tenth of a millisecond
MOST_TOKENS: Final = 1 << 20  # XLM-V has 901,629, the most known


@dataclass(frozen=True, slots=True)
class Prompt:
    """The ids of a prompt, and whether the model is already thinking at its end, or may begin to.

    `opening` is the message on a channel that the template begins.
    """

    ids: list[int]
    is_thinking: bool = False
    may_think: bool = False
    opening: str = ""
    images: Sequence[ImageSpan] = ()


class ChatTokenizer:
    """A chat model's tokenizer, template and formats. Stateless in use, so threads may share it."""

    def __init__(
        self,
        wrapper: TokenizerWrapper,
        template_args: Mapping[str, Any],
        *,
        tools: ToolFormat,
        reasoning: ReasoningFormat,
        template: ChatTemplate,
        split_special_tokens: bool = False,
    ) -> None:
        self._wrapper: Any = wrapper
        self.template = template
        self._template_args = dict(template_args)
        self.backend: Tokenizer = wrapper.backend_tokenizer
        # These are set once: changes per call make a tokenizer say "Already borrowed".
        self.backend.no_truncation()
        self.backend.no_padding()
        self.vocabulary = Vocabulary(self.backend)
        self.controls = ControlTokens(self.backend)
        self._splits_controls = split_special_tokens
        self._reasoning = reasoning
        self.answers = AnswerFormat(
            tools, reasoning, self.backend, self.vocabulary, wrapper.eos_token_ids
        )
        self._tried_until = time.monotonic() + TRIALS_S
        self._form = Form()
        # The reason why the template's way of reading turns is not known, if it is not.
        self.untried: str | None = None
        try:
            self._form = find_form(template, self._try)
        except BadRequest as error:
            self.untried = str(error)

    @property
    def tokenizer(self) -> Any:
        """Return transformers' tokenizer, for callers that build on it."""
        return self._wrapper._tokenizer

    def prompt(self, job: GenerateJob, images: ImageFormat | None = None) -> Prompt:
        """Return a bare prompt, or a conversation in the model's template.

        Raises BadRequest with the template's own words when it refuses the conversation, and for an
        image that cannot be read.
        """
        if isinstance(job.prompt, str):
            # The text is encoded as a batch, since only tokenizers' batch calls release the GIL: a
            # megabyte kept the event loop waiting for three seconds.
            (encoded,) = self.backend.encode_batch_fast([job.prompt])
            return Prompt(list(encoded.ids))
        if job.prompt is not None:
            return Prompt(list(job.prompt))
        if job.continues:
            return self._continue(job, images)
        text, opening = self.render(job)
        ids, spans = self._encode(text, job, images)
        return replace(self.begin(opening, ids), images=spans)

    def _encode(
        self, text: str, job: GenerateJob, images: ImageFormat | None
    ) -> tuple[list[int], Sequence[ImageSpan]]:
        """Return the ids of a template's text, and the places of its images."""
        if not job.images:
            return self.encode(text), ()
        assert images is not None
        return place_images(text, job.images, images, self.encode)

    def begin(self, opening: str, ids: list[int]) -> Prompt:
        """Return a prompt that ends with `opening`, the template's opening of the answer."""
        # The grammar applies only when the answer's own message begins.
        if self.answers.is_harmony:
            header = opening.rpartition("<|start|>")[2]
            return Prompt(ids, is_thinking=not opens_answer(header), opening=header)
        marks = (*self._reasoning.starts, *self._reasoning.ends)
        may_think = not any(mark in opening for mark in marks)
        return Prompt(ids, is_thinking=self._is_thinking(opening), may_think=may_think)

    def _is_thinking(self, opening: str) -> bool:
        """Return True if the answer that a template opens begins inside a block of thinking."""
        opened = max((opening.rfind(mark) for mark in self._reasoning.starts), default=-1)
        closed = max((opening.rfind(mark) for mark in self._reasoning.ends), default=-1)
        return opened > closed

    def _continue(self, job: GenerateJob, images: ImageFormat | None) -> Prompt:
        """Return a prompt that ends inside the last message, right after its text. Marks in it are
        plain letters: it opens no thinking and ends none.
        """
        *earlier, last = job.messages
        # A template may close a message in any way. So a placeholder word is rendered instead of
        # the text, and the text is put after the part before that word.
        word = f"continued{secrets.token_hex(16)}"
        messages = [*earlier, {**last, "content": word}]
        text = self.apply(replace(job, messages=messages), is_asking=False)
        if text.count(word) != 1:
            raise BadRequest("The model's chat template cannot continue an answer.", part="prompt")
        before = text[: text.index(word)]
        behind = max((before.rfind(each.word) + len(each.word) for each in job.images), default=0)
        read, spans = self._encode(before[:behind], job, images)  # an image ends a text
        before = before[behind:]
        [ids] = self.controls.encode([[*self.controls.pieces(before), (last["content"], True)]])
        return Prompt([*read, *ids], images=spans)

    def render_questions(self, job: GenerateJob) -> tuple[list[Piece], str]:
        """Return the template's text before and after the last message's text. If it opens a
        thought, the thought is closed, and the answer's own message is begun.
        """
        # A placeholder word replaces that text and the question at its end, so that the template
        # runs once.
        *earlier, last = job.messages
        word = f"question{secrets.token_hex(16)}"
        messages = [*earlier, {**last, "content": word}]
        text, opening = self.render(replace(job, messages=messages))
        if text.count(word) != 1:
            raise BadRequest("The model's chat template cannot ask questions.", part="prompt")
        before, after = text.split(word)
        if self.answers.is_harmony:
            header = opening.rpartition("<|start|>")[2]
            if header.endswith("<|message|>") and not opens_answer(header):
                after += "<|end|><|start|>assistant"
            after += "" if opens_answer(header) else "<|channel|>final<|message|>"
        elif self._is_thinking(opening):
            line = "\n" if after.endswith("\n") else "\n\n"
            after += f"{line}{self._reasoning.ends[0]}\n\n"
        return self.controls.pieces(before), after

    def tokenize(self, job: GenerateJob, *, special: bool, asking: bool) -> list[int]:
        """Return the ids of a text, or of a conversation, with the answer's opening if `asking`."""
        if isinstance(job.prompt, str):
            (encoded,) = self.backend.encode_batch_fast([job.prompt], add_special_tokens=special)
            return list(encoded.ids)
        if asking or job.continues:
            return self.prompt(job).ids
        return self.encode(self.apply(job, is_asking=False))

    def encode(self, text: str) -> list[int]:
        """Encode the template's text, with the special tokens that it wants."""
        [ids] = self.controls.encode([self.controls.pieces(text)])
        return ids

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the vocabulary's strings of ids; an empty one for an unknown id."""
        return [self.backend.id_to_token(token) or "" for token in ids]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.backend.decode(list(ids), skip_special_tokens=False))

    def texts_of(self, ids: Sequence[int], prompt: str | TokenIds | None) -> list[str]:
        """Return the texts of a bare prompt's tokens; `prompt` is as the caller sent it."""
        added = self.backend.get_added_tokens_decoder()
        special = {token for token, added_token in added.items() if added_token.special}
        return texts_of(ids, prompt if isinstance(prompt, str) else None, self.vocabulary, special)

    def render(self, job: GenerateJob) -> tuple[str, str]:
        """Return a conversation's text, and the part that the template adds at its end to open the
        answer.

        Only the second says whether the model is thinking, since messages may contain its marks
        too. It is empty if the text contains none.
        """
        text = self.apply(job, is_asking=True)
        marks = (*self._reasoning.starts, *self._reasoning.ends)
        if self.answers.is_harmony and text.endswith("<|message|>"):
            marks = ("<|message|>",)
        if not any(mark in text for mark in marks):
            return text, ""
        try:
            opening = text[count_alike(text, self.apply(job, is_asking=False)) :]
        except TemplateRefusal:  # some templates cannot render it otherwise
            opening = ""
        if opening:
            return text, opening
        # This template always opens an answer: its last words count, unless the caller wrote them.
        last = str(job.messages[-1].get("content") or "").rstrip()
        if text.rstrip().endswith(marks) and not last.endswith(marks):
            opening = text.rstrip().splitlines()[-1]
        return text, opening

    def apply(self, job: GenerateJob, *, is_asking: bool) -> str:
        """Return a conversation in the model's template, to be answered if `is_asking`.

        If the template refuses it, it is rendered again without thoughts, which may contain the
        template's marks. Raises the errors of rendering, and BadRequest for arguments that no
        request may set.
        """
        try:
            return self._apply(job, is_asking=is_asking)
        except TemplateRefusal:
            turns = [{**turn, THOUGHT_KEY: None} for turn in job.messages]
            if not any(turn.get(THOUGHT_KEY) for turn in job.messages):
                raise
            return self._apply(replace(job, messages=turns), is_asking=is_asking)

    def _apply(self, job: GenerateJob, *, is_asking: bool) -> str:
        reserved = RESERVED & job.template_args.keys()
        if reserved:
            raise BadRequest(
                f"'{min(reserved)}' is not for a request to set.", part="template_args"
            )
        messages = map(self._turn, own_ids(job.messages, self.answers.tools.new_id))
        tools, arguments = job.tools, job.template_args
        if self._splits_controls:
            tools, arguments = self.controls.split(tools), self.controls.split(arguments)
        arguments = self._thinking_arguments({**self._template_args, **arguments})
        return self.template.render(
            list(messages), tools, {**arguments, "add_generation_prompt": is_asking}
        )

    def _turn(self, message: dict[str, Any]) -> Turn:
        """Return a turn in the template's form, with its thought where the template looks
        for it.
        """
        turn, thought = self._form.turn(message, message.pop(THOUGHT_KEY, None) or "")
        if self._splits_controls:
            # A template looks for the marks of thinking in earlier answers.
            whole = self._reasoning.marks if message["role"] == "assistant" else ()
            turn, thought = self.controls.split(turn, whole), self.controls.split(thought)
        return self._form.put(turn, thought) if thought else turn

    def try_out(self, render: Callable[[], T]) -> T:
        """Render made-up turns, once more if other work left no time for them.

        Raises BadRequest too if all trials of the model have taken too long.
        """
        if time.monotonic() > self._tried_until:
            raise BadRequest(f"Its trials took over {TRIALS_S:g} seconds.")
        try:
            return render()
        except (Overloaded, Unavailable):
            return render()

    def _try(self, turns: Sequence[Turn]) -> str | None:
        """Return the text of a made-up conversation; None if the template refuses it."""
        try:
            return self.try_out(lambda: self._apply(trial_job(turns), is_asking=False))
        except TemplateRefusal:
            return None

    def _thinking_arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return a template's arguments, with those about thinking renamed to the words of its
        family.

        Most templates read `enable_thinking`; Granite's and DeepSeek's read `thinking`, Cohere's
        `reasoning` and MiniMax M3's `thinking_mode`; gpt-oss has three levels of thinking and
        cannot turn it off.
        """
        if self.template.is_program:  # a program has arguments of its own
            return arguments
        asked = arguments.get("enable_thinking")
        if self.answers.is_harmony:
            nearest = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
            effort = arguments.get("reasoning_effort")
            if asked is False:
                effort = "none"
            if effort not in nearest:
                return arguments
            return {**arguments, "reasoning_effort": nearest[str(effort)]}
        if asked is None:
            return arguments
        mode = "enabled" if asked else "disabled"
        return {"thinking": asked, "reasoning": asked, "thinking_mode": mode, **arguments}


def count_alike(text: str, other: str) -> int:
    """Count the characters of two texts' common beginning."""
    if text.startswith(other):
        return len(other)
    pairs = enumerate(zip(text, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(text), len(other)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormats:
    """The settings of a chat model's template and formats."""

    chat_template: str | None = None  # replaces the checkpoint's own
    template_args: Mapping[str, Any] = field(default_factory=dict)
    tool_parser: str | None = None  # a format's name, inferred if it is None
    reasoning_parser: str | None = None  # a format's name, inferred if it is None
    split_special_tokens: bool = False  # control tokens in callers' texts are letters
    template_sandbox: Sandbox | None = None  # the process that renders the template

    @classmethod
    def of(cls, spec: ChatSpec, template_sandbox: Sandbox) -> "ChatFormats":
        """Return the formats that models.yaml sets for a model."""
        return cls(
            chat_template=spec.chat_template,
            template_args=spec.chat_template_kwargs,
            tool_parser=spec.tool_parser,
            reasoning_parser=spec.reasoning_parser,
            split_special_tokens=spec.split_special_tokens,
            template_sandbox=template_sandbox,
        )


def wrap_folder_tokenizer(
    folder: Path, *, name: str, eos_ids: int | list[int] | None = None
) -> TokenizerWrapper:
    """Load tokenizer.json. Code from the model's folder is never run. Raises ModelLoadFailed."""
    if not (folder / "tokenizer.json").is_file():
        raise ModelLoadFailed(name, f"there is no tokenizer.json in {folder.name}")
    added = (folder / "tokenizer.json").read_bytes().count(b'"special"')
    if added > MOST_ADDED:
        raise ModelLoadFailed(name, f"tokenizer.json has over {MOST_ADDED:,} added tokens")
    try:
        return load_tokenizer(
            folder,
            {"trust_remote_code": False},
            eos_token_ids=eos_ids,
            defaults=_tokenizer_defaults(folder),
        )
    except Exception as error:
        raise ModelLoadFailed(name, f"its tokenizer cannot be read: {error}") from error


def chat_tokenizer(
    wrapper: TokenizerWrapper, formats: ChatFormats, *, name: str, model_type: str
) -> ChatTokenizer:
    """Wrap mlx-lm's tokenizer for chat. Raises ModelLoadFailed."""
    chat_template = formats.chat_template
    # mlx-lm infers a format from the checkpoint's own template, and notes it here.
    declared = wrapper._tokenizer.init_kwargs.get("tool_parser_type")
    if chat_template is not None:
        wrapper.chat_template, declared = chat_template, None
        wrapper._chat_template = None  # a program of mlx-lm's would take precedence
    if not (wrapper.has_chat_template or chat_template):
        raise ModelLoadFailed(name, "it has no chat template; set `chat_template:` in models.yaml")
    template = ChatTemplate(wrapper, formats.template_sandbox)
    template.check(name, formats.template_args)
    text = template.text
    vocabulary = wrapper.backend_tokenizer.get_vocab()
    largest = max(vocabulary.values(), default=0)
    if largest >= MOST_TOKENS:  # the grammars' tables have a place for each id
        raise ModelLoadFailed(name, f"tokenizer.json has a token with the id {largest:,}")
    tools = formats.tool_parser or infer_tools(vocabulary, text, model_type, declared)
    reasoning = formats.reasoning_parser or infer_reasoning(vocabulary, text, model_type)
    return ChatTokenizer(
        wrapper,
        formats.template_args,
        tools=tool_format(tools or "none"),
        reasoning=reasoning_format(reasoning),
        template=template,
        split_special_tokens=formats.split_special_tokens,
    )
