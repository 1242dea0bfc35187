"""The policy of speculative decoding: how many tokens a pass may read ahead, and where drafts come
from.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, Protocol

from gateway.engine.drafts.draft_model import MOST_AHEAD, DraftModel
from gateway.engine.drafts.head_drafter import HeadDrafter
from gateway.engine.drafts.prompt_lookup import DraftedSequence, LookupDrafter
from gateway.engine.kv.layers import can_go_back
from gateway.jobs.steps import DRAFTERS, Drafter

MOST_TOKENS: Final = 16  # the most tokens of a speculative pass, over all rows


class DraftSource(Protocol):
    """A source of drafts."""

    name: Drafter
    reads_images: bool  # False: sequences with images get no drafts

    @property
    def nbytes(self) -> int: ...

    def is_due(self, sequence_id: int, context: Sequence[int]) -> bool:
        """Return True if a sequence may get a draft now."""

    def draft(
        self, seqs: Mapping[int, DraftedSequence], rooms: Mapping[int, int]
    ) -> Mapping[int, Sequence[int]]:
        """Return drafts of at most `rooms` tokens; a sequence may get none.

        A sequence's context only grows between calls.
        """

    def note(self, sequence_id: int, context: Sequence[int], accepted: int) -> bool:
        """Note how many draft tokens were accepted; return False if another source drafted them."""

    def keep(self, ids: Collection[int]) -> None:
        """Drop the state of all other sequences."""

    def clear_prefixes(self) -> None: ...


def count_ahead(rows: int) -> int:
    return min(MOST_AHEAD, MOST_TOKENS // rows - 1)


class DraftPolicy:
    """The policy of one model. Batches of more than `rows` sequences don't use speculation."""

    def __init__(
        self,
        rows: int,
        model: DraftModel | HeadDrafter | None,
        on_fault: Callable[[Drafter, Exception], None],
    ) -> None:
        self._rows = rows
        self._on_fault = on_fault
        # Sources in the order in which they are asked: prompt lookup costs least.
        self.sources: list[DraftSource] = [LookupDrafter()]
        if model is not None:
            self.sources.append(model)
        self.allowed: Collection[Drafter] = DRAFTERS
        # The source of the running pass's drafts; None if there are no drafts or two sources.
        self.drafter: Drafter | None = None

    def count_ahead(self, seqs: Sequence[DraftedSequence], cache: Sequence[Any]) -> int:
        if not 0 < len(seqs) <= self._rows or any(seq.was_suspect for seq in seqs):
            return 0
        if not can_go_back(cache):
            return 0
        if any(seq.matcher is not None or self._is_due(seq) for seq in seqs):
            return count_ahead(len(seqs))
        return 0

    def draft(
        self, cache: Sequence[Any], seqs: Sequence[DraftedSequence], rooms: Sequence[int]
    ) -> list[Sequence[int]]:
        """Return a draft of at most `rooms[i]` tokens for each row i of a batch; it may be empty.

        `cache` is the batch's.
        """
        drafting = {seq.id: seq for seq in seqs if seq.room(1)}
        free = {seq.id: seq.room(room) for seq, room in zip(seqs, rooms, strict=True)}
        drafts: dict[int, Sequence[int]] = {}
        names: list[Drafter] = []
        for source in self._allowed():
            due = {
                number: seq
                for number, seq in drafting.items()
                if source.reads_images or not seq.has_images
            }
            is_due = any(source.is_due(seq.id, seq.context) for seq in due.values())
            if max(rooms) < 1 or not is_due:
                continue
            # Sequences that have a draft are passed too, so that the source sees their contexts.
            lengths = {number: 0 if number in drafts else free[number] for number in due}
            if isinstance(source, HeadDrafter):
                source.see(seqs, cache)
            try:
                new_drafts = source.draft(due, lengths)
            except Exception as error:
                # Answers don't depend on drafts, so a source that fails is dropped.
                self.sources.remove(source)
                source.clear_prefixes()
                self._on_fault(source.name, error)
                continue
            if any(new_drafts.values()):
                names.append(source.name)
            drafts |= {number: tokens for number, tokens in new_drafts.items() if tokens}
        self.drafter = names[0] if len(names) == 1 else None
        return [drafts.get(seq.id, ()) for seq in seqs]

    def note(self, seq: DraftedSequence, accepted: int) -> None:
        for source in self.sources:
            if source.note(seq.id, seq.context, accepted):
                return

    @property
    def nbytes(self) -> int:
        return sum(source.nbytes for source in self.sources)

    def clear_prefixes(self) -> None:
        for source in self.sources:
            source.clear_prefixes()

    def forget(self) -> None:
        self.keep([])
        self.clear_prefixes()

    def keep(self, seqs: Sequence[DraftedSequence]) -> None:
        ids = {seq.id for seq in seqs}
        for source in self.sources:
            source.keep(ids)

    def close(self) -> None:
        self.forget()
        self.sources.clear()

    def _is_due(self, seq: DraftedSequence) -> bool:
        return seq.room(1) > 0 and any(
            source.is_due(seq.id, seq.context)
            for source in self._allowed()
            if source.reads_images or not seq.has_images
        )

    def _allowed(self) -> list[DraftSource]:
        return [source for source in self.sources if source.name in self.allowed]
