"""Make pictures, and the numbers that transformers' processor makes of them.

    python tests/golden/vision/make_pixels.py

It needs transformers 5.23 and Pillow, not torch: transformers' processors for Pillow are those that
Qwen's checkpoints name, without torchvision. Pictures that transformers would show otherwise (over
black, white at 16 bits) are given to it after the conversion that the gateway promises, which is
written here once more in numpy.
"""

import hashlib
import io
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

HERE: Final = Path(__file__).parent
HALVES: Final = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
# The image processors of Qwen3-VL and Qwen3.5, and of Qwen2.5-VL, as their files have them.
FILES: Final[Mapping[str, Mapping[str, Any]]] = {
    "patch 16": {
        "size": {"longest_edge": 16777216, "shortest_edge": 65536},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        **HALVES,
        "image_processor_type": "Qwen2VLImageProcessorFast",
    },
    "patch 14": {
        "min_pixels": 3136,
        "max_pixels": 12845056,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "image_processor_type": "Qwen2VLImageProcessor",
    },
}
# The image processors of Pixtral and of Mistral 3, with the patches per side of a token.
PIXTRAL: Final[Mapping[str, Mapping[str, Any]]] = {
    "pixtral": {
        "size": {"longest_edge": 1024},
        "patch_size": {"height": 16, "width": 16},
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "image_processor_type": "PixtralImageProcessor",
    },
    "mistral3": {
        "size": {"longest_edge": 1540},
        "patch_size": 14,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "image_processor_type": "PixtralImageProcessorFast",
    },
}
MERGES: Final = {"pixtral": 1, "mistral3": 2}
# The most tokens of an image: with the first, most pictures become smaller, with None few do.
LIMITS: Final = (64, None)


