"""The classes of each family: its tower, and how its images are read."""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import mlx.core as mx

from gateway.engine.vision.families import FAMILIES
from gateway.engine.vision.gemma4 import Gemma4Tower
from gateway.engine.vision.overlay import Gemma3Decoder, Gemma4Decoder
from gateway.engine.vision.pixtral import PixtralTower
from gateway.engine.vision.qwen import QwenTower
from gateway.engine.vision.qwen_windows import WindowTower
from gateway.engine.vision.reading import QwenDecoder, SeeingDecoder
from gateway.engine.vision.siglip import SiglipTower
from gateway.engine.vision.tower_numbers import TowerNumbers


class Tower(Protocol):
    """A tower with its weights, an mlx Module."""

    depth: int  # features of a token: one, and one for each DeepStack layer
    dtype: mx.Dtype

    @property
    def token_bytes(self) -> int:
        """Return the most bytes that an image's token takes while it is encoded and read."""

    def compute_on_cpu(self) -> None: ...

    def encode(self, patches: mx.array, grid: tuple[int, int]) -> Generator[None, None, mx.array]:
        """Return an image's features, (tokens, depth, decoder's hidden size), in steps."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A family's classes."""

    tower: Callable[[TowerNumbers], Any]  # returns a `Tower` whose weights are not read yet
    layers: str  # is before a layer's number in the names of arrays
    decoder: Callable[[Any, dict[str, Any]], SeeingDecoder]


KINDS: Final = {
    "qwen3": Kind(QwenTower, "blocks.", QwenDecoder),
    "qwen2_5": Kind(WindowTower, "blocks.", partial(QwenDecoder, is_interleaved=False)),
    "mistral": Kind(PixtralTower, "transformer.layers.", SeeingDecoder),
    "gemma3": Kind(SiglipTower, "encoder.layers.", Gemma3Decoder),
    "gemma4": Kind(Gemma4Tower, "encoder.layers.", Gemma4Decoder),
}


def kind_of(config: Mapping[str, Any]) -> Kind:
    """Return a supported family's classes. Raises KeyError."""
    return KINDS[FAMILIES[config["model_type"]].name]
