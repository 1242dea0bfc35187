"""Flags, environment and .env → Settings, or one line for each value that cannot be.

The only place that reads the environment.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from dotenv import dotenv_values
from pydantic import ValidationError

from gateway.settings.fields import PREFIX, Settings

ENV_FILE = Path(".env")
Origin = Literal["default", ".env", "environment", "flag"]


class SettingsInvalid(Exception):
    """Settings that cannot be: one line per wrong variable or flag."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def load_settings(
    flags: Mapping[str, object] | None = None, env_file: Path | None = ENV_FILE
) -> Settings:
    """Read flags, environment and .env, in that order; a flag that is None was not given.

    Raises SettingsInvalid with one line per problem.
    """
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    try:
        return Settings(_env_file=env_file, **given)  # type: ignore[call-arg, arg-type]
    except ValidationError as error:
        raise SettingsInvalid(_lines(error, given, env_file)) from None
    except UnicodeDecodeError:
        raise SettingsInvalid([f"{env_file}: not UTF-8 text"]) from None


def variables(env_file: Path | None = ENV_FILE) -> dict[str, str]:
    """Give .env and over it the process environment: what models.yaml may ask for.

    As for settings, a variable that is empty in the environment doesn't hide one in .env.
    """
    filled = {name: value for name, value in os.environ.items() if value}
    return {**os.environ, **_dotenv(env_file), **filled}


def _dotenv(env_file: Path | None) -> dict[str, str]:
    if env_file is None or not env_file.is_file():
        return {}
    values = dotenv_values(env_file, encoding="utf-8")
    return {name: value for name, value in values.items() if value is not None}


def _lines(error: ValidationError, given: Mapping[str, Any], env_file: Path | None) -> list[str]:
    """Say of each wrong value which variable or flag it came from, and its bound."""
    lines = []
    for details in error.errors(include_url=False):
        name = str(details["loc"][0]) if details["loc"] else ""
        said = details["msg"].removeprefix("Input ").removeprefix("Value error, ")
        if not name:
            lines.append(said)
            continue
        field = Settings.model_fields[name]
        text, source = provenance(name, given, env_file)
        shown = "…" if "SecretStr" in str(field.annotation) else text
        where = " (.env)" if source == ".env" else ""
        called = f"--{name} {shown}" if source == "flag" else f"{PREFIX}{name.upper()}={shown}"
        lines.append(f"{called}{where}: {said}")
    return lines


def provenance(
    name: str, given: Mapping[str, Any], env_file: Path | None
) -> tuple[str | None, Origin]:
    """Find what a field was set to, and by whom; None for the text of a default."""
    if name in given:
        return str(given[name]), "flag"
    return origin(f"{PREFIX}{name.upper()}", env_file)


def origin(variable: str, env_file: Path | None = ENV_FILE) -> tuple[str | None, Origin]:
    """Find a variable's text and whether the environment or .env gave it; empty is unset."""
    places: tuple[tuple[Mapping[str, str], Origin], ...] = (
        (os.environ, "environment"),
        (_dotenv(env_file), ".env"),
    )
    for values, place in places:
        for key, value in values.items():
            if key.casefold() == variable.casefold() and value:
                return value, place
    return None, "default"