def draw(width: int, height: int, channels: int, seed: int) -> NDArray[np.uint8]:
    """Draw soft noise with a few hard edges, as screenshots and photographs have them."""
    rng = np.random.default_rng(seed)
    soft = rng.integers(0, 256, (height // 24 + 2, width // 24 + 2, channels), np.uint8)
    bands = [
        Image.fromarray(soft[..., i]).resize((width, height), Image.Resampling.BICUBIC)
        for i in range(channels)
    ]
    pixels = np.stack([np.asarray(band) for band in bands], -1)
    for _ in range(5):
        top, left = rng.integers(0, height), rng.integers(0, width)
        pixels[top : top + height // 5 + 1, left : left + width // 5 + 1] = rng.integers(0, 256, 3)[
            0
        ]
    return pixels


def save(picture: Image.Image, name: str, **options: Any) -> NDArray[np.uint8]:
    """Write a file, and return the pixels of it as Pillow reads them."""
    written = io.BytesIO()
    picture.save(written, name.rpartition(".")[2].upper().replace("JPG", "JPEG"), **options)
    (HERE / name).write_bytes(written.getvalue())
    return np.asarray(Image.open(written))


def over_white(pixels: NDArray[np.uint8], alpha: NDArray[np.uint8]) -> NDArray[np.uint8]:
    shown = pixels.astype(np.int64) * alpha[..., None] + 255 * (255 - alpha[..., None].astype(int))
    return np.asarray((2 * shown + 255) // 510, np.uint8)


def make_pictures() -> dict[str, NDArray[np.uint8]]:
    """Write the files, and return red, green and blue of each."""
    made: dict[str, NDArray[np.uint8]] = {}
    for name, width, height in (
        ("odd.png", 233, 317),
        ("even.png", 320, 240),
        ("tiny.png", 5, 7),
        ("wide.png", 1000, 40),
        ("tall.png", 48, 1200),
    ):
        made[name] = save(Image.fromarray(draw(width, height, 3, len(made))), name)
    gray = save(Image.fromarray(draw(300, 200, 1, 5)[..., 0]), "gray.png")
    made["gray.png"] = np.stack([gray] * 3, -1)
    low = np.random.default_rng(6).integers(0, 256, (190, 257))
    deep = (draw(257, 190, 1, 6)[..., 0].astype(np.uint16) << 8) | low.astype(np.uint16)
    save(Image.fromarray(deep), "deep.png")
    made["deep.png"] = np.stack([(deep >> 8).astype(np.uint8)] * 3, -1)
    indexes = draw(120, 160, 1, 7)[..., 0] // 16
    palette = np.random.default_rng(7).integers(0, 256, (16, 3), np.uint8)
    alphas = np.array([0, 128, 17, *[255] * 13], np.uint8)
    chosen = Image.fromarray(indexes)
    chosen.putpalette(palette.tobytes())
    save(chosen, "palette.png", transparency=alphas.tobytes())
    made["palette.png"] = over_white(palette[indexes], alphas[indexes])
    clear = save(Image.fromarray(draw(200, 150, 4, 8)), "clear.png")
    made["clear.png"] = over_white(clear[..., :3], clear[..., 3])
    save(Image.fromarray(draw(160, 120, 4, 9), "CMYK"), "cmyk.jpg", quality=85)
    made["cmyk.jpg"] = np.asarray(Image.open(HERE / "cmyk.jpg").convert("RGB"))
    exif = Image.Exif()
    exif[0x0112] = 6
    photo = Image.fromarray(draw(131, 90, 3, 10))
    made["turned.jpg"] = np.rot90(save(photo, "turned.jpg", quality=85, exif=exif), -1)
    made["lossless.webp"] = save(
        Image.fromarray(draw(222, 111, 3, 11)), "lossless.webp", lossless=True
    )
    flat = Image.fromarray(draw(100, 75, 1, 12)[..., 0] // 16)
    flat.putpalette(palette.tobytes())
    save(flat, "flat.gif")
    made["flat.gif"] = palette[np.asarray(flat)]
    return made


def list_sizes() -> list[tuple[int, int]]:
    """List sizes of images, small and large, in proportions of up to 200 to 1."""
    rng = random.Random(13)
    sizes: list[tuple[int, int]] = []
    while len(sizes) < 5000:
        width, height = (round(2 ** rng.uniform(2, 14)) for _ in range(2))
        if max(width, height) <= 200 * min(width, height) and width * height <= 64_000_000:
            sizes.append((width, height))
    return sizes


def main() -> None:
    """Write the pictures and golden.json."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil,
        smart_resize,
    )

    pictures = make_pictures()
    # Decoders of JPEG may differ by a level between platforms: their pixels are kept too.
    for name in ("cmyk.jpg", "turned.jpg"):
        Image.fromarray(pictures[name]).save(HERE / f"{name}.png")
    golden: dict[str, Any] = {"files": FILES, "pixels": [], "sizes": []}
    for file, settings in FILES.items():
        for limit in LIMITS:
            processor = Qwen2VLImageProcessorPil(**settings)
            block = settings["patch_size"] * settings["merge_size"]
            least, most = processor.size["shortest_edge"], processor.size["longest_edge"]
            if limit is not None:
                most = min(most, limit * block**2)
                least = min(least, most)
                processor.size = {"shortest_edge": least, "longest_edge": most}
            for name, pixels in pictures.items():
                made = processor([Image.fromarray(pixels)], return_tensors="np")
                values = np.ascontiguousarray(made["pixel_values"], "<f4")
                golden["pixels"].append(
                    {
                        "name": name,
                        "file": file,
                        "max_tokens": limit,
                        "grid": made["image_grid_thw"][0].tolist()[1:],
                        "sha256": hashlib.sha256(values.tobytes()).hexdigest(),
                    }
                )
            resized = [smart_resize(h, w, block, least, most)[::-1] for w, h in list_sizes()]
            golden["sizes"].append(
                {
                    "file": file,
                    "max_tokens": limit,
                    "first": resized[:20],
                    "sha256": hashlib.sha256(json.dumps(resized).encode()).hexdigest(),
                }
            )
    (HERE / "golden.json").write_text(json.dumps(golden, indent=1) + "\n")
    (HERE / "golden_pixtral.json").write_text(json.dumps(of_pixtral(pictures), indent=1) + "\n")


def of_pixtral(pictures: Mapping[str, NDArray[np.uint8]]) -> dict[str, Any]:
    """Return the sizes and patches, ordered by token, of Pixtral's processor."""
    from transformers.models.pixtral.image_processing_pil_pixtral import (
        PixtralImageProcessorPil,
        get_resize_output_image_size,
    )

    golden: dict[str, Any] = {"files": PIXTRAL, "pixels": [], "sizes": []}
    for file, settings in PIXTRAL.items():
        merge = MERGES[file]
        processor: Any = PixtralImageProcessorPil(**settings)
        patch = {"pixtral": 16, "mistral3": 14}[file]
        block, whole = patch * merge, settings["size"]["longest_edge"]

        def size_of(width: int, height: int, edge: int, block: int = block) -> Any:
            blank: Any = np.broadcast_to(np.uint8(0), (3, height, width))
            sides = (edge, edge), (block, block)
            return get_resize_output_image_size(blank, *sides, "channels_first")

        for limit in LIMITS:
            for name, pixels in pictures.items():
                edge = whole
                height, width = size_of(pixels.shape[1], pixels.shape[0], edge)
                # Each row of tokens ends with one that stands for its end.
                while limit is not None and height // block * (width // block + 1) > limit:
                    edge -= 1
                    height, width = size_of(pixels.shape[1], pixels.shape[0], edge)
                made = processor(
                    [Image.fromarray(pixels)],
                    size={"longest_edge": edge},
                    patch_size={"height": block, "width": block},
                    return_tensors="np",
                )
                values = made["pixel_values"][0]
                assert values.shape == (3, height, width)
                split = values.reshape(
                    3, height // block, merge, patch, width // block, merge, patch
                )
                patches = split.transpose(1, 4, 2, 5, 0, 3, 6).reshape(-1, 3 * patch**2)
                content = np.ascontiguousarray(patches, "<f4").tobytes()
                golden["pixels"].append(
                    {
                        "name": name,
                        "file": file,
                        "max_tokens": limit,
                        "grid": [height // patch, width // patch],
                        "sha256": hashlib.sha256(content).hexdigest(),
                    }
                )
        sizes = [size_of(size[0], size[1], whole)[::-1] for size in list_sizes()]
        golden["sizes"].append(
            {
                "file": file,
                "max_tokens": None,
                "first": sizes[:20],
                "sha256": hashlib.sha256(json.dumps(sizes).encode()).hexdigest(),
            }
        )
    return golden


if __name__ == "__main__":
    main()
