"""Token ids → text as it grows: whole characters only, and never a part of a stop string."""

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


def held_back(text: str, stops: Sequence[str]) -> int:
    """Count the characters at the end of `text` that may be the beginning of a stop string."""
    longest = max((len(stop) for stop in stops), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops):
            return size
    return 0


class TextStream:
    """The text of one row. Special tokens are not text."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = [stop for stop in stops if stop]
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._held = ""
        self.is_stopped = False

    def push(self, token: int) -> str:
        """Give the text that `token` makes certain. After a stop string, nothing more."""
        piece = self._decoder.step(self._tokenizer, token)
        return self._scan(piece) if piece and not self.is_stopped else ""

    def flush(self) -> str:
        """Give what was held back, once no more tokens come; half a character is dropped."""
        text, self._held = self._held, ""
        return "" if self.is_stopped else text

    def _scan(self, piece: str) -> str:
        text = self._held + piece
        # The one that is complete first counts, however the tokens fall.
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.is_stopped = True
            return text[: min(found)[1]]
        cut = len(text) - held_back(text, self._stops)
        self._held = text[cut:]
        return text[:cut]
