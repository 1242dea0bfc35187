"""The features of images that were encoded lately, so that none is encoded twice."""

from collections import OrderedDict
from typing import TypeAlias

import mlx.core as mx

Key: TypeAlias = tuple[str, bytes]
"""The salt of the callers who may share the features, and the digest of the pixels: the time of an
answer must not tell one caller of another's image.
"""


class FeatureCache:
    """Features by image, the least recently used dropped first."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._features: OrderedDict[Key, mx.array] = OrderedDict()
        self.nbytes = 0

    def get(self, key: Key) -> mx.array | None:
        """Return an image's features, (tokens, 1 + DeepStack's, hidden), if they are here."""
        features = self._features.get(key)
        if features is not None:
            self._features.move_to_end(key)
        return features

    def keep(self, key: Key, features: mx.array) -> None:
        """Keep evaluated features, unless they alone are too large."""
        if features.nbytes > self.most_bytes or key in self._features:
            return
        self._features[key] = features
        self.nbytes += features.nbytes
        while self.nbytes > self.most_bytes:
            _, dropped = self._features.popitem(last=False)
            self.nbytes -= dropped.nbytes

    def clear(self) -> None:
        """Drop all features."""
        self._features.clear()
        self.nbytes = 0
