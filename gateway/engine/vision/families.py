"""The model families whose images are read, recognized without mlx."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Family:
    """Model families that share a tower; `kinds` has their classes."""

    name: str
    types: tuple[str, ...]  # values of model_type in config.json
    # The prefix, left out, of a tower's arrays in transformers' two layouts and mlx-vlm's.
    tower: re.Pattern[str]
    # config.json's keys of an image's token, and of those around it, with their defaults.
    ids: Mapping[str, int | None]
    vision_types: tuple[str | None, ...] = ()  # vision_config's model_type, if not any is supported
    before: str = ""  # text before an image's marks
    after: str = ""
    # The tokens that end a row of an image and the image, by their keys in processor_config.json.
    row_ends: Mapping[str, str] = field(default_factory=dict)

    def is_in(self, names: Iterable[str]) -> bool:
        """Return True if a checkpoint's arrays include a tower, and not only its projector."""
        return any(self.tower.match(name) and _ENCODER.search(name) for name in names)


_ENCODER: Final = re.compile(r"(visual|vision_tower)\.")
_QWEN_TOWER: Final = re.compile(r"^(model\.visual|visual|vision_tower)\.")
_QWEN_IDS: Final = dict.fromkeys(("image_token_id", "vision_start_token_id", "vision_end_token_id"))
_PROJECTED_TOWER: Final = re.compile(
    r"^(model\.)?(vision_tower\.(vision_model\.)?|(?=multi_modal_projector\.))"
)
_DECLARED: Final = (
    Family(
        "qwen3",
        ("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"),
        _QWEN_TOWER,
        _QWEN_IDS,
    ),
    Family("qwen2_5", ("qwen2_5_vl",), _QWEN_TOWER, _QWEN_IDS),
    Family(
        "mistral",
        ("mistral3", "llava", "pixtral"),
        _PROJECTED_TOWER,
        {"image_token_index": None},
        ("pixtral",),
        row_ends={"image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"},
    ),
    Family(
        "gemma3",
        ("gemma3",),
        _PROJECTED_TOWER,
        {"image_token_index": 262144, "boi_token_index": 255999, "eoi_token_index": 256000},
        ("siglip_vision_model", "gemma3", "gemma3_vision", None),
        "\n\n",
        "\n\n",
    ),
    Family(
        "gemma4",
        ("gemma4",),
        re.compile(r"^(model\.)?(vision_tower\.|(?=embed_vision\.))"),
        {"image_token_id": 258880, "boi_token_id": 255999, "eoi_token_id": 258882},
        ("gemma4_vision", "gemma4", None),
    ),
)
FAMILIES: Final = {kind: family for family in _DECLARED for kind in family.types}


def family_of(config: Mapping[str, Any]) -> Family | None:
    """Return a config's family, or None if its images are not supported."""
    return FAMILIES.get(str(config.get("model_type")))
