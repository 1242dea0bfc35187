"""The arrays of models' MTP heads, by their names in each family's files. Without mlx."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from gateway.engine.models.folder import Folder, Tensor

QWEN: Final = r"(?:(?:language_)?model\.)*mtp\.(.+)"
# The layer's copies of the model's embedding and output layer are left out.
AFTER_LAST: Final = r"model\.layers\.{layers}\.(?!embed_tokens\.|shared_head\.head\.)(.+)"
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
    """List the arrays of a checkpoint's head; there are none if its type is not supported."""
    tensors = checkpoint.all_tensors()
    return {name: tensors[name] for name in head_names(checkpoint.config(), tensors)}


def head_names(config: Mapping[str, Any], names: Iterable[str]) -> dict[str, str]:
    """Return the names of a head's arrays, and their names within the head."""
    pattern = NAMES.get(str(config.get("model_type")), "")
    own = re.compile(pattern.replace("{layers}", str(config.get("num_hidden_layers"))))
    return {name: match[1] for name in names if (match := own.fullmatch(name))} if pattern else {}
