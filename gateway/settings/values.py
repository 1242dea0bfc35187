"""What a variable's text may be: a list, a path, a word, or an address to listen on."""

import ipaddress
import os
import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, SecretStr
from pydantic_settings import NoDecode


def is_local(bind: str) -> bool:
    """Return True if a Hypercorn bind can be reached from this machine only."""
    if bind.startswith("unix:"):
        return True
    host = with_port(bind, 0).rpartition(":")[0].removeprefix("[").removesuffix("]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name or an inherited socket may lead anywhere


def is_socket(bind: str) -> bool:
    """Return True if a bind is a socket rather than a host and port."""
    return bind.startswith(("unix:", "fd://"))


def with_port(bind: str, port: int) -> str:
    """Add the port to `host`, `::1` and `[::1]`; return sockets and what has a port unchanged."""
    if is_socket(bind) or (bind.startswith("[") and "]:" in bind) or bind.count(":") == 1:
        return bind
    host = bind.removeprefix("[").removesuffix("]")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _split(value: object) -> object:
    """Read `a, b` as a list, without empty parts."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


_ORIGIN = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<host>\*|(\*\.)?[^*/:@?#\s\[\]]+|\[[0-9a-f:]+\])(:(?P<port>\d+|\*))?"
)
_USUAL_PORTS = {"http": "80", "https": "443"}  # which browsers leave out


def _read_origin(value: str) -> str:
    """Read an origin, in which a `*` is any port, any host, or any names before a domain."""
    if value in ("*", "null"):
        return value
    match = _ORIGIN.fullmatch(value.lower())
    if match is None:
        raise ValueError(
            f"{value!r} matches no origin: those are `scheme://host` or `scheme://host:port`, of "
            "which the port, the host, or what is before a domain may be `*`"
        )
    if match["port"] is not None and match["port"] == _USUAL_PORTS.get(match["scheme"]):
        raise ValueError(f"{value!r} matches no origin: browsers leave out :{match['port']} there")
    return value.lower()


def lower(value: object) -> object:
    """Accept words in capitals."""
    return value.lower() if isinstance(value, str) else value


def library(value: str) -> str:
    """Read `wheel`, `system`, or the path of a library that exists."""
    value = value.strip()
    if value.lower() in ("wheel", "system"):
        return value.lower()
    if not os.path.isfile(os.path.expanduser(value)):
        raise ValueError("should be wheel, system, or the path of a library that is there")
    return value


def _expand_home(path: Path) -> Path:
    """Expand `~`, which no shell does in .env; an unknown user's stays as written."""
    return Path(os.path.expanduser(path))


HomePath = Annotated[Path, AfterValidator(_expand_home)]
Texts = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
Origins = Annotated[
    tuple[Annotated[str, AfterValidator(_read_origin)], ...], NoDecode, BeforeValidator(_split)
]
Secrets = Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(_split)]
