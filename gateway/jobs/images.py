"""The images of a conversation: as its caller sent them, and as they stand in a prompt."""

from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

Detail: TypeAlias = Literal["low", "auto", "high"]


@dataclass(frozen=True, slots=True)
class ImageInput:
    """An image in a conversation: a file's content, which nobody has decoded yet."""

    data: bytes = field(repr=False)
    word: str  # stands for the image in the text of its turn
    place: str  # its place in the request, such as `messages[3].content[1]`
    kind: str  # the type of its part, by the API's own name
    detail: Detail = "auto"


@dataclass(frozen=True, slots=True, eq=False)
class ImageSpan:
    """An image in a prompt: the tokens that stand for it, and its pixels."""

    start: int  # the index of its first token
    end: int
    key: bytes  # a digest of its pixels
    grid: tuple[int, int]  # rows and columns of patches
    pixels: bytes = field(repr=False)  # uint8, (rows of pixels, columns, red green blue)

    @property
    def tokens(self) -> int:
        return self.end - self.start


# Ids from here on are of no vocabulary: each stands for the content of an image.
FIRST_IMAGE_ID: Final = 1 << 40
