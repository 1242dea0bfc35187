"""An answer's text → content, reasoning and calls, separated by the marks of the model's format."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gateway.engine.answers.output_parts import (
    AnswerParser,
    CallWriter,
    Mode,
    OutputPart,
    spell_out,
    strip_marks,
)
from gateway.engine.answers.stop_strings import held_back

ReadCalls = Callable[[str], Sequence[Mapping[str, Any]]]
_State = Literal["text", "thinking", "call"]
_Next = Literal["text", "thinking", "call", "noise"]


@dataclass(frozen=True, slots=True)
class Markup:
    """A model's marks, their tokens spelled as the stream has them."""

    opens: tuple[str, ...] = ()  # thinking
    closes: tuple[str, ...] = ()
    # Pairs around calls; the second is empty if only the answer's end ends the call.
    calls: tuple[tuple[str, str], ...] = ()
    noise: tuple[str, ...] = ()  # marks that are dropped
    # Matches the beginning of an answer that is a call without any mark. A regex.Pattern, which
    # can match in part.
    bare: Any = None
    # Turns the text between call marks into calls, or raises.
    read: ReadCalls | None = None


class Parser(AnswerParser):
    """Reads the text of one sequence as it grows.

    A call in the model's own format is returned once it is finished; one that cannot be read is
    text. A forced call is returned as it grows: it has the one form that its grammar allows,
    {"name":…,"arguments":…}.

    Thinking opens before any text and after a finished call. A sequence that is held to a grammar
    is free of it only at its very beginning, so thinking opens only there (`is_bound`); and an
    answer that is continued (`is_begun`) has text already. Nothing follows the last call allowed.
    """

    def __init__(
        self,
        markup: Markup,
        mode: Mode,
        *,
        is_thinking: bool,
        is_bound: bool = False,
        is_begun: bool = False,
        calls: CallWriter | None = None,
    ) -> None:
        super().__init__(mode, calls or CallWriter())
        self._markup = markup
        self._state: _State = "thinking" if is_thinking else "text"
        self._held = ""
        self._call: list[str] = []  # the beginning of the call under way, which has no mark
        self._is_fresh = is_thinking  # white space after a mark is not part of any text
        self._is_bound = is_bound
        self._has_text = is_begun
        self._may_think = not is_begun
        self._may_be_bare = mode == "free" and not is_begun and markup.bare is not None
        self._pair = ("", "")

    @property
    def is_thinking(self) -> bool:
        return self._state == "thinking"

    def push(self, piece: str) -> list[OutputPart]:
        self._held += piece
        parts: list[OutputPart] = []
        while self._advance(parts):
            pass
        return parts

    def flush(self) -> list[OutputPart]:
        if self._calls.is_full:
            return []
        pending, self._held = "".join((*self._call, self._held)), ""
        self._call = []
        parts: list[OutputPart] = []
        if self._state == "call":
            start, end = self._pair
            self._state = "text"
            if not end:
                parts = self._read(pending)
            if not parts:
                parts = self._to_parts(start + pending, is_call=True)
        else:
            parts = self._to_parts(pending)
        if not self.is_thinking:
            parts += self._flush_forced()
        return parts

    def _advance(self, parts: list[OutputPart]) -> bool:
        """Add the parts up to the next mark; return True if there was one."""
        if self._calls.is_full or self._is_waiting():
            return False
        marks = self._marks()
        held = self._held
        matches = [(held.find(mark), -len(mark), mark) for mark in marks if mark in held]
        if not matches:
            cut = len(self._held) - held_back(self._held, marks)
            sure, self._held = self._held[:cut], self._held[cut:]
            if self._state == "call":
                self._call.append(sure)
            else:
                parts += self._to_parts(sure)
            return False
        at, _, mark = min(matches)
        before, self._held = self._held[:at], self._held[at + len(mark) :]
        if self._state == "call":
            before, self._call = "".join((*self._call, before)), []
            start, end = self._pair
            parts += self._read(before) or self._to_parts(start + before + end, is_call=True)
        else:
            parts += self._to_parts(before)
        self._enter(marks[mark], mark)
        return True

    def _enter(self, following: _Next, mark: str) -> None:
        was_thinking = self._state == "thinking"
        if following == "thinking" or was_thinking:
            self._may_think = not self._is_bound
        if following == "call":
            self._pair = next(pair for pair in self._markup.calls if pair[0] == mark)
        if following != "noise":
            self._state = following
        self._may_be_bare = self._may_be_bare and following != "call"
        self._is_fresh = not (was_thinking and self._is_bound)  # white space may be the grammar's

    def _is_waiting(self) -> bool:
        """Return True while an answer that has just begun may still turn out to be a bare call."""
        if not self._may_be_bare or self._state != "text":
            return False
        assert self._markup.bare is not None
        match = self._markup.bare.match(self._held, partial=True)
        if match is not None and match.partial:
            return True
        self._may_be_bare = False
        if match is not None:
            self._state, self._pair = "call", ("", "")
        return False

    def _marks(self) -> dict[str, _Next]:
        """Return the marks that count in this state, and the state that each leads to."""
        markup = self._markup
        if self._state == "thinking":
            return dict.fromkeys(markup.closes, "text")
        if self._state == "call":
            if self._pair[1]:
                return {self._pair[1]: "text"}
            return {start: "call" for start, _ in markup.calls}
        marks: dict[str, _Next] = dict.fromkeys(markup.noise, "noise")
        if self._may_think and not self._has_text:
            marks |= dict.fromkeys(markup.opens, "thinking")
        if self.mode == "free" or (self.mode == "either" and not self._has_text):
            marks |= {start: "call" for start, _ in markup.calls}
        return marks

    def _to_parts(self, pending: str, *, is_call: bool = False) -> list[OutputPart]:
        """Return text as parts of the current kind; a call that was not read shows its tokens."""
        if is_call:
            text = spell_out(pending)
        else:
            text = strip_marks(pending)
            if self._is_fresh:
                text = text.lstrip()
        if not text:
            return []
        self._is_fresh = False
        if self.is_thinking:
            return [OutputPart(reasoning=text)]
        if self._is_bound or text.strip():
            self._has_text = True
            self._may_think = self._may_think and not self._is_bound
        return self._answer(text)

    def _read(self, pending: str) -> list[OutputPart]:
        """Return finished calls as parts; none if they cannot be read."""
        assert self._markup.read is not None
        try:
            calls = self._calls.write(self._markup.read(spell_out(pending)))
        except Exception:  # parsers raise whatever they trip over
            return []
        if calls:
            self._has_text = False
        return [OutputPart(call=call) for call in calls]
