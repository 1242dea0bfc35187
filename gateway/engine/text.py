"""Token ids → text as it grows: whole characters only, and never a part of a stop string."""

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


def held_back(text: str, marks: Sequence[str]) -> int:
    """Count the characters at the end of `text` that may be the beginning of one of `marks`."""
    longest = max((len(mark) for mark in marks), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-size:]) for mark in marks):
            return size
    return 0


class Decoder:
    """The text of one row's tokens.

    SentencePiece drops the space of a text's first word; `before` are tokens of a text that the
    first one `continues`, or which stand in for what came before when a stream must begin anew.
    """

    def __init__(
        self, tokenizer: Tokenizer, before: Sequence[int] = (), *, continues: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._before = list(before)
        self._stream = self._begun() if continues else DecodeStream(skip_special_tokens=False)

    def push(self, token: int) -> str:
        """Return the characters that `token` completes; half a character waits for its rest.

        Bytes that never become a character are left out, as there is nothing right to show.
        """
        try:
            piece: str | None = self._stream.step(self._tokenizer, token)
        except (
            Exception
        ):  # "Invalid prefix": bytes turned out to be none, after their text was told
            self._stream = self._begun()
            piece = self._stream.step(self._tokenizer, token)
        return piece.replace("\ufffd", "") if piece else ""

    def _begun(self) -> DecodeStream:
        return DecodeStream(ids=self._before, skip_special_tokens=False)


class StopScanner:
    """Ends a text before the first stop string to be complete in it."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.is_stopped = False

    def push(self, piece: str) -> str:
        """Give the text that is certain now. After a stop string, nothing more."""
        if self.is_stopped:
            return ""
        text = self._held + piece
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.is_stopped = True
            return text[: min(found)[1]]
        cut = len(text) - held_back(text, self._stops)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """Give what was held back, once no more comes."""
        text, self._held = self._held, ""
        return "" if self.is_stopped else text
