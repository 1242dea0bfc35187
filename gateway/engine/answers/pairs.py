"""Reads calls whose arguments are pairs of a name and a text, as most agent models write them.

    <tool_call>
    <function=write>
    <parameter=path>
    a.py
    </parameter>
    </function>
    </tool_call>

A text may contain these marks, so it ends only before the next pair or the end of the call. If no
end is found, a lenient scan allows for missing marks.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import unescape
from typing import Any

import regex  # type: ignore[import-untyped]

from gateway.engine.answers.call_bodies import Bodies, read_json
from gateway.engine.answers.call_values import (
    Allowed,
    Call,
    Ending,
    Reading,
    Schemas,
    as_cdata,
    as_text,
    guess,
    write_call,
)

_GAP = r"(?:\s|\\n)*+"
_QUOTE = r"\\*+[\"']"  # a quote, perhaps escaped as in JSON
_QUOTED = (
    rf"(?:{_QUOTE}(?P<{{0}}>[^\\\"'<>\n]{{{{1,256}}}}){_QUOTE}"
    rf"|(?P<{{0}}>[^\\\s\"'<>]{{{{1,256}}}}))"
)
_NAMES = {
    "name": rf"(?:{_QUOTE})?(?P<name>[^\\\s\"'<>{{}}]{{1,256}})(?:{_QUOTE})?",
    "key": r"(?P<key>[^<>\n]{1,256}?)",
}
_ATTRIBUTES = r"\s++(?:[^<>\s]++\s++){0,8}?"  # other attributes before the wanted attribute
_NAMED_GROUP = regex.compile(r"\(\?P<\w+>")
_CDATA = regex.compile(r"\A\s*<!\[CDATA\[(.*)\]\]>\s*\Z", regex.DOTALL)


@dataclass(frozen=True)
class Pairs:
    """The call format of one model family, whose patterns are made from the forms for writing."""

    call: str  # "<function={name}>\n{pairs}</function>"
    pair: str  # "<parameter={key}>\n{value}\n</parameter>\n"
    blocks: tuple[tuple[str, str], ...] = ()  # marks around calls
    joins: bool = False  # one block has all calls
    whole: tuple[str, str] = ("", "")  # marks around all arguments as one JSON object
    write_value: Callable[[Any], str] = as_text

    @cached_property
    def marks(self) -> tuple[tuple[str, str], ...]:
        """Return pairs of an opening mark and a closing mark, which may be ""."""
        opening = self.call.partition("{name}")[0].rstrip("\"'")
        return (*self.blocks, (opening, "")) if opening else self.blocks

    @cached_property
    def value_end(self) -> str:
        return self.pair.partition("{value}")[2].strip()

    @cached_property
    def call_end(self) -> str:
        return self.call.partition("{pairs}")[2].strip() or self.blocks[0][1]

    @property
    def wraps(self) -> bool:
        return "\n{value}\n" in self.pair

    @cached_property
    def _closing(self) -> str:
        ends = _any(end for _, end in self.blocks)
        closing = f"{regex.escape(self.call_end)}(?:{_GAP}{ends})?"
        return f"(?:{closing}|{ends})" if self.blocks else closing

    @cached_property
    def _opening(self) -> str:
        block = f"{_any(start for start, _ in self.blocks)}{_GAP}" if self.blocks else ""
        if len(self.marks) > len(self.blocks):
            block = f"(?:{block})?"
        return f"{block}{_pattern(self.call.partition('{pairs}')[0])}{_GAP}"

    @cached_property
    def _key(self) -> str:
        key = _pattern(self.pair.partition("{value}")[0])
        return f"(?:{key}|{_any(self.whole[:1])})" if self.whole[0] else key

    @cached_property
    def head_pattern(self) -> Any:
        return regex.compile(f"{self._opening}(?:(?={self._key})|(?P<empty>{self._closing}))")

    @cached_property
    def key_pattern(self) -> Any:
        return regex.compile(self._key)

    @cached_property
    def event_pattern(self) -> Any:
        """Return a pattern of marks that may end a text, or begin a call or pair in the text."""
        key, opening = (_NAMED_GROUP.sub("(?:", each) for each in (self._key, self._opening))
        value_end = _any(filter(None, (self.value_end, self.whole[1])))
        return regex.compile(
            f"(?P<closed>{value_end}{_GAP}{self._closing})"
            f"|{value_end}{_GAP}(?P<next>{key})"
            f"|(?P<abrupt>{value_end}(?={_GAP}{opening}{key}))"
            f"|(?P<stray>{value_end})"
            f"|(?P<open>{opening}(?={key}))"
            f"|(?P<empty>{opening}{self._closing})"
            f"|(?P<key>{key})"
            f"|(?P<unclosed>{self._closing})"
        )

    def __call__(self, text: str, at: int, schemas: Schemas, ending: Ending) -> Reading | None:
        head = self.head_pattern.match(text, at, partial=True)
        starts = tuple(start for start, _ in self.blocks)
        is_bare = bool(starts) and not text.startswith(starts, at)
        if head is None and not is_bare:
            return Bodies(read_json, self.blocks)(text, at, schemas, ending)  # GLM also writes JSON
        if head is None:
            raise ValueError("no call")
        if head.partial:
            return None
        name = _unquote(head["name"])
        is_word = bool(head["empty"]) and self.marks == self.blocks  # only a name between marks
        if (is_bare or is_word) and name not in schemas:
            raise ValueError("no function has that name")
        if head["empty"]:
            return Reading([{"name": name, "arguments": {}}], head.end())
        schema = schemas.get(name, {})
        scan = self._scan(text, head.end(), schema, schemas, ending)
        if scan is None:
            return None
        assert scan.end is not None
        end = min(scan.end, len(text))
        if ending is Ending.CUT and any(
            mark.startswith(text[end:].strip()) for _, mark in self.blocks
        ):
            end = len(text)  # the answer was cut in the end mark of the block
        try:
            arguments = self._arguments(scan.texts, schema)
        except ValueError:
            return Reading((), end)
        is_in_doubt = scan.is_lenient or ending is Ending.CUT
        if is_in_doubt and not _listed(schema, "required") <= arguments.keys():
            return None
        return Reading([{"name": name, "arguments": arguments}], end)

    def _scan(
        self, text: str, at: int, schema: Mapping[str, Any], schemas: Schemas, ending: Ending
    ) -> "_Scan | None":
        """Return a scan that found the call's end, or None while the end is uncertain."""
        declared = _listed(schema, "properties")
        scan = _Scan(self, text, at, declared, schemas)
        if scan.end is not None:
            rest = text[scan.end :].strip()
            follows = scan.is_settled or rest.startswith(tuple(start for start, _ in self.marks))
            marks = [mark for pair in self.marks for mark in pair]
            is_last = ending is Ending.CUT and any(mark.startswith(rest) for mark in marks)
            return scan if follows or is_last or ending is Ending.END else None
        if ending is Ending.MORE:
            return None
        if ending is Ending.CUT or scan.is_doubtful or (scan.depth and scan.holds_calls):
            return None
        if text.rstrip().endswith(self.value_end):  # only the call's end mark is missing
            text = text.rstrip() + self.call_end
        is_flat = not scan.holds_calls
        scan = _Scan(self, text, at, declared, schemas, is_lenient=True, is_flat=is_flat)
        is_last = scan.end is not None and not text[scan.end :].strip()
        return scan if is_last or scan.is_settled else None

    def _arguments(
        self, texts: Sequence[tuple[Any, str]], schema: Mapping[str, Any]
    ) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        allowed = Allowed(schema)
        for key, text in texts:
            kind = key.groupdict().get("kind")
            if self.write_value is as_cdata:
                text = _CDATA.sub(r"\1", text)
            if key["key"] is None:  # one JSON object has all arguments
                arguments |= json.loads(text, strict=False)
            elif kind in ("true", "string"):
                arguments[_unquote(key["key"])] = text
            else:
                name = _unquote(key["key"])
                arguments[name] = guess(text) if kind else allowed.argument(name, text)
        (name, value), *others = arguments.items()
        declared = _listed(schema, "properties")
        is_around = name in ("arguments", "parameters") and name not in declared and not others
        if is_around and isinstance(value, dict) and declared.issuperset(value):
            return value
        return arguments

    def write(self, calls: Sequence[Call]) -> str:
        start, end = self.blocks[0] if self.blocks else ("", "")
        gap = "\n" if self.call.endswith("\n") else ""
        texts = [
            write_call(call, self.call, self.pair, self.write_value, place=place)
            for place, call in enumerate(calls)
        ]
        if self.joins:
            texts = ["".join(texts)]
        return "\n".join(f"{start}{gap}{text}{end}" for text in texts)


