"""Images of a request, as its caller sent them."""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Detail: TypeAlias = Literal["low", "auto", "high"]


@dataclass(frozen=True, slots=True)
class ImageInput:
    """An image in a conversation: a file's content, which nobody has decoded yet."""

    data: bytes = field(repr=False)
    word: str  # stands for the image in the text of its turn
    place: str  # its place in the request, such as `messages[3].content[1]`
    kind: str  # the type of its part, by the API's own name
    detail: Detail = "auto"
