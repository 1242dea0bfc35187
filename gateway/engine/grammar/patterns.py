"""Tells which regular expressions and formats of strings llguidance can enforce."""

import re
import warnings
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
_ATOM: Final = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_LABEL: Final = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
# Dates and times of RFC 3339, without second 60, which parsers such as Python's refuse.
_DATES: Final = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
# Most validators require a dot in the domain of an email.
OWN_FORMATS: Final = {**_DATES, "email": rf"^{_ATOM}(?:\.{_ATOM})*@(?:{_LABEL}\.)+{_LABEL}$"}
# Formats that llguidance enforces.
FORMATS: Final = frozenset({"duration", "hostname", "ipv4", "ipv6", "uri", "uuid"})
ENDLESS_FORMATS: Final = frozenset({"duration", "hostname", "uri"})  # without a longest value
_WIDEST: Final = 10_000  # characters that a match may have before it counts as unbounded
_MOST_REPEATED: Final = 2_000  # nested repetitions that llguidance can match
# An unclosed class matches, too: otherwise the search would begin again at each bracket, and hold
# the GIL meanwhile.
_CLASS: Final = r"\[(?P<excludes>\^)?(?P<body>(?:\\.|[^\]\\])*)(?P<end>\])?"
_PARTS: Final = re.compile(rf"\\.|\.|{_CLASS}", re.DOTALL)
_SPACES: Final = r"\t-\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
# ECMA's meanings of these parts of a pattern, which differ from Rust's.
_ECMA: Final = {r"\s": f"[{_SPACES}]", r"\S": f"[^{_SPACES}]", ".": r"[^\n\r\u2028\u2029]"}
_QUOTE: Final = re.compile(r'["]|\\\\|\\x22|\\x5[cC]|\\u0022|\\u005[cC]')
# Contents of classes that Rust refuses, or reads differently from ECMA.
_ESCAPE: Final = r"\\(?:[^\x00-\x7f]|[0-9A-Za-z](?<![dDsSwWnrtfvxupP]))"
_FOREIGN: Final = re.compile(rf"(?:\\.|[^\\])*?(?:\[|&&|--|~~|{_ESCAPE})|\Z", re.DOTALL)
_FROM_NUL: Final = re.compile(r"\\(?:x00|u0000)-")  # llguidance allows quotes in such a class
_TOKENS: Final = re.compile(
    rf"\\[pPux]\{{[^}}]{{1,64}}\}}|\\.|{_CLASS}|\{{[0-9]+(?:,(?P<most>[0-9]*))?\}}|\(\?<?[=!]|.",
    re.DOTALL,
)
# Look-arounds, backreferences, anchors such as `\b`, unknown escapes, and braces without a count.
_NOT_REGULAR: Final = re.compile(rf"\(\?.*|{_ESCAPE}|\{{", re.DOTALL)


def is_holdable(pattern: str) -> bool:
    """Return True if llguidance can enforce a pattern in ECMA's dialect."""
    for match in _TOKENS.finditer(pattern):
        if _NOT_REGULAR.fullmatch(match[0]):
            return False
        body = match["body"]
        if body is None:
            continue
        if _FOREIGN.match(body) or (not match["excludes"] and _FROM_NUL.match(body)):
            return False
    return _repetitions(pattern) <= _MOST_REPEATED


def _repetitions(pattern: str) -> int:
    """Return the largest product of nested repetition counts, or 1 if no counts are nested."""
    levels, atom, largest = [1], 1, 1
    for match in _TOKENS.finditer(pattern):
        token = match[0]
        if token == "(":
            levels.append(1)
            continue
        if token == ")" and len(levels) > 1:
            atom = levels.pop()
        elif token[0] == "{" and len(token) > 1:
            count = max(map(int, re.findall("[0-9]{1,9}", token)))
            if atom > 1:
                largest = max(largest, atom * count)
            atom *= count
        else:
            atom = 1
        levels[-1] = max(levels[-1], atom)
    return largest


def as_ecma(pattern: str) -> str:
    """Translate a pattern from ECMA's dialect to Rust's, which llguidance reads."""

    def rewrite(match: re.Match[str]) -> str:
        part = match[0]
        text = _ECMA.get(part) or re.sub(r"\\.", lambda e: _ECMA.get(e[0], e[0]), part)
        # If a class that excludes quotes allowed NUL, llguidance 1.9.1 would allow quotes.
        if match["excludes"] and match["end"] and _QUOTE.search(match["body"]):
            return f"[^\\x00{text[2:]}"
        return text

    return _PARTS.sub(rewrite, pattern)


@lru_cache(maxsize=128)  # small, because a caller's pattern may be very long
def widths(pattern: str) -> tuple[int, int | None]:
    """Return the fewest and the most characters of a string in which a pattern is found.

    The most is None if it is unbounded or unknown.
    """
    parser: Any = vars(re)["_parser"]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parsed = parser.parse(pattern)
            narrowest, widest = parsed.getwidth()
    except (re.error, RecursionError, OverflowError):
        return 0, None
    has_ends = bool(parsed.data) and all(
        str(op) == "AT" and str(where) in ends
        for (op, where), ends in (
            (parsed.data[0], ("AT_BEGINNING", "AT_BEGINNING_STRING")),
            (parsed.data[-1], ("AT_END", "AT_END_STRING")),
        )
    )
    if has_ends and widest < _WIDEST:
        return int(narrowest), int(widest)
    return int(narrowest), None
