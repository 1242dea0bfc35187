"""Drafts from Gemma 4's drafter, which reads the hidden states and the KV of its target.

It keeps no KV, so nothing is undone after a draft. The target's states are kept in the last of its
caches, where they are undone with the others (`gemma4_assistant.keep_states`).
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchRotatingKVCache

from gateway.engine.drafts.head_drafter import HeadDrafter
from gateway.engine.kv.cache import RaggedKVCache
from gateway.engine.models.decoders import parameters
from gateway.engine.models.gemma4_assistant import KvOfTypes, shared_layers, text_model
from gateway.jobs.steps import Drafter


class SharedKvDrafter(HeadDrafter):
    """The draft source that uses a drafter of Gemma 4 beside its target, which keeps states."""

    name: Drafter = "draft_model"
    _after_nan = ""

    def __init__(self, model: Any, target: Any, *, vocab_size: int) -> None:
        super().__init__(model, vocab_size=vocab_size)
        self._text = text_model(target).model
        self._layers = shared_layers(text_model(target))
        self.nbytes = sum(array.nbytes for array in parameters(model))

    def _guess(self, feeds: Sequence[list[int]], length: int) -> list[list[int]]:
        kv, hidden = self._read_kv(), self._states[0]
        offset = next(x for x in self._cache if isinstance(x, RaggedKVCache)).offset
        guessed = [mx.array([feed[:1] for feed in feeds])]
        while len(guessed) <= length:
            embedded = self._text.embed_tokens(guessed[-1]) * self._text.embed_scale
            states = self._model(mx.concatenate([embedded, hidden], axis=-1), kv, offset)
            guessed.append(self._likeliest(states))
            hidden = self._model.post_projection(states)
        return self._evaluate(guessed[1:], hidden)

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
