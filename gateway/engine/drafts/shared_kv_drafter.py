"""Drafts from Gemma 4's drafter, which reads the hidden state and the KV of its target.

It keeps no KV, so nothing is undone after a draft.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchRotatingKVCache

from gateway.engine.drafts.head_drafter import HeadDrafter
from gateway.engine.drafts.prompt_lookup import DraftedSequence
from gateway.engine.kv.cache import RaggedKVCache
from gateway.engine.kv.layers import row_lengths
from gateway.engine.models.decoders import parameters
from gateway.engine.models.gemma4_assistant import KvOfTypes, language_model, shared_layers
from gateway.jobs.steps import Drafter, KvCost


class SharedKvDrafter(HeadDrafter):
    """The draft source that uses a drafter of Gemma 4 beside its target."""

    name: Drafter = "draft_model"

    def __init__(self, model: Any, target: Any, *, vocab_size: int) -> None:
        super().__init__(model, vocab_size=vocab_size)
        self._text = language_model(target)
        self._layers = shared_layers(self._text)
        self.nbytes = sum(array.nbytes for array in parameters(model))
        # The states of each sequence's last pass, (n, width), and the number of tokens before it.
        self._passes: dict[int, tuple[mx.array, int]] = {}

    def with_kv(self, cost: KvCost, _: int) -> KvCost:
        return cost

    @contextmanager
    def watching(self, seqs: Sequence[DraftedSequence], cache: Sequence[Any]) -> Iterator[None]:
        """While entered, keep the hidden states of the target's pass for these rows."""
        # Python finds `__call__` on the class, so the class is changed. Only the lane runs models.
        kind, before, passes = type(self._text.model), row_lengths(cache), list[mx.array]()
        original = kind.__call__

        def call(*args: Any, **kwargs: Any) -> mx.array:
            passes.append(original(*args, **kwargs))
            return passes[-1]

        kind.__call__ = call
        try:
            yield
        finally:
            kind.__call__ = original
        for i, (seq, count) in enumerate(zip(seqs, before, strict=True)):
            self._passes[seq.id] = passes[-1][i], count

    def draft(
        self, seqs: Mapping[int, DraftedSequence], rooms: Mapping[int, int]
    ) -> dict[int, Sequence[int]]:
        counts = row_lengths(self._cache)
        states: list[mx.array] = []
        lengths: dict[int, int] = {}
        for seq, count in zip(self._seqs, counts, strict=True):
            state, room = self._state(seq, count), rooms.get(seq.id, 0)
            if state is not None and room > 0 and self.is_due(seq.id, seq.context):
                lengths[seq.id] = min(room, self._find(seq.id).length)
            states.append(mx.zeros((self._text.args.hidden_size,)) if state is None else state)
        for number in seqs:
            self._find(number).drafted = lengths.get(number, 0)
        if not lengths:
            return {}
        last = mx.array([seq.context[-1:] for seq in self._seqs])
        drafts = self._guess_ahead(last, mx.stack(states)[:, None], max(lengths.values()))
        return {
            seq.id: draft[: lengths[seq.id]]
            for seq, draft in zip(self._seqs, drafts, strict=True)
            if seq.id in lengths
        }

    def _state(self, seq: DraftedSequence, count: int) -> mx.array | None:
        """Return the hidden state of the last of `count` tokens in the KV, if it is known."""
        states, before = self._passes.get(seq.id, (None, 0))
        # Forced tokens are not read yet, so their sequence gets no draft this time.
        if states is None or len(seq.context) != count + 1:
            return None
        return states[count - 1 - before] if 0 < count - before <= len(states) else None

    def _guess_ahead(self, last: mx.array, hidden: mx.array, length: int) -> list[list[int]]:
        text, kv = self._text.model, self._read_kv()
        offset = next(x for x in self._cache if isinstance(x, RaggedKVCache)).offset
        guessed = [last]
        while len(guessed) <= length:
            embedded = text.embed_tokens(guessed[-1]) * text.embed_scale
            states = self._model(mx.concatenate([embedded, hidden], axis=-1), kv, offset)
            hidden = self._model.post_projection(states)
            guessed.append(self._likeliest(states))
        drafts: Any = mx.concatenate(guessed[1:], axis=1)
        mx.eval(drafts)
        return drafts.tolist()  # type: ignore[no-any-return]

    def _likeliest(self, hidden: mx.array) -> mx.array:
        logits, tokens = self._model.score(hidden)
        if tokens is None:
            return mx.argmax(logits[..., : self._vocab_size], axis=-1)
        best = mx.argmax(logits, axis=-1, keepdims=True)
        return mx.take_along_axis(tokens, best, axis=-1)[..., 0]

    def _read_kv(self) -> KvOfTypes:
        """Return the target's KV that each type of layer reads, with masks of unused places."""
        shared: dict[str, tuple[mx.array, mx.array, mx.array | None]] = {}
        for kind, index in self._layers.items():
            layer = self._cache[index]
            if isinstance(layer, BatchRotatingKVCache):
                window: Any = layer
                window._temporal_order()
                first = max(0, window._idx - window.max_size)
                at = slice(first, window._idx)
                keys, values = window.keys[..., at, :], window.values[..., at, :]
                mask = mx.arange(first, window._idx) >= window.left_padding[:, None]
                shared[kind] = keys, values, mask[:, None, None]
            else:
                lengths, (keys, values) = layer.lengths, layer.floating()
                mask = mx.arange(lengths.longest) < mx.array(lengths.counts)[:, None]
                shared[kind] = keys, values, None if lengths.are_equal else mask[:, None, None]
        return shared

    def keep(self, ids: Collection[int]) -> None:
        super().keep(ids)
        self._passes = {number: each for number, each in self._passes.items() if number in ids}
