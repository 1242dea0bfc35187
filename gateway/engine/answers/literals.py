"""The ends and the values of JSON and Python that stand in a text, some of it badly written.

An end is found before anything is read: brackets are counted, except those in strings.
"""

import ast
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

from gateway.engine.answers.call_reading import Unfinished

# Errors of whatever reads a text that is no value.
UNREADABLE = (ValueError, TypeError, LookupError, SyntaxError, MemoryError, RecursionError)
SPACE = re.compile(r"\s*+")
# A quote that ends a string stands before something that can follow a value.
_ENDS_VALUE = r"(?=\s*+(?:[,)\]}:]|\Z))"
_ESCAPES = re.compile(
    r"\\(?:[\\'\"abfnrtv\n]|[0-3]?[0-7]{1,2}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8})|[\\'\"\n\r]"
)
_ESCAPED = {"\n": r"\n", "\r": r"\r", "\\": r"\\", "'": r"\'", '"': r"\""}
_LITERALS = {"true": "True", "false": "False", "null": "None"}


def _string(quote: str, end: str) -> str:
    """Return a pattern of strings whose end is a quote with `end` behind it, linear in time."""
    return rf"{quote}[^\\{quote}]*+(?:(?:\\.|{quote}(?!{end}))[^\\{quote}]*+)*+{quote}"


def _strings(end: str) -> str:
    triples = (quote * 2 + _string(quote, quote * 2) + quote * 2 for quote in "\"'")
    return "|".join((*triples, *(_string(quote, end) for quote in "\"'")))


_STRICT, _LENIENT = _strings(""), _strings(_ENDS_VALUE)
_WORDS = r"(?P<word>[\w.$-]++)(?P<is_name>(?=\s*+(?:\(|=(?!=))))?"
_TOKENS = [
    re.compile(rf"(?P<prefix>[bBfFrRuU]{{0,2}})(?P<string>{strings})|{_WORDS}|[\"'].*", re.DOTALL)
    for strings in (_STRICT, _LENIENT)
]


def skip(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Return the place in a text behind what a pattern matches there, which may be nothing."""
    match = pattern.match(text, at)
    return at if match is None else match.end()


@lru_cache
def _brackets(closers: tuple[str, ...], *, is_lenient: bool) -> re.Pattern[str]:
    mark = "|".join(map(re.escape, filter(None, closers))) or r"(?!)"
    strings = _LENIENT if is_lenient else _STRICT
    return re.compile(
        rf"(?P<mark>{mark})|{strings}|(?P<loose>[\"'])|(?P<open>[\[({{]+)|(?P<close>[\])}}]+)",
        re.DOTALL,
    )


def find_end(
    text: str, at: int, closers: Sequence[str], *, is_lenient: bool = False
) -> tuple[int, int]:
    """Return where the bracket at a place is closed, or where one of the marks stands that may
    close the whole, and how many brackets are open there. Raises Unfinished.

    `is_lenient`: a string may hold its own quotes, if nothing behind them could follow a value.
    """
    depth = 0
    for token in _brackets(tuple(closers), is_lenient=is_lenient).finditer(text, at):
        if token["mark"]:
            return token.start(), depth
        if token["loose"]:
            break
        depth += len(token["open"] or "") - len(token["close"] or "")
        if token["close"] and depth <= 0:
            return token.end() + depth, 0
    raise Unfinished("no end")


def parse_python(source: str) -> tuple[ast.expr, Mapping[str | None, str]]:
    """Return an expression's tree, and the names of functions and arguments by the words that stand
    for them: `_0` is the first. Raises SyntaxError.

    Line breaks in strings, unknown escapes, names with dashes and JSON's literals are mended. Only
    what is no Python otherwise may have quotes inside its strings.
    """
    try:
        return _parse(source, _TOKENS[0])
    except SyntaxError:
        return _parse(source, _TOKENS[1])


def _parse(source: str, tokens: re.Pattern[str]) -> tuple[ast.expr, Mapping[str | None, str]]:
    names: dict[str | None, str] = {}

    def escape(match: re.Match[str]) -> str:
        return _ESCAPED.get(match[0], match[0])

    def spell(token: re.Match[str]) -> str:
        string, word = token["string"], token["word"]
        if string is not None:
            if token["prefix"] or string.startswith(('"""', "'''")):
                return token[0]
            return string[0] + _ESCAPES.sub(escape, string[1:-1]) + string[0]
        if word is None or token["is_name"] is None:  # a string without an end, or a value
            return _LITERALS.get(word, token[0])
        names[f"_{len(names)}"] = word
        return f"_{len(names) - 1}"

    return ast.parse(tokens.sub(spell, source), mode="eval").body, names


def read_literal(source: str, *, is_lenient: bool = False) -> object:
    """Return the value of a Python literal, mended. Raises one of UNREADABLE.

    `is_lenient`: a string may hold its own quotes.
    """
    return ast.literal_eval(_parse(source, _TOKENS[is_lenient])[0])
