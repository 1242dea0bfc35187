"""Tokens that are read ahead of their choice, several in one pass.

Some are certain: a grammar may allow only one continuation. Others are drafts: what followed the
same tokens earlier in the prompt or the answer (prompt lookup decoding, Saxena, 2023,
github.com/apoorvumang/prompt-lookup-decoding), or else what a smaller model says. The pass that
reads a draft also gives the logits after each of its tokens, and they are chosen from those as they
would be one by one. As much of a draft counts as was chosen; so a draft costs time, and never
changes an answer.
"""

from collections.abc import Sequence
from typing import Final

MOST_AHEAD: Final = 7  # tokens a row: a turn's steps stay within the memory held for it
# In a pass of all rows. On a CPU a pass of 8 tokens takes 1.5 times as long as one of 1 token.
MOST_TOKENS: Final = 16
_GRAMS: Final = (3, 2)  # how many tokens must have stood together before; the longer ones first
_LONGEST_WAIT: Final = 64
_INDEXED_AT_ONCE: Final = 4096  # tokens, in 3 to 4 ms: a step of others waits for it


def count_ahead(rows: int) -> int:
    """Return how many tokens each of so many rows may read ahead in one pass."""
    return min(MOST_AHEAD, MOST_TOKENS // rows - 1)


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


class PromptLookup:
    """Drafts for one sequence, out of its own context."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}  # tokens → the place after them, at the latest
        self._indexed = 0
        self._patience = Patience()

    def draft(self, context: Sequence[int], most: int) -> Sequence[int]:
        """Return up to `most` tokens that may follow a context, which only grows between calls."""
        if most < 1 or not self._patience.is_over(len(context)):
            return ()
        # What ends the context is not indexed yet: it would be found itself.
        until = max(self._indexed, min(len(context) - 1, self._indexed + _INDEXED_AT_ONCE))
        for end in range(self._indexed + 1, until + 1):
            for size in _GRAMS:
                self._after[tuple(context[max(0, end - size) : end])] = end
        self._indexed = until
        for size in _GRAMS:
            if (place := self._after.get(tuple(context[-size:]))) is not None:
                return context[place : place + most]
        return ()

    def note(self, context: Sequence[int], accepted: int) -> None:
        """Note how much of a draft was chosen, once the context has what was."""
        self._patience.note(len(context), accepted)
