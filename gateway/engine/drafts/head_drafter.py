"""Drafts from the model's own head for the token after the next one (multi-token prediction,
Gloeckle et al., 2024, arxiv.org/abs/2404.19737).

The head's KV is a layer of the batch, so it is read, kept and undone with the model's. A draft is
added to it only while the next tokens are guessed.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import mlx.core as mx

from gateway.engine.drafts.prompt_lookup import DraftedSequence, Patience
from gateway.engine.kv.layers import StatesCache, padded, row_lengths
from gateway.jobs.steps import Drafter

MOST_GUESSED: Final = 4  # the most tokens per draft
_FIRST_LENGTH: Final = 2


@dataclass(slots=True)
class _Guesses:
    """The guesses for one sequence."""

    length: int = _FIRST_LENGTH  # the next draft's
    drafted: int = 0  # tokens of the draft that is being verified
    patience: Patience = field(default_factory=Patience)


class HeadDrafter:
    """The draft source that uses a model's head."""

    name: Drafter = "mtp_head"
    reads_images = True
    nbytes = 0  # the model and the batch have its weights and its KV
    _after_nan = ", and prompts with such KV are not kept: set `mtp_head: false`"

    def __init__(self, model: Any, *, vocab_size: int) -> None:
        self._model, self._vocab_size = model, vocab_size
        self._guesses: dict[int, _Guesses] = {}
        self._seqs: Sequence[DraftedSequence] = ()
        self._cache: Sequence[Any] = ()

    def see(self, seqs: Sequence[DraftedSequence], cache: Sequence[Any]) -> None:
        """Set the rows of the batch that the next draft is for."""
        self._seqs, self._cache = seqs, cache

    def is_due(self, sequence_id: int, context: Sequence[int]) -> bool:
        return self._find(sequence_id).patience.is_over(len(context))

    def draft(
        self, seqs: Mapping[int, DraftedSequence], rooms: Mapping[int, int]
    ) -> dict[int, Sequence[int]]:
        states, counts = self._states, row_lengths(self._cache)
        known = states.known if states.recent is not None else (0,) * len(self._seqs)
        feeds: list[list[int]] = []
        lengths: dict[int, int] = {}
        for seq, read, count in zip(self._seqs, counts, known, strict=True):
            feed, room = seq.context[read:], rooms.get(seq.id, 0)
            # Forced tokens have no hidden states yet, so their sequence gets no draft this time.
            if len(feed) <= count + 1 and room > 0 and self.is_due(seq.id, seq.context):
                lengths[seq.id] = min(room, self._find(seq.id).length)
            feeds.append(feed if seq.id in lengths else feed[:1])
        for number in seqs:
            self._find(number).drafted = lengths.get(number, 0)
        if not lengths:
            return {}
        drafts = self._guess(feeds, max(lengths.values()))
        return {
            seq.id: draft[: lengths[seq.id]]
            for seq, draft in zip(self._seqs, drafts, strict=True)
            if seq.id in lengths
        }

    @property
    def _states(self) -> Any:
        """The hidden state of each row's last token."""
        return next(each for each in reversed(self._cache) if isinstance(each, StatesCache))

    def _guess(self, feeds: Sequence[list[int]], length: int) -> list[list[int]]:
        """Return a draft of `length` tokens after each row's `feed`, which the KV lacks."""
        states, kv = self._states, self._cache[-1]
        width, before = max(map(len, feeds)), kv.lengths
        padding = [width - len(feed) for feed in feeds]
        tokens = mx.array(
            [[*feed, *[0] * count] for feed, count in zip(feeds, padding, strict=True)]
        )
        hidden = states[0]
        if width > 1:
            hidden = mx.concatenate([hidden, states.recent[:, : width - 1]], axis=1)
        try:
            with padded([kv], width, padding):
                hidden = self._model.guess(hidden, tokens, kv)
            ends = mx.array([len(feed) - 1 for feed in feeds])
            hidden = hidden[mx.arange(len(feeds)), ends][:, None]
            guessed = [self._likeliest(hidden)]
            while len(guessed) < length:
                hidden = self._model.guess(hidden, guessed[-1], kv)
                guessed.append(self._likeliest(hidden))
            return self._evaluate(guessed, hidden)
        except Exception:
            # The next pass would compute what has just failed.
            kv.planes = [mx.zeros(plane.shape, plane.dtype) for plane in kv.planes]
            raise
        finally:
            kv.lengths = before

    def _evaluate(self, guessed: list[mx.array], hidden: mx.array) -> list[list[int]]:
        """Return the guessed tokens, each (rows, 1), by rows. Raises ValueError if the last hidden
        states are not finite.
        """
        drafts: Any = mx.concatenate(guessed, axis=1)
        is_finite = mx.isfinite(hidden).all()
        mx.eval(drafts, is_finite)
        if not is_finite.item():
            raise ValueError(f"its guesses are not finite numbers{self._after_nan}")
        return drafts.tolist()  # type: ignore[no-any-return]

    def _likeliest(self, hidden: mx.array) -> mx.array:
        logits: mx.array = self._model.score(hidden)
        return mx.argmax(logits[..., : self._vocab_size], axis=-1)

    def note(self, sequence_id: int, context: Sequence[int], accepted: int) -> bool:
        guesses = self._find(sequence_id)
        if not guesses.drafted:
            return False
        change = 1 if accepted >= guesses.drafted else -1
        guesses.length = min(MOST_GUESSED, max(1, guesses.length + change))
        guesses.patience.note(len(context), accepted)
        guesses.drafted = 0
        return True

    def keep(self, ids: Collection[int]) -> None:
        self._seqs = self._cache = ()
        self._guesses = {number: each for number, each in self._guesses.items() if number in ids}

    def clear_prefixes(self) -> None:
        """Do nothing: the head's KV is kept with the model's."""

    def _find(self, sequence_id: int) -> _Guesses:
        return self._guesses.setdefault(sequence_id, _Guesses())
