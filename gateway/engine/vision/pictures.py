"""An image file's size and pixels, read by Pillow in the sandbox."""

import hashlib
import secrets
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gateway.engine.sandbox_worker import Sandbox, refuse_size
from gateway.errors import BadRequest, Overloaded, Unavailable

MOST_BYTES: Final = 1 << 30  # 64 million pixels take 700 MB
BUSY_S: Final = 2.0
_KEY: Final = secrets.token_bytes(32)
INVALID: Final = "the process that read it gave an invalid answer"


def measure(sandbox: Sandbox, data: bytes, place: str, salt: str = "") -> tuple[int, int]:
    """Return an image's width and height after the rotation that its EXIF states.

    Only the header is read. A caller with another `salt` cannot learn that the file was read
    before. Raises BadRequest for a file that is not decoded, Overloaded, and Unavailable.
    """
    value = _read(sandbox, {"kind": "measure"}, data, place, salt)
    # The answer isn't trusted: an attacker may control the process.
    match value:
        case [int(width), int(height)] if refuse_size(width, height) is None:
            return width, height
    raise _unreadable(place, INVALID)


def decode(
    sandbox: Sandbox,
    data: bytes,
    width: int,
    height: int,
    resample: str,  # a filter of Pillow's in lower case
    place: str,
    salt: str = "",
) -> NDArray[np.uint8]:
    """Return an image's pixels at a size, (height, width, 3), over white and read-only.

    Raises the errors of `measure`.
    """
    nbytes = width * height * 3
    size = {"width": width, "height": height, "resample": resample}
    request = {"kind": "decode", **size, "answer_bytes": nbytes}
    value = _read(sandbox, request, data, place, salt)
    if not isinstance(value, bytes) or len(value) != nbytes:
        raise _unreadable(place, INVALID)
    return np.frombuffer(value, np.uint8).reshape(height, width, 3)


def _read(sandbox: Sandbox, request: dict[str, Any], data: bytes, place: str, salt: str) -> Any:
    # The key may be logged, and a plain hash would identify a known image.
    key = hashlib.blake2b(salt.encode() + b"\0" + data, digest_size=32, key=_KEY).digest()
    outcome, value = sandbox({**request, "data": data, "max_bytes": MOST_BYTES}, key)
    if outcome in ("measured", "decoded"):
        return value
    if outcome == "busy":
        raise Overloaded("Other images are being decoded; ask again.", retry_after_s=BUSY_S)
    if outcome in ("killed", "slow"):
        raise Unavailable(f"The image '{place}' was not decoded: {value}.", retry_after_s=BUSY_S)
    raise _unreadable(place, str(value))


def _unreadable(place: str, why: str) -> BadRequest:
    return BadRequest(f"Invalid '{place}': the image could not be read: {why[:500]}.", param=place)
