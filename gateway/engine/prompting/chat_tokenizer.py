"""Conversation → prompt: the model's own template, rendered and encoded, on any thread."""

import inspect
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_tokenizer
from mlx_lm.utils import _tokenizer_defaults, load_config
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from gateway.engine.answers.detokenizer import Detokenizer, Vocabulary
from gateway.engine.answers.harmony import STOPS, HarmonyParser, answer_begins
from gateway.engine.answers.output_parts import (
    AnswerParser,
    CallWriter,
    Marks,
    Mode,
    openai_id,
    own_ids,
)
from gateway.engine.answers.parsing import Markup, Parser
from gateway.engine.answers.reasoning import (
    HARMONY,
    REASONING_FORMATS,
    ReasoningFormat,
    Thinking,
    infer_reasoning,
)
from gateway.engine.answers.stop_strings import StopScanner
from gateway.engine.answers.tool_formats import (
    TOOL_FORMATS,
    ToolFormat,
    infer_tools,
    known_tool_parser,
)
from gateway.engine.answers.tool_parsers import read_arguments
from gateway.engine.control_tokens import ControlTokens, Piece
from gateway.engine.generation.scoring import texts_of
from gateway.engine.generation.sequence import OutputProcessor
from gateway.engine.grammar.calls import CallFormat
from gateway.engine.grammar.trial import Sandbox
from gateway.engine.prompting.chat_template import ChatTemplate
from gateway.errors import BadRequest, ModelLoadFailed
from gateway.jobs import GenerateJob, SequenceParams, TokenIds

# Parameters of transformers' functions, which no request may set by `template_args`: its
# `chat_template` would run as a program.
RESERVED = frozenset(
    name
    for function in (PreTrainedTokenizerBase.apply_chat_template, render_jinja_template)
    for name in inspect.signature(function).parameters
) | {"messages"}


@dataclass(frozen=True, slots=True)
class Prompt:
    """The ids of a prompt, and whether at its end the model is thinking already or may begin to."""

    ids: list[int]
    is_thinking: bool = False
    may_think: bool = False


