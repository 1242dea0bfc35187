"""Encoding of texts so that control tokens in a caller's text become plain text.

Otherwise a document could end its turn in the prompt and write the model's answer.
"""

import secrets
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

from tokenizers import Encoding, Tokenizer

Piece: TypeAlias = tuple[str, bool]
"""A part of a text, and whether it is a caller's."""


class ControlTokens:
    """A tokenizer's control tokens, which are all added tokens but white space."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._contents = {
            token: added_token.content
            for token, added_token in added.items()
            if added_token.content.strip(" ▁\r\n\t")
        }
        self._word = f"split{secrets.token_hex(16)}"

    def encode(self, texts: Sequence[Sequence[Piece]]) -> list[list[int]]:
        """Return texts' ids, with control tokens that begin in callers' pieces as plain text."""
        whole = ["".join(text for text, _ in pieces) for pieces in texts]
        # Only tokenizers' batch calls release the GIL.
        if not any(is_own for pieces in texts for _, is_own in pieces):
            fast = self._tokenizer.encode_batch_fast(whole, add_special_tokens=False)
            return [list(encoded_text.ids) for encoded_text in fast]
        encoded = self._tokenizer.encode_batch(whole, add_special_tokens=False)
        return [self._spell(*encoding) for encoding in zip(encoded, whole, texts, strict=True)]

    def spell(self, ids: Sequence[int]) -> Sequence[int]:
        """Return the ids of a caller's text with control tokens replaced by plain text."""
        contents = self._contents
        if contents.keys().isdisjoint(ids):
            return ids
        spelled: list[int] = []
        for token in ids:
            if token in contents:
                spelled += self._letters(contents[token])
            else:
                spelled.append(token)
        return spelled

    def split(self, value: Any, plain: Collection[str] = ()) -> Any:
        """Return a JSON value with a marker after the first letter of each control token not in
        `plain`.

        `pieces` finds the markers in the text that a template renders.
        """
        match value:
            case str():
                return self._word.join(self._cut(value, plain))
            case Mapping():
                return {self.split(key): self.split(item, plain) for key, item in value.items()}
            case list() | tuple():
                return [self.split(item, plain) for item in value]
        return value

    def pieces(self, text: str) -> list[Piece]:
        """Split a text at the markers of `split`; the letter before a marker is the caller's."""
        *parts, last = text.split(self._word)
        pieces: list[Piece] = []
        for part in parts:
            pieces += [(part[:-1], False), (part[-1:], True)]
        return [*pieces, (last, False)]

    def _cut(self, text: str, plain: Collection[str]) -> list[str]:
        (encoded,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
        controls = self._contents
        places = [
            _begin(text, *offsets) + 1
            for token, offsets in zip(encoded.ids, encoded.offsets, strict=True)
            if token in controls and controls[token] not in plain
        ]
        return [text[start:end] for start, end in pairwise([0, *places, len(text)])]

    def _spell(self, encoded: Encoding, text: str, pieces: Sequence[Piece]) -> list[int]:
        starts = [0, *accumulate(len(piece) for piece, _ in pieces)]
        ids: list[int] = []
        for token, offsets in zip(encoded.ids, encoded.offsets, strict=True):
            is_own = False
            if token in self._contents:
                _, is_own = pieces[bisect_right(starts, _begin(text, *offsets)) - 1]
            ids += self._letters(self._contents[token]) if is_own else [token]
        return ids

    def _letters(self, content: str) -> list[int]:
        """Return ids of a control token's text that are no control tokens."""
        tokenizer = self._tokenizer
        text = content
        if tokenizer.normalizer:
            text = tokenizer.normalizer.normalize_str(content)
        pieces = [text]
        if tokenizer.pre_tokenizer:
            pieces = [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
        # Some tokenizers put a space before every text.
        if pieces and pieces[0][:1] in ("▁", "Ġ") and content[:1] not in (" ", "▁", "Ġ"):
            pieces[0] = pieces[0][1:]
        ids = [word.id for piece in pieces if piece for word in tokenizer.model.tokenize(piece)]
        if self._contents.keys().isdisjoint(ids):
            return ids
        # A unigram model's vocabulary may have the control token as an ordinary entry too.
        return [
            token.id
            for piece in pieces
            for letter in piece
            for token in tokenizer.model.tokenize(letter)
        ]


def _begin(text: str, start: int, end: int) -> int:
    """Return where a token begins, without the white space that its offsets include."""
    if text[start:end].strip():
        return end - len(text[start:end].lstrip())
    return start
