"""Regular expressions of strings and of property names: how long they match, all but some words.

In the dialect that JSON Schema's `pattern` and llguidance have in common.
"""

import math
import re
import warnings
from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache
from typing import Any, Final

_YEAR: Final = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_FOURTH: Final = "(?:0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR: Final = f"(?:[0-9]{{2}}{_FOURTH}|{_FOURTH}00)"
_DATE: Final = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP_YEAR}-02-29)"
)
_TIME: Final = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?"
    r"(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
# Every RFC 3339 date of the years 1 to 9999, and no second 60: readers such as Python's know none.
DATES: Final = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
# llguidance's own, of which some may be of any length.
FORMATS: Final = frozenset({"duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"})
ENDLESS_FORMATS: Final = frozenset({"duration", "email", "hostname", "uri"})
_WIDEST: Final = 10_000
_MOST_LETTERS: Final = 4096
_LONGEST: Final = 64  # regex compilers nest no deeper than a few hundred groups
# A class that excludes, as far as it goes. What opens one always matches: a search that failed
# would begin again at each of a caller's brackets, and holds the GIL all that time.
_EXCLUDING: Final = re.compile(r"\\.|\[\^(?P<body>(?:\\.|[^\]\\])*)(?P<end>\])?", re.DOTALL)
_QUOTE: Final = re.compile(r'["]|\\\\|\\x22|\\x5[cC]|\\u0022|\\u005[cC]')
_CLASS: Final = r"\\.|\[(?:\\.|[^\]\\])*\]?"
_QUANTIFIER: Final = re.compile(rf"{_CLASS}|(?P<any>[*+])|\{{(?P<least>[0-9]+),\}}", re.DOTALL)
_COUNT: Final = re.compile(r"(?<=[{,])[0-9]{1,9}(?=\})")
_GROUPING: Final = re.compile(rf"{_CLASS}|[()|]", re.DOTALL)


def quotable(pattern: str) -> str:
    """Keep quotes and backslashes out of the classes that exclude them.

    llguidance 1.9.1 lets them through `[^"]` when it writes the class as JSON would, where the
    class has every control character; so each such class excludes NUL besides.
    """

    def without_nul(found: re.Match[str]) -> str:
        if found["end"] and _QUOTE.search(found["body"]):
            return f"[^\\x00{found['body']}]"
        return found[0]

    return _EXCLUDING.sub(without_nul, pattern)


@lru_cache(maxsize=128)  # a caller's patterns, each of which may be most of a schema
def widths(pattern: str) -> tuple[int, int | None]:
    """Return the fewest and the most characters of a string that a pattern is found in.

    None for no bound; (0, None) too for what Python's parser doesn't read.
    """
    parser: Any = re._parser
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parsed = parser.parse(pattern)
            least, most = parsed.getwidth()
    except (re.error, RecursionError, OverflowError):
        return 0, None
    has_ends = bool(parsed.data) and all(
        str(op) == "AT" and str(where) in ends
        for (op, where), ends in (
            (parsed.data[0], ("AT_BEGINNING", "AT_BEGINNING_STRING")),
            (parsed.data[-1], ("AT_END", "AT_END_STRING")),
        )
    )
    return int(least), int(most) if has_ends and most < _WIDEST else None


def within(pattern: str, chars: int) -> str:
    """Bound a pattern: each endless repetition gets a bound, and nothing comes before or after.

    What matches the result matches the pattern, and is of bounded length.
    """

    def end(found: re.Match[str]) -> str:
        if found["any"]:
            return f"{{{0 if found['any'] == '*' else 1},{chars}}}"
        if found["least"]:
            return f"{{{found['least']},{int(found['least']) + chars}}}"
        return found[0]

    drawn = _QUANTIFIER.sub(end, pattern)
    any_text = f"(?s:.{{0,{chars}}})"
    is_whole = not _has_bare_alternatives(pattern)
    before = "" if is_whole and pattern.startswith("^") else any_text
    after = "" if is_whole and re.search(r"(?<!\\)(?:\\\\)*\$\Z", pattern) else any_text
    body = drawn.removeprefix("^") if not before else drawn
    body = body.removesuffix("$") if not after else body
    return f"^{before}(?:{body}){after}$"


def repetitions(pattern: str) -> int:
    """Return the product of all counts in a pattern: no part of it is repeated more often."""
    return math.prod(max(1, int(count)) for count in _COUNT.findall(pattern))


def _has_bare_alternatives(pattern: str) -> bool:
    """Return True if there is a `|` outside of groups: its sides have anchors of their own."""
    depth = 0
    for found in _GROUPING.finditer(pattern):
        depth += {"(": 1, ")": -1}.get(found[0], 0)
        if found[0] == "|" and depth == 0:
            return True
    return False


def all_but(words: Collection[str], chars: int | None = None) -> str | None:
    """Return a pattern of every string but these, of at most `chars` characters beyond the longest.

    None if the words are too many or too long for that.
    """
    if sum(map(len, words)) > _MOST_LETTERS or any(len(word) > _LONGEST for word in words):
        return None
    tree: dict[str, Any] = {}
    for word in words:
        branch = tree
        for letter in word:
            branch = branch.setdefault(letter, {})
        branch[""] = {}
    return f"^{_other(tree, '*' if chars is None else f'{{0,{chars}}}')}$"


def _other(tree: dict[str, Any], more: str) -> str:
    """Return a pattern of what leaves the tree, or ends where no word does."""
    ways = list(_ways(tree, more))
    return f"(?:{'|'.join(ways)})"


def _ways(tree: dict[str, Any], more: str) -> Iterator[str]:
    letters = [letter for letter in tree if letter]
    if letters:
        yield f"(?s:[^{''.join(map(_in_class, letters))}].{more})"
    else:
        yield f"(?s:..{more})"
    if "" not in tree:
        yield ""
    for letter in letters:
        yield re.escape(letter) + _other(tree[letter], more)


def _in_class(letter: str) -> str:
    return f"\\{letter}" if letter in "\\]^-[&~" else letter


def one_of(words: Iterable[str]) -> str:
    """Return a pattern of exactly these strings."""
    return f"^(?:{'|'.join(map(re.escape, words))})$"
