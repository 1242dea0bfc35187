"""Vectors of texts seen before: a bounded, least-recently-used cache of one model's."""

from collections import OrderedDict
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from gateway import metrics

Vector = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Known:
    """A text's vector, (dimensions,), the tokens read for it, and whether it was cut."""

    vector: Vector
    tokens: int
    was_cut: bool


class EmbeddingCache:
    """At most `size` vectors by text, its prompt included; none at all for a size of 0."""

    def __init__(self, model: str, size: int) -> None:
        self._size = size
        self._known: OrderedDict[str, Known] = OrderedDict()
        self._hit = metrics.of(metrics.EMBEDDING_CACHE, model, "hit")
        self._missed = metrics.of(metrics.EMBEDDING_CACHE, model, "miss")

    def resize(self, size: int) -> None:
        """Keep at most so many from now on."""
        self._size = size
        while len(self._known) > size:
            self._known.popitem(last=False)

    def get(self, text: str, *, truncate: bool) -> Known | None:
        """Give what is known of a text; one that was cut only to who lets it be cut."""
        if not self._size:
            return None
        known = self._known.get(text)
        if known is None or (known.was_cut and not truncate):
            self._missed.inc()
            return None
        self._known.move_to_end(text)
        self._hit.inc()
        return known

    def put(self, text: str, known: Known) -> None:
        """Keep a text's vector; the least recently used one makes room."""
        if not self._size:
            return
        # A copy of its own: the vector is a view of its whole request's.
        self._known[text] = replace(known, vector=known.vector.copy())
        self._known.move_to_end(text)
        if len(self._known) > self._size:
            self._known.popitem(last=False)
