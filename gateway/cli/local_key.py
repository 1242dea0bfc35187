"""The key that opens /admin of a gateway on loopback to its user's commands, such as `stop`.

It is in a file, named after the gateway's address, in a folder that only the user can access. The
file of a process that was killed stays behind, and its key opens nothing.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from gateway import logs
from gateway.cli import lazy
from gateway.settings import with_port

log = logs.get("serve")


@contextlib.contextmanager
def keep_key(key: str | None, host: str, port: int | None) -> Iterator[None]:
    """Keep a key in the file of an address, until exit. Without a private folder, keep none."""
    with contextlib.ExitStack() as stack:
        try:
            if key is not None and port is not None:
                file = _private_folder() / f"{host}_{port}"
                with lazy.prefix_files.replacing(file, ".key-") as writing:
                    writing.write(key.encode())
                stack.callback(_remove, file, key)
        except OSError as error:
            log.info("no_local_key", reason=str(error))
        yield


def _remove(file: Path, key: str) -> None:
    with contextlib.suppress(OSError):
        if file.read_text() == key:  # otherwise a later gateway has the address
            file.unlink()


def read_key(url: str) -> str | None:
    """Return the key of the gateway at a URL; None if this user has none."""
    address = urlsplit(url)
    with contextlib.suppress(OSError):
        return (_private_folder() / f"{address.hostname}_{address.port}").read_text()
    return None


def list_addresses() -> list[str]:
    """Return the hosts and ports of this user's gateways. Some may have been killed."""
    with contextlib.suppress(OSError):
        names = [file.name.rpartition("_") for file in _private_folder().glob("[!.]*_*")]
        return [with_port(host, int(port)) for host, _, port in names if port.isdecimal()]
    return []


def _private_folder() -> Path:
    """Return the folder of keys. Raises OSError if it is a link, or if others may access it."""
    folder = lazy.blas.cache_folder(os.environ, "keys")
    with lazy.blas.open_folder(folder):
        return Path(str(folder))