class _Scan:
    """Scans a text for the end of a call whose first pair begins at `at`."""

    def __init__(
        self,
        form: Pairs,
        text: str,
        at: int,
        declared: Collection[str],
        schemas: Schemas,
        *,
        is_lenient: bool = False,
        is_flat: bool = False,
    ) -> None:
        self.texts: list[tuple[Any, str]] = []  # the match of each key, and the key's text
        self.end: int | None = None
        self.is_settled = False  # the end is certain because another call follows
        self.is_doubtful = False  # several marks might end the call or a text
        self.is_lenient = is_lenient  # marks may be missing
        self.depth = 0  # the number of open calls inside a text
        self.holds_calls = False  # a text contains calls of known functions
        self._is_flat = is_flat  # calls inside a text are ignored
        self._form, self._text = form, text
        self._declared, self._schemas = declared, schemas
        self._key = form.key_pattern.match(text, at)
        self._value_end = at
        self._inner = 0  # the number of open pairs inside a text
        self._following: set[str] = set()  # names of pairs right after an end mark
        events = form.event_pattern.finditer(text, self._key.end())
        if is_lenient:
            events = list(events)
            names = (event["next"] and form.key_pattern.match(event["next"]) for event in events)
            self._following = {name["key"] for name in names if name}
        for event in events:
            self._take(event, event.lastgroup)
            if self.is_settled:
                break
        if self.is_doubtful:
            self.end, self.is_settled = None, False
        if self.end is not None:
            self._add_text()

    def _take(self, event: Any, kind: str) -> None:
        if kind in ("open", "empty"):
            self.is_settled = self.end is not None
            if kind == "open" and not (self.is_settled or self._is_flat):
                self.depth += 1
                name = self._form.head_pattern.match(self._text, event.start())["name"]
                self.holds_calls = self.holds_calls or _unquote(name) in self._schemas
        elif self.depth:
            if kind == "closed":
                self.depth -= 1
        elif kind == "next" or (kind == "key" and self.is_lenient):
            self._begin(event, kind)
        elif kind == "key":
            self._inner += 1
        elif kind == "closed" and not self._inner:
            if self.end is None:
                self._value_end = event.start()
            elif self._text[self.end : event.start()].strip():
                self.is_doubtful = True
            self.end = event.end()  # models may write an end mark twice
        elif self.is_lenient and self.end is None and kind in ("unclosed", "abrupt"):
            self._value_end, self.end = event.span()
            self.is_settled = kind == "abrupt"
        elif kind != "unclosed":
            self._inner = max(0, self._inner - 1)

    def _begin(self, event: Any, kind: str) -> None:
        """Begin the next pair, unless its mark is part of the current text."""
        key = self._form.key_pattern.match(self._text, event.start(kind))
        is_closed = kind == "next"
        names = {self._key["key"], *(each["key"] for each, _ in self.texts)}
        is_declared = _unquote(key["key"] or "") in self._declared
        is_free = is_closed and not self._inner
        if not is_closed:
            names |= self._following
        elif not self._inner and (key["key"] in names or self.end is not None):
            self.is_doubtful = True
        if key["key"] in names or not (is_declared or is_free):
            if not self.is_lenient:
                self._inner = max(1, self._inner)
        elif is_closed or self.end is None:
            self._value_end = event.start()
            self._add_text()
            self._key, self.end, self._inner = key, None, 0

    def _add_text(self) -> None:
        text = self._text[self._key.end() : self._value_end]
        if self._form.wraps:
            text = text.removeprefix("\n").removesuffix("\n")
        elif not self._text.startswith(self._form.value_end, self._value_end):
            text = text.removesuffix("\n")
        self.texts.append((self._key, text))


