"""Drafts by a smaller model of the same vocabulary (speculative decoding, Leviathan et al., 2023,
arxiv.org/abs/2211.17192).

Its KV follows the sequences' contexts in a batch of its own. One that joins is read in chunks,
and has drafts once all of it is read; what was not chosen of a draft is taken off when the next one
is asked for.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import sub
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from gateway.engine.device import launch
from gateway.engine.drafts.prompt_lookup import DraftRow, Patience, count_accepted
from gateway.engine.kv.cache import SPARE, RaggedKVCache, cache_nbytes, compact, filter_layers
from gateway.engine.kv.layers import batch_of_one, hold_layers, make_batch_caches, padded
from gateway.engine.kv.prefix_cache import PrefixCache, PrefixPool, Root
from gateway.engine.models.checkpoint import measure_kv
from gateway.engine.models.decoders import parameters
from gateway.jobs import DraftCost, Drafter, KvCost

MOST_AHEAD: Final = 7  # tokens a row: a turn's steps stay within the memory held for it
CHUNK: Final = 512  # tokens, padding included, that catch up in one step
FEED: Final = MOST_AHEAD + 1  # tokens of a sequence that a draft's first pass reads
_FIRST_LENGTH: Final = 4


@dataclass(slots=True)
class _Follower:
    """The KV of one sequence: so many tokens of its context, then some of its last draft."""

    id: int
    root: Root  # of what is kept of its prompt
    read: int = 0
    ahead: Sequence[int] = ()
    drafted: int = 0  # tokens of the draft that is being verified
    # Of its next draft. It grows by two after one that was chosen whole, and shrinks by one after
    # another, as in transformers (the "heuristic" schedule of assisted generation).
    length: int = _FIRST_LENGTH
    patience: Patience = field(default_factory=Patience)


class DraftModel:
    """A model, and its KV of the sequences that it drafts for."""

    name: Drafter = "draft_model"

    def __init__(
        self,
        model: Any,
        *,
        vocab_size: int,  # other tokens are read as its last one, and never drafted
        max_context: int,  # no drafts for contexts that come near it
        prefixes: PrefixPool,  # shared with its target
    ) -> None:
        self._model = model
        self._vocab_size = vocab_size
        # MLX reads positions beyond an array's end without a word.
        self._longest = max_context - FEED
        self._prefixes = PrefixCache(make_prompt_cache(model), prefixes)
        self._rows: list[_Follower] = []
        self._cache: list[Any] = []
        # What of it cannot take tokens off, as it was before the drafts under way, by place.
        self._held: dict[int, Any] = {}

    def with_kv(self, cost: KvCost, rows: int) -> KvCost:
        """Return what a sequence's KV costs with this model's added, for up to `rows` of them."""
        own, rows = measure_kv(self._model), rows + rows // SPARE
        held = 2 * (own.constant + sum(token * most for token, most in own.windows))
        return replace(cost, draft=DraftCost(own.token, cost.draft.states + held, rows))

    @property
    def nbytes(self) -> int:
        """Count the bytes on the device: weights, KV and prefixes."""
        weights = sum(array.nbytes for array in parameters(self._model))
        kv = cache_nbytes([*self._cache, *self._held.values()])
        return weights + kv + self._prefixes.nbytes

    def clear_prefixes(self) -> None:
        self._prefixes.clear()

    def is_due(self, sequence_id: int, context: Sequence[int]) -> bool:
        """Return True if a sequence is not too long, and has waited long enough."""
        if len(context) > self._longest:
            return False
        row = self._find(sequence_id)
        return row is None or row.patience.is_over(len(context))

    def keep(self, ids: Collection[int]) -> None:
        """Drop the KV of all other sequences."""
        staying = [i for i, row in enumerate(self._rows) if row.id in ids]
        if not staying:
            self._rows, self._cache, self._held = [], [], {}
        elif len(staying) < len(self._rows):
            staying = compact(staying)
            self._rows = [self._rows[i] for i in staying]
            filter_layers(self._cache, staying)
            filter_layers(list(self._held.values()), staying)
            launch([layer.state for layer in self._cache])

    def draft(
        self, rows: Mapping[int, DraftRow], rooms: Mapping[int, int]
    ) -> dict[int, Sequence[int]]:
        """Return drafts of up to so many tokens; none of those whose prompt is still being read."""
        contexts = {
            number: row.context for number, row in rows.items() if len(row.context) <= self._longest
        }
        self.keep(contexts)
        self._take_back(contexts)
        for number in contexts:
            if self._find(number) is None:
                self._join(rows[number])
        due = {
            row.id
            for row in self._rows
            if rooms.get(row.id, 0) > 0 and row.patience.is_over(len(contexts[row.id]))
        }
        if not due:
            return {}
        self._catch_up(contexts)
        # Those with more to read than a draft's first pass takes have none this time.
        ready = [row for row in self._rows if len(contexts[row.id]) - row.read <= FEED]
        lengths = {row.id: min(row.length, rooms[row.id]) for row in ready if row.id in due}
        if not lengths:
            return {}
        drafts = self._generate(contexts, max(lengths.values()))
        for row in self._rows:
            row.drafted = lengths.get(row.id, 0)
        return {number: drafts[number][:length] for number, length in lengths.items()}

    def note(self, sequence_id: int, context: Sequence[int], accepted: int) -> bool:
        row = self._find(sequence_id)
        if row is None or not row.drafted:
            return False
        if accepted >= row.drafted:
            row.length = min(MOST_AHEAD, row.length + 2)
        else:
            row.length = max(1, row.length - 1)
        row.patience.note(len(context), accepted)
        row.drafted = 0
        return True

    def _find(self, sequence_id: int) -> _Follower | None:
        return next((row for row in self._rows if row.id == sequence_id), None)

    def _join(self, joining_row: DraftRow) -> None:
        """Follow a sequence, from what is kept of its prompt on."""
        _, salt = joining_row.root
        root = 0, salt  # no adapter is this model's
        known, kept = self._prefixes.take(joining_row.context[:-1], root)
        layers = batch_of_one(kept or make_batch_caches(self._model))
        if self._rows:
            for layer, joining in zip(self._cache, layers, strict=True):
                layer.extend(joining)
        else:
            self._cache = layers
        self._rows.append(_Follower(joining_row.id, root, known))

    def _take_back(self, contexts: Mapping[int, Sequence[int]]) -> None:
        """Take off the tokens of drafts that were not chosen. Each context keeps one to read."""
        rests = [contexts[row.id][row.read :] for row in self._rows]
        chosen = [
            min(count_accepted(row.ahead, rest), len(rest) - 1)
            for row, rest in zip(self._rows, rests, strict=True)
        ]
        drafted = [len(row.ahead) for row in self._rows]
        if self._held and chosen != drafted:
            chosen = [0] * len(chosen)  # it is read again
            for place, layer in self._held.items():
                self._cache[place] = layer
        back = tuple(map(sub, drafted, chosen))
        for layer in self._cache:
            if isinstance(layer, RaggedKVCache) and any(back):
                layer.rewind(back)
        for row, count in zip(self._rows, chosen, strict=True):
            row.read, row.ahead = row.read + count, ()
        self._held = {}

    def _catch_up(self, contexts: Mapping[int, Sequence[int]]) -> None:
        """Read what a draft's first pass would be too wide for, or a part of it."""
        behind = max(len(contexts[row.id]) - row.read for row in self._rows)
        if behind <= FEED:
            return
        width = min(behind - 1, CHUNK // len(self._rows))
        feeds = [contexts[row.id][row.read : -1][:width] for row in self._rows]
        self._read(self._cache, feeds)
        launch([layer.state for layer in self._cache])
        for i, (row, feed) in enumerate(zip(self._rows, feeds, strict=True)):
            row.read += len(feed)
            self._prefixes.store(contexts[row.id][: row.read], self._cache, i, root=row.root)

    def _generate(
        self, contexts: Mapping[int, Sequence[int]], length: int
    ) -> dict[int, Sequence[int]]:
        """Continue every context by so many tokens, each the likeliest."""
        feeds = [contexts[row.id][row.read :][:FEED] for row in self._rows]
        logits = self._read(self._cache, feeds)
        self._held = hold_layers(self._cache)
        ends = mx.array([len(feed) - 1 for feed in feeds])
        tokens = [self._likeliest(logits[mx.arange(len(feeds)), ends])]
        while len(tokens) < length:
            logits = self._model(tokens[-1][:, None], cache=self._cache)
            tokens.append(self._likeliest(logits[:, -1]))
        drafts: Any = mx.stack(tokens, axis=1)
        mx.eval(drafts, [layer.state for layer in self._cache])
        for row, feed, draft in zip(self._rows, feeds, drafts.tolist(), strict=True):
            row.read, row.ahead = row.read + len(feed), draft[:-1]
        return dict(zip((row.id for row in self._rows), drafts.tolist(), strict=True))

    def _read(self, cache: list[Any], feeds: Sequence[Sequence[int]]) -> mx.array:
        """Append tokens to each row; return the logits, (rows, longest, vocabulary). Nothing is
        evaluated.
        """
        width = max(map(len, feeds))
        last = self._vocab_size - 1
        inputs = [
            [*(min(token, last) for token in feed), *[0] * (width - len(feed))] for feed in feeds
        ]
        with padded(cache, width, [width - len(feed) for feed in feeds]):
            logits: mx.array = self._model(mx.array(inputs), cache=cache)
        return logits

    def _likeliest(self, logits: mx.array) -> mx.array:
        return mx.argmax(logits[:, : self._vocab_size], axis=-1)
