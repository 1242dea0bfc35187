"""The sizes of Gemma's images, as in transformers' PIL processors."""

import math
from dataclasses import dataclass
from typing import Any, Final

from gateway.engine.models.checkpoint import Checkpoint
from gateway.engine.vision.patches import FILTERS, MOST_SIDE, Patches, read_processor, read_triple

SOFT_TOKENS: Final = (70, 140, 280, 560, 1120)  # the most tokens of an image of Gemma 4
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


def read_gemma3(checkpoint: Checkpoint) -> GemmaPatches:
    """Read a Gemma 3 checkpoint's image settings. Raises ModelLoadFailed."""
    with checkpoint.blame("its image processor: "):
        given = {**GEMMA3_DEFAULTS, **read_processor(checkpoint, "do_normalize")}
        if given.get("do_pan_and_scan"):
            raise ValueError("do_pan_and_scan is true, which is not supported")
        config = checkpoint.config()
        side, patch = given["size"]["height"], config["vision_config"]["patch_size"]
        tokens = config.get("mm_tokens_per_image", 256)
        merge = side // patch // math.isqrt(tokens)
        if side != given["size"]["width"] or (merge * patch) ** 2 * tokens != side**2:
            raise ValueError(f"size is not of {tokens} tokens in a square")
        return _make(given, patch, merge, side, tokens)


def read_gemma4(checkpoint: Checkpoint) -> GemmaPatches:
    """Read a Gemma 4 checkpoint's image settings. Raises ModelLoadFailed."""
    with checkpoint.blame("its image processor: "):
        given = {**GEMMA4_DEFAULTS, **read_processor(checkpoint)}
        tokens = given["max_soft_tokens"]
        if tokens not in SOFT_TOKENS:
            raise ValueError(f"max_soft_tokens is none of {SOFT_TOKENS}")
        if not given["do_normalize"]:
            given |= {name: GEMMA4_DEFAULTS[name] for name in ("image_mean", "image_std")}
        return _make(given, given["patch_size"], given["pooling_kernel_size"], None, tokens)


def _make(
    given: dict[str, Any], patch: int, merge: int, side: int | None, tokens: int
) -> GemmaPatches:
    for number in (patch, merge):
        if type(number) is not int or not 1 <= number <= MOST_SIDE:
            raise ValueError(f"patch_size and the side of a token are 1 to {MOST_SIDE}")
    if side is not None and not 1 <= side <= 1 << 13:
        raise ValueError("size is no number of pixels")
    if given["resample"] not in range(len(FILTERS)):
        raise ValueError("resample is no filter of Pillow's")
    mean, std = (read_triple(given, name) for name in ("image_mean", "image_std"))
    scale = float(given["rescale_factor"])
    resample = FILTERS[given["resample"]]
    return GemmaPatches(patch, merge, 1, mean, std, scale, resample, side, tokens)