class ChatTokenizer:
    """A chat model's tokenizer, template and formats. Stateless in use, so threads may share it."""

    def __init__(
        self,
        wrapper: TokenizerWrapper,
        template_args: Mapping[str, Any],
        *,
        tools: ToolFormat | None = None,
        reasoning: ReasoningFormat,
        template: ChatTemplate,
        split_special_tokens: bool = False,
    ) -> None:
        self._wrapper: Any = wrapper
        self._template = template
        self._template_args = dict(template_args)
        self.backend: Tokenizer = wrapper.backend_tokenizer
        # Set once: changing these per call is what makes a tokenizer say "Already borrowed".
        self.backend.no_truncation()
        self.backend.no_padding()
        self.eos_ids = frozenset(wrapper.eos_token_ids)
        self.vocabulary = Vocabulary(self.backend)
        self.controls = ControlTokens(self.backend)
        self._splits_controls = split_special_tokens
        self._tools = tools
        self._reasoning = reasoning
        words = [*reasoning.marks, *(tools.words if tools else ())]
        self._marks = Marks(self.backend.get_added_tokens_decoder(), words)
        if self._is_harmony:  # the end of a message does not end the answer
            self.eos_ids = (self.eos_ids | self._ids(STOPS)) - self._ids(("<|end|>", "<|eom|>"))

    @property
    def tokenizer(self) -> Any:
        return self._wrapper._tokenizer

    @property
    def reads_calls(self) -> bool:
        return self._tools is not None

    @property
    def _is_harmony(self) -> bool:
        return self._reasoning is HARMONY

    def prompt(self, job: GenerateJob) -> Prompt:
        """Return a bare prompt, or a conversation in the model's template.

        Raises BadRequest with the template's own words when it refuses the conversation.
        """
        if isinstance(job.prompt, str):
            # As a batch, since only tokenizers' batch calls release the GIL: a megabyte kept the
            # event loop waiting for three seconds.
            (encoded,) = self.backend.encode_batch_fast([job.prompt])
            return Prompt(list(encoded.ids))
        if job.prompt is not None:
            return Prompt(list(job.prompt))
        if job.continues:
            return self._continue(job)
        text, opening = self._render(job)
        ids = self._encode(text)
        if self._is_harmony:  # free of its grammar until the answer's own message begins
            return Prompt(ids, is_thinking=True)
        marks = (*self._reasoning.starts, *self._reasoning.ends)
        may_think = not any(mark in opening for mark in marks)
        return Prompt(ids, is_thinking=self._is_thinking(opening), may_think=may_think)

    def _is_thinking(self, opening: str) -> bool:
        """Return True if the answer that a template opens begins inside a block of thinking."""
        opened = max((opening.rfind(mark) for mark in self._reasoning.starts), default=-1)
        closed = max((opening.rfind(mark) for mark in self._reasoning.ends), default=-1)
        return opened > closed

    def _continue(self, job: GenerateJob) -> Prompt:
        """Return a prompt that ends inside the last message, right after its text.

        A template may close a message in any way. So a placeholder word is rendered instead of the
        text, and the text put after what stands before that word. Marks in the text count as plain
        letters: it opens no thinking and ends none.
        """
        *earlier, last = job.messages
        word = f"continued{secrets.token_hex(16)}"
        turns = [*earlier, {**last, "content": word}]
        text = self._apply(replace(job, messages=turns), is_asking=False)
        if text.count(word) != 1:
            raise BadRequest("The model's chat template cannot continue an answer.", part="prompt")
        before = self.controls.pieces(text[: text.index(word)])
        [ids] = self.controls.encode([[*before, (last["content"], True)]])
        return Prompt(ids)

    def render_questions(self, job: GenerateJob) -> tuple[list[Piece], str]:
        """Return what the template writes before and after the text of the last message.

        A placeholder word is rendered for that text and the question at its end, so that the
        template runs once. What it opens for thinking is closed, and the answer's own message is
        begun.
        """
        *earlier, last = job.messages
        word = f"question{secrets.token_hex(16)}"
        turns = [*earlier, {**last, "content": word}]
        text, opening = self._render(replace(job, messages=turns))
        if text.count(word) != 1:
            raise BadRequest("The model's chat template cannot ask questions.", part="prompt")
        before, after = text.split(word)
        if self._is_harmony:
            after += "<|channel|>final<|message|>"
        elif self._is_thinking(opening):
            line = "\n" if after.endswith("\n") else "\n\n"
            after += f"{line}{self._reasoning.ends[0]}\n\n"
        return self.controls.pieces(before), after

    def tokenize(self, job: GenerateJob, *, special: bool, asking: bool) -> list[int]:
        """Return the ids of a text, or of a conversation: of one to be answered, if `asking`."""
        if isinstance(job.prompt, str):
            (encoded,) = self.backend.encode_batch_fast([job.prompt], add_special_tokens=special)
            return list(encoded.ids)
        if asking or job.continues:
            return self.prompt(job).ids
        return self._encode(self._apply(job, is_asking=False))

    def _encode(self, text: str) -> list[int]:
        """Encode what the template has written, with the special tokens that it wants."""
        [ids] = self.controls.encode([self.controls.pieces(text)])
        return ids

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the vocabulary's strings of ids; of an unknown one an empty one."""
        return [self.backend.id_to_token(token) or "" for token in ids]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.backend.decode(list(ids), skip_special_tokens=False))

    def texts_of(self, ids: Sequence[int], prompt: str | TokenIds | None) -> list[str]:
        """Return the texts of a bare prompt's tokens; `prompt` is what the caller sent."""
        added = self.backend.get_added_tokens_decoder()
        special = {token for token, added_token in added.items() if added_token.special}
        return texts_of(ids, prompt if isinstance(prompt, str) else None, self.vocabulary, special)

    def _render(self, job: GenerateJob) -> tuple[str, str]:
        """Return a conversation's text, and what the template adds at its end to open the answer.

        Only the second says whether the model is thinking, since messages may contain its marks
        too. It is empty if the text contains none.
        """
        text = self._apply(job, is_asking=True)
        marks = (*self._reasoning.starts, *self._reasoning.ends)
        if not any(mark in text for mark in marks):
            return text, ""
        try:
            opening = text[_alike(text, self._apply(job, is_asking=False)) :]
        except BadRequest:  # some cannot be rendered otherwise
            opening = ""
        if opening:
            return text, opening
        # This template always opens an answer: its last words count, unless the caller wrote them.
        last = str(job.messages[-1].get("content") or "").rstrip()
        is_own = text.rstrip().endswith(marks) and not last.endswith(marks)
        return text, text.rstrip().splitlines()[-1] if is_own else ""

    def _apply(self, job: GenerateJob, *, is_asking: bool) -> str:
        if reserved := RESERVED & job.template_args.keys():
            name = min(reserved)
            raise BadRequest(f"'{name}' is not for a request to set.", part="template_args")
        new_id = self._tools.new_id if self._tools else openai_id
        messages: Sequence[Mapping[str, Any]] = own_ids(job.messages, new_id)
        tools, template_args = job.tools, job.template_args
        if self._splits_controls:
            # A template looks for the marks of thinking in earlier answers.
            marks = {"assistant": self._reasoning.marks}
            messages = [self.controls.split(turn, marks.get(turn["role"], ())) for turn in messages]
            tools, template_args = self.controls.split(tools), self.controls.split(template_args)
        arguments = self._thinking_arguments({**self._template_args, **template_args})
        return self._template.render(
            messages, tools, {**arguments, "add_generation_prompt": is_asking}
        )

    def _thinking_arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return a template's arguments, with those about thinking renamed to the words of its
        family.

        Most templates read `enable_thinking`; Granite's and DeepSeek's read `thinking`; gpt-oss has
        three levels of thinking and cannot turn it off.
        """
        if self._wrapper._chat_template is not None:  # a program, with arguments of its own
            return arguments
        asked = arguments.get("enable_thinking")
        if self._is_harmony:
            effort = arguments.get("reasoning_effort")
            nearest = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
            if asked is False or effort in nearest:
                effort = "low" if asked is False else nearest[str(effort)]
                return {**arguments, "reasoning_effort": effort}
            return arguments
        if asked is not None:
            return {"thinking": asked, **arguments}
        # mlx-lm's wrapper has this for the families that it knows.
        return {"enable_thinking": True, **arguments} if self._reasoning.starts else arguments

    @property
    def call_ids(self) -> frozenset[int]:
        """List the tokens that mark calls, if a grammar can hold calls."""
        pairs = self._tools.marks if self._tools is not None and self._tools.is_json else ()
        return self._ids(mark for pair in pairs for mark in pair)

    def call_format(self, is_special: Callable[[int], bool]) -> CallFormat | None:
        """Return the model's own form of a call, if that is JSON between marks."""
        if self._tools is None or not (self._tools.is_json or self._tools.is_separate):
            return None
        if self._tools.is_separate:
            return CallFormat("", "", is_special=True, closing_is_special=True, is_separate=True)
        start, end = self._tools.marks[0]
        ids = [self.backend.token_to_id(mark) for mark in (start, end)]
        return CallFormat(start, end, *(i is not None and is_special(i) for i in ids))

    def output_processor(self, job: SequenceParams) -> OutputProcessor:
        return OutputProcessor(
            Detokenizer(self.vocabulary, continues=job.is_bare or job.is_continued),
            self._parser(job),
            StopScanner(job.stop),
            self.vocabulary,
            self._marks,
        )

    def thinking(self, job: SequenceParams) -> Thinking:
        spell, pattern = self._spell, self._marks.pattern
        if self._is_harmony:
            # A call ends the answer too, if calls are allowed.
            may_call = job.calling is not None and not job.calling.forced
            return Thinking(
                spell,
                answer_begins(pattern),
                is_on=job.is_thinking,
                closes_with=self.backend.token_to_id("<|end|>"),
                stops=self.eos_ids - (self._ids(("<|call|>",)) if may_call else frozenset()),
            )
        starts = self._ids(self._reasoning.starts)
        ends = [self.backend.token_to_id(mark) for mark in self._reasoning.ends]
        found = "|".join(re.escape(pattern(mark)) for mark in self._reasoning.ends)
        return Thinking(
            spell,
            re.compile(found) if found else None,
            is_on=job.is_thinking,
            opens_with=min(starts) if job.may_think and starts else None,
            closes_with=ends[0] if ends else None,
            stops=self.eos_ids,
        )

    def _spell(self, token: int) -> str:
        return self._marks.spelled(token) or self.vocabulary.text(token)

    def _parser(self, job: SequenceParams) -> AnswerParser:
        calling, tools = job.calling, self._tools
        mode: Mode = "none"
        if calling is not None and calling.forced:
            mode = "forced"
        elif calling is not None and tools is not None:
            mode = "either" if job.is_either else "free"
        functions = {}
        if calling is not None:
            functions = {function.name: function.parameters for function in calling.functions}
        is_single = calling is not None and not calling.parallel and mode != "forced"
        calls = CallWriter(
            tools.new_id if tools else openai_id, job.earlier_calls, most=1 if is_single else None
        )
        is_bound = job.grammar is not None
        if job.is_bare:
            return Parser(Markup(), mode, is_thinking=False, is_bound=is_bound, calls=calls)
        if self._is_harmony:
            return HarmonyParser(
                mode,
                functions=functions,
                read=self._read_message(functions),
                calls=calls,
                is_bound=is_bound,
                is_begun=job.is_continued,
            )
        pattern, reasoning = self._marks.pattern, self._reasoning
        noise = (*reasoning.noise, *(tools.noise if tools else ()))
        markup = Markup(
            opens=tuple(map(pattern, reasoning.starts)),
            closes=tuple(map(pattern, reasoning.ends)),
            calls=tuple((pattern(a), pattern(b)) for a, b in tools.marks) if tools else (),
            noise=tuple(map(pattern, noise)),
            bare=tools.begins(list(functions)) if tools else None,
            read=(lambda text: tools.read(text, functions)) if tools else None,
        )
        return Parser(
            markup,
            mode,
            is_thinking=job.is_thinking,
            is_bound=is_bound,
            is_begun=job.is_continued,
            calls=calls,
        )

    def _read_message(
        self, functions: Mapping[str, Mapping[str, Any]]
    ) -> Callable[[str, str], Sequence[Mapping[str, Any]]]:
        """Return a reader of messages addressed to a function: JSON arguments, or marked calls."""
        tools = self._tools

        def read(name: str, text: str) -> Sequence[Mapping[str, Any]]:
            if tools is not None and tools.marks:
                return tools.read(text, functions)
            return [read_arguments(name, text)]

        return read

    def _ids(self, tokens: Iterable[str]) -> frozenset[int]:
        ids = (self.backend.token_to_id(token) for token in tokens if token)
        return frozenset(token for token in ids if token is not None)


