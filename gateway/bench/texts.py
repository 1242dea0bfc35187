"""What the requests say: the same for the same seed, and no two alike, so that no cache helps."""

from collections.abc import Sequence
from random import Random

_PAGE = (
    "the a one every old new small large quiet bright river mountain garden station market "
    "library engine letter window morning evening winter summer child teacher farmer doctor "
    "reads writes finds carries opens closes follows answers remembers builds paints repairs "
    "slowly quickly often never always under over beside behind near between without because"
)
WORDS = _PAGE.split()


class Texts:
    """Text number n, of as many words as one of `lengths`: each length comes in its turn."""

    def __init__(self, seed: int, lengths: Sequence[int]) -> None:
        self._seed = seed
        self._lengths = lengths

    def __getitem__(self, number: int) -> str:
        # The number comes first: texts that differ only at their end share a prefix, which
        # servers may keep.
        random = Random(self._seed << 40 | number)
        length = self._lengths[number % len(self._lengths)]
        return " ".join((str(number), *random.choices(WORDS, k=length - 1)))
