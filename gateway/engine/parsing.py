"""What a model says → text, reasoning and calls, told apart by the marks of its own format."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from gateway.engine.text import held_back
from gateway.jobs import CallDelta

Mode = Literal["none", "free", "forced"]
ParseCall = Callable[[str], Sequence[Mapping[str, Any]]]


@dataclass(frozen=True, slots=True)
class Markup:
    """A model's marks: around its thinking and around its calls; None where it has none.

    `parse_call` turns what stands between call marks into calls, or raises.
    """

    think: tuple[str, str] | None = None
    call: tuple[str, str] | None = None
    parse_call: ParseCall | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of an answer: one of the three."""

    text: str = ""
    reasoning: str = ""
    call: CallDelta | None = None


class Parser:
    """Reads one row's text as it grows.

    A finished call of the model's own format is told whole; one that cannot be read is text. A
    forced call is told as it is made: it has the one form that its grammar allows,
    {"name":…,"arguments":…}.
    """

    def __init__(self, markup: Markup, mode: Mode, *, is_thinking: bool) -> None:
        self._markup = markup
        self.mode = mode
        self._state: Literal["text", "thinking", "call"] = "thinking" if is_thinking else "text"
        self._held = ""
        self._is_fresh = is_thinking  # white space after a mark is nobody's text
        self._forced = _ForcedCall()
        self.calls = 0

    @property
    def is_thinking(self) -> bool:
        """Tell whether what comes next is reasoning."""
        return self._state == "thinking"

    def push(self, piece: str) -> list[Part]:
        """Take new text; give the parts that are certain now."""
        self._held += piece
        parts: list[Part] = []
        while self._advance(parts):
            pass
        return parts

    def flush(self) -> list[Part]:
        """Give what was held back, once no more comes."""
        text, self._held = self._held, ""
        if self._state == "call":
            assert self._markup.call is not None
            if self._markup.call[1] == "" and (calls := self._read(text)):
                return calls
            text = self._markup.call[0] + text
            self._state = "text"
        parts = self._told(text) if text else []
        if self.mode == "forced" and not self.is_thinking:
            parts += [Part(call=call) for call in self._forced.flush()]
        return parts

    def _advance(self, parts: list[Part]) -> bool:
        """Tell what can be told up to the next mark; say whether there was one."""
        marks = self._marks()
        found = [(at, mark) for mark in marks if (at := self._held.find(mark)) >= 0]
        if not found:
            if self._state != "call":
                cut = len(self._held) - held_back(self._held, list(marks))
                parts += self._told(self._held[:cut])
                self._held = self._held[cut:]
            return False
        at, mark = min(found)
        before, self._held = self._held[:at], self._held[at + len(mark) :]
        if self._state == "call":
            assert self._markup.call is not None
            parts += self._read(before) or self._told("".join((self._markup.call[0], before, mark)))
        else:
            parts += self._told(before)
        self._state = marks[mark]
        self._is_fresh = True
        return True

    def _marks(self) -> dict[str, Literal["text", "thinking", "call"]]:
        """Give the marks that matter now, and the state each leads to."""
        think, call = self._markup.think, self._markup.call
        if self._state == "thinking":
            assert think is not None
            return {think[1]: "text"}
        if self._state == "call":
            assert call is not None
            return {call[1]: "text"} if call[1] else {}
        marks: dict[str, Literal["text", "thinking", "call"]] = {}
        if think is not None:
            marks[think[0]] = "thinking"
        if call is not None and self.mode == "free":
            marks[call[0]] = "call"
        return marks

    def _told(self, text: str) -> list[Part]:
        if self._is_fresh:
            text = text.lstrip()
        if not text:
            return []
        self._is_fresh = False
        if self.is_thinking:
            return [Part(reasoning=text)]
        if self.mode == "forced":
            calls = self._forced.push(text)
            self.calls = 1
            return [Part(call=call) for call in calls]
        return [Part(text=text)]

    def _read(self, text: str) -> list[Part]:
        """Read finished calls; nothing when they cannot be read."""
        assert self._markup.parse_call is not None
        try:
            read = self._markup.parse_call(text)
            calls = [
                CallDelta(self.calls + i, new_call_id(), str(call["name"]), _arguments(call))
                for i, call in enumerate(read)
            ]
        except Exception:  # mlx-lm's parsers raise whatever they trip over
            return []
        self.calls += len(calls)
        return [Part(call=call) for call in calls]


class _ForcedCall:
    """Cuts {"name":"f","arguments":{…}} into a name and growing arguments."""

    _HEAD, _NECK = '{"name":', ',"arguments":'

    def __init__(self) -> None:
        self._text = ""
        self._is_named = False

    def push(self, text: str) -> list[CallDelta]:
        self._text += text
        calls = []
        if not self._is_named:
            neck = self._text.find(self._NECK)
            if neck < 0:
                return []
            name = orjson.loads(self._text[len(self._HEAD) : neck])
            self._text = self._text[neck + len(self._NECK) :]
            self._is_named = True
            calls.append(CallDelta(0, new_call_id(), name))
        # The last character so far may be the brace that closes the whole.
        told, self._text = self._text[:-1], self._text[-1:]
        if told:
            calls.append(CallDelta(0, arguments=told))
        return calls

    def flush(self) -> list[CallDelta]:
        """Give the last character, unless it is the closing brace."""
        rest, self._text = self._text.removesuffix("}"), ""
        return [CallDelta(0, arguments=rest)] if rest and self._is_named else []


def new_call_id() -> str:
    """Make the id that a tool's result refers to."""
    return f"call_{secrets.token_hex(12)}"


def _arguments(call: Mapping[str, Any]) -> str:
    """Give a call's arguments as OpenAI does: JSON inside a string."""
    arguments = call.get("arguments", {})
    return arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
