"""The tokenizer and formats of a chat model, which turn conversations into prompts."""

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

# Parameters of transformers' functions, which requests may not set in `template_args`.
RESERVED = frozenset(
    name
    for function in (PreTrainedTokenizerBase.apply_chat_template, render_jinja_template)
    for name in inspect.signature(function).parameters
) | {"messages"}


T = TypeVar("T")
TRIALS_S: Final = 30.0  # seconds after which no trial (see `find_form`) begins
MOST_ADDED: Final = 1 << 17  # added tokens; transformers reads each in 0.1 ms
MOST_TOKENS: Final = 1 << 20  # token ids; the largest known vocabulary, XLM-V's, has 901,629


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's ids, and the state of thinking at its end."""

    ids: list[int]
    is_thinking: bool = False
    may_think: bool = False
    opening: str = ""  # the header of the message that a Harmony template opens
    images: Sequence[ImageSpan] = ()


class ChatTokenizer:
    """A chat model's tokenizer, template and formats, safe on any thread."""

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
        # Set only once: a change while a thread encodes raises "Already borrowed".
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
        # The error if trials of the chat template failed.
        self.trial_error: str | None = None
        try:
            self._form = find_form(template, self._try)
        except BadRequest as error:
            self.trial_error = str(error)

    @property
    def tokenizer(self) -> Any:
        return self._wrapper._tokenizer

    def prompt(self, job: GenerateJob, images: ImageFormat | None = None) -> Prompt:
        """Return a job's prompt. Raises BadRequest."""
        if isinstance(job.prompt, str):
            # Only batch calls release the GIL: a megabyte of text blocked the event loop for three
            # seconds.
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
        if not job.images:
            return self.encode(text), ()
        assert images is not None
        return place_images(text, job.images, images, self.encode, job.caller.cache_salt)

    def begin(self, opening: str, ids: list[int]) -> Prompt:
        """Return a prompt with these ids. `opening` is the end of their text."""
        if self.answers.is_harmony:
            # The model may think unless the header begins the answer.
            header = opening.rpartition("<|start|>")[2]
            return Prompt(ids, is_thinking=not opens_answer(header), opening=header)
        marks = (*self._reasoning.starts, *self._reasoning.ends)
        may_think = not any(mark in opening for mark in marks)
        return Prompt(ids, is_thinking=self._is_thinking(opening), may_think=may_think)

    def _is_thinking(self, opening: str) -> bool:
        opened = max((opening.rfind(mark) for mark in self._reasoning.starts), default=-1)
        closed = max((opening.rfind(mark) for mark in self._reasoning.ends), default=-1)
        return opened > closed

    def _continue(self, job: GenerateJob, images: ImageFormat | None) -> Prompt:
        """Return a prompt that ends after the last message's text.

        Control tokens in the last message become plain text.
        """
        *earlier, last = job.messages
        # Templates close messages in various ways, so the rendered text is cut at a placeholder.
        word = f"continued{secrets.token_hex(16)}"
        messages = [*earlier, {**last, "content": word}]
        text = self.apply(replace(job, messages=messages), is_asking=False)
        if text.count(word) != 1:
            raise BadRequest("The model's chat template cannot continue an answer.", part="prompt")
        before = text[: text.index(word)]
        head_end = max((before.rfind(each.word) + len(each.word) for each in job.images), default=0)
        head_ids, spans = self._encode(before[:head_end], job, images)
        before = before[head_end:]
        [ids] = self.controls.encode([[*self.controls.pieces(before), (last["content"], True)]])
        return Prompt([*head_ids, *ids], images=spans)

    def render_questions(self, job: GenerateJob) -> tuple[list[Piece], str]:
        """Return the rendered text before and after the last message's text.

        The second text ends any thought, so that the model answers at once.
        """
        # The template runs once, with a placeholder that each question replaces later.
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
        """Return the ids of a job's text or conversation.

        `special` adds special tokens to a text, and `asking` adds the answer's opening to a
        conversation.
        """
        if isinstance(job.prompt, str):
            (encoded,) = self.backend.encode_batch_fast([job.prompt], add_special_tokens=special)
            return list(encoded.ids)
        if asking or job.continues:
            return self.prompt(job).ids
        return self.encode(self.apply(job, is_asking=False))

    def encode(self, text: str) -> list[int]:
        """Return the ids of rendered text, with callers' control tokens as plain text."""
        [ids] = self.controls.encode([self.controls.pieces(text)])
        return ids

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the vocabulary entries of ids; an empty string for an unknown id."""
        return [self.backend.id_to_token(token) or "" for token in ids]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.backend.decode(list(ids), skip_special_tokens=False))

    def texts_of(self, ids: Sequence[int], prompt: str | TokenIds | None) -> list[str]:
        """Return the text of each token in `ids`. `prompt` is the caller's input for these ids."""
        added = self.backend.get_added_tokens_decoder()
        special = {token for token, added_token in added.items() if added_token.special}
        return texts_of(ids, prompt if isinstance(prompt, str) else None, self.vocabulary, special)

    def render(self, job: GenerateJob) -> tuple[str, str]:
        """Return a rendered conversation, and the end of its text that opens the answer.

        The end is empty if the text has no marks of thinking.
        """
        text = self.apply(job, is_asking=True)
        marks = (*self._reasoning.starts, *self._reasoning.ends)
        if self.answers.is_harmony and text.endswith("<|message|>"):
            marks = ("<|message|>",)
        if not any(mark in text for mark in marks):
            return text, ""
        try:
            opening = text[count_alike(text, self.apply(job, is_asking=False)) :]
        except TemplateRefusal:  # some templates require an opening
            opening = ""
        if opening:
            return text, opening
        # The template always opens an answer. Take the last line if it ends with a mark, unless the
        # caller wrote the mark.
        last = str(job.messages[-1].get("content") or "").rstrip()
        if text.rstrip().endswith(marks) and not last.endswith(marks):
            opening = text.rstrip().splitlines()[-1]
        return text, opening

    def apply(self, job: GenerateJob, *, is_asking: bool) -> str:
        """Render a conversation, with the answer's opening if `is_asking`. Raises BadRequest."""
        try:
            return self._apply(job, is_asking=is_asking)
        except TemplateRefusal:
            # A template may refuse thoughts that contain its marks, so render without thoughts.
            turns = [{**turn, THOUGHT_KEY: None} for turn in job.messages]
            if not any(turn.get(THOUGHT_KEY) for turn in job.messages):
                raise
            return self._apply(replace(job, messages=turns), is_asking=is_asking)

    def _apply(self, job: GenerateJob, *, is_asking: bool) -> str:
        reserved = RESERVED & job.template_args.keys()
        if reserved:
            raise BadRequest(f"'{min(reserved)}' cannot be set by a request.", part="template_args")
        messages = map(self._turn, own_ids(job.messages, self.answers.tools.new_id))
        tools, arguments = job.tools, job.template_args
        if self._splits_controls:
            tools, arguments = self.controls.split(tools), self.controls.split(arguments)
        arguments = self._thinking_arguments({**self._template_args, **arguments})
        return self.template.render(
            list(messages), tools, {**arguments, "add_generation_prompt": is_asking}
        )

    def _turn(self, message: dict[str, Any]) -> Turn:
        turn, thought = self._form.turn(message, message.pop(THOUGHT_KEY, None) or "")
        if self._splits_controls:
            # Templates search for marks of thinking in earlier answers.
            whole = self._reasoning.marks if message["role"] == "assistant" else ()
            turn, thought = self.controls.split(turn, whole), self.controls.split(thought)
        return self._form.put(turn, thought) if thought else turn

    def try_out(self, render: Callable[[], T]) -> T:
        """Call `render`, and once more if the sandbox was unavailable. Raises BadRequest."""
        if time.monotonic() > self._tried_until:
            raise BadRequest(f"Trials of the chat template took over {TRIALS_S:g} seconds.")
        try:
            return render()
        except (Overloaded, Unavailable):
            return render()

    def _try(self, turns: Sequence[Turn]) -> str | None:
        try:
            return self.try_out(lambda: self._apply(trial_job(turns), is_asking=False))
        except TemplateRefusal:
            return None

    def _thinking_arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Add the choice whether to think to `arguments`, under every name that templates read.

        Most templates read `enable_thinking`. Granite's and DeepSeek's read `thinking`, Cohere's
        read `reasoning`, and MiniMax M3's reads `thinking_mode`.
        """
        if self.template.is_program:  # a Python function may raise for unknown arguments
            return arguments
        asked = arguments.get("enable_thinking")
        if self.answers.is_harmony:  # gpt-oss cannot turn thinking off
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
    if text.startswith(other):
        return len(other)
    pairs = enumerate(zip(text, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(text), len(other)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormats:
    """The settings of a chat model's template and formats."""

    chat_template: str | None = None  # replaces the checkpoint's template
    template_args: Mapping[str, Any] = field(default_factory=dict)
    tool_parser: str | None = None  # a format's name; None to infer it
    reasoning_parser: str | None = None  # a format's name; None to infer it
    split_special_tokens: bool = False  # encode callers' control tokens as plain text
    template_sandbox: Sandbox | None = None

    @classmethod
    def of(cls, spec: ChatSpec, template_sandbox: Sandbox) -> "ChatFormats":
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
    """Load tokenizer.json without running code in the folder. Raises ModelLoadFailed."""
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
    # The tool format that mlx-lm inferred from the checkpoint's template.
    inferred = wrapper._tokenizer.init_kwargs.get("tool_parser_type")
    if chat_template is not None:
        wrapper.chat_template, inferred = chat_template, None
        wrapper._chat_template = None  # otherwise mlx-lm's function is used
    if not (wrapper.has_chat_template or chat_template):
        raise ModelLoadFailed(name, "it has no chat template; set `chat_template:` in models.yaml")
    template = ChatTemplate(wrapper, formats.template_sandbox)
    template.check(name, formats.template_args)
    text = template.text
    vocabulary = wrapper.backend_tokenizer.get_vocab()
    largest = max(vocabulary.values(), default=0)
    if largest >= MOST_TOKENS:  # grammar tables have an entry for each id
        raise ModelLoadFailed(name, f"tokenizer.json has a token with the id {largest:,}")
    tools = formats.tool_parser or infer_tools(vocabulary, text, model_type, inferred)
    reasoning = formats.reasoning_parser or infer_reasoning(vocabulary, text, model_type)
    return ChatTokenizer(
        wrapper,
        formats.template_args,
        tools=tool_format(tools or "none"),
        reasoning=reasoning_format(reasoning),
        template=template,
        split_special_tokens=formats.split_special_tokens,
    )
