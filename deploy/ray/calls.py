"""A request's body → what decides who answers it. Only digests of what it says go any further."""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import orjson

from deploy.ray.choice import Call
from gateway.ids import NAME_CHARS
from gateway.wire.bounds import parse

BLOCK_BYTES: Final = 256  # some 64 tokens of English: what the engine keeps prefixes by
MOST_BLOCKS: Final = 128  # of the beginning; what is alike in 32 KB is alike enough
DIGEST_BYTES: Final = 8
TOKEN_BYTES: Final = 4
_KEPT_ID: Final = re.compile(rf"[a-z]+_([0-9a-f]{{{NAME_CHARS}}})[0-9a-f]+")
# In the order in which a chat template has them.
_CONVERSATION: Final = ("instructions", "system", "tools", "messages", "prompt", "input")


def read_call(
    path: str,
    body: bytes,
    salt: bytes,
    find_model: Callable[[str], str | None],
    cache_salt: str = "",
) -> Call:
    """Return what a request to a path, without /v1, asks for. A body that is not an object, names
    no model, or is beyond the gateway's bounds asks for nothing in particular: whoever gets it
    refuses it.

    `find_model` returns the id of a model by any of its names, or None. Of callers with another
    `cache_salt` nothing kept is of use, and its digests are others.
    """
    owner = _owner_in(path)
    try:
        request = parse(body) if body else None
    except ValueError:
        request = None
    if not isinstance(request, dict):
        return Call(owner=owner)
    name = request.get("model")
    model = find_model(name) if isinstance(name, str) else None
    tokens = max(1, len(body) // TOKEN_BYTES)
    blocks = () if model is None else digests(request, f"{model}\0{cache_salt}".encode(), salt)
    return Call(model, blocks, owner or _owner_of_parts(request), tokens)


def digests(request: Mapping[str, Any], model: bytes, salt: bytes) -> tuple[bytes, ...]:
    """Return the digests of the whole blocks that a conversation with a model begins with.

    Each is of all up to its block's end, and keyed: without the cluster's salt (up to 64 bytes)
    nobody can try texts until one fits.
    """
    text = b"".join(_beginning(request))
    found: list[bytes] = []
    last = model
    for end in range(BLOCK_BYTES, min(len(text), MOST_BLOCKS * BLOCK_BYTES) + 1, BLOCK_BYTES):
        block = last + text[end - BLOCK_BYTES : end]
        last = hashlib.blake2b(block, key=salt, digest_size=DIGEST_BYTES).digest()
        found.append(last)
    return tuple(found)


def _beginning(request: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield the conversation as JSON, piece by piece, until there is enough of it."""
    size = 0
    for field in _CONVERSATION:
        value = request.get(field)
        for each in value if isinstance(value, list) else [value]:
            if each is None:
                continue
            piece = orjson.dumps(each)
            yield piece
            size += len(piece)
            if size >= MOST_BLOCKS * BLOCK_BYTES:
                return


def _owner_in(path: str) -> str | None:
    """Return who keeps the response that a path names, /responses/ID and what is under it."""
    steps = path.split("/")
    return _owner_of(steps[2]) if steps[:2] == ["", "responses"] and len(steps) > 2 else None


def _owner_of(id_: str) -> str | None:
    """Return the name in a gateway's id; None if it has not the form of one."""
    match = _KEPT_ID.fullmatch(id_)
    return match[1] if match else None


def _owner_of_parts(request: Mapping[str, Any]) -> str | None:
    """Return who keeps what a request goes on from, or the first item it refers to."""
    if isinstance(earlier := request.get("previous_response_id"), str):
        return _owner_of(earlier)
    items = request.get("input")
    for item in items if isinstance(items, Sequence) and not isinstance(items, str) else ():
        if isinstance(item, dict) and item.get("type") == "item_reference":
            return _owner_of(item["id"]) if isinstance(item.get("id"), str) else None
    return None
