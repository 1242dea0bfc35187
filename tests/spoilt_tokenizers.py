"""Tokenizers of single letters, with a part that native code panics at."""

import json
from typing import Any

from tokenizers import Tokenizer

LETTERS = {chr(code): place for place, code in enumerate(range(97, 123))}


def spoilt(**parts: Any) -> Tokenizer:
    """Make a tokenizer of letters with these parts in the place of its own."""
    model = {"type": "BPE", "vocab": LETTERS, "merges": []}
    whole = {"version": "1.0", "added_tokens": [], "decoder": {"type": "Fuse"}, "model": model}
    return Tokenizer.from_str(json.dumps({**whole, **parts}))


def strip(letter: str) -> dict[str, Any]:
    """Return a decoder that panics where a token is nothing but this letter."""
    step = {"type": "Strip", "content": letter, "start": 1, "stop": 1}
    return {"type": "Sequence", "decoders": [step, {"type": "Fuse"}]}
