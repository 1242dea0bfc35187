"""Reads the answers of gpt-oss and Muse. A header before each message names its channel.

    <|channel|>analysis<|message|>Let me see.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>
    <|start|>assistant<|channel|>final<|message|>Four.<|return|>

Sources: https://cookbook.openai.com/articles/openai-harmony for gpt-oss;
mlx_lm/chat_templates/muse_spark.py for `to=self`, `to=user` and `<|eom|>`.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

from gateway.engine.answers.output_parts import (
    BEGINS,
    TOKENS,
    AnswerParser,
    CallWriter,
    Mode,
    OutputPart,
    spell_out,
    strip_marks,
)

HARMONY_TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|eom|>", "<|eot|>")  # tokens that end a message
STOPS = ("<|return|>", "<|call|>")  # tokens that end an answer
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_ROLE = "(?:".join("assistant") + ")?" * 8  # matches every prefix of "assistant"
_HEADER = re.compile(rf"\s*(?:{_ROLE})?\s*(?:to?(?:=\S*)?)?\s*")
_QUOTES = re.compile(r"\\(?:.|\Z)|\"", re.DOTALL)
_Body = Literal["header", "reasoning", "text", "call", "none"]
ReadCall = Callable[[str, str], Sequence[Mapping[str, Any]]]


def answer_begins(pattern: Callable[[str], str]) -> re.Pattern[str]:
    """Return a pattern of the answer's header, in a text with spelled tokens (output_parts.py)."""
    channel, message = re.escape(pattern("<|channel|>")), re.escape(pattern("<|message|>"))
    constrain = re.escape(pattern("<|constrain|>"))
    text = rf"(?:(?!\bto=)[^{BEGINS}])*"
    final = rf"{channel}final{text}(?:{constrain}{text})?{message}"
    return re.compile(rf"{final}|to=user{message}")


def opens_answer(opening: str) -> bool:
    """Return True if `opening`, the end of a prompt, ends with the answer's header."""
    return any(found.end() == len(opening) for found in answer_begins(str).finditer(opening))


def thought_end(*, is_spark: bool, may_call: bool) -> str:
    """Return the text that ends a thought. It also begins the answer, unless a call may follow."""
    end, answer = "<|end|>", "<|channel|>final<|message|>"
    if is_spark:
        end, answer = "<|eom|>", " to=user<|message|>"
    return f"{end}<|start|>assistant" + ("" if may_call else answer)


class HarmonyParser(AnswerParser):
    """Reads the messages of one sequence as they grow."""

    def __init__(
        self,
        mode: Mode,
        *,
        functions: Collection[str],
        read: ReadCall,
        calls: CallWriter,
        is_bound: bool = False,
        is_begun: bool = False,
        opening: str = "",
    ) -> None:
        super().__init__(mode, calls)
        self._functions = functions
        self._read = read
        self._is_bound = is_bound  # a grammar applies, so only the final message is text
        # A continued answer begins inside the final message. Other answers begin inside a header.
        self._body: _Body = "text" if is_begun else "header"
        self._header = ""
        self._call: list[str] = []
        self._recipient = ""
        self._is_json: bool | None = None  # None before the call's first letter
        self._is_in_string = self._is_escaped = False
        self.push(opening)

    @property
    def is_thinking(self) -> bool:
        return self._body in ("header", "reasoning", "none")

    @property
    def is_in_thought(self) -> bool:
        return self._body == "reasoning"

    def push(self, piece: str) -> list[OutputPart]:
        parts: list[OutputPart] = []
        # TOKENS has a group, so split() returns texts at even places, and tokens at odd places.
        for place, run in enumerate(TOKENS.split(piece)):
            if place % 2:
                parts += self._take_token(run)
            elif run:
                parts += self._take_text(run)
        return parts

    def flush(self, *, is_cut: bool = False) -> list[OutputPart]:
        return [*self._close(is_cut=is_cut), *self._flush_forced()]

    def _take_token(self, run: str) -> list[OutputPart]:
        token = spell_out(run)
        if self._is_in_string and token not in STOPS:
            return self._to_parts(run)
        if token in ENDS:
            return self._close()
        if self._body == "header" and token == "<|message|>":
            self._open()
            return []
        if self._body == "header" or token not in ("<|start|>", "<|channel|>"):
            return self._take_text(run)
        parts = self._close()
        self._body = "header"
        self._header = run if token == "<|channel|>" else ""
        return parts

    def _take_text(self, run: str) -> list[OutputPart]:
        if self._body == "header":
            self._header += run
            return []
        return self._to_parts(run)

    def _open(self) -> None:
        """Read a complete header, and choose how to read the message after it."""
        header, self._header = spell_out(self._header), ""
        recipient = _RECIPIENT.search(header)
        channel = _CHANNEL.search(header)
        name = "" if recipient is None else recipient[1]
        self._recipient = name.removeprefix("functions.")
        is_known = name.startswith("functions.") or self._recipient in self._functions
        is_answer = name == "user" or (channel is not None and channel[1] == "final")
        is_thought = name == "self" or (channel is not None and channel[1] == "analysis")
        if is_known and self.mode in ("free", "either"):
            self._body = "call"
        elif is_thought or (self._is_bound and not is_answer):
            self._body = "reasoning"
        else:
            self._body = "text"

    def _to_parts(self, run: str) -> list[OutputPart]:
        if self._body == "call":
            self._call.append(run)
            self._follow_quotes(spell_out(run))
            return []
        text = strip_marks(run)
        if self._body == "none" or not text:
            return []
        if self._body == "reasoning":
            return [OutputPart(reasoning=text)]
        return self._answer(text)

    def _follow_quotes(self, text: str) -> None:
        """Track whether a JSON call is inside a string. Tokens in strings are plain text."""
        if self._is_json is None and text.strip():
            self._is_json = text.lstrip().startswith("{")
        if self._is_json:
            marks = [mark[0] for mark in _QUOTES.finditer(text, self._is_escaped)]
            self._is_in_string ^= marks.count('"') % 2 == 1
            self._is_escaped = text.endswith("\\") and marks[-1:] == ["\\"]

    def _close(self, *, is_cut: bool = False) -> list[OutputPart]:
        """End the message under way, and read its call unless the call was cut."""
        self._is_json, self._is_in_string, self._is_escaped = None, False, False
        body, self._body = self._body, "none"
        call, self._call = spell_out("".join(self._call)), []
        if body == "header":
            text, self._header = TOKENS.split(self._header)[0], ""
            if _HEADER.fullmatch(text):
                return []
            return [OutputPart(reasoning=text)] if self._is_bound else self._answer(text)
        if body != "call":
            return []
        if is_cut:
            return [OutputPart(text=call)] if call else []
        try:
            calls = self._calls.write(self._read(self._recipient, call))
        except Exception:  # a call that cannot be read is text
            return [OutputPart(text=call)]
        return [OutputPart(call=call_delta) for call_delta in calls]
