"""The arrays of models' MTP heads, by their names in each family's files. Without mlx."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from gateway.engine.models.folder import Folder, Tensor

QWEN: Final = r"(?:(?:language_)?model\.)*mtp\.(.+)"
# The layer's copies of the model's embedding and output layer are left out.
AFTER_LAST: Final = r"model\.layers\.{layers}\.(?!embed_tokens\.|shared_head\.head\.)(.+)"
_PLACE: Final = re.compile(r"model\.layers\.(\d+)\.")
_MIMO: Final = r"model\.mtp_layers\.0\.(.+)"
# The names of a head's arrays, by model_type.
NAMES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text"), QWEN),
    **dict.fromkeys(("deepseek_v3", "glm4_moe", "glm4_moe_lite", "qwen3"), AFTER_LAST),
    "mimo": _MIMO,
}


def has_mtp_head(config: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Return True if a model of a supported type has arrays of a head."""
    return bool(head_names(config, names))


def head_tensors(checkpoint: Folder) -> dict[str, Tensor]:
    """List the arrays of a checkpoint's head; there are none if its type is not supported, or if
    only the head is packed.
    """
    config, tensors = checkpoint.config(), checkpoint.all_tensors()
    names = head_names(config, tensors)
    if config.get("quantization") is None and packed_modules(names):
        return {}
    return {name: tensors[name] for name in names}


def head_names(config: Mapping[str, Any], names: Iterable[str]) -> dict[str, str]:
    """Return the names of a head's arrays, and their names within the head."""
    pattern, later = NAMES.get(str(config.get("model_type"))), later_layers(config)
    if pattern is None or (pattern == AFTER_LAST and not later):
        return {}
    own = re.compile(pattern.replace("{layers}", str(later.start)))
    return {name: match[1] for name in names if (match := own.fullmatch(name))}


def packed_modules(names: Iterable[str]) -> set[str]:
    """Return the modules whose weights are packed."""
    return {name.removesuffix(".scales") for name in names if name.endswith(".scales")}


def later_layers(config: Mapping[str, Any]) -> range:
    """Return the places of the layers after a model's last, which are heads that draft tokens."""
    layers, count = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers")
    if isinstance(layers, int) and isinstance(count, int):
        return range(layers, layers + count)
    return range(0)


def is_later(name: str, later: range) -> bool:
    """Return True if an array is of one of these layers."""
    place = _PLACE.match(name)
    return place is not None and int(place[1]) in later
