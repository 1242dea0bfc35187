"""Random ids. The ids of objects stored for clients contain the name of the storing process."""

import secrets
from typing import Final

NAME_CHARS: Final = 8
# The name of this process. A router uses it to find the process that has a stored object: objects
# are stored in the process's memory only.
OWN_NAME: Final = secrets.token_hex(NAME_CHARS // 2)


def new_id(prefix: str, nbytes: int) -> str:
    """Return `prefix_`, OWN_NAME and random hex digits: with OWN_NAME, `nbytes` bytes in hex."""
    return f"{prefix}_{OWN_NAME}{secrets.token_hex(nbytes - NAME_CHARS // 2)}"


def passing_id(prefix: str) -> str:
    """Return an id for an object that is not stored."""
    return f"{prefix}-{secrets.token_hex(12)}"
