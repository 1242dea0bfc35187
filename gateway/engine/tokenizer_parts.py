"""Checks of a tokenizer.json for slow patterns and for parts that lengthen texts."""

import json
import math
from collections.abc import Iterator
from typing import Any, Final

from tokenizers import Tokenizer

MOST_GROWTH: Final = 64  # the factor by which a text may grow
# Steps with a pattern from the file, whose running time is unknown.
_PATTERNS: Final = ("Split", "Replace")


def check_growth(tokenizer: Tokenizer) -> None:
    """Raise ValueError if the normalizer or the decoder may make texts much longer."""
    for name, part in (("normalizer", tokenizer.normalizer), ("decoder", tokenizer.decoder)):
        growth = math.prod(_growth(step) for step in _steps(part))
        if growth > MOST_GROWTH:
            raise ValueError(f"its {name} makes texts up to {growth:.0f} times as long")


def has_patterns(tokenizer: Tokenizer) -> bool:
    """Return True if texts are matched with patterns from the file, which may be slow."""
    parts = (tokenizer.normalizer, tokenizer.pre_tokenizer)
    return any(step.get("type") in _PATTERNS for part in parts for step in _steps(part))


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    if part is None:
        return
    waiting = [json.loads(part.__getstate__())]
    while waiting:
        step = waiting.pop()
        if isinstance(step, dict):
            yield step
        inner = step.values() if isinstance(step, dict) else step
        waiting += [each for each in inner if isinstance(each, dict | list)]


def _growth(step: dict[str, Any]) -> float:
    """Return the most characters into which a step may turn one character."""
    pattern = step.get("pattern") or {}
    replaced = len(pattern.get("String", "")) if isinstance(pattern, dict) else 0
    made = {"Replace": step.get("content"), "Prepend": step.get("prepend")}.get(
        step.get("type", "")
    )
    return max(1.0, len(made or "") / max(1, replaced))
