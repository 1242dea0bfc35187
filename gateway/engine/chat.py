"""Conversation → prompt: the model's own template, rendered and encoded, on any thread."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_tokenizer
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from gateway.engine.grammar.calls import CallFormat
from gateway.engine.parsing import Markup, Mode, Parser
from gateway.engine.rows import Speech
from gateway.engine.text import Decoder, StopScanner
from gateway.engine.vocabulary import Vocabulary
from gateway.errors import BadRequest, ModelLoadFailed
from gateway.jobs import GenerateJob, RowJob

# What transformers' own function takes: a caller's template, above all, would run as a program.
RESERVED = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
TAIL = 8  # tokens: an empty block of thinking that a template writes fits in it


class ChatTokenizer:
    """A chat model's tokenizer and template. Stateless in use, so threads may share it."""

    def __init__(self, wrapper: TokenizerWrapper, template_args: Mapping[str, Any]) -> None:
        self._wrapper: Any = wrapper
        self._template_args = dict(template_args)
        self.backend: Tokenizer = wrapper.backend_tokenizer
        # Set once: changing these per call is what makes a tokenizer say "Already borrowed".
        self.backend.no_truncation()
        self.backend.no_padding()
        self.eos_ids = frozenset(wrapper.eos_token_ids)
        self.think_ids = (
            tuple(self._wrapper.think_start_tokens or ()),
            tuple(self._wrapper.think_end_tokens or ()),
        )
        self.vocabulary = Vocabulary(self.backend)
        self._think = _pair(self._wrapper.think_start, self._wrapper.think_end)
        self._call = _pair(self._wrapper.tool_call_start, self._wrapper.tool_call_end)
        self._silent = self._special_ids()

    @property
    def tokenizer(self) -> Any:
        """Give the transformers tokenizer, for those who build upon it."""
        return self._wrapper._tokenizer

    def encode(self, job: GenerateJob) -> list[int]:
        """Give the ids of a bare prompt, or of a conversation in the model's template.

        Raises BadRequest with the template's own words when it refuses the conversation.
        """
        if isinstance(job.prompt, str):
            return list(self.backend.encode(job.prompt).ids)
        if job.prompt is not None:
            return list(job.prompt)
        if taken := RESERVED & job.template_args.keys():
            raise BadRequest(
                f"'{min(taken)}' is not for a request to set.", param="chat_template_kwargs"
            )
        try:
            text = self._wrapper.apply_chat_template(
                [dict(message) for message in job.messages],
                tools=list(job.tools) or None,
                tokenize=False,
                add_generation_prompt=True,
                **{**self._template_args, **job.template_args},
            )
        except Exception as error:  # a template is a program, and raises whatever it likes
            raise BadRequest(
                f"The model's chat template refuses these messages: {str(error)[:500]}",
                param="messages",
            ) from error
        # The template has written the special tokens that it wants.
        return list(self.backend.encode(text, add_special_tokens=False).ids)

    def is_thinking(self, prompt: Sequence[int]) -> bool:
        """Tell whether the prompt ends inside a block of thinking."""
        if self._think is None:
            return False
        opened: int = self._wrapper.rfind_think_start(prompt)
        closed: int = self._wrapper.rfind_think_end(prompt)
        return opened > closed

    def may_think(self, prompt: Sequence[int]) -> bool:
        """Tell whether the model may open a block of thinking: the prompt did not just end one."""
        start, end = self.think_ids
        tail = list(prompt[-TAIL:])
        return bool(start) and self._wrapper.find_think_end(tail) < 0 and bool(end)

    @property
    def call_ids(self) -> frozenset[int]:
        """List the tokens that are the model's marks around calls."""
        ids = (self.backend.token_to_id(mark) for mark in self._call or () if mark)
        return frozenset(token for token in ids if token is not None)

    def call_format(self, is_special: Callable[[int], bool]) -> CallFormat | None:
        """Give the model's own form of a call, where it is JSON between marks."""
        settings: Mapping[str, Any] = self.tokenizer.init_kwargs
        if self._call is None or settings.get("tool_parser_type") != "json_tools":
            return None
        ids = [self.backend.token_to_id(mark) for mark in self._call]
        return CallFormat(*self._call, *(i is not None and is_special(i) for i in ids))

    def speech(self, job: RowJob) -> Speech:
        """Give what turns a row's tokens into parts."""
        calling = job.calling
        mode: Mode = "none" if calling is None else "forced" if calling.forced else "free"
        markup = Markup() if job.is_bare else Markup(self._think, self._call, self._parse_call)
        return Speech(
            Decoder(self.backend, self._silent),
            Parser(markup, mode, is_thinking=job.is_thinking),
            StopScanner(job.stop),
            self.vocabulary,
        )

    def _parse_call(self, text: str) -> list[Mapping[str, Any]]:
        """Read what stands between call marks with mlx-lm's parser for this model."""
        read = self._wrapper.tool_parser(text, None)
        return list(read) if isinstance(read, list) else [read]

    def _special_ids(self) -> frozenset[int]:
        """List the special tokens, which are not text, but for those that are marks."""
        marks = {mark for pair in (self._think, self._call) if pair for mark in pair}
        return frozenset(
            token
            for token, added in self.backend.get_added_tokens_decoder().items()
            if added.special and added.content not in marks
        )


def _pair(start: str | None, end: str | None) -> tuple[str, str] | None:
    return None if start is None else (start, end or "")


def load_chat_tokenizer(
    folder: Path,
    *,
    name: str,
    eos_ids: int | list[int] | None,
    chat_template: str | None,
    template_args: Mapping[str, Any],
) -> ChatTokenizer:
    """Load tokenizer.json and the template beside it, or the given one in its place.

    Raises ModelLoadFailed naming what is missing. No code of the model's is ever run.
    """
    if not (folder / "tokenizer.json").is_file():
        raise ModelLoadFailed(name, f"there is no tokenizer.json in {folder.name}")
    try:
        wrapper = load_tokenizer(folder, {"trust_remote_code": False}, eos_token_ids=eos_ids)
    except Exception as error:
        raise ModelLoadFailed(name, f"its tokenizer cannot be read: {error}") from error
    if chat_template is not None:
        wrapper.chat_template = chat_template
    if not (wrapper.has_chat_template or chat_template):
        raise ModelLoadFailed(name, "it has no chat template; set `chat_template:` in models.yaml")
    return ChatTokenizer(wrapper, template_args)
