"""The key that opens /admin of a gateway on loopback to its user's commands, such as `stop`.

It is in a file, named after the gateway's address, in a folder that only the user can access. The
file of a process that was killed stays behind, and its key opens nothing.
"""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from gateway import logs
from gateway.cli import lazy
from gateway.settings import Settings, is_local

log = logs.get("serve")


def make_key(settings: Settings) -> str | None:
    """Return a new key; None if GATEWAY_ADMIN_KEY is set or others can reach the gateway."""
    is_needed = settings.admin_key is None and all(map(is_local, settings.binds))
    return secrets.token_urlsafe() if is_needed else None


@contextlib.contextmanager
def keep_key(key: str | None, host: str, port: int | None) -> Iterator[None]:
    """Keep a key in the file of an address, until exit. Without such a folder, keep none."""
    if key is None or port is None:
        yield
        return
    file = None
    try:
        file = _private_folder() / f"{host}_{port}"
        with lazy.replacing(file, ".key-") as writing:
            writing.write(key.encode())
    except OSError as error:
        log.info("no_local_key", reason=str(error))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if file is not None and file.read_text() == key:  # not a later gateway's
                file.unlink()


def read_key(url: str) -> str | None:
    """Return the key of the gateway at a URL; None if this user has none."""
    address = urlsplit(url)
    with contextlib.suppress(OSError, ValueError):
        return (_private_folder() / f"{address.hostname}_{address.port}").read_text()
    return None


def _private_folder() -> Path:
    """Return the folder of keys, which only this user can access. Raises OSError."""
    folder = lazy.cache_folder(os.environ, "keys")
    with lazy.open_folder(folder):  # raises if the folder is a link, or others may access it
        return Path(str(folder))
