"""Random ids of requests, answers and stored objects."""

import secrets
from typing import Final

NAME_CHARS: Final = 8
# The name of this process in ids, which tells a router where an object is stored.
OWN_NAME: Final = secrets.token_hex(NAME_CHARS // 2)


def new_id(prefix: str, nbytes: int) -> str:
    """Return `prefix_` and `nbytes` bytes in hex, which begin with OWN_NAME."""
    return f"{prefix}_{OWN_NAME}{secrets.token_hex(nbytes - NAME_CHARS // 2)}"


def passing_id(prefix: str) -> str:
    """Return an id for an object that is not stored."""
    return f"{prefix}-{secrets.token_hex(12)}"
