"""Random ids. Those of what is kept for clients to go on from name the process that keeps it."""

import secrets
from typing import Final

NAME_CHARS: Final = 8
# Of this process, since what it keeps is gone with it. A router finds the process by it.
OWN_NAME: Final = secrets.token_hex(NAME_CHARS // 2)


def new_id(prefix: str, nbytes: int) -> str:
    """Return an id of so many bytes as hexadecimal digits, the first of which are the name."""
    return f"{prefix}_{OWN_NAME}{secrets.token_hex(nbytes - NAME_CHARS // 2)}"


def passing_id(prefix: str) -> str:
    """Return an id of something that is not kept."""
    return f"{prefix}-{secrets.token_hex(12)}"
