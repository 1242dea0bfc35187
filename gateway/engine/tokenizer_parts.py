"""The possible costs of a tokenizer.json's parts: texts that grow, and patterns that take long."""

import json
import math
from collections.abc import Iterator
from typing import Any, Final

from tokenizers import Tokenizer

# The most growth of a text; `▁` for a space and quotes for ticks are the usual kinds.
MOST_GROWTH: Final = 64
# The time of these steps grows with the text; the time of a pattern of the file is unknown.
_PATTERNS: Final = ("Split", "Replace")


def check_growth(tokenizer: Tokenizer) -> None:
    """Raise ValueError for a normalizer or a decoder that makes texts far longer."""
    for name, part in (("normalizer", tokenizer.normalizer), ("decoder", tokenizer.decoder)):
        growth = math.prod(_growth(step) for step in _steps(part))
        if growth > MOST_GROWTH:
            raise ValueError(f"its {name} makes texts up to {growth:.0f} times as long")


def has_patterns(tokenizer: Tokenizer) -> bool:
    """Return True if the file has patterns that texts are matched with, which may take long."""
    parts = (tokenizer.normalizer, tokenizer.pre_tokenizer)
    return any(step.get("type") in _PATTERNS for part in parts for step in _steps(part))


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of a part, those of sequences among them."""
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
    """Return the most characters that a step may make of one."""
    pattern = step.get("pattern") or {}
    replaced = len(pattern.get("String", "")) if isinstance(pattern, dict) else 0
    made = {"Replace": step.get("content"), "Prepend": step.get("prepend")}.get(
        step.get("type", "")
    )
    return max(1.0, len(made or "") / max(1, replaced))
