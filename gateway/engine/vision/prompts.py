"""Reads the images of a job, and finds their places in its prompt."""

import hashlib
import hmac
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

from gateway.engine.models.checkpoint import Checkpoint
from gateway.engine.sandbox_worker import Sandbox
from gateway.engine.vision.features import Recent
from gateway.engine.vision.image_setup import Marks, has_tower, read_image_setup
from gateway.engine.vision.patches import Patches
from gateway.engine.vision.pictures import decode, measure
from gateway.errors import BadRequest, ContextLengthExceeded, ModelLoadFailed
from gateway.jobs.images import FIRST_IMAGE_ID, Detail, ImageInput, ImageSpan

# An image's token limit by its detail.
MOST_TOKENS: Final[dict[Detail, int]] = {"low": 256, "auto": 2048, "high": 8192}
PIXEL_BYTES: Final = 256 << 20  # for recently decoded images
_ID_BYTES: Final = 7
_SECRET: Final = secrets.token_bytes(32)


@dataclass(frozen=True, slots=True)
class Decoded:
    """An image's decoded pixels."""

    key: bytes  # a digest of grid and pixels
    grid: tuple[int, int]  # rows and columns of patches
    pixels: bytes


def _count_bytes(image: Decoded) -> int:
    return len(image.pixels)


# Recently decoded images of all models, by a digest of the file and everything that decides its
# pixels.
_DECODED: Final[Recent[bytes, Decoded]] = Recent(PIXEL_BYTES, _count_bytes)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The size to decode an image to, or the image itself if `found`."""

    name: bytes  # its key in _DECODED
    width: int
    height: int
    found: Decoded | None = None


@dataclass(frozen=True, slots=True)
class ImageFormat:
    """A model's preparation of images, and their tokens in a prompt."""

    patches: Patches
    marks: Marks
    sandbox: Sandbox
    max_context: int
    secret: bytes = _SECRET

    def read(self, images: Sequence[ImageInput], salt: str = "") -> list[Decoded]:
        """Return images' pixels at the model's sizes, cached for callers with the same `salt`.

        Raises ContextLengthExceeded before any image is decoded, and the errors of `decode`.
        """
        plans = [self._plan(image, salt) for image in images]
        tokens = sum(self.patches.tokens(plan.width, plan.height) for plan in plans)
        if tokens > self.max_context:
            raise ContextLengthExceeded(self.max_context, tokens)
        return [self._decode(*pair, salt) for pair in zip(images, plans, strict=True)]

    def _plan(self, image: ImageInput, salt: str) -> _Plan:
        wanted = repr((image.detail, self.patches, salt)).encode()
        name = hashlib.sha256(hashlib.sha256(wanted).digest() + image.data).digest()
        found = _DECODED.get(name)
        if found is not None:
            rows, columns = self.patches.pixels(found.grid)
            return _Plan(name, columns, rows, found)
        sides = measure(self.sandbox, image.data, image.place, salt)
        return _Plan(name, *self.patches.size(*sides, MOST_TOKENS[image.detail]))

    def _decode(self, image: ImageInput, plan: _Plan, salt: str) -> Decoded:
        found = plan.found or _DECODED.get(plan.name)  # a prompt may have an image twice
        if found is not None:
            return found
        size = plan.width, plan.height
        rgb = decode(self.sandbox, image.data, *size, self.patches.resample, image.place, salt)
        grid, pixels = self.patches.grid(*size), rgb.tobytes()
        decoded = Decoded(hashlib.sha256(repr(grid).encode() + pixels).digest(), grid, pixels)
        _DECODED.keep(plan.name, decoded)
        return decoded

    def ids(self, image: Decoded) -> list[int]:
        """Return an image's ids, which are a repeated id between the marks. A last row's end keeps
        its own id, as it may be the prompt's last token, which the model reads as text.

        The id depends on the content and on a secret, so nobody can make two images with the same
        id.
        """
        digest = hmac.digest(self.secret, image.key, "sha256")[:_ID_BYTES]
        own = FIRST_IMAGE_ID + int.from_bytes(digest, "big")
        tokens = prod(self.patches.places(image.grid))
        ends = self.marks.row_ends[1:]
        return [*self.marks.start, *[own] * (tokens - len(ends)), *ends, *self.marks.end]


def read_image_format(
    checkpoint: Checkpoint,
    sandbox: Sandbox,
    max_context: int,
    note: Callable[[str], None],
    secret: bytes | None = None,
) -> ImageFormat | None:
    """Return how a checkpoint's model reads images; None if it has no vision tower, or one that
    cannot be used. `note` is called with the reason.
    """
    if not has_tower(checkpoint):
        return None
    try:
        setup = read_image_setup(checkpoint)
    except ModelLoadFailed as error:
        note(f"It reads no images: {error.message}")
        return None
    return ImageFormat(setup.patches, setup.marks, sandbox, max_context, secret or _SECRET)


def place_images(
    text: str,
    images: Sequence[ImageInput],
    formats: ImageFormat,
    encode: Callable[[str], list[int]],
    salt: str = "",
) -> tuple[list[int], list[ImageSpan]]:
    """Return a prompt's ids and spans, for rendered text with the images' placeholder words.

    Raises BadRequest if a word doesn't occur exactly once, and the errors of `ImageFormat.read`.
    """
    found = sorted((text.find(image.word), number) for number, image in enumerate(images))
    for place, number in found:
        if place < 0 or text.count(images[number].word) != 1:
            raise BadRequest(
                f"Invalid '{images[number].place}': the model's chat template shows no image "
                "there.",
                param=images[number].place,
            )
    pixels, marks = formats.read(images, salt), formats.marks
    ids: list[int] = []
    spans: list[ImageSpan] = []
    end, behind = 0, ""
    for place, number in found:
        image = images[number]
        decoded = pixels[number]
        marked = formats.ids(decoded)
        ids += encode(behind + text[end:place] + marks.before)
        first = len(ids) + len(marks.start)
        ids += marked
        last = len(ids) - len(marks.end)
        spans.append(ImageSpan(first, last, decoded.key, decoded.grid, decoded.pixels))
        end = place + len(image.word)
        behind = marks.after
    return [*ids, *encode(behind + text[end:])], spans
