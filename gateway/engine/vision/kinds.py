"""The declaration of each family: its tower, its images, their marks, and how they are read."""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol, cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from gateway.engine.models.checkpoint import Checkpoint
from gateway.engine.vision.families import FAMILIES, Family
from gateway.engine.vision.gemma4 import Gemma4Vision
from gateway.engine.vision.gemma_patches import read_gemma3, read_gemma4
from gateway.engine.vision.overlay import Gemma3Decoder, Gemma4Decoder
from gateway.engine.vision.patches import read_qwen
from gateway.engine.vision.qwen import QwenVision
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


@dataclass(frozen=True, slots=True)
class Kind:
    """A family's classes and functions."""

    read_vision: Callable[[Mapping[str, Any]], Vision]  # KeyError, TypeError and ValueError
    read_images: Callable[[Checkpoint], Preprocessing]  # raises ModelLoadFailed
    marks: tuple[str, str, str]  # config.json's keys of an image's token, and those around it
    decoder: Callable[[Any, dict[str, Any]], SeeingDecoder]
    before: str = ""  # text before an image's marks
    after: str = ""


KINDS: Final = {
    "qwen3": Kind(
        lambda config: QwenVision.read(config["vision_config"]),
        read_qwen,
        ("image_token_id", "vision_start_token_id", "vision_end_token_id"),
        QwenDecoder,
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


def family_of(config: Mapping[str, Any]) -> Family | None:
    return FAMILIES.get(str(config.get("model_type")))


def kind_of(config: Mapping[str, Any]) -> Kind:
    """Return a supported family's declaration. Raises KeyError."""
    return KINDS[FAMILIES[config["model_type"]].name]


def read_marks(config: Mapping[str, Any], vocab_size: int) -> Marks | None:
    """Return a supported family's marks, or None if config.json lacks an id."""
    kind = kind_of(config)
    image, start, end = tokens = [cast(Any, config.get(name)) for name in kind.marks]
    if not all(type(token) is int and 0 <= token < vocab_size for token in tokens):
        return None
    return Marks(image, (start,), (end,), kind.before, kind.after)
