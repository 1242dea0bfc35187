"""Images: as a caller sends them, and as spans of a prompt."""

from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from gateway.errors import BadRequest

Detail: TypeAlias = Literal["low", "auto", "high"]


@dataclass(frozen=True, slots=True)
class ImageInput:
    """An image file in a conversation, not decoded yet."""

    data: bytes = field(repr=False)
    word: str  # stands for the image in the text of its turn
    place: str  # path in the request, such as `messages[3].content[1]`
    kind: str  # the part's type in the API, such as `image_url`
    detail: Detail = "auto"


@dataclass(frozen=True, slots=True, eq=False)
class ImageSpan:
    """An image in a prompt, as a range of tokens and as pixels."""

    start: int
    end: int
    key: bytes  # digest of the pixels
    grid: tuple[int, int]  # rows and columns, in patches
    pixels: bytes = field(repr=False)  # uint8, (rows of pixels, columns, red green blue)

    @property
    def tokens(self) -> int:
        return self.end - self.start


# Token ids from here on are in no vocabulary: each stands for the content of an image.
FIRST_IMAGE_ID: Final = 1 << 40


class ImageRefused(BadRequest):
    """The model reads only text, and the request has an image."""

    def __init__(self, kind: str, place: str, param: str) -> None:
        # Claude Code looks for Anthropic's words "Could not process image", then sends the request
        # again without the image.
        super().__init__(
            f"Invalid '{place}': Could not process image of type '{kind}': this model reads text. "
            "Send text, or ask a model that reads images. With GATEWAY_LEAVE_OUT_IMAGES=true, or "
            "in one request the header x-gateway-leave-out-images: true, images of earlier turns "
            "and of tools' results are left out: a session then goes on with the next message.",
            param=param,
        )