def _alike(text: str, other: str) -> int:
    """Count the characters that two texts have in common at their beginning."""
    if text.startswith(other):
        return len(other)
    pairs = enumerate(zip(text, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(text), len(other)))


def load_chat_tokenizer(
    folder: Path,
    *,
    name: str,
    eos_ids: int | list[int] | None,
    chat_template: str | None,
    template_args: Mapping[str, Any],
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    split_special_tokens: bool = False,
    sandbox: Sandbox | None = None,
) -> ChatTokenizer:
    """Load tokenizer.json and the template stored with it, or use the given template instead.

    Other arguments are those of `chat_tokenizer`. Code from the model's folder is never run.
    """
    return chat_tokenizer(
        wrap_folder_tokenizer(folder, name=name, eos_ids=eos_ids),
        name=name,
        model_type=str(_config(folder).get("model_type")),
        chat_template=chat_template,
        template_args=template_args,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        split_special_tokens=split_special_tokens,
        sandbox=sandbox,
    )


def wrap_folder_tokenizer(
    folder: Path, *, name: str, eos_ids: int | list[int] | None = None
) -> TokenizerWrapper:
    """Load tokenizer.json. Code from the model's folder is never run. Raises ModelLoadFailed."""
    if not (folder / "tokenizer.json").is_file():
        raise ModelLoadFailed(name, f"there is no tokenizer.json in {folder.name}")
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
    wrapper: TokenizerWrapper,
    *,
    name: str,
    model_type: str,
    chat_template: str | None,
    template_args: Mapping[str, Any],
    tool_parser: str | None,
    reasoning_parser: str | None,
    split_special_tokens: bool,
    sandbox: Sandbox | None,
) -> ChatTokenizer:
    """Wrap mlx-lm's tokenizer for chat, with the given template or its own.

    `tool_parser` and `reasoning_parser` name the model's formats; None has them inferred. With
    `split_special_tokens`, control tokens in what callers send are letters. The template is
    rendered in the `sandbox`, if there is one. Raises ModelLoadFailed.
    """
    if chat_template is not None:
        wrapper.chat_template = chat_template
        wrapper._chat_template = None  # a program of mlx-lm's, which would take precedence
    if not (wrapper.has_chat_template or chat_template):
        raise ModelLoadFailed(name, "it has no chat template; set `chat_template:` in models.yaml")
    template = ChatTemplate(wrapper, sandbox)
    template.check(name, template_args)
    tools, reasoning = _formats(wrapper, model_type, chat_template, tool_parser, reasoning_parser)
    return ChatTokenizer(
        wrapper,
        template_args,
        tools=TOOL_FORMATS.get(tools or "none"),
        reasoning=REASONING_FORMATS[reasoning],
        template=template,
        split_special_tokens=split_special_tokens,
    )


def _formats(
    wrapper: Any,
    model_type: str,
    chat_template: str | None,
    tool_parser: str | None,
    reasoning_parser: str | None,
) -> tuple[str | None, str]:
    """Return the names of a checkpoint's formats of calls and of thinking."""
    written = wrapper._tokenizer.chat_template or ""
    # Hermes 3 and Command-R have several templates, by name: one of them shows tools.
    template = written if isinstance(written, str) else "\n".join(written.values())
    vocabulary = wrapper.backend_tokenizer.get_vocab()
    # mlx-lm infers a format from the checkpoint's own template, and notes it here.
    declared = wrapper._tokenizer.init_kwargs.get("tool_parser_type")
    if tool_parser is not None:
        tools = known_tool_parser(tool_parser)
    else:
        if chat_template is not None:
            declared = None
        tools = infer_tools(vocabulary, template, model_type, declared)
    return tools, reasoning_parser or infer_reasoning(vocabulary, template, model_type)


def _config(folder: Path) -> Mapping[str, Any]:
    try:
        return dict(load_config(folder))
    except (OSError, ValueError):
        return {}
