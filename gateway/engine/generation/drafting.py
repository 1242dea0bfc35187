"""Which sequences read tokens ahead of their choice, and whose drafts: prompt lookup's, as they are
free, or else a draft model's.
"""

from collections import abc
from collections.abc import Callable

from gateway.engine.generation.decode_batch import DecodeBatch
from gateway.engine.generation.draft_model import DraftModel
from gateway.engine.generation.sequence import Sequence
from gateway.engine.generation.speculation import count_ahead
from gateway.engine.kv.cache import RaggedKVCache


class Drafting:
    """Drafts for batches of up to `rows` sequences. A draft model that fails is dropped, and its
    error goes to `on_fault`.
    """

    def __init__(
        self, rows: int, model: DraftModel | None, on_fault: Callable[[Exception], None]
    ) -> None:
        self._rows = rows
        self._on_fault = on_fault
        self.model = model

    def most(self, running: DecodeBatch) -> int:
        """Return how many tokens a sequence may read ahead in the next pass; 0 if none does."""
        if not 0 < len(running.rows) <= self._rows:
            return 0
        if not all(isinstance(layer, RaggedKVCache) for layer in running.cache):
            return 0
        if any(row.was_suspect for row in running.rows):
            return 0
        is_ahead = any(
            row.matcher is not None or row.draft(1) or self._is_due(row) for row in running.rows
        )
        return count_ahead(len(running.rows)) if is_ahead else 0

    def draft(
        self, rows: abc.Sequence[Sequence], rooms: abc.Sequence[int]
    ) -> list[abc.Sequence[int]]:
        """Return a draft for each sequence, of up to so many tokens."""
        drafts = [row.draft(room) for row, room in zip(rows, rooms, strict=True)]
        if self.model is None or max(rooms) < 1 or not any(map(self._is_due, rows)):
            return drafts
        open_rooms = {
            row.id: 0 if draft else row.room(room)
            for row, room, draft in zip(rows, rooms, drafts, strict=True)
            if row.room(1)
        }
        contexts = {row.id: row.context for row in rows if row.id in open_rooms}
        try:
            theirs = self.model.draft(contexts, open_rooms)
        except Exception as error:
            self.model = None
            self._on_fault(error)
            return drafts
        return [draft or theirs.get(row.id, ()) for row, draft in zip(rows, drafts, strict=True)]

    def note(self, row: Sequence, accepted: int) -> None:
        """Note how much of a sequence's draft was chosen, once that is appended."""
        if self.model is None or not self.model.note(row.id, len(row.context), accepted):
            row.note_draft(accepted)

    @property
    def nbytes(self) -> int:
        """Count the bytes of the draft model: weights, KV and prefixes."""
        return 0 if self.model is None else self.model.nbytes

    @property
    def prefix_bytes(self) -> int:
        return 0 if self.model is None else self.model.prefix_bytes

    def clear_prefixes(self) -> None:
        if self.model is not None:
            self.model.clear_prefixes()

    def forget(self) -> None:
        """Drop all of the draft model's KV."""
        self.keep([])
        self.clear_prefixes()

    def keep(self, rows: abc.Sequence[Sequence]) -> None:
        """Drop the draft model's KV of all other sequences."""
        if self.model is not None:
            self.model.keep({row.id for row in rows})

    def _is_due(self, row: Sequence) -> bool:
        if self.model is None or not row.room(1):
            return False
        return self.model.is_due(row.id, len(row.context))
