"""How a variable's text becomes a list, a path, a secret or a word."""

import os
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, SecretStr
from pydantic_settings import NoDecode


def _split(value: object) -> object:
    """Read `a, b` as a list, without empty parts."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


def lower(value: object) -> object:
    """Let words be written in capitals."""
    return value.lower() if isinstance(value, str) else value


def library(value: str) -> str:
    """Read a word in capitals too; a path leads to a file."""
    value = value.strip()
    if value.lower() in ("wheel", "system"):
        return value.lower()
    if not os.path.isfile(os.path.expanduser(value)):
        raise ValueError("should be wheel, system, or the path of a library that is there")
    return value


def _home(path: Path) -> Path:
    """Put `~` in, which no shell does for .env; an unknown user's stays as written."""
    return Path(os.path.expanduser(path))


HomePath = Annotated[Path, AfterValidator(_home)]
Texts = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
Secrets = Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(_split)]
