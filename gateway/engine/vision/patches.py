"""The patches of pixels that a tower reads, with the same numbers as in transformers."""

import math
from bisect import bisect
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gateway.engine.models.folder import Folder

Triple: TypeAlias = tuple[float, float, float]

# Indexed by their numbers in Pillow.
FILTERS: Final = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
MOST_SIDE: Final = 256  # limit of patch_size, merge_size and temporal_patch_size
MOST_PIXELS: Final = 1 << 28
MOST_EDGE: Final = 1 << 14
MOST_LEVEL: Final = 1e6  # limit of the numbers that pixels are scaled by
CHANNELS: Final = 3
SOFT_TOKENS: Final = (70, 140, 280, 560, 1120)  # the most tokens of an image of Gemma 4
# transformers' defaults.
QWEN_DEFAULTS: Final = {
    "shortest_edge": 56 * 56,
    "longest_edge": 28 * 28 * 1280,
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
    "rescale_factor": 1 / 255,
    "resample": 3,
}
_PIXTRAL_SIZES: Final = frozenset({"patch_size", "spatial_merge_size"})


@dataclass(frozen=True, slots=True)
class Patches:
    """The image settings of a model."""

    patch: int  # pixels per side
    merge: int  # patches per side of a token
    frames: int  # equal frames in a patch, since some towers read videos too
    mean: Triple  # red, green and blue
    std: Triple
    scale: float  # multiplies a byte before the mean is subtracted
    resample: str

    @property
    def most_tokens(self) -> int:
        """Return the most tokens of an image."""
        raise NotImplementedError

    def size(self, width: int, height: int, max_tokens: int | None = None) -> tuple[int, int]:
        """Return the width and height to decode an image to."""
        raise NotImplementedError

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Return the rows and columns of patches."""
        return height // self.patch, width // self.patch

    def tokens(self, width: int, height: int) -> int:
        return math.prod(self.places(self.grid(width, height)))

    def pixels(self, grid: tuple[int, int]) -> tuple[int, int]:
        """Return the rows and columns of pixels."""
        return grid[0] * self.patch, grid[1] * self.patch

    def places(self, grid: tuple[int, int]) -> tuple[int, int]:
        """Return the rows and columns of tokens."""
        return grid[0] // self.merge, grid[1] // self.merge

    def to_patches(self, rgb: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return patches, ordered by token, of pixels (height, width, 3)."""
        rows, columns = self.grid(rgb.shape[1], rgb.shape[0])
        patch, merge = self.patch, self.merge
        split = rgb.reshape(rows // merge, merge, patch, columns // merge, merge, patch, 3)
        ordered = split.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, 3, 1, patch**2)
        patches = np.empty((rows * columns, 3, self.frames, patch**2), np.float32)
        # Each of a byte's 256 values is computed once, in transformers' order and dtypes.
        levels = (np.arange(256, dtype=np.float64) * self.scale).astype(np.float32)
        for channel in range(3):
            mean, std = np.float32(self.mean[channel]), np.float32(self.std[channel])
            patches[:, channel] = ((levels - mean) / std)[ordered[:, channel]]
        return patches.reshape(rows * columns, -1)


@dataclass(frozen=True, slots=True)
class QwenPatches(Patches):
    """The image settings of Qwen2-VL and its successors."""

    least_pixels: int
    most_pixels: int

    @property
    def most_tokens(self) -> int:
        return self.most_pixels // (self.patch * self.merge) ** 2

    def size(self, width: int, height: int, max_tokens: int | None = None) -> tuple[int, int]:
        """Return the width and height to decode an image to.

        Narrow or small images may get a few tokens more than `max_tokens`, as in transformers.
        """
        block = self.patch * self.merge
        most = self.most_pixels
        if max_tokens is not None:
            most = min(most, max_tokens * block**2)
        return smart_resize(width, height, block, min(self.least_pixels, most), most)


@dataclass(frozen=True, slots=True)
class PixtralPatches(Patches):
    """The image settings of Pixtral and Mistral 3, where a token ends each row of tokens."""

    longest_edge: int  # in pixels

    @property
    def most_tokens(self) -> int:
        return self.tokens(*self._fit(self.longest_edge, self.longest_edge, self.longest_edge))

    def size(self, width: int, height: int, max_tokens: int | None = None) -> tuple[int, int]:
        """Return the width and height to decode an image to, within `max_tokens`."""
        edge = self.longest_edge
        if max_tokens is not None and self.tokens(*self._fit(width, height, edge)) > max_tokens:
            # The last edge before those that give too many tokens.
            edge = bisect(
                range(1, edge),
                max_tokens,
                key=lambda edge: self.tokens(*self._fit(width, height, edge)),
            )
        return self._fit(width, height, max(1, edge))

    def places(self, grid: tuple[int, int]) -> tuple[int, int]:
        return grid[0] // self.merge, grid[1] // self.merge + 1

    def _fit(self, width: int, height: int, edge: int) -> tuple[int, int]:
        """Return the size of whole tokens of an image that has at most `edge` pixels per side."""
        block = self.patch * self.merge
        ratio = max(width / edge, height / edge, 1.0)
        fitting = (max(1, math.floor(side / ratio)) for side in (width, height))
        wide, high = (math.ceil(side / block) * block for side in fitting)
        return wide, high


