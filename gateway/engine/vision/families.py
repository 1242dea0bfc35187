"""The model families whose images are read, recognized without mlx."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Family:
    """Model families that share a tower; `kinds` has the rest of the declaration."""

    name: str
    types: tuple[str, ...]  # values of model_type in config.json
    # The prefix, left out, of a tower's arrays in transformers' two layouts and mlx-vlm's.
    tower: re.Pattern[str]
    vision_type: str | None = None  # vision_config's model_type, if others are not supported

    def is_in(self, names: Iterable[str]) -> bool:
        """Return True if a checkpoint's arrays include a tower, and not only its projector."""
        return any(self.tower.match(name) and _ENCODER.search(name) for name in names)


_ENCODER: Final = re.compile(r"(visual|vision_tower)\.")
_QWEN_TOWER: Final = re.compile(r"^(model\.visual|visual|vision_tower)\.")
_DECLARED: Final = (
    Family(
        "qwen3",
        ("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"),
        _QWEN_TOWER,
    ),
    Family("qwen2_5", ("qwen2_5_vl",), _QWEN_TOWER),
    Family(
        "mistral",
        ("mistral3", "llava", "pixtral"),
        re.compile(r"^(model\.)?(vision_tower\.(vision_model\.)?|(?=multi_modal_projector\.))"),
        "pixtral",
    ),
    Family(
        "gemma3",
        ("gemma3",),
        re.compile(r"^(model\.)?(?=(vision_tower|multi_modal_projector)\.)"),
    ),
    Family("gemma4", ("gemma4",), re.compile(r"^(model\.)?(?=(vision_tower|embed_vision)\.)")),
)
FAMILIES: Final = {kind: family for family in _DECLARED for kind in family.types}
PROCESSORS: Final = ("processor_config.json", "preprocessor_config.json")
_HEADER_BYTES: Final = 100_000_000


def reads_images(folder: Path) -> bool:
    """Return True if a folder has a supported tower and the settings of an image processor.

    Raises OSError and ValueError.
    """
    config = _object((folder / "config.json").read_bytes())
    family = family_of(config)
    if family is None or "vision_config" not in config:
        return False
    if not any((folder / name).is_file() for name in PROCESSORS):
        return False
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = _object(index.read_bytes()).get("weight_map", {})
    else:
        with (folder / "model.safetensors").open("rb") as content:
            length = int.from_bytes(content.read(8), "little")
            names = _object(content.read(min(length, _HEADER_BYTES)))
    return family.is_in(names)


def family_of(config: Mapping[str, Any]) -> Family | None:
    """Return a config's family, or None if its images are not supported."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is not None and family.vision_type is not None:
        vision = config.get("vision_config")
        if not isinstance(vision, dict) or vision.get("model_type") != family.vision_type:
            return None
    return family


def _object(content: bytes) -> dict[str, Any]:
    found = json.loads(content)
    return found if isinstance(found, dict) else {}
