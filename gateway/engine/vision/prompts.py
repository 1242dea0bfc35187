"""The images of a job → spans of its prompt: measured, decoded, and given ids of their content."""

import hashlib
import hmac
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from gateway.engine.models.checkpoint import Checkpoint
from gateway.engine.sandbox_worker import Sandbox
from gateway.engine.vision.features import Recent
from gateway.engine.vision.patches import QwenPatches, read_qwen
from gateway.engine.vision.pictures import decode, measure
from gateway.engine.vision.towers import tower_tensors
from gateway.errors import BadRequest, ContextLengthExceeded, ModelLoadFailed
from gateway.jobs.images import FIRST_IMAGE_ID, Detail, ImageInput, ImageSpan

# The most tokens of an image by its detail; the model's own files may want fewer.
MOST_TOKENS: Final[dict[Detail, int]] = {"low": 256, "auto": 2048, "high": 8192}
PIXEL_BYTES: Final = 256 << 20  # bytes of the images decoded lately
_ID_BYTES: Final = 7
_SECRET: Final = secrets.token_bytes(32)


@dataclass(frozen=True, slots=True)
class Decoded:
    """An image's pixels at the size that a model wants, and a digest of them."""

    key: bytes
    grid: tuple[int, int]  # rows and columns of patches
    pixels: bytes


def _count_bytes(image: Decoded) -> int:
    return len(image.pixels)


# Images decoded lately, for all models, by a digest of the file, the wanted size and the caller's
# salt.
_DECODED: Final[Recent[bytes, Decoded]] = Recent(PIXEL_BYTES, _count_bytes)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The size to decode an image to; or the image, if it was decoded lately."""

    name: bytes  # its key in _DECODED
    width: int
    height: int
    found: Decoded | None = None


@dataclass(frozen=True, slots=True)
class ImageFormat:
    """How a model's images are prepared, and the tokens that stand for them in a prompt."""

    patches: QwenPatches
    start: int  # the token before an image, and the one behind it
    end: int
    sandbox: Sandbox
    max_context: int  # tokens
    secret: bytes = _SECRET

    def read(self, images: Sequence[ImageInput], salt: str = "") -> list[Decoded]:
        """Return images' pixels, at the model's sizes.

        Callers with another `salt` wait for another decoding: the time tells them nothing. Raises
        ContextLengthExceeded before any image is decoded, and the errors of `decode`.
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
            rows, columns = (each * self.patches.patch for each in found.grid)
            return _Plan(name, columns, rows, found)
        sides = measure(self.sandbox, image.data, image.place, salt)
        return _Plan(name, *self.patches.size(*sides, MOST_TOKENS[image.detail]))

    def _decode(self, image: ImageInput, plan: _Plan, salt: str) -> Decoded:
        found = plan.found or _DECODED.get(plan.name)  # one image may stand there twice
        if found is not None:
            return found
        size = plan.width, plan.height
        rgb = decode(self.sandbox, image.data, *size, self.patches.resample, image.place, salt)
        grid, pixels = self.patches.grid(*size), rgb.tobytes()
        decoded = Decoded(hashlib.sha256(repr(grid).encode() + pixels).digest(), grid, pixels)
        _DECODED.keep(plan.name, decoded)
        return decoded

    def ids(self, image: Decoded) -> list[int]:
        """Return the ids that stand for an image: the mark before it, an id of its content for each
        of its tokens, and the mark behind it.

        The id is keyed by a secret, so that nobody can make two images with the same one.
        """
        rows, columns = image.grid
        digest = hmac.digest(self.secret, image.key, "sha256")[:_ID_BYTES]
        own = FIRST_IMAGE_ID + int.from_bytes(digest, "big")
        return [self.start, *[own] * (rows * columns // self.patches.merge**2), self.end]


def read_image_format(
    checkpoint: Checkpoint,
    sandbox: Sandbox,
    vocab_size: int,
    max_context: int,
    note: Callable[[str], None],
    secret: bytes | None = None,
) -> ImageFormat | None:
    """Return the image format of a folder; None for a model that reads text alone. `note` is called
    with the reason why a tower is not used. Ids of images are keyed by `secret`, or by the
    process's own.
    """
    if not tower_tensors(checkpoint):
        return None
    config = checkpoint.config()
    try:
        names = ("vision_start_token_id", "vision_end_token_id", "image_token_id")
        start, end, _ = marks = [cast(Any, config.get(name)) for name in names]
        if not all(type(token) is int and 0 <= token < vocab_size for token in marks):
            raise checkpoint.failed("config.json has no ids of the tokens around images")
        return ImageFormat(
            read_qwen(checkpoint), start, end, sandbox, max_context, secret or _SECRET
        )
    except ModelLoadFailed as error:
        note(f"It reads no images: {error.message}")
        return None


def place_images(
    text: str,
    images: Sequence[ImageInput],
    formats: ImageFormat,
    encode: Callable[[str], list[int]],
    salt: str = "",
) -> tuple[list[int], list[ImageSpan]]:
    """Return a prompt's ids, and its spans, for a template's text with the words of images.

    Raises BadRequest if the template does not show each image once, and as `ImageFormat.read` does.
    """
    found = sorted((text.find(image.word), number) for number, image in enumerate(images))
    for place, number in found:
        if place < 0 or text.count(images[number].word) != 1:
            raise BadRequest(
                f"Invalid '{images[number].place}': the model's chat template shows no image "
                "there.",
                param=images[number].place,
            )
    pixels = formats.read(images, salt)
    ids: list[int] = []
    spans: list[ImageSpan] = []
    end = 0
    for place, number in found:
        image = images[number]
        decoded = pixels[number]
        marked = formats.ids(decoded)
        ids += encode(text[end:place])
        first = len(ids) + 1
        ids += marked
        spans.append(ImageSpan(first, len(ids) - 1, decoded.key, decoded.grid, decoded.pixels))
        end = place + len(image.word)
    return [*ids, *encode(text[end:])], spans
