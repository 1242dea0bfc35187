"""Token ids → text as it grows: whole characters only, and never a part of a stop string."""

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream

from gateway.engine.vocabulary import Vocabulary

_REPLACEMENT = "\ufffd"
_WRITTEN = _REPLACEMENT.encode()


def held_back(text: str, marks: Sequence[str]) -> int:
    """Count the characters at the end of `text` that may be the beginning of one of `marks`."""
    longest = max((len(mark) for mark in marks), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-size:]) for mark in marks):
            return size
    return 0


class Decoder:
    """The text of one row's tokens.

    SentencePiece drops the space of a text's first word, unless the tokens `continue` a text.
    """

    def __init__(self, vocabulary: Vocabulary, *, continues: bool = False) -> None:
        self._vocabulary = vocabulary
        self._tokenizer = vocabulary.tokenizer
        self._stream = self._begun() if continues else DecodeStream(skip_special_tokens=False)
        self._is_first = not continues  # until there is text
        self._held: list[int] = []  # tokens whose text is still to come

    def push(self, token: int) -> str:
        """Return the characters that `token` completes; half a character waits for its rest.

        Bytes that never become a character are left out, as there is nothing right to show.
        """
        try:
            piece: str | None = self._stream.step(self._tokenizer, token)
        except Exception:  # "Invalid prefix": bytes turned out to be none, after their text was out
            self._held.append(token)
            return self._anew()
        if piece and _REPLACEMENT not in piece:
            self._held.clear()
            self._is_first = False
            return piece
        self._held.append(token)
        if piece:
            return self._written()
        # The stream holds back all text that ends with U+FFFD, be it what the tokens say.
        is_last = self._vocabulary.bytes(token)[-1:] == _WRITTEN[-1:]
        return self._anew() if is_last and self._bytes(self._held[-3:]).endswith(_WRITTEN) else ""

    def _anew(self) -> str:
        """Return the text of the tokens held back, of which the stream keeps nothing."""
        self._stream = self._begun()
        return self._written()

    def _written(self) -> str:
        """Return the text of the tokens held back by their bytes: the stream has U+FFFD both where
        they say so and for bytes that are no character.
        """
        text = self._bytes(self._held).decode(errors="ignore")
        if self._is_first and text.startswith(" "):
            whole: str = self._tokenizer.decode(self._held, skip_special_tokens=False)
            if text.replace(_REPLACEMENT, "") == " " + whole.replace(_REPLACEMENT, ""):
                text = text[1:]
        self._held.clear()
        self._is_first = self._is_first and not text
        return text

    def _bytes(self, tokens: Sequence[int]) -> bytes:
        return b"".join(map(self._vocabulary.bytes, tokens))

    def _begun(self) -> DecodeStream:
        return DecodeStream(ids=self._vocabulary.probe, skip_special_tokens=False)


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
