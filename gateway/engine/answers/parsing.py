"""Splits an answer's text into content, reasoning and calls by the marks of the model's format."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from gateway.engine.answers.call_values import Call, Ending, Reading
from gateway.engine.answers.output_parts import (
    SPECIAL,
    AnswerParser,
    CallWriter,
    Mode,
    OutputPart,
    letters_at,
    spell_out,
    strip_marks,
)
from gateway.engine.answers.stop_strings import held_back

ReadCalls = Callable[[str, int, Ending], Reading | None]  # call_values.ReadCalls without schemas
_State = Literal["text", "thinking", "call", "aside", "broken"]
_Next = Literal["text", "thinking", "call", "aside", "noise"]

BARE_SIZE: Final = 1024  # characters that show whether an answer begins with a call without marks
EARLY: Final = 128  # characters after a mark that show whether the mark begins a call
PROMPT_READS: Final = 8  # readings of a call before `_Tail.put_off` delays the next reading
LAST_READS: Final = 32  # the most readings of calls after the answer has ended
PIECE: Final = 2048  # characters searched for marks at once
ASIDE_SIZE: Final = 1 << 17  # the most characters of an aside (see `Parser`)


@dataclass(frozen=True, slots=True)
class Markup:
    """A model's marks, with spelled tokens (output_parts.py)."""

    opens: tuple[str, ...] = ()  # marks that begin thinking
    closes: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    call_ends: tuple[str, ...] = ()
    words: tuple[str, ...] = ("",)  # marks that may also stand in other text
    noise: tuple[str, ...] = ()
    around: tuple[str, ...] = ()  # marks around all calls
    bare: Any = None  # a `regex.Pattern` of how answers begin with a call without marks
    read: ReadCalls | None = None


