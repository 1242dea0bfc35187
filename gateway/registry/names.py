"""The nearest valid name, for a message about a wrong one."""

import difflib
from collections.abc import Iterable

MOST = 256  # characters of a name that is worth comparing: difflib takes the square of them


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """Find the valid name most like this one, if any is alike at all."""
    if len(name) > MOST:
        return None
    by_folded = {each.casefold(): each for each in valid}
    found = difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=0.6)
    return by_folded[found[0]] if found else None


def did_you_mean(name: str | None) -> str:
    """Word a hint as the tail of a sentence; nothing when there is none."""
    return f"; did you mean {name!r}?" if name else ""
