"""What may be read without a template: a text, token ids, or an array of either."""

from typing import Any

MOST = 2048  # as OpenAI's
TEXT = {"type": "string", "minLength": 1}
IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
SCHEMA: dict[str, Any] = {
    "anyOf": [
        TEXT,
        {"type": "array", "items": TEXT, "minItems": 1, "maxItems": MOST},
        IDS,
        {"type": "array", "items": IDS, "minItems": 1, "maxItems": MOST},
    ]
}


def rows(given: object) -> list[Any]:
    """Give the inputs as an array, all texts or all rows of ids.

    Raises ValueError, saying how many there are where that is what is wrong.
    """
    if isinstance(given, str):
        given = [given]
    if not isinstance(given, list) or not given:
        raise ValueError("it is neither a text nor an array of some")
    found = [given] if all(map(_is_id, given)) else given
    if len(found) > MOST:
        raise ValueError(f"it has {len(found)} entries")
    if not (all(map(_is_text, found)) or all(map(_is_ids, found))):
        raise ValueError("its entries are not all texts, or all token ids, and none of them empty")
    return found


def _is_text(item: object) -> bool:
    return isinstance(item, str) and item != ""


def _is_id(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool) and item >= 0


def _is_ids(item: object) -> bool:
    return isinstance(item, list) and bool(item) and all(map(_is_id, item))