class Parser(AnswerParser):
    """Splits the text of one sequence into parts as it grows.

    A call is returned once it is complete, or as text if it cannot be read. A sequence with a
    grammar (`is_bound`) may think only at its start.

    Inside a thought, the mark of a call begins an aside unless the mark is a special token. An
    aside is a call if the answer ends with it, and part of the thought otherwise.
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
        self._later: list[str] = []  # the text after `_held`, last part first
        self._is_over = False
        self._counting: dict[tuple[Any, ...], dict[str, _Next]] = {}  # results of `_marks`
        self._tail = _Tail("")
        self._is_in_thought = False  # the last mark began a call in a thought
        self._is_fresh = is_thinking  # leading white space is dropped after a mark
        self._is_bound = is_bound
        self._has_text = is_begun  # a continued answer has text
        self._may_think = not is_begun
        self._reads_bare = mode == "free" and markup.bare is not None
        self._may_be_bare = self._reads_bare and not is_begun

    @property
    def is_thinking(self) -> bool:
        return self._state in ("thinking", "aside")

    def push(self, piece: str) -> list[OutputPart]:
        self._held += piece
        parts: list[OutputPart] = []
        self._drain(parts)
        return parts

    def flush(self, *, is_cut: bool = False) -> list[OutputPart]:
        ending = Ending.CUT if is_cut else Ending.END
        parts: list[OutputPart] = []
        self._is_over = True
        for reads in range(LAST_READS, -1, -1):
            if self._calls.is_full:
                break
            self._take("".join((self._held, *reversed(self._later))), parts)
            self._held, self._later = "", []
            if self._state == "aside":
                self._end_aside(parts, ending)
            elif self._state != "call":
                break
            elif not reads or not self._read(parts, ending):
                if self._is_in_thought:
                    self._give_up(parts)
                else:
                    self._state = "text"
                    parts += self._to_parts(self._tail.text, is_call=True)
            self._drain(parts)
        if not self.is_thinking:
            parts += self._flush_forced()
        return parts

    def _drain(self, parts: list[OutputPart]) -> None:
        while not self._calls.is_full and (self._advance(parts) or self._feed()):
            pass

    def _feed(self) -> bool:
        """Move a piece of `_later` into `_held`, if there is one."""
        if not self._later or self._is_last_call:
            return False
        text = self._later.pop()
        self._held += text[:PIECE]
        if len(text) > PIECE:
            self._later.append(text[PIECE:])
        return True

    @property
    def _is_last_call(self) -> bool:
        return self._is_over and self._state == "call"

    def _advance(self, parts: list[OutputPart]) -> bool:
        """Take the text up to the next mark, and return True if another mark may follow."""
        if self._is_waiting() or self._is_last_call:
            return False
        marks, held = self._marks(), self._held
        matches = [(held.find(mark), -len(mark), mark) for mark in marks if mark in held]
        cut = len(held) - held_back(held, marks)
        if not matches or cut < min(matches)[0]:  # a longer mark may be under way
            self._held = held[cut:]
            self._take(held[:cut], parts)
            is_early = self._state == "call" and self._tail.is_early
            return is_early and self._read(parts, Ending.MORE)
        at, _, mark = min(matches)
        self._held = held[at + len(mark) :]
        self._take(held[:at], parts)
        if self._state != "call":
            self._enter(marks[mark], mark, parts)
            return True
        self._tail.add(mark)
        if self._tail.is_due:
            self._read(parts, Ending.MORE)
        return True

    def _take(self, text: str, parts: list[OutputPart]) -> None:
        if self._state in ("call", "aside"):
            self._tail.add(text)
        else:
            parts += self._to_parts(text, is_call=self._state == "broken")
        if self._state == "aside" and self._tail.size > ASIDE_SIZE:
            self._state = "thinking"
            parts += self._to_parts(self._tail.text)

    def _enter(self, following: _Next, mark: str, parts: list[OutputPart]) -> None:
        was_thinking = self.is_thinking
        if self._state == "aside":
            parts += self._to_parts(self._tail.text)
        elif self._state == "broken":
            parts += self._to_parts(mark, is_call=True)
        if following == "thinking" or was_thinking:
            self._may_think = not self._is_bound
        if following in ("call", "aside"):
            self._tail = _Tail(mark)
        if following != "noise":
            self._state = following
            self._is_in_thought = was_thinking and following == "call"
        begins_text = was_thinking and following == "text" and not self._has_text
        self._may_be_bare = self._reads_bare and (self._may_be_bare or begins_text)
        # White space is kept if a grammar may ask for it, and after marks that are shown.
        is_kept = (was_thinking and self._is_bound) or mark in self._markup.call_ends
        self._is_fresh = not is_kept

    def _is_waiting(self) -> bool:
        """Return True while a new answer may still become a call without marks."""
        if not self._may_be_bare or self._state != "text":
            return False
        assert self._markup.bare is not None
        match = self._markup.bare.match(self._held, partial=True)
        if match is not None and match.partial and len(self._held) < BARE_SIZE:
            return True
        self._may_be_bare = False
        if match is not None and not match.partial:
            self._state, self._tail = "call", _Tail("")
        return False

    def _marks(self) -> dict[str, _Next]:
        """Return the marks that count in this state, each with the state after the mark."""
        state = (self._state, self._has_text, self._may_think, self._is_in_thought)
        if state not in self._counting:
            self._counting[state] = self._marks_that_count()
        return self._counting[state]

    def _marks_that_count(self) -> dict[str, _Next]:
        markup = self._markup
        if self._state == "call":
            return dict.fromkeys((*markup.calls, *markup.call_ends), "call")
        if self.is_thinking:
            return self._marks_in_thought()
        if self._state == "broken":
            return dict.fromkeys(markup.call_ends, "text")
        marks: dict[str, _Next] = dict.fromkeys(markup.noise, "noise")
        if self._is_in_thought:
            marks |= dict.fromkeys(markup.closes, "noise")
        if self._may_think and not self._has_text:
            marks |= dict.fromkeys(markup.opens, "thinking")
        if self.mode == "free" or (self.mode == "either" and not self._has_text):
            marks |= dict.fromkeys(markup.calls, "call")
        return marks

    def _marks_in_thought(self) -> dict[str, _Next]:
        markup = self._markup
        marks: dict[str, _Next] = dict.fromkeys(markup.closes, "text")
        if self.mode != "free" or self._is_bound:
            return marks
        marks |= {mark: "call" for mark in markup.calls if mark.startswith(SPECIAL)}
        if self._state == "thinking":
            letters = [mark for mark in (*markup.around, *markup.calls) if mark[0] != SPECIAL]
            marks |= dict.fromkeys(letters, "aside")
        return marks

    def _to_parts(self, pending: str, *, is_call: bool = False) -> list[OutputPart]:
        """Return text as parts, with special tokens if it is a call that cannot be read."""
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

    def _read(self, parts: list[OutputPart], ending: Ending) -> bool:
        """Read the call under way, and return True if the result is final."""
        assert self._markup.read is not None
        spelled = self._tail.text
        try:
            reading = self._markup.read(spell_out(spelled), 0, ending)
        except ValueError:
            self._give_up(parts)
            return True
        except Exception:
            reading = None
        if reading is None:
            self._tail.put_off()
            return False
        end = letters_at(spelled, reading.end)
        calls = self._write(reading.calls)
        self._state, self._is_fresh = "text", bool(calls)
        if not calls and self._is_in_thought:
            self._state = "thinking"
        parts += calls or self._to_parts(spelled[:end], is_call=True)
        rest = spelled[end:]
        if reading.is_last:
            parts += self._to_parts(rest, is_call=True)
        else:
            self._later += [self._held, rest]
            self._held = ""
        return True

    def _give_up(self, parts: list[OutputPart]) -> None:
        """Add text that is no call, up to the end mark of the call or of the thought around it."""
        spelled, markup = self._tail.text, self._markup
        ends = markup.closes if self._is_in_thought else markup.call_ends
        places = [spelled.find(mark) for mark in ends if mark in spelled]
        if self._tail.opening in markup.words:
            end, self._state = len(self._tail.opening), "text"
        else:
            end = min(places, default=len(spelled))
            self._state = "thinking" if self._is_in_thought else "broken"
        self._later += [self._held, spelled[end:]]
        self._held, self._is_fresh = "", False
        parts += self._to_parts(spelled[:end], is_call=True)

    def _end_aside(self, parts: list[OutputPart], ending: Ending) -> None:
        spelled = self._tail.text
        begin, read = self._last_calls(spell_out(spelled)) if ending is Ending.END else (0, [])
        calls = self._write(read)
        if calls:
            spelled = _any(self._markup.around).sub("", spelled[: letters_at(spelled, begin)])
        parts += [*self._to_parts(spelled), *calls]
        self._state = "text" if calls else "thinking"

    def _last_calls(self, text: str) -> tuple[int, list[Call]]:
        """Return the place where the calls at the end of a text begin, and the calls."""
        assert self._markup.read is not None
        starts, noise = map(_any, (self._markup.calls, self._markup.around))
        calls: list[Call] = []
        begin = len(text)
        start = starts.search(text)
        while start is not None:
            try:
                reading = self._markup.read(text, start.start(), Ending.END)
            except ValueError:
                reading = Reading((), start.end())
            except Exception:
                reading = None
            if reading is None:
                return len(text), []
            if not calls:
                begin = start.start()
            calls = [*calls, *reading.calls] if reading.calls else []
            start = starts.search(text, reading.end)
            between = text[reading.end : len(text) if start is None else start.start()]
            if noise.sub("", between).strip():
                calls = []
        return begin, calls

    def _write(self, read: Sequence[Call]) -> list[OutputPart]:
        try:
            calls = self._calls.write(read)
        except Exception:  # arguments that JSON cannot express
            return []
        if calls:
            self._has_text = False
        return [OutputPart(call=call) for call in calls]


def _any(marks: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(spell_out(mark)) for mark in marks) or "(?!)")


class _Tail:
    """The text since a mark that may begin a call, and when to read that text."""

    def __init__(self, opening: str) -> None:
        self.opening = opening
        self.size = len(opening)
        self._pieces = [opening]
        self._reads = 0
        self._due = 0

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def is_early(self) -> bool:
        """Return True if unread text is long enough to show whether a call begins."""
        return self._reads == 0 and self.size >= EARLY

    @property
    def is_due(self) -> bool:
        return self._reads < PROMPT_READS or self.size >= self._due

    def add(self, text: str) -> None:
        self._pieces.append(text)
        self.size += len(text)

    def put_off(self) -> None:
        """Delay the next reading until the text has grown by half, to avoid quadratic time."""
        self._reads += 1
        self._due = self.size * 3 // 2
