"""Images in requests: read for a model that sees, left out or refused for a model that only reads
text, and never shown in a log.
"""

import re
import secrets
from binascii import Error, a2b_base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from operator import is_not
from typing import Any, Final

from gateway.errors import BadRequest
from gateway.jobs.images import Detail, ImageInput, ImageRefused
from gateway.wire.validation import IMAGE_TYPES, P, Part, part_fields

LEFT_OUT = {"type": "text", "text": "[image left out: this model reads text]"}
_SYSTEM = ("system", "developer")
_READ = ("user", "tool", "function")  # roles whose images are read
_DETAILS: Final[Mapping[object, Detail]] = {
    "low": "low",
    "auto": "auto",
    "high": "high",
    "original": "high",
}
_HEADER = re.compile(r"data:[^,]{0,1024};base64,", re.IGNORECASE)
_BLANKS = " \t\n\v\f\r"
# Digits of base64 decoded at once, a multiple of four: the decoder holds the GIL for some
# milliseconds.
_SLICE = 1 << 20
_TAG_KEY = secrets.token_bytes(32)


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """The most images of one request, and the most bytes of each."""

    images: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Source:
    """The base64 of an image: the part of `text` from `start` on."""

    text: str
    start: int

    @property
    def nbytes(self) -> int:
        """Return the bytes that the base64 stands for; nothing is decoded."""
        others = sum(self.text.count(letter, self.start) for letter in (*_BLANKS, "="))
        return (len(self.text) - self.start - others) * 3 // 4

    def decode(self, place: str) -> bytes:
        """Return the image's bytes. Raises BadRequest for anything but base64 and whitespace."""
        try:
            given = self.text[self.start :].encode("ascii").translate(None, _BLANKS.encode())
            digits = given.rstrip(b"=")
            padding = b"=" * (-len(digits) % 4)
            # A slice may end in padding only if it is the last one.
            if b"=" in digits or len(given) - len(digits) > len(padding):
                raise Error
            padded = digits + padding
            slices = range(0, len(padded), _SLICE)
            parts = [a2b_base64(padded[i : i + _SLICE], strict_mode=True) for i in slices]
        except (Error, UnicodeEncodeError):
            raise _invalid(place, "its data is not base64.") from None
        if not parts:
            raise _invalid(place, "it has no data.")
        return b"".join(parts)


class ImageReader:
    """Reads the images of one request in order. Each image gets a word, which stands for the image
    in the text of its turn. Without limits, the model only reads text: every image is refused.
    """

    def __init__(self, limits: ImageLimits | None = None) -> None:
        self._limits = limits
        # The secret is drawn after the request has arrived: no client can put such a word into it.
        self._secret = secrets.token_hex(16)
        self._found: list[tuple[_Source, ImageInput]] = []  # images without data

    def check(self, kind: str, place: str, role: str, *, param: str | None = None) -> None:
        """Raise BadRequest if images of this kind are not read from a turn with this role. `place`
        is the image's place in the request.
        """
        if self._limits is None:
            raise ImageRefused(kind, place, param or place)
        if role not in _READ:
            raise _invalid(place, "only messages of the user and results of tools may have images.")

    def word(self, part: Part, place: str, role: str, *, param: str | None = None) -> str:
        """Return the word of an image, and note the image. Nothing is decoded yet.

        Raises BadRequest for an image that is not sent whole, or is beyond a limit.
        """
        fields = part.model_dump(exclude_none=True)
        kind = fields["type"]
        self.check(kind, place, role, param=param)
        assert self._limits is not None
        number = len(self._found) + 1
        if number > self._limits.images:
            raise _invalid(place, f"a request may have at most {self._limits.images} images.")
        source = _source(fields, place)
        # The exact count takes some milliseconds a megabyte: it is left out for small images.
        is_near = (len(source.text) - source.start) * 3 // 4 > self._limits.nbytes
        if is_near and source.nbytes > self._limits.nbytes:
            raise _invalid(
                place,
                f"it has {source.nbytes} bytes, and at most {self._limits.nbytes} are read.",
            )
        # The letter after the number ensures that no word is the beginning of another.
        word = f"image{self._secret}{number}z"
        self._found.append((source, ImageInput(b"", word, place, kind, _detail(fields, place))))
        return word

    def decode(self) -> Sequence[ImageInput]:
        """Return all images that were noted. Raises BadRequest for data that is not base64."""
        # Stored items may share one text of an image: it is decoded once.
        contents: dict[int, bytes] = {}
        for source, image in self._found:
            if id(source.text) not in contents:
                contents[id(source.text)] = source.decode(image.place)
        return [replace(image, data=contents[id(source.text)]) for source, image in self._found]