def _pattern(form: str) -> str:
    """Return a pattern of the marks in a form, with extra or missing attributes."""
    pieces = regex.split(r'("?)\{(\w+)\}"?', form.strip())
    pattern = ""
    for before, quote, field in zip(pieces[::3], pieces[1::3], pieces[2::3], strict=False):
        words = [regex.escape(word).replace("=", r"\s*+=\s*+") for word in before.split()]
        if field not in _NAMES:
            pattern += rf"(?:\s++{words[-1]}{_QUOTE}(?P<kind>\w+){_QUOTE})?"
        elif quote:
            pattern += rf"{_ATTRIBUTES.join(words)}{_QUOTED.format(field)}(?=[\s<>])"
        else:
            pattern += _GAP.join(words) + _NAMES[field]
    others = "[^<>]*+" if '"' in pieces else ""
    return pattern + others + _GAP.join(map(regex.escape, pieces[-1].split()))


def _any(marks: Iterable[str]) -> str:
    return f"(?:{'|'.join(map(regex.escape, marks))})"


def _listed(schema: Mapping[str, Any], keyword: str) -> set[str]:
    names = schema.get(keyword)
    listed = names if isinstance(names, Mapping | list) else ()
    return {name for name in listed if isinstance(name, str)}


def _unquote(name: str) -> str:
    return unescape(name.strip().strip("\"'"))
