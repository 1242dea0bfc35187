"""Reads the images of requests, leaves them out, refuses them, or hides them from logs."""

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
from gateway.wire.validation import IMAGE_TYPES, P, Part, Skipped, part_fields

LEFT_OUT = {"type": "text", "text": "[image left out: this model reads text]"}
_READ = ("user", "tool", "function")  # roles whose images are read
_DETAILS: Final[Mapping[object, Detail]] = {
    "low": "low",
    "auto": "auto",
    "high": "high",
    "original": "high",
}
_IMAGE_FIELDS: Final[Mapping[str, Any]] = {
    "image_url": {
        "description": "An image as a `data:` URL, or an object with such a `url` and `detail`.",
        "type": ["string", "object", "null"],
    },
    "detail": {"enum": [*_DETAILS, None]},
}
_HEADER = re.compile(r"data:[^,]{0,1024};base64,", re.IGNORECASE)
_BLANKS = " \t\n\v\f\r"
# Base64 in one piece or in lines, with any escapes of JSON inside JSON: the longest words of texts,
# paths and hashes are shorter.
_LETTERS = r"[A-Za-z0-9+/_=\\-]"
_LINES = rf"{_LETTERS}{{40,}}(?:\s{{1,4}}{_LETTERS}{{40,}}){{3,}}"
_BASE64 = re.compile(rf"(?<!{_LETTERS})(?:{_LETTERS}{{160,}}|{_LINES})")
# The base64 digits, a multiple of four, to decode at once: the decoder holds the GIL.
_SLICE = 1 << 20
_TAG_KEY = secrets.token_bytes(32)


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """The most images of one request, and the most bytes of each."""

    images: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Source:
    """The base64 of an image, from `start` on in `text`."""

    text: str
    start: int

    @property
    def nbytes(self) -> int:
        """Return the size of the image, without decoding it."""
        others = sum(self.text.count(letter, self.start) for letter in (*_BLANKS, "="))
        return (len(self.text) - self.start - others) * 3 // 4

    def decode(self, place: str) -> bytes:
        """Return the bytes of the image. Raises BadRequest for data that is not base64."""
        try:
            given = self.text[self.start :].encode("ascii").translate(None, _BLANKS.encode())
            digits = given.rstrip(b"=")
            padding = b"=" * (-len(digits) % 4)
            # The decoder would accept padding at the end of any slice.
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
    """Collects the images of a request, and puts a random word in the place of each.

    Without limits, every image is refused.
    """

    def __init__(self, limits: ImageLimits | None = None) -> None:
        self._limits = limits
        # Clients cannot write such a word, since the secret is new for each request.
        self._secret = secrets.token_hex(16)
        self._found: list[tuple[_Source, ImageInput]] = []

    def check(self, kind: str, place: str, role: str, *, param: str | None = None) -> None:
        """Raise BadRequest if this model or this role may not have images."""
        if self._limits is None:
            raise ImageRefused(kind, place, param or place)
        if role not in _READ:
            raise _invalid(place, "only messages of the user and results of tools may have images.")

    def word(self, part: Part, place: str, role: str, *, param: str | None = None) -> str:
        """Note an image, without decoding it, and return its word.

        Raises BadRequest for an image without data, or one beyond a limit.
        """
        fields = part.model_dump(exclude_none=True)
        kind = fields["type"]
        self.check(kind, place, role, param=param)
        assert self._limits is not None
        number = len(self._found) + 1
        if number > self._limits.images:
            raise _invalid(place, f"a request may have at most {self._limits.images} images.")
        source = _source(fields, place)
        # The exact count takes milliseconds a megabyte, so small images skip it.
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
        """Return all noted images. Raises BadRequest for data that is not base64."""
        # Stored items may share one image's text, which is decoded once.
        contents: dict[int, bytes] = {}
        for source, image in self._found:
            if id(source.text) not in contents:
                contents[id(source.text)] = source.decode(image.place)
        return [replace(image, data=contents[id(source.text)]) for source, image in self._found]


REFUSING: Final = ImageReader()


def show_image_fields(schema: dict[str, Any]) -> None:
    """Add an image's fields to the JSON schema of a part, for the OpenAPI document."""
    schema["properties"] |= _IMAGE_FIELDS


def _invalid(place: str, why: str) -> BadRequest:
    """Return the error for a bad image, in words that Claude Code recognizes."""
    return BadRequest(f"Invalid '{place}': Could not process image: {why}", param=place)


def _source(fields: Mapping[str, Any], place: str) -> _Source:
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
    """Return a request's fields for a log, with a summary in place of images and other base64."""
    if isinstance(value, list | tuple):
        return [hide_images(each) for each in value]
    if isinstance(value, dict):
        kind = value.get("type")
        if isinstance(kind, str) and kind in IMAGE_TYPES:
            return _summary(max(_texts(value), key=len, default=""))
        return {hide_images(name): hide_images(each) for name, each in value.items()}
    if not isinstance(value, str):
        return value
    if _HEADER.match(value):
        return _summary(value)
    return _BASE64.sub(lambda found: _summary(found[0], "base64"), value)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)


def _summary(text: str, kind: str = "image") -> str:
    header = _HEADER.match(text)
    source = _Source(text, header.end() if header is not None else 0)
    # Without the key, the hash would reveal a known picture.
    tag = blake2b(text[source.start :].encode(), digest_size=4, key=_TAG_KEY).hexdigest()
    return f"<{kind} {source.nbytes:,} bytes, tag {tag}>"


def _sender(turn: Part) -> str | None:
    """Return system, user, tool or assistant, in any API; None for a turn that is skipped."""
    if isinstance(turn, Skipped):
        return None
    content = getattr(turn, "content", None)
    last = content[-1] if isinstance(content, list) and content else None
    is_output = str(getattr(turn, "type", "")).endswith("_output")
    if is_output or getattr(last, "type", None) == "tool_result":
        return "tool"
    # A call and a thought of /v1/responses have no role.
    role = getattr(turn, "role", None) or "assistant"
    return {"developer": "system", "function": "tool"}.get(role, role)


def leave_images_out(turns: Sequence[P], *, continues: bool = False) -> tuple[list[P], int]:
    """Return the turns with a text in place of older images, and the number of these images.

    Images in system messages and in the newest user message stay, so that they are refused; but
    a message right behind a tool's result has that tool's images. If the answer `continues` the
    assistant's last turn, no text takes an image's place there.
    """
    senders = [_sender(turn) for turn in turns]
    heard = [i for i, sender in enumerate(senders) if sender in ("user", "tool", "assistant")]
    # An assistant's message at the end is the beginning of the answer, not a newer turn.
    while heard and senders[heard[-1]] == "assistant":
        heard.pop()
    newest = heard[-1] if heard else -1
    is_of_tool = len(heard) > 1 and senders[heard[-2]] == "tool"
    continues = continues and senders[-1:] == ["assistant"]
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

    kept = []
    for i, (turn, sender) in enumerate(zip(turns, senders, strict=True)):
        content = getattr(turn, "content", None)
        if continues and i > newest and sender == "assistant" and isinstance(content, list):
            texts = [part for part in content if not part.is_image]
            count += len(content) - len(texts)
            turn = turn.model_copy(update={"content": texts})
        is_question = i == newest and getattr(turn, "role", None) == "user" and not is_of_tool
        kept.append(without_images(turn, stay=is_question or sender == "system"))
    return kept, count
