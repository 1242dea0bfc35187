"""The nearest valid name, for messages about an unknown one."""

import difflib
from collections.abc import Iterable

MAX_CHARS = 256  # of a name to compare: difflib's time grows with their square


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """Return the valid name most similar to a name; None if none is similar."""
    if len(name) > MAX_CHARS:
        return None
    by_folded = {name.casefold(): name for name in valid}
    matches = difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=0.6)
    return by_folded[matches[0]] if matches else None


def did_you_mean(name: str | None) -> str:
    """Return a hint that ends a sentence; empty if there is no name to suggest."""
    return f"; did you mean {name!r}?" if name else ""
