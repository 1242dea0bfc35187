"""The parts of an answer, and the marks between the parts.

A token that is a mark is spelled: its text stands between two lone surrogates. No other text has
lone surrogates, so a string search finds the token `<think>` but not the same letters in text.
"""

import hashlib
import json
import math
import re
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import orjson
from tokenizers import AddedToken

from gateway.engine.answers.detokenizer import Detokenizer, Vocabulary
from gateway.engine.answers.stop_strings import StopScanner
from gateway.jobs.chat import CallDelta, Likelihood, TokenLogprob

SPECIAL, _ADDED, _END = "\ud800", "\ud801", "\ud802"
_SPELLING = str.maketrans("", "", SPECIAL + _ADDED + _END)
_SPECIALS = re.compile(f"{SPECIAL}[^{_END}]*{_END}")
BEGINS = SPECIAL + _ADDED
TOKENS = re.compile(f"([{BEGINS}][^{_END}]*{_END})")


class Marks:
    """A tokenizer's marks: its special tokens, and the added tokens that a format names."""

    def __init__(self, added: Mapping[int, AddedToken], named: Collection[str]) -> None:
        self._spelled = {
            token: f"{SPECIAL if added_token.special else _ADDED}{added_token.content}{_END}"
            for token, added_token in added.items()
            if added_token.special or any(_is_in(added_token.content, name) for name in named)
        }
        self._contents = {added[token].content: spelled for token, spelled in self._spelled.items()}
        longest_first = sorted(self._contents, key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def spelled(self, token: int) -> str | None:
        """Return the spelled text of a token, or None if the token is no mark."""
        return self._spelled.get(token)

    def pattern(self, mark: str) -> str:
        """Return a mark as it appears in the text of an answer, with spelled tokens."""
        return self._any.sub(lambda match: self._contents[match[0]], mark)


def _is_in(content: str, name: str) -> bool:
    # Words and white space are not marks.
    return content in name and not content.strip().isalnum() and len(content.strip()) > 1


def strip_marks(text: str) -> str:
    """Return text without special tokens, and with other marks as plain letters."""
    if text.isascii():
        return text
    return _SPECIALS.sub("", text).translate(_SPELLING)


def spell_out(text: str) -> str:
    """Return text with all spelled tokens as plain letters."""
    if text.isascii():
        return text
    return text.translate(_SPELLING)


def letters_at(spelled: str, count: int) -> int:
    """Return the place after the first `count` characters, not counting lone surrogates."""
    if spelled.isascii():
        return count
    place = 0
    for run in TOKENS.split(spelled):
        letters = len(spell_out(run))
        if letters >= count:
            return place + (count if letters == len(run) else len(run) if count else 0)
        count, place = count - letters, place + len(run)
    return place


# The calls of an answer. They are "free" among text, or a grammar asks for "either" calls or text,
# or for one "forced" call.
Mode = Literal["none", "free", "either", "forced"]
NewId = Callable[[str, int], str]


@dataclass(frozen=True, slots=True)
class OutputPart:
    """A piece of an answer: text, reasoning or a call."""

    text: str = ""
    reasoning: str = ""
    call: CallDelta | None = None


def openai_id(name: str, place: int) -> str:
    return f"call_{secrets.token_hex(12)}"


def mistral_id(name: str, place: int) -> str:
    """Return a new id that Mistral's templates accept: nine letters and digits."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


def kimi_id(name: str, place: int) -> str:
    """Return the id that Kimi's template expects for call number `place` of a conversation."""
    return f"functions.{name}:{place}"


def own_ids(messages: Sequence[Mapping[str, Any]], new_id: NewId) -> list[dict[str, Any]]:
    """Return messages whose call ids have the form that the model's template needs."""
    named: dict[str, str] = {}
    renamed = []
    for original in messages:
        message = dict(original)
        if message.get("tool_calls"):
            message["tool_calls"] = [
                _with_own_id(call, named, new_id) for call in message["tool_calls"]
            ]
        call_id = message.get("tool_call_id")
        if call_id is not None:
            message["tool_call_id"] = named.get(call_id, call_id)
        renamed.append(message)
    return renamed


def _with_own_id(
    call: Mapping[str, Any], named: dict[str, str], new_id: NewId
) -> Mapping[str, Any]:
    if not call.get("id"):
        return call
    call_id = str(call["id"])
    if new_id is kimi_id:
        own_id = kimi_id(str(call["function"]["name"]), len(named))
    elif new_id is mistral_id and not re.fullmatch(r"[A-Za-z0-9]{9}", call_id):
        own_id = hashlib.sha256(call_id.encode()).hexdigest()[:9]
    else:
        own_id = call_id
    return {**call, "id": named.setdefault(call_id, own_id)}


class CallWriter:
    """Numbers an answer's calls and gives them ids."""

    def __init__(
        self, new_id: NewId = openai_id, earlier: int = 0, limit: float = math.inf
    ) -> None:
        self.count = 0
        self._limit = limit
        self._new_id = new_id
        self._earlier = earlier  # the number of calls in the conversation so far

    @property
    def is_full(self) -> bool:
        return self.count >= self._limit

    def write(self, read: Sequence[Mapping[str, Any]]) -> list[CallDelta]:
        """Return complete calls, with new ids for calls without one."""
        calls: list[CallDelta] = []
        for place, call in enumerate(read, self.count):
            if place >= self._limit:
                break
            name, call_id = str(call["name"]), call.get("id")
            if not (call_id and isinstance(call_id, str)):
                call_id = self._new_id(name, self._earlier + place)
            calls.append(CallDelta(place, call_id, name, arguments_json(call["arguments"])))
        # If one call cannot be written, none of these calls count.
        self.count += len(calls)
        return calls

    def begin(self, name: str) -> CallDelta:
        place = self.count
        self.count += 1
        return CallDelta(place, self._new_id(name, self._earlier + place), name)


def arguments_json(arguments: Any) -> str:
    """Return a call's arguments as JSON text. Raises ValueError for NaN and infinities."""
    if isinstance(arguments, str):
        return arguments
    # orjson would write NaN and infinities as null.
    written = json.dumps(arguments, allow_nan=False, separators=(",", ":"))
    try:
        return orjson.dumps(arguments).decode()
    except TypeError:  # integers beyond 64 bits, lone surrogates
        return written


class ForcedCall:
    """Splits a growing forced call, {"name":"f","arguments":{…}}, into its name and arguments."""

    _HEAD, _NECK = '{"name":', ',"arguments":'

    def __init__(self, calls: CallWriter) -> None:
        self._text = ""
        self._calls = calls
        self._is_named = False

    def push(self, text: str) -> list[CallDelta]:
        if not (self._text or self._is_named):
            text = text.lstrip()
        self._text += text
        deltas = []
        if not self._is_named:
            neck = self._text.find(self._NECK)
            if neck < 0:
                return []
            name = orjson.loads(self._text[len(self._HEAD) : neck])
            self._text = self._text[neck + len(self._NECK) :]
            self._is_named = True
            deltas.append(self._calls.begin(name))
        # The last character so far may be the brace that closes the outer object.
        sure, self._text = self._text[:-1], self._text[-1:]
        if sure:
            deltas.append(CallDelta(0, arguments=sure))
        return deltas

    def flush(self) -> list[CallDelta]:
        rest, self._text = self._text.removesuffix("}"), ""
        if not rest or not self._is_named:
            return []
        return [CallDelta(0, arguments=rest)]


class AnswerParser(ABC):
    """Reads the text of one sequence, with spelled tokens, as it grows."""

    def __init__(self, mode: Mode, calls: CallWriter) -> None:
        self.mode = mode
        self._calls = calls
        self._forced = ForcedCall(calls)

    @property
    def calls(self) -> int:
        return self._calls.count

    @property
    @abstractmethod
    def is_thinking(self) -> bool:
        """Return True if the next text is reasoning."""

    @property
    def is_in_thought(self) -> bool:
        """Return True if an end mark would now end a thought."""
        return self.is_thinking

    @abstractmethod
    def push(self, piece: str) -> list[OutputPart]:
        """Take new text, and return the parts that are certain now."""

    @abstractmethod
    def flush(self, *, is_cut: bool = False) -> list[OutputPart]:
        """Return the last parts of an answer, which the length limit ended if `is_cut`."""

    def _answer(self, text: str) -> list[OutputPart]:
        if self.mode == "forced":
            return [OutputPart(call=call) for call in self._forced.push(text)]
        return [OutputPart(text=text)]

    def _flush_forced(self) -> list[OutputPart]:
        if self.mode != "forced":
            return []
        return [OutputPart(call=call) for call in self._forced.flush()]


class WholeParser(AnswerParser):
    """Returns text unchanged, with its spelled tokens, for readers of whole answers."""

    is_thinking = False

    def push(self, piece: str) -> list[OutputPart]:
        return [OutputPart(text=piece)]

    def flush(self, *, is_cut: bool = False) -> list[OutputPart]:
        return []


@dataclass(frozen=True, slots=True)
class TokenScores:
    """The logprobs of one token and of its likeliest alternatives."""

    chosen: float
    ids: Sequence[int]
    logprobs: Sequence[float]
    top: int  # alternatives to return

    def to_logprob(self, vocabulary: Vocabulary, token: int, piece: str) -> TokenLogprob:
        """Return the logprobs with texts, without alternatives that a grammar excludes."""
        ranked = sorted(zip(self.logprobs, self.ids, strict=True), reverse=True)[: self.top]
        alternatives = [
            Likelihood(vocabulary.text(i), vocabulary.bytes(i), logprob)
            for logprob, i in ranked
            if logprob > -math.inf
        ]
        return TokenLogprob(Likelihood(piece, vocabulary.bytes(token), self.chosen), alternatives)


@dataclass(slots=True)
class OutputProcessor:
    """Turns a sequence's tokens into parts."""

    decoder: Detokenizer
    parser: AnswerParser
    stops: StopScanner
    vocabulary: Vocabulary
    marks: Marks
    _parsed: int = 0
    _shown: int = 0
    _pending: list[tuple[int, TokenLogprob]] = field(default_factory=list)

    def push(
        self,
        token: int,
        scores: TokenScores | None,
        *,
        is_shown_as_text: bool,
        may_stop: bool = True,
    ) -> list[OutputPart]:
        piece = self.marks.spelled(token)
        if piece is None:
            piece = self.decoder.push(token)
        begun, was_thinking = self._parsed, self.parser.is_thinking
        parts = [self._scan_for_stops(part, may_stop=may_stop) for part in self.parser.push(piece)]
        opens = self.parser.is_thinking and is_shown_as_text
        if scores is not None and not (was_thinking or opens):
            # Rerankers read the only token of an answer, even if it is not shown as text.
            text = strip_marks(piece)
            if not is_shown_as_text:
                text = text or self.vocabulary.text(token)
            self._pending.append((begun, scores.to_logprob(self.vocabulary, token, text)))
        return parts

    def finish(self, *, is_cut: bool = False) -> list[OutputPart]:
        parts = [self._scan_for_stops(part) for part in self.parser.flush(is_cut=is_cut)]
        rest = self.stops.flush()
        self._shown += len(rest)
        return [*parts, OutputPart(text=rest)]

    def take_logprobs(self, *, is_last: bool) -> Sequence[TokenLogprob]:
        """Return the logprobs of tokens whose text has been returned."""
        if not self._pending:
            return ()
        is_whole = is_last and not self.stops.is_stopped
        ready = [pair for pair in self._pending if is_whole or pair[0] < self._shown]
        self._pending = self._pending[len(ready) :]
        if not self.stops.is_stopped:
            return [logprob for _, logprob in ready]
        # A stop string may begin inside a token, whose text is cut there.
        return [_cut_text(logprob, self._shown - start) for start, logprob in ready]

    def _scan_for_stops(self, part: OutputPart, *, may_stop: bool = True) -> OutputPart:
        if not part.text:
            return part
        self._parsed += len(part.text)
        text = self.stops.push(part.text) if may_stop else part.text
        self._shown += len(text)
        return part if text == part.text else OutputPart(text=text)


def _cut_text(logprob: TokenLogprob, length: int) -> TokenLogprob:
    chosen = logprob.chosen
    return replace(logprob, chosen=replace(chosen, token=chosen.token[:length]))
