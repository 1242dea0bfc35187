"""What single tokens are: their text, their bytes, and which are marks rather than text."""

import re
from functools import lru_cache

from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_of() -> dict[str, int]:
    """Invert the alphabet of byte-level BPE: printable bytes are themselves, the other 68 follow
    from U+0100 on. Source: GPT-2's encoder.py, `bytes_to_unicode`.
    """
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {
        chr(0x100 + place): byte for place, byte in enumerate(others)
    }


_BYTES = _byte_of()


class Vocabulary:
    """A tokenizer's single tokens, as logprobs show them: ` True`, never `ĠTrue` or `▁True`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        # A token's text depends on whether one stands before it: SentencePiece drops the space
        # of the first. So each is decoded behind another, whose text is then cut off.
        self.probe: list[int] = tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        self._prefix = len(self._decode(self.probe))
        self.text = lru_cache(maxsize=65_536)(self._text)
        self.bytes = lru_cache(maxsize=65_536)(self._bytes)

    def encode(self, text: str, plain_from: int) -> list[int]:
        """Return a text's ids; from the character `plain_from` on no control token counts."""
        # As a batch, for which alone Python's lock is let go of.
        (encoded,) = self.tokenizer.encode_batch([text], add_special_tokens=False)
        added = self.tokenizer.get_added_tokens_decoder()
        ids: list[int] = []
        for token, (start, _) in zip(encoded.ids, encoded.offsets, strict=True):
            is_control = start >= plain_from and token in added
            ids += self._letters(added[token].content) if is_control else [token]
        return ids

    def _letters(self, content: str) -> list[int]:
        """Return the ids of what spells a control token: the pipeline without the added ones."""
        tokenizer = self.tokenizer
        text = tokenizer.normalizer.normalize_str(content) if tokenizer.normalizer else content
        split = tokenizer.pre_tokenizer
        pieces = [each for each, _ in split.pre_tokenize_str(text)] if split else [text]
        # A space that the pipeline puts before every text is none of this one's.
        if pieces and pieces[0][:1] in ("▁", "Ġ") and content[:1] not in (" ", "▁", "Ġ"):
            pieces[0] = pieces[0][1:]
        return [each.id for piece in pieces if piece for each in tokenizer.model.tokenize(piece)]

    def _decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def _text(self, token: int) -> str:
        """Give a token's own text; U+FFFD where it is part of a character."""
        return self._decode([*self.probe, token])[self._prefix :]

    def _bytes(self, token: int) -> bytes:
        """Give a token's own bytes, a part of a character's too."""
        text: str = self.text(token)
        if "\ufffd" not in text:
            return text.encode()
        name = self.tokenizer.id_to_token(token) or ""
        if match := _BYTE.fullmatch(name):
            return bytes([int(match[1], 16)])
        if name and all(character in _BYTES for character in name):
            return bytes(_BYTES[character] for character in name)
        return text.encode()
