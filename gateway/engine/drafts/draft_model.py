"""Drafts from a smaller model with the same vocabulary (speculative decoding, Leviathan et al.,
2023, arxiv.org/abs/2211.17192).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import sub
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from gateway.engine.device import launch
from gateway.engine.drafts.prompt_lookup import DraftedSequence, Patience, count_accepted
from gateway.engine.kv.cache import SPARE, RaggedKVCache, cache_nbytes, compact, filter_layers
from gateway.engine.kv.layers import batch_of_one, hold_layers, make_batch_caches, padded
from gateway.engine.kv.prefix_cache import PrefixCache, PrefixPool, Root
from gateway.engine.models.decoders import parameters
from gateway.engine.models.kv_costs import measure_kv
from gateway.jobs.steps import DraftCost, Drafter, KvCost

MOST_AHEAD: Final = 7  # the most tokens per draft; a turn's memory estimate includes them
CHUNK: Final = 512  # the most tokens, with padding, of a pass that reads new contexts
FEED: Final = MOST_AHEAD + 1  # the most context tokens per row that a draft's first pass reads
_FIRST_LENGTH: Final = 4


@dataclass(slots=True)
class _Follower:
    """The draft model's state of one sequence."""

    id: int
    root: Root
    read: int = 0  # context tokens in the KV
    ahead: Sequence[int] = ()  # tokens of the last draft, in the KV after the context's
    drafted: int = 0  # tokens of the draft that is being verified
    length: int = _FIRST_LENGTH  # next draft's length, on transformers' "heuristic" schedule
    patience: Patience = field(default_factory=Patience)


