"""The images of a conversation: as its caller sent them, and as they stand in a prompt."""

from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from gateway.errors import BadRequest

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


class ImageRefused(BadRequest):
    """An image for a model that reads text. `place` is its place in the request."""

    def __init__(self, kind: str, place: str, param: str) -> None:
        # "Could not process image" are the words of Anthropic's own API: Claude Code reads them,
        # takes the image out of its session and asks again.
        super().__init__(
            f"Invalid '{place}': Could not process image of type '{kind}': this model reads text. "
            "Send text, or ask a model that reads images. With GATEWAY_LEAVE_OUT_IMAGES=true, or "
            "in one request the header x-gateway-leave-out-images: true, images of earlier turns "
            "and of tools' results are left out: a session then goes on with the next message.",
            param=param,
        )
