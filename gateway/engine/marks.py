"""Marks around parts of an answer: control tokens are told from text that only looks like them.

A token that is a mark is spelled between two lone surrogates, which no text has, as tokens decode
to UTF-8: so plain string search finds the token `<think>` and never the seven letters. A mark that
the vocabulary has no token for is found by its letters.
"""

import re
from collections.abc import Collection, Mapping

from tokenizers import AddedToken

_SPECIAL, _ADDED, _END = "\ud800", "\ud801", "\ud802"
_SPELLING = str.maketrans("", "", _SPECIAL + _ADDED + _END)
_SPECIALS = re.compile(f"{_SPECIAL}[^{_END}]*{_END}")
BEGINS = _SPECIAL + _ADDED
TOKENS = re.compile(f"([{BEGINS}][^{_END}]*{_END})")


class Marks:
    """A tokenizer's marks: its special tokens, and the added ones that a format names."""

    def __init__(self, added: Mapping[int, AddedToken], named: Collection[str]) -> None:
        self._spelled = {
            token: f"{_SPECIAL if each.special else _ADDED}{each.content}{_END}"
            for token, each in added.items()
            if each.special or any(_is_in(each.content, name) for name in named)
        }
        self._contents = {added[token].content: spelled for token, spelled in self._spelled.items()}
        longest_first = sorted(self._contents, key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def spelled(self, token: int) -> str | None:
        """Return a mark as it stands in the text of an answer; None for a token that is text."""
        return self._spelled.get(token)

    def pattern(self, mark: str) -> str:
        """Return a format's mark, its control tokens spelled as the stream has them."""
        return self._any.sub(lambda found: self._contents[found[0]], mark)


def _is_in(content: str, name: str) -> bool:
    """Return True if an added token is a part of a mark: no word, nor white space, that is."""
    return content in name and not content.strip().isalnum() and len(content.strip()) > 1


def shown(text: str) -> str:
    """Return text as a reader sees it: special tokens are no part of it."""
    return text if text.isascii() else _SPECIALS.sub("", text).translate(_SPELLING)


def plain(text: str) -> str:
    """Return text with every token in it written out, and nothing that spells marks."""
    return text if text.isascii() else text.translate(_SPELLING)