class DraftModel:
    """A draft model, and its KV of the sequences that get drafts."""

    name: Drafter = "draft_model"
    reads_images = False

    def __init__(
        self,
        model: Any,
        *,
        vocab_size: int,  # higher ids are read as the last id below this, and never drafted
        max_context: int,  # contexts near this length get no drafts
        prefixes: PrefixPool,  # shared with the target model
    ) -> None:
        self._model = model
        self._vocab_size = vocab_size
        # MLX reads beyond an array's end without an error, so contexts are limited.
        self._longest = max_context - FEED
        self._prefixes = PrefixCache(make_prompt_cache(model), prefixes)
        self._seqs: list[_Follower] = []
        self._cache: list[Any] = []
        # Copies, by layer index, of the caches that can't drop tokens, made before the drafts.
        self._held: dict[int, Any] = {}

    def with_kv(self, cost: KvCost, rows: int) -> KvCost:
        """Return a sequence's KV cost, with this model's KV for up to `rows` sequences added."""
        own, rows = measure_kv(self._model), rows + rows // SPARE
        held = 2 * (own.constant + sum(token * most for token, most in own.windows))
        return replace(cost, draft=DraftCost(own.token, cost.draft.states + held, rows))

    @property
    def nbytes(self) -> int:
        weights = sum(array.nbytes for array in parameters(self._model))
        kv = cache_nbytes([*self._cache, *self._held.values()])
        return weights + kv + self._prefixes.nbytes

    def clear_prefixes(self) -> None:
        self._prefixes.clear()

    def is_due(self, sequence_id: int, context: Sequence[int]) -> bool:
        if len(context) > self._longest:
            return False
        seq = self._find(sequence_id)
        return seq is None or seq.patience.is_over(len(context))

    def keep(self, ids: Collection[int]) -> None:
        staying = [i for i, seq in enumerate(self._seqs) if seq.id in ids]
        if not staying:
            self._seqs, self._cache, self._held = [], [], {}
        elif len(staying) < len(self._seqs):
            staying = compact(staying)
            self._seqs = [self._seqs[i] for i in staying]
            filter_layers(self._cache, staying)
            filter_layers(list(self._held.values()), staying)
            launch([layer.state for layer in self._cache])

    def draft(
        self, seqs: Mapping[int, DraftedSequence], rooms: Mapping[int, int]
    ) -> dict[int, Sequence[int]]:
        contexts = {
            number: seq.context for number, seq in seqs.items() if len(seq.context) <= self._longest
        }
        self.keep(contexts)
        self._take_back(contexts)
        for number in contexts:
            if self._find(number) is None:
                self._join(seqs[number])
        due = {
            seq.id
            for seq in self._seqs
            if rooms.get(seq.id, 0) > 0 and seq.patience.is_over(len(contexts[seq.id]))
        }
        if not due:
            return {}
        self._catch_up(contexts)
        # A sequence with more than FEED tokens left to read gets no draft this time.
        ready = [seq for seq in self._seqs if len(contexts[seq.id]) - seq.read <= FEED]
        lengths = {seq.id: min(seq.length, rooms[seq.id]) for seq in ready if seq.id in due}
        if not lengths:
            return {}
        drafts = self._generate(contexts, max(lengths.values()))
        for seq in self._seqs:
            seq.drafted = lengths.get(seq.id, 0)
        return {number: drafts[number][:length] for number, length in lengths.items()}

    def note(self, sequence_id: int, context: Sequence[int], accepted: int) -> bool:
        seq = self._find(sequence_id)
        if seq is None or not seq.drafted:
            return False
        if accepted >= seq.drafted:
            seq.length = min(MOST_AHEAD, seq.length + 2)
        else:
            seq.length = max(1, seq.length - 1)
        seq.patience.note(len(context), accepted)
        seq.drafted = 0
        return True

    def _find(self, sequence_id: int) -> _Follower | None:
        return next((seq for seq in self._seqs if seq.id == sequence_id), None)

    def _join(self, joiner: DraftedSequence) -> None:
        _, salt = joiner.root
        root = 0, salt
        known, kept = self._prefixes.take(joiner.context[:-1], root)
        layers = batch_of_one(kept or make_batch_caches(self._model))
        if self._seqs:
            for layer, joining in zip(self._cache, layers, strict=True):
                layer.extend(joining)
        else:
            self._cache = layers
        self._seqs.append(_Follower(joiner.id, root, known))

    def _take_back(self, contexts: Mapping[int, Sequence[int]]) -> None:
        rests = [contexts[seq.id][seq.read :] for seq in self._seqs]
        chosen = [
            min(count_accepted(seq.ahead, rest), len(rest) - 1)
            for seq, rest in zip(self._seqs, rests, strict=True)
        ]
        drafted = [len(seq.ahead) for seq in self._seqs]
        if self._held and chosen != drafted:
            chosen = [0] * len(chosen)  # caches are restored: accepted tokens are read again
            for place, layer in self._held.items():
                self._cache[place] = layer
        back = tuple(map(sub, drafted, chosen))
        for layer in self._cache:
            if isinstance(layer, RaggedKVCache) and any(back):
                layer.rewind(back)
        for seq, count in zip(self._seqs, chosen, strict=True):
            seq.read, seq.ahead = seq.read + count, ()
        self._held = {}

    def _catch_up(self, contexts: Mapping[int, Sequence[int]]) -> None:
        """Read a chunk of each sequence if any has more than FEED tokens left to read."""
        behind = max(len(contexts[seq.id]) - seq.read for seq in self._seqs)
        if behind <= FEED:
            return
        width = min(behind - 1, CHUNK // len(self._seqs))
        feeds = [contexts[seq.id][seq.read : -1][:width] for seq in self._seqs]
        self._read(self._cache, feeds)
        launch([layer.state for layer in self._cache])
        for i, (seq, feed) in enumerate(zip(self._seqs, feeds, strict=True)):
            seq.read += len(feed)
            self._prefixes.store(contexts[seq.id][: seq.read], self._cache, i, root=seq.root)

    def _generate(
        self, contexts: Mapping[int, Sequence[int]], length: int
    ) -> dict[int, Sequence[int]]:
        feeds = [contexts[seq.id][seq.read :][:FEED] for seq in self._seqs]
        logits = self._read(self._cache, feeds)
        self._held = hold_layers(self._cache)
        ends = mx.array([len(feed) - 1 for feed in feeds])
        tokens = [self._likeliest(logits[mx.arange(len(feeds)), ends])]
        while len(tokens) < length:
            logits = self._model(tokens[-1][:, None], cache=self._cache)
            tokens.append(self._likeliest(logits[:, -1]))
        drafts: Any = mx.stack(tokens, axis=1)
        mx.eval(drafts, [layer.state for layer in self._cache])
        for seq, feed, draft in zip(self._seqs, feeds, drafts.tolist(), strict=True):
            seq.read, seq.ahead = seq.read + len(feed), draft[:-1]
        return dict(zip((seq.id for seq in self._seqs), drafts.tolist(), strict=True))

    def _read(self, cache: list[Any], feeds: Sequence[Sequence[int]]) -> mx.array:
        """Read each row's tokens; return unevaluated logits, (rows, longest, vocabulary)."""
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
