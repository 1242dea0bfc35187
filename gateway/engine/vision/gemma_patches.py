"""The sizes of Gemma's images, as in transformers' PIL processors."""

import math
from dataclasses import dataclass
from typing import Any, Final

from gateway.engine.models.folder import Folder
from gateway.engine.vision.patches import (
    MOST_EDGE,
    MOST_SIDE,
    SOFT_TOKENS,
    Patches,
    read_count,
    read_levels,
    read_processor,
    read_size,
)

_RAISED: Final = 2048  # above this limit, images of Gemma 4 may have the most tokens of all
GEMMA3_DEFAULTS: Final[dict[str, Any]] = {
    "size": {"height": 224, "width": 224},
    "image_mean": (0.5, 0.5, 0.5),
    "image_std": (0.5, 0.5, 0.5),
    "rescale_factor": 1 / 255,
    "resample": 2,
}
GEMMA4_DEFAULTS: Final[dict[str, Any]] = {
    "image_mean": (0.0, 0.0, 0.0),
    "image_std": (1.0, 1.0, 1.0),
    "rescale_factor": 1 / 255,
    "resample": 3,
    "patch_size": 16,
    "max_soft_tokens": 280,
    "pooling_kernel_size": 3,
    "do_normalize": False,
}


@dataclass(frozen=True, slots=True)
class GemmaPatches(Patches):
    """The image settings of Gemma 3, with a fixed size, or of Gemma 4."""

    side: int | None  # pixels per side of every image, or None
    usual_tokens: int  # the most tokens of an image, if no caller asks for more

    @property
    def most_tokens(self) -> int:
        return self.usual_tokens if self.side is not None else SOFT_TOKENS[-1]

    def size(self, width: int, height: int, max_tokens: int | None = None) -> tuple[int, int]:
        """Return the width and height to decode an image to."""
        if self.side is not None:
            return self.side, self.side
        most = self.usual_tokens
        if max_tokens is not None:
            most = SOFT_TOKENS[-1] if max_tokens > _RAISED else min(most, max_tokens)
            most = max(each for each in SOFT_TOKENS if each <= max(most, SOFT_TOKENS[0]))
        block = self.patch * self.merge
        factor = math.sqrt(most * self.merge**2 * self.patch**2 / (height * width))
        high, wide = (math.floor(factor * each / block) for each in (height, width))
        if high == 0:
            high, wide = 1, min(width // height, most)
        elif wide == 0:
            high, wide = min(height // width, most), 1
        return wide * block, high * block


def read_gemma3(checkpoint: Folder) -> GemmaPatches:
    """Read a Gemma 3 checkpoint's image settings. Raises ModelLoadFailed."""
    with checkpoint.blame("its image processor: "):
        given = {**GEMMA3_DEFAULTS, **read_processor(checkpoint, "do_normalize")}
        if given.get("do_pan_and_scan"):
            raise ValueError("do_pan_and_scan is true, which is not supported")
        config, size = checkpoint.config(), read_size(given)
        side = read_count(size, "height", MOST_EDGE)
        patch = read_count(config["vision_config"], "patch_size", MOST_SIDE)
        tokens = read_count({"mm_tokens_per_image": 256, **config}, "mm_tokens_per_image", side**2)
        merge = side // patch // math.isqrt(tokens)
        if side != size["width"] or (merge * patch) ** 2 * tokens != side**2:
            raise ValueError(f"size is not of {tokens} tokens in a square")
        return GemmaPatches(patch, merge, 1, **read_levels(given), side=side, usual_tokens=tokens)


def read_gemma4(checkpoint: Folder) -> GemmaPatches:
    """Read a Gemma 4 checkpoint's image settings. Raises ModelLoadFailed."""
    with checkpoint.blame("its image processor: "):
        given = {**GEMMA4_DEFAULTS, **read_processor(checkpoint)}
        tokens = given["max_soft_tokens"]
        if type(tokens) is not int or tokens not in SOFT_TOKENS:
            raise ValueError(f"max_soft_tokens is {tokens!r:.40}, none of {SOFT_TOKENS}")
        if not given["do_normalize"]:
            given |= {name: GEMMA4_DEFAULTS[name] for name in ("image_mean", "image_std")}
        patch = read_count(given, "patch_size", MOST_SIDE)
        merge = read_count(given, "pooling_kernel_size", MOST_SIDE)
        return GemmaPatches(patch, merge, 1, **read_levels(given), side=None, usual_tokens=tokens)
