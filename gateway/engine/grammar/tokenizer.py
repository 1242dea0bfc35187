"""Makes llguidance's tokenizer of a model.

llguidance holds the GIL for 1.3 s to make a tokenizer of 152,000 tokens. So the tokenizer is made
in parts, and other threads run between the parts.
"""

import json
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import llguidance
import numpy as np
from llguidance import LLTokenizer
from outlines.backends.llguidance import LLGuidanceBackend
from tokenizers import Tokenizer

from gateway.engine.grammar.matching import TextTokens, words
from gateway.panics import as_exception

_BYTE = '"<0x0A>"'  # a token of vocabularies that have a token for each byte
_PAUSE_S = 0.01


# llguidance 1.9.1 holds the GIL while it reads added tokens: 1 s for 20,000 tokens, 180 s for
# 100,000, and 37 s for 16,000 tokens of 1,000 characters (AMD EPYC).
MOST_ADDED: Final = 1 << 14  # tokens, of which Gemma 3 has 6,414
MOST_CHARS: Final = 1 << 10  # characters of one added token
MOST_ADDED_CHARS: Final = 1 << 20  # characters of all added tokens


class GrammarTokenizer:
    """A model's tokens in the form that grammars need. It is slow to make.

    `tokenizer` is a tokenizer of transformers, `vocab_size` the number of the model's logits, and
    `marks` are the control tokens around calls. Raises ValueError for an unusable tokenizer.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        vocab_size: int,
        eos_ids: Collection[int],
        marks: Collection[int] = (),
    ) -> None:
        _check_added(tokenizer.backend_tokenizer)
        size = max(vocab_size, 1 + max(tokenizer.get_vocab().values()))
        self.eos_ids = tuple(sorted(token for token in eos_ids if 0 <= token < vocab_size))
        if not self.eos_ids:
            raise ValueError("the model has no end-of-sequence token")
        self.vocab_size = vocab_size
        self.maker = _Maker(_tokens(tokenizer.backend_tokenizer, size, self.eos_ids))
        self.tokens: LLTokenizer = self.maker.llg_tokenizer
        self.texts = self._texts()
        self.json = replace(self.texts, spell=self.tokens.decode_bytes)
        self.texts_and_marks = self.texts.with_marks(marks)

    @property
    def words(self) -> int:
        return words(self.tokens.vocab_size)

    def _texts(self) -> TextTokens:
        is_special, decode = self.tokens.is_special_token, self.tokens.decode_bytes
        ids: dict[bytes, list[int]] = {}
        is_other = np.ones(32 * self.words, dtype=np.bool_)
        is_other[: self.vocab_size] = [is_special(token) for token in range(self.vocab_size)]
        is_other[list(self.eos_ids)] = True
        for token in np.flatnonzero(~is_other).tolist():
            ids.setdefault(decode([token]), []).append(token)
        return TextTokens(ids, np.packbits(is_other, bitorder="little").view(np.uint32))


class _Maker(LLGuidanceBackend):
    """Outlines' backend, with a tokenizer that knows the number of logits and all EOS tokens."""

    def __init__(self, tokens: LLTokenizer) -> None:
        self.llg = llguidance
        self.tensor_library_name = "numpy"  # required but unused
        self.llg_tokenizer = tokens


def _tokens(tokenizer: Tokenizer, size: int, eos_ids: Sequence[int]) -> LLTokenizer:
    # Each step holds the GIL, so other threads run between the steps.
    text = _readable(tokenizer.to_str())
    time.sleep(_PAUSE_S)
    try:
        tokens = LLTokenizer(text, n_vocab=size, eos_token=list(eos_ids), slices=[])
    except BaseException as error:
        raise ValueError(str(as_exception(error))) from error
    time.sleep(_PAUSE_S)
    return tokens.with_slices(LLTokenizer.general_slices())


def _check_added(tokenizer: Tokenizer) -> None:
    """Raise ValueError if llguidance would take long to read the added tokens."""
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    if len(added) > MOST_ADDED:
        raise ValueError(f"it has {len(added):,} added tokens, and {MOST_ADDED:,} are allowed")
    lengths = [len(content) for content in added]
    if max(lengths, default=0) > MOST_CHARS or sum(lengths) > MOST_ADDED_CHARS:
        raise ValueError(
            f"its longest added token has {max(lengths):,} characters, "
            f"and all together have {sum(lengths):,}"
        )


def _readable(text: str) -> str:
    """Return a tokenizer's JSON with a decoder that llguidance can read.

    SentencePiece's decoder "Metaspace" is replaced by a decoder that turns `▁` into a space. Raises
    ValueError if tokens would stand for other bytes.
    """
    if '"Metaspace"' not in text:  # skips slow parsing and writing of the JSON
        return text
    whole = json.loads(text)
    decoders = list(_parts(whole.get("decoder"), "decoders"))
    marks = {part.get("replacement", "▁") for part in decoders if part.get("type") == "Metaspace"}
    for part in _parts(whole.get("pre_tokenizer"), "pretokenizers"):
        if part.get("type") == "Metaspace":
            part["prepend_scheme"] = "never"
    if len(marks) == 1:
        if _BYTE in text and not any(part.get("type") == "ByteFallback" for part in decoders):
            raise ValueError("its decoder does not decode byte tokens")
        whole["decoder"] = {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": marks.pop()}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        }
    return json.dumps(whole, ensure_ascii=False)


def _parts(part: Any, name: str) -> Iterator[dict[str, Any]]:
    """Yield a part of a tokenizer, or all parts of a `Sequence`."""
    if isinstance(part, dict):
        if part.get("type") == "Sequence":
            for child in part.get(name) or ():
                yield from _parts(child, name)
        else:
            yield part