REFUSING: Final = ImageReader()


def _invalid(place: str, why: str) -> BadRequest:
    """Return the error for an image that cannot be read, in words that Claude Code knows."""
    return BadRequest(f"Invalid '{place}': Could not process image: {why}", param=place)


def _source(fields: Mapping[str, Any], place: str) -> _Source:
    """Return the base64 of an image in any API's form."""
    match fields:
        case {"source": {"type": "base64", "data": str(data)}}:
            return _Source(data, 0)
        case {"image_url": {"url": str(url)} | str(url)} if header := _HEADER.match(url):
            return _Source(url, header.end())
        case {"image_url": {"url": str()} | str()} | {"source": {"type": "url"}}:
            why = (
                "this gateway looks up no addresses: send the image itself as a data: URL, "
                "'data:image/png;base64,…', or as a source of type 'base64'."
            )
        case {"file_id": _} | {"source": {"type": "file"}}:
            why = "this gateway keeps no files: send the image itself as base64."
        case _:
            why = "it has no data."
    raise _invalid(place, why)


def _detail(fields: Mapping[str, Any], place: str) -> Detail:
    url = fields.get("image_url")
    given = {**fields, **(url if isinstance(url, dict) else {})}.get("detail")
    if given is None:
        return "auto"
    if not isinstance(given, str) or given not in _DETAILS:
        raise _invalid(place, "its 'detail' should be 'low', 'auto', 'high' or 'original'.")
    return _DETAILS[given]


def hide_images(value: Any) -> Any:
    """Return the fields of a request with a few words in the place of each image, for logs."""
    if isinstance(value, list | tuple):
        return [hide_images(each) for each in value]
    if isinstance(value, dict):
        kind = value.get("type")
        if isinstance(kind, str) and kind in IMAGE_TYPES:
            return _summary(max(_texts(value), key=len, default=""))
        return {name: hide_images(each) for name, each in value.items()}
    return _summary(value) if isinstance(value, str) and _HEADER.match(value) else value


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)


def _summary(text: str) -> str:
    """Return an image's size, and a tag that tells the image from others in this process's logs."""
    header = _HEADER.match(text)
    source = _Source(text, header.end() if header is not None else 0)
    # A hash without a key would give a known picture away.
    tag = blake2b(text[source.start :].encode(), digest_size=4, key=_TAG_KEY).hexdigest()
    return f"<image {source.nbytes:,} bytes, tag {tag}>"


def leave_images_out(turns: Sequence[P]) -> tuple[list[P], int]:
    """Return a conversation's messages or items with a text in place of each image of an earlier
    turn or of a tool's result, and the number of the images that were replaced.

    Images stay, to be refused, in system messages, which hold for each turn, and in the user's
    newest message. An assistant's message after the newest one is the beginning of the answer.
    """
    # Only the last of several user messages in a row is new: the others had no answer, perhaps
    # because an image was refused.
    roles = [getattr(turn, "role", None) for turn in turns]
    passed = (*_SYSTEM, "assistant")
    newest = max((i for i, role in enumerate(roles) if role not in passed), default=-1)
    count = 0

    def without_images(part: Any, *, stay: bool) -> Any:
        nonlocal count
        if isinstance(part, list):
            parts = [without_images(each, stay=stay) for each in part]
            return parts if any(map(is_not, parts, part)) else part
        if not isinstance(part, Part):
            return part
        if part.is_image and not stay:
            count += 1
            return type(part).model_validate(LEFT_OUT)
        stay = stay and getattr(part, "type", None) != "tool_result"
        names = [name for name, _ in part_fields(type(part)) if name in part.model_fields_set]
        fields = {name: without_images(getattr(part, name), stay=stay) for name in names}
        changed = {name: each for name, each in fields.items() if each is not getattr(part, name)}
        return part.model_copy(update=changed) if changed else part

    stays = [role in _SYSTEM or (role == "user" and i == newest) for i, role in enumerate(roles)]
    kept = [without_images(turn, stay=stay) for turn, stay in zip(turns, stays, strict=True)]
    return kept, count
