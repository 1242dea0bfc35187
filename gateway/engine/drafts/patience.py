"""How long a sequence waits after a draft of which nothing was chosen, and how much was chosen."""

from collections.abc import Sequence
from typing import Final

_LONGEST_WAIT: Final = 64


def count_accepted(draft: Sequence[int], chosen: Sequence[int]) -> int:
    """Count the draft's tokens that were chosen; `chosen` has one more, for the place after it."""
    pairs = zip(draft, chosen, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), len(draft))


class Patience:
    """Waits longer after each draft of which nothing was chosen. Lengths are those of contexts."""

    def __init__(self) -> None:
        self._wait = 0
        self._resumes_at = 0

    def is_over(self, length: int) -> bool:
        """Return True if it is time for a draft."""
        return length >= self._resumes_at

    def note(self, length: int, accepted: int) -> None:
        """Note how much of a draft was chosen, once the context has what was."""
        self._wait = 0 if accepted else min(_LONGEST_WAIT, 2 * self._wait + 1)
        self._resumes_at = length + self._wait