def smart_resize(width: int, height: int, block: int, least: int, most: int) -> tuple[int, int]:
    """Return the nearest size of whole blocks, with `least` to `most` pixels."""
    area = width * height
    rounded = round(width / block) * round(height / block) * block**2
    if rounded > most:
        shrink = math.sqrt(area / most)
        sides = (max(1, math.floor(side / shrink / block)) for side in (width, height))
    elif rounded < least:
        grow = math.sqrt(least / area)
        sides = (math.ceil(side * grow / block) for side in (width, height))
    else:
        sides = (round(side / block) for side in (width, height))
    wide, high = sides
    return wide * block, high * block


def read_qwen(checkpoint: Folder) -> QwenPatches:
    """Read a Qwen checkpoint's image settings. Raises ModelLoadFailed."""
    with checkpoint.blame("its image processor: "):
        present = read_processor(checkpoint, "do_normalize")
        given = {**QWEN_DEFAULTS, **read_size(present), **present}
        least = "min_pixels" if "min_pixels" in given else "shortest_edge"
        most = "max_pixels" if "max_pixels" in given else "longest_edge"
        return QwenPatches(
            patch=read_count(given, "patch_size", MOST_SIDE),
            merge=read_count(given, "merge_size", MOST_SIDE),
            frames=read_count(given, "temporal_patch_size", MOST_SIDE),
            least_pixels=read_count(given, least, MOST_PIXELS),
            most_pixels=read_count(given, most, MOST_PIXELS),
            **read_levels(given),
        )


def read_pixtral(checkpoint: Folder) -> PixtralPatches:
    """Read a checkpoint's image settings, of Pixtral's processor. Raises ModelLoadFailed."""
    processor, config = checkpoint.read_object("processor_config.json"), checkpoint.config()
    with checkpoint.blame("its image processor: "):
        present = read_processor(checkpoint, "do_normalize")
        # The processor's keys count, and its image processor's patch_size does not.
        sizes = {"patch_size": 16, "spatial_merge_size": 1, **config["vision_config"], **config}
        sizes |= {name: processor[name] for name in _PIXTRAL_SIZES & processor.keys()}
        size = read_size(present) or {"longest_edge": 1024}
        if "longest_edge" not in size:
            raise ValueError("its size has no longest_edge, and others are not supported")
        return PixtralPatches(
            patch=read_count(sizes, "patch_size", MOST_SIDE),
            merge=read_count(sizes, "spatial_merge_size", MOST_SIDE),
            frames=1,
            longest_edge=read_count(size, "longest_edge", MOST_EDGE),
            **read_levels({**QWEN_DEFAULTS, **present}),
        )


def read_processor(checkpoint: Folder, *required: str) -> dict[str, Any]:
    """Return the written settings of an image processor. Raises ModelLoadFailed and ValueError."""
    written = checkpoint.read_object("processor_config.json").get("image_processor")
    if written is None:
        written = checkpoint.read_object("preprocessor_config.json")
    if not written or not isinstance(written, dict):
        raise ValueError("neither processor_config.json nor preprocessor_config.json has one")
    for key in ("do_resize", "do_rescale", "do_convert_rgb", *required):
        if written.get(key) is False:
            raise ValueError(f"{key} is false, which is not supported")
    return {key: each for key, each in written.items() if each is not None}


def read_size(present: dict[str, Any]) -> dict[str, Any]:
    size = present.get("size", {})
    if not isinstance(size, dict):
        raise ValueError(f"size is {size!r:.40}, no object")
    return size


def read_levels(given: dict[str, Any]) -> dict[str, Any]:
    """Return how a byte's values are scaled, and how pixels are."""
    return {
        "mean": _read_triple(given, "image_mean", -MOST_LEVEL),
        "std": _read_triple(given, "image_std", 1 / MOST_LEVEL),
        "scale": _read_triple(given, "rescale_factor", 1 / MOST_LEVEL)[0],
        "resample": FILTERS[read_count(given, "resample", len(FILTERS) - 1, least=0)],
    }


def read_count(given: dict[str, Any], key: str, most: int, least: int = 1) -> int:
    value = given[key]
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{key} is {value!r:.40}, no number from {least} to {most}")
    return value


def _read_triple(given: dict[str, Any], key: str, least: float) -> Triple:
    value = given[key]
    listed = value if isinstance(value, list | tuple) else [value] * 3
    are_numbers = all(type(each) in (int, float) for each in listed)
    if len(listed) != 3 or not are_numbers or not all(least <= x <= MOST_LEVEL for x in listed):
        raise ValueError(f"{key} is {value!r:.60}, not one or three numbers to compute with")
    first, second, third = map(float, listed)
    return first, second, third
