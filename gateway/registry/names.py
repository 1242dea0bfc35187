"""The nearest valid name, for a message about a wrong one."""

import difflib
from collections.abc import Iterable

MOST = 256  # characters: difflib takes their square, so a longer name is not compared


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """Return the valid name most similar to this one; None if none is similar."""
    if len(name) > MOST:
        return None
    by_folded = {each.casefold(): each for each in valid}
    found = difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=0.6)
    return by_folded[found[0]] if found else None


def did_you_mean(name: str | None) -> str:
    """Return a hint that ends a sentence; nothing where there is no name to suggest."""
    return f"; did you mean {name!r}?" if name else ""
