"""Tracks each sequence's place in its grammar, and makes masks of the tokens that may come next.

A mask is an array of uint32 words; bit i of word w allows the token with the id 32 w + i.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from typing import Final, TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher

Mask: TypeAlias = npt.NDArray[np.uint32]
_WORD = 32
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_DIGITS = b"-+.0123456789eE"
_NUMBER = re.compile(rb"[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
# Unfinished numbers that more digits may make too large for a double.
_LARGE = re.compile(rb"[0-9][eE]|[0-9]{200}")
# Digits that hardly change an unfinished number.
_NEEDLESS = re.compile(rb"(?<=\.[0-9]{40})[0-9]+|(?<=[eE])0+(?=0)|(?<=[eE][-+])0+(?=0)")


def words(vocab_size: int) -> int:
    """Return the number of words in one row's mask."""
    return -(-vocab_size // _WORD)


@dataclass(frozen=True, slots=True)
class TextTokens:
    """The tokens of a model that are text."""

    ids: Mapping[bytes, Sequence[int]]  # by the tokens' bytes
    not_text: Mask  # (words,), all other tokens
    spell: Callable[[Sequence[int]], bytes] | None = None  # set only for JSON

    def with_marks(self, marks: Collection[int]) -> "TextTokens":
        """Return a copy in which these control tokens count as text."""
        not_text = self.not_text.copy()
        for token in marks:
            not_text[token // _WORD] &= ~np.uint32(1 << (token % _WORD))
        return replace(self, not_text=not_text)


# The most tokens that a grammar may force at once. llguidance lists them without releasing the GIL,
# which takes a second for 500,000.
MOST_FORCED: Final = 1 << 15


class GrammarState:
    """A place in a grammar, held by a matcher of llguidance."""

    def __init__(self, matcher: LLMatcher, texts: TextTokens) -> None:
        self.matcher = matcher
        self._texts = texts
        self._open = b""  # the unfinished end of the JSON text

    @property
    def may_end(self) -> bool:
        """Return True if the tokens so far are a whole answer."""
        return self.matcher.is_accepting()

    @property
    def is_over(self) -> bool:
        return self.matcher.is_stopped()

    def advance(self, token: int) -> str | None:
        self.matcher.consume_token(token)
        if self._texts.spell is not None:
            self._open = open_part(self._open + self._texts.spell([token]))
        return self.problem()

    def fill(self, row: Mask) -> str | None:
        """Write the next token's mask to `row`, without the EOS tokens, and return any error."""
        self.matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self.mend(row)
        return self.problem()

    def mend(self, row: Mask) -> None:
        """Correct a mask: forbid control tokens, and numbers in JSON that no double can hold."""
        if self._texts.spell is not None and _LARGE.search(self._open):
            octets = np.unpackbits(row.view(np.uint8), bitorder="little")
            for token in np.flatnonzero(octets).tolist():
                number = _NUMBER.search(self._open + self._texts.spell([token]))
                if number and math.isinf(float(number[0])):
                    row[token // _WORD] &= ~np.uint32(1 << (token % _WORD))
        # If only one text can follow, llguidance allows the first token of that text. For a text
        # such as `<|end|>` this is a control token, so tokens of plain text are allowed instead.
        if self.may_end or not (row & self._texts.not_text).any():
            return
        row[:] = 0
        following = self.matcher.compute_ff_bytes()
        for end in range(1, len(following) + 1):
            for token in self._texts.ids.get(following[:end], ()):
                row[token // _WORD] |= np.uint32(1 << (token % _WORD))

    def forced(self) -> list[int]:
        """Return the text tokens that must come next, as far as llguidance knows."""
        tokens = takewhile(self._is_text, self.matcher.compute_ff_tokens())
        return list(islice(tokens, MOST_FORCED + 1))

    def _is_text(self, token: int) -> bool:
        return not int(self._texts.not_text[token // _WORD]) >> (token % _WORD) & 1

    def problem(self) -> str | None:
        """Return the matcher's error, without the dump of the parser."""
        error = self.matcher.get_error().partition("\n<")[0]
        if error.startswith("NoExtension"):
            return "no answer can match it"
        return error or None


def open_part(text: bytes) -> bytes:
    """Return the open quote or the unfinished number at the end of a JSON text."""
    outside, quote, inside = _STRING.sub(b" ", text).partition(b'"')
    if quote:
        return quote + b"\\" * ((len(inside) - len(inside.rstrip(b"\\"))) % 2)
    return _NEEDLESS.sub(b"", outside[len(outside.rstrip(_DIGITS)) :])


class Matcher:
    """The place of one sequence in its grammar, for one thread at a time.

    After an `error`, which is recorded and not raised, only EOS tokens are allowed.
    """

    __slots__ = ("_alone", "_eos", "_has_ended", "_taken", "error", "state")

    def __init__(
        self,
        begin: Callable[[], GrammarState],
        eos_ids: Collection[int],
        alone: Callable[[], GrammarState] | None = None,
    ) -> None:
        # Other sequences may use up the states of a shared lexer. So an error counts only if a
        # state from `alone`, with an unshared lexer, has an error too.
        self.state = begin()
        self.error: str | None = None
        self._alone = alone
        self._eos = frozenset(eos_ids)
        self._taken: list[int] = []
        self._has_ended = False

    @property
    def may_end(self) -> bool:
        return self.error is None and (self._has_ended or self.state.may_end)

    @property
    def is_over(self) -> bool:
        return self.error is None and (
            self._has_ended or (self.state.is_over and self.state.may_end)
        )

    def consume(self, token: int) -> None:
        if self.error is not None:
            return
        if self._has_ended:
            self.error = "a token came after the end of the answer"
        elif token in self._eos:
            self._has_ended = self.state.may_end
            if not self._has_ended:
                self.error = "the answer ended before its grammar did"
        else:
            self._taken.append(token)
            self.error = self.state.advance(token)
            if self.error is not None:
                self._retry()

    def replay(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.consume(token)

    def forced_tokens(self) -> list[int]:
        """Return tokens that must come next, though not always all of them."""
        if self.error is not None or self.is_over:
            return []
        forced = self.state.forced()
        if len(forced) > MOST_FORCED:
            self.error = f"it leaves no choice for over {MOST_FORCED:,} tokens"
            return []
        return [token for token in forced if token not in self._eos]

    def allowed(self, row: Mask) -> None:
        """Write the next token's mask, (words,), to `row`."""
        if self.error is None and not self._has_ended:
            self.error = self.state.fill(row)
            if self.error is not None and self._retry():
                self.error = self.state.fill(row)
        self._settle(row)

    def settle(self, row: Mask) -> None:
        if self.state.problem() is not None:
            return self.allowed(row)
        self.state.mend(row)
        return self._settle(row)

    def _settle(self, row: Mask) -> None:
        if self.error is not None or self._has_ended:
            row[:] = 0
        may_end = self.error is not None or self.may_end
        for token in self._eos:
            bit = np.uint32(1 << (token % _WORD))
            if may_end:
                row[token // _WORD] |= bit
            else:
                row[token // _WORD] &= ~bit
        if not row.any():
            self.error = "no token of this model continues the answer"
            self._settle(row)

    def _retry(self) -> bool:
        """Replay all tokens with an unshared lexer, and return True if this succeeds."""
        if self._alone is None:
            return False
        state, self._alone = self._alone(), None
        if all(state.advance(token) is None for token in self._taken):
            self.state, self.error = state, None
        return self.error is None


class Masks:
    """Fills the masks of many sequences, in parallel."""

    def __init__(self, threads: int | None = None) -> None:
        self._executor = LLExecutor(threads)

    def fill(self, matchers: Sequence[Matcher], bitmask: Mask) -> None:
        """Fill `bitmask`, (rows, words), with one row per matcher, which may set its `error`."""
        in_parallel: list[tuple[LLMatcher, int]] = []
        for i, matcher in enumerate(matchers):
            if matcher.error is None:
                in_parallel.append((matcher.state.matcher, i))
            else:
                matcher.allowed(bitmask[i])
        if in_parallel:
            self._executor.unsafe_compute_mask_ptr(
                in_parallel, bitmask.ctypes.data, bitmask.shape[1] * bitmask.itemsize, len(bitmask)
            )
        for _, i in in_parallel:
            matchers[i].settle(bitmask[i])


@dataclass(frozen=True, slots=True)
class BoundRow:
    """A row of a batch whose next token a grammar constrains."""

    place: int  # the row's index in the batch
    matcher: Matcher
    opening: int | None  # a token that opens thinking, allowed despite the grammar
    barred: Collection[int]  # tokens that are forbidden unless the grammar allows no others

    def forced(self, most: int) -> list[int]:
        return [] if self.opening is not None else self.matcher.forced_tokens()[:most]


def apply_masks(logits: mx.array, bitmask: Mask, rows: Sequence[int]) -> mx.array:
    """Return (batch, vocabulary) logits with -inf for tokens that the masks do not allow.

    `bitmask` is (len(rows), words), and `rows` are indices in the batch.
    """
    if not len(rows):
        return logits
    batch, vocab_size = logits.shape
    at, width = list(rows), bitmask.shape[1]
    forbidden = mx.array(-mx.inf, dtype=logits.dtype)
    if 2 * len(at) >= batch:
        masks = np.full((batch, max(width, words(vocab_size))), 0xFFFFFFFF, dtype=np.uint32)
        masks[at] = 0
        masks[at, :width] = bitmask
        return mx.where(_unpack(masks, vocab_size), logits, forbidden)
    is_allowed = _unpack(bitmask, vocab_size)
    masked = mx.array(logits)
    # On a CPU, gathering and scattering eight rows takes twice as long as masking one by one.
    for i, row in enumerate(at):
        one = slice(row, row + 1)
        masked[one] = mx.where(is_allowed[i : i + 1], logits[one], forbidden)
    return masked


def _unpack(bitmask: Mask, vocab_size: int) -> mx.array:
    """Return masks as (rows, vocabulary) bool."""
    # The bits are unpacked on the host, which is idle while the pass runs.
    octets = np.ascontiguousarray(bitmask).view(np.uint8)
    is_allowed = np.unpackbits(octets, axis=1, count=vocab_size, bitorder="little")
    return mx.array(is_allowed.view(np.bool_))
