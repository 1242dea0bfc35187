"""The features of a sequence's images, and a cache of recent features."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import mlx.core as mx

from gateway.engine.vision.layout import Layout
from gateway.engine.vision.reading import Row
from gateway.jobs.images import ImageSpan

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(slots=True, eq=False)
class Images:
    """The images of one sequence, with their features while its prompt is read."""

    spans: Sequence[ImageSpan]
    layout: Layout
    salt: str  # callers with another salt share no features, so timing tells them nothing
    features: dict[int, mx.array] = field(default_factory=dict)  # by the first token's index
    # Pairs of first token and end of the images that one pass must read as a whole.
    wholes: Sequence[tuple[int, int]] = ()

    def cut_around(self, place: int) -> tuple[int, int]:
        """Return the nearest places, before and after, where the prompt may be cut."""
        for start, end in self.wholes:
            if start < place < end:
                return start, end
        return place, place

    @property
    def row(self) -> Row:
        return Row(self.layout, list(self.features.items()))


class SeenSequence(Protocol):
    """A sequence that may have images."""

    images: Images | None


class Recent(Generic[K, V]):
    """A cache that drops the least recently used values, safe on any thread."""

    def __init__(self, most_bytes: int, measure: Callable[[V], int]) -> None:
        self.most_bytes = most_bytes
        self.nbytes = 0
        self._measure = measure
        self._lock = threading.Lock()
        self._values: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K) -> V | None:
        with self._lock:
            value = self._values.get(key)
            if value is not None:
                self._values.move_to_end(key)
            return value

    def keep(self, key: K, value: V) -> None:
        with self._lock:
            if key in self._values or self._measure(value) > self.most_bytes:
                return
            self._values[key] = value
            self.nbytes += self._measure(value)
            while self.nbytes > self.most_bytes:
                _, dropped = self._values.popitem(last=False)
                self.nbytes -= self._measure(dropped)

    def clear(self) -> None:
        with self._lock:
            self._values.clear()
            self.nbytes = 0
