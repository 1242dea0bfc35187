"""Decodes a growing sequence of token ids into text, in whole characters only."""

import re
from collections.abc import Collection, Sequence
from functools import lru_cache

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from gateway.panics import raise_panics

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_of() -> dict[str, int]:
    """Return the byte of each character in byte-level BPE's alphabet.

    Source: GPT-2's encoder.py, `bytes_to_unicode`.
    """
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {
        chr(0x100 + place): byte for place, byte in enumerate(unprintable)
    }


_BYTES = _byte_of()


class Vocabulary:
    """The texts of single tokens: ` True`, never `ĠTrue` or `▁True`."""

    @raise_panics
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        # SentencePiece drops a text's first space, so each token is decoded after a probe token.
        self.probe: list[int] = tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        self._prefix = len(self._decode(self.probe))
        self.text = lru_cache(maxsize=65_536)(self._text)
        self.bytes = lru_cache(maxsize=65_536)(self._bytes)

    @raise_panics
    def _decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def _text(self, token: int) -> str:
        return self._decode([*self.probe, token])[self._prefix :]

    def _bytes(self, token: int) -> bytes:
        text: str = self.text(token)
        if "\ufffd" not in text:
            return text.encode()
        name = self.tokenizer.id_to_token(token) or ""
        match = _BYTE.fullmatch(name)
        if match is not None:
            return bytes([int(match[1], 16)])
        if name and all(character in _BYTES for character in name):
            return bytes(_BYTES[character] for character in name)
        return text.encode()


_REPLACEMENT = "\ufffd"
_REPLACEMENT_BYTES = _REPLACEMENT.encode()


class Detokenizer:
    """Turns the tokens of one sequence into text.

    `continues` means that the tokens continue a text, so a space before the first word is kept.
    """

    def __init__(self, vocabulary: Vocabulary, *, continues: bool = False) -> None:
        self._vocabulary = vocabulary
        self._tokenizer = vocabulary.tokenizer
        self._stream = self._new_stream() if continues else DecodeStream(skip_special_tokens=False)
        self._is_first = not continues
        self._held: list[int] = []

    @raise_panics
    def push(self, token: int) -> str:
        """Return the characters that `token` completes, without bytes that form no character."""
        try:
            piece: str | None = self._stream.step(self._tokenizer, token)
        except Exception:  # "Invalid prefix": earlier bytes turned out to form no character
            self._held.append(token)
            return self._restart()
        if piece and _REPLACEMENT not in piece:
            self._held.clear()
            self._is_first = False
            return piece
        self._held.append(token)
        if piece:
            return self._flush_held()
        # The stream holds back all text that ends with U+FFFD, even if tokens really spell U+FFFD.
        may_be_replacement = self._vocabulary.bytes(token)[-1:] == _REPLACEMENT_BYTES[-1:]
        if may_be_replacement and self._bytes(self._held[-3:]).endswith(_REPLACEMENT_BYTES):
            return self._restart()
        return ""

    def _restart(self) -> str:
        self._stream = self._new_stream()
        return self._flush_held()

    def _flush_held(self) -> str:
        # The stream would write U+FFFD for invalid bytes, so the bytes are decoded here.
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

    def _new_stream(self) -> DecodeStream:
        return DecodeStream(ids=self._vocabulary.probe, skip_special_tokens=False)


def texts_of(
    ids: Sequence[int], text: str | None, vocabulary: Vocabulary, special: Collection[int]
) -> list[str]:
    """Return the text of each token of a prompt.

    Special tokens that the prompt's `text` lacks have an empty text.
    """
    decoder, texts, at = Detokenizer(vocabulary), [], 0
    for token in ids:
        is_added = False
        if token in special and text is not None:
            is_added = not text.startswith(vocabulary.tokenizer.id_to_token(token) or "", at)
        piece = "" if is_added else decoder.push(token)
        texts.append(piece)
        at += len(piece)
    return texts
