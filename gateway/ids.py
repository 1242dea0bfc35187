"""Random ids. The ids of objects kept for clients name the process that keeps them."""

import secrets
from typing import Final

NAME_CHARS: Final = 8
# The name of this process. A router finds the process by it; kept objects end with the process.
OWN_NAME: Final = secrets.token_hex(NAME_CHARS // 2)


def new_id(prefix: str, nbytes: int) -> str:
    """Return an id of `nbytes` bytes as hexadecimal digits; the first are the process's name."""
    return f"{prefix}_{OWN_NAME}{secrets.token_hex(nbytes - NAME_CHARS // 2)}"


def passing_id(prefix: str) -> str:
    """Return an id for an object that is not kept."""
    return f"{prefix}-{secrets.token_hex(12)}"
