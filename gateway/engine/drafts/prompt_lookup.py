"""Drafts copied from a sequence's context (prompt lookup decoding, Saxena, 2023,
github.com/apoorvumang/prompt-lookup-decoding).

If the context's last tokens occur earlier, the tokens that followed them there are the draft.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile
from typing import Final, Protocol

from gateway.engine.kv.prefix_cache import Root
from gateway.jobs.images import FIRST_IMAGE_ID
from gateway.jobs.steps import Drafter

_GRAMS: Final = (3, 2)  # lengths of the n-grams that are searched for, in this order
_INDEXED_AT_ONCE: Final = 4096  # the most tokens indexed per call, which takes 4 ms
_LONGEST_WAIT: Final = 64  # the most tokens to wait after a rejected draft


def count_accepted(draft: Sequence[int], chosen: Sequence[int]) -> int:
    """Count the draft's first tokens that equal those in `chosen`."""
    pairs = zip(draft, chosen, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), len(draft))


class DraftedSequence(Protocol):
    """The parts of a sequence that drafting needs."""

    id: int
    context: list[int]
    was_suspect: bool

    @property
    def has_images(self) -> bool: ...

    @property
    def root(self) -> Root: ...

    @property
    def matcher(self) -> object | None: ...

    def room(self, limit: int) -> int: ...


class Patience:
    """The wait for a sequence's next draft; it grows with each draft that is rejected whole."""

    def __init__(self) -> None:
        self._wait = 0
        self._resumes_at = 0

    def is_over(self, length: int) -> bool:
        return length >= self._resumes_at

    def note(self, length: int, accepted: int) -> None:
        """Note the number of accepted draft tokens. `length` counts the context's tokens, the
        accepted ones included.
        """
        if accepted:
            self._wait = 0
        else:
            self._wait = min(_LONGEST_WAIT, 2 * self._wait + 1)
        self._resumes_at = length + self._wait


class PromptLookup:
    """Prompt lookup for one sequence."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}  # n-gram → end of its latest occurrence
        self._indexed = 0
        self._patience = Patience()

    def draft(self, context: Sequence[int], limit: int) -> Sequence[int]:
        """Return up to `limit` tokens that may follow a context, which only grows between calls."""
        if limit < 1 or not self._patience.is_over(len(context)):
            return ()
        # The last n-grams are not indexed yet, so that the search finds only earlier ones.
        until = max(self._indexed, min(len(context) - 1, self._indexed + _INDEXED_AT_ONCE))
        for end in range(self._indexed + 1, until + 1):
            for size in _GRAMS:
                self._after[tuple(context[max(0, end - size) : end])] = end
        self._indexed = until
        for size in _GRAMS:
            place = self._after.get(tuple(context[-size:]))
            if place is not None:
                found = context[place : place + limit]
                return list(takewhile(lambda token: token < FIRST_IMAGE_ID, found))
        return ()

    def note(self, context: Sequence[int], accepted: int) -> None:
        self._patience.note(len(context), accepted)


class LookupDrafter:
    """The draft source that uses prompt lookup."""

    name: Drafter = "prompt_lookup"
    reads_images = True  # it only compares ids, and images have ids too
    nbytes = 0

    def __init__(self) -> None:
        self._lookups: dict[int, PromptLookup] = {}
        # Sequences whose last draft came from prompt lookup.
        self._drafted: set[int] = set()

    def is_due(self, sequence_id: int, context: Sequence[int]) -> bool:
        return bool(self._find(sequence_id).draft(context, 1))

    def draft(
        self, seqs: Mapping[int, DraftedSequence], rooms: Mapping[int, int]
    ) -> dict[int, Sequence[int]]:
        drafts = {
            number: self._find(number).draft(seq.context, rooms[number])
            for number, seq in seqs.items()
        }
        self._drafted = {number for number, tokens in drafts.items() if tokens}
        return drafts

    def note(self, sequence_id: int, context: Sequence[int], accepted: int) -> bool:
        if sequence_id not in self._drafted:
            return False
        self._find(sequence_id).note(context, accepted)
        return True

    def keep(self, ids: Collection[int]) -> None:
        if any(number not in ids for number in self._lookups):
            lookups = self._lookups.items()
            self._lookups = {number: lookup for number, lookup in lookups if number in ids}

    def clear_prefixes(self) -> None:
        """Do nothing: this source has no KV."""

    def _find(self, sequence_id: int) -> PromptLookup:
        return self._lookups.setdefault(sequence_id, PromptLookup())
