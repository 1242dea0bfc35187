"""The declaration of each family: its tower, its images, their marks, and how they are read."""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Final, Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from gateway.engine.models.checkpoint import Checkpoint
from gateway.engine.vision.families import FAMILIES
from gateway.engine.vision.gemma4 import Gemma4Vision
from gateway.engine.vision.gemma_patches import read_gemma3, read_gemma4
from gateway.engine.vision.overlay import Gemma3Decoder, Gemma4Decoder
from gateway.engine.vision.patches import PixtralPatches, read_pixtral, read_qwen
from gateway.engine.vision.pixtral import PixtralVision
from gateway.engine.vision.qwen import QwenVision
from gateway.engine.vision.qwen_windows import WindowVision
from gateway.engine.vision.reading import QwenDecoder, SeeingDecoder
from gateway.engine.vision.siglip import SiglipVision


class Preprocessing(Protocol):
    """The image settings of a checkpoint."""

    @property
    def resample(self) -> str: ...

    @property
    def most_tokens(self) -> int:
        """Return the most tokens of an image."""

    def size(self, width: int, height: int, max_tokens: int | None = None) -> tuple[int, int]:
        """Return the width and height to decode an image to."""

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Return the rows and columns of patches."""

    def tokens(self, width: int, height: int) -> int: ...

    def pixels(self, grid: tuple[int, int]) -> tuple[int, int]:
        """Return the rows and columns of pixels."""

    def places(self, grid: tuple[int, int]) -> tuple[int, int]:
        """Return the rows and columns of tokens."""

    def to_patches(self, rgb: NDArray[np.uint8]) -> NDArray[np.float32]: ...


class Tower(Protocol):
    """A tower with its weights, an mlx Module."""

    @property
    def depth(self) -> int:
        """Return the number of features of a token: one, and one for each DeepStack layer."""

    @property
    def token_bytes(self) -> int:
        """Return the most bytes that an image's token takes while it is encoded and read."""

    @property
    def dtype(self) -> mx.Dtype: ...

    def check_fit(self, patches: Any, decoder: Mapping[str, Any]) -> None:
        """Raises ValueError for image settings or a decoder's config that don't fit."""

    def compute_on_cpu(self) -> None: ...

    def encode(self, patches: mx.array, grid: tuple[int, int]) -> Generator[None, None, mx.array]:
        """Return an image's features, (tokens, depth, decoder's hidden size), in steps."""


class Vision(Protocol):
    """The settings in `vision_config` of config.json."""

    layers: ClassVar[str]  # is before a layer's number in the names of arrays

    @property
    def depth(self) -> int:
        """Return the number of layers."""

    def arrange(self, arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Return a checkpoint's arrays by the tower's names."""

    def open(self) -> Any:
        """Return a `Tower` whose weights are not read yet."""


@dataclass(frozen=True, slots=True)
class Marks:
    """An image's token in a prompt, and the tokens and texts around an image."""

    image: int
    start: tuple[int, ...] = ()
    end: tuple[int, ...] = ()
    before: str = ""  # joins the text before `start`
    after: str = ""
    row_ends: tuple[int, ...] = ()  # the token that ends a row, and the one that ends the last


@dataclass(frozen=True, slots=True)
class Kind:
    """A family's classes and functions."""

    read_vision: Callable[[Mapping[str, Any]], Vision]  # KeyError, TypeError and ValueError
    read_images: Callable[[Checkpoint], Preprocessing]  # raises ModelLoadFailed
    # config.json's keys of an image's token, and of those around it.
    marks: tuple[str, str, str] | tuple[str]
    decoder: Callable[[Any, dict[str, Any]], SeeingDecoder]
    before: str = ""  # text before an image's marks
    after: str = ""
    # The tokens that end a row of an image and the image, by their keys in processor_config.json.
    row_ends: Mapping[str, str] = field(default_factory=dict)


def _read_pixtral(checkpoint: Checkpoint) -> PixtralPatches:
    """Read image settings. Raises ModelLoadFailed, also for an unsupported tower."""
    with checkpoint.reading_config():
        PixtralVision.read(checkpoint.config())  # without images, the model reads text
    return read_pixtral(checkpoint)


KINDS: Final = {
    "qwen3": Kind(
        lambda config: QwenVision.read(config["vision_config"]),
        read_qwen,
        ("image_token_id", "vision_start_token_id", "vision_end_token_id"),
        QwenDecoder,
    ),
    "qwen2_5": Kind(
        lambda config: WindowVision.read(config["vision_config"]),
        read_qwen,
        ("image_token_id", "vision_start_token_id", "vision_end_token_id"),
        partial(QwenDecoder, is_interleaved=False),
    ),
    "mistral": Kind(
        PixtralVision.read,
        _read_pixtral,
        ("image_token_index",),
        SeeingDecoder,
        row_ends={"image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"},
    ),
    "gemma3": Kind(
        SiglipVision.read,
        read_gemma3,
        ("image_token_index", "boi_token_index", "eoi_token_index"),
        Gemma3Decoder,
        "\n\n",
        "\n\n",
    ),
    "gemma4": Kind(
        Gemma4Vision.read,
        read_gemma4,
        ("image_token_id", "boi_token_id", "eoi_token_id"),
        Gemma4Decoder,
    ),
}


def kind_of(config: Mapping[str, Any]) -> Kind:
    """Return a supported family's declaration. Raises KeyError."""
    return KINDS[FAMILIES[config["model_type"]].name]


def read_marks(
    checkpoint: Checkpoint, vocab_size: int, token_id: Callable[[str], int | None]
) -> Marks | None:
    """Return a supported family's marks, or None if the files lack an id.

    `token_id` returns the id of a token of the vocabulary.
    """
    config = checkpoint.config()
    kind = kind_of(config)
    tokens = [config.get(name) for name in kind.marks]
    processor = checkpoint.read_object("processor_config.json")
    ends = [token_id(str(processor.get(key, mark))) for key, mark in kind.row_ends.items()]
    known = [each for each in [*tokens, *ends] if type(each) is int and 0 <= each < vocab_size]
    if len(known) < len(tokens) + len(ends):
        return None
    image, *around = known[: len(tokens)]
    row_ends = tuple(known[len(tokens) :])
    return Marks(image, (*around[:1],), (*around[1:],), kind.before, kind.after, row_ends)
