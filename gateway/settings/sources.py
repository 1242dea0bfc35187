"""Finds the settings' values in flags, the environment and .env, and describes them."""

import difflib
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dotenv import dotenv_values
from pydantic import ValidationError

from gateway.settings.settings import PREFIX, Settings, variable

ENV_FILE = Path(".env")
Origin = Literal["default", ".env", "environment", "flag"]


class SettingsInvalid(Exception):
    """Wrong settings, with one line for each variable or flag."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def load_settings(
    flags: Mapping[str, object] | None = None, env_file: Path | None = ENV_FILE
) -> Settings:
    """Return the settings; flags win over the environment, which wins over .env.

    Raises SettingsInvalid with one line per problem.
    """
    set_flags = {name: value for name, value in (flags or {}).items() if value is not None}
    try:
        return Settings(_env_file=env_file, **set_flags)  # type: ignore[call-arg, arg-type]
    except ValidationError as error:
        raise SettingsInvalid(_lines(error, set_flags, env_file)) from None
    except UnicodeDecodeError:
        raise SettingsInvalid([f"{env_file}: not UTF-8 text"]) from None


def variables(env_file: Path | None = ENV_FILE) -> dict[str, str]:
    """Return all variables; the environment wins over .env unless its value is empty."""
    filled = {name: value for name, value in os.environ.items() if value}
    return {**os.environ, **_dotenv(env_file), **filled}


def exports_traces() -> bool:
    """Return True if OpenTelemetry's own variables name a destination for traces."""
    # OpenTelemetry reads its variables only from the environment, not from .env.
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if os.environ.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return False
    names = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    return any(os.environ.get(name) for name in names)


def _dotenv(env_file: Path | None) -> dict[str, str]:
    if env_file is None or not env_file.is_file():
        return {}
    values = dotenv_values(env_file, encoding="utf-8")
    return {name: value for name, value in values.items() if value is not None}


def _lines(error: ValidationError, given: Mapping[str, Any], env_file: Path | None) -> list[str]:
    lines = []
    for details in error.errors(include_url=False):
        message = details["msg"].removeprefix("Input ").removeprefix("Value error, ")
        if not details["loc"]:
            lines.append(message)
            continue
        name = str(details["loc"][0])
        text, source = find_source(name, given, env_file)
        if "SecretStr" in str(Settings.model_fields[name].annotation):
            text = "…"
        match source:
            case "flag":
                lines.append(f"--{name} {text}: {message}")
            case ".env":
                lines.append(f"{variable(name)}={text} (.env): {message}")
            case _:
                lines.append(f"{variable(name)}={text}: {message}")
    return lines


def find_source(
    name: str, given: Mapping[str, Any], env_file: Path | None
) -> tuple[str | None, Origin]:
    """Return a setting's text and origin; the text is None for a default."""
    if name in given:
        return str(given[name]), "flag"
    return origin(variable(name), env_file)


def origin(name: str, env_file: Path | None = ENV_FILE) -> tuple[str | None, Origin]:
    """Return a variable's text and origin; an empty variable counts as not set."""
    places: tuple[tuple[Mapping[str, str], Origin], ...] = (
        (os.environ, "environment"),
        (_dotenv(env_file), ".env"),
    )
    for values, place in places:
        for key, value in values.items():
            if key.casefold() == name.casefold() and value:
                return value, place
    return None, "default"


# The user and password of a URL.
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")


@dataclass(frozen=True, slots=True)
class Knob:
    """A setting to show, with secrets masked."""

    name: str
    env: str
    value: str
    source: Origin


def explain(
    settings: Settings, flags: Mapping[str, object] | None = None, env_file: Path | None = ENV_FILE
) -> list[Knob]:
    """List every setting; `flags` and `env_file` are those given to `load_settings`."""
    set_flags = {name: value for name, value in (flags or {}).items() if value is not None}
    dumped = settings.model_dump(mode="json")
    return [
        Knob(
            name,
            variable(name),
            _CREDENTIALS.sub("**********@", in_words(value)),
            find_source(name, set_flags, env_file)[1],
        )
        for name, value in dumped.items()
    ]


VARIABLES = frozenset(
    {variable(name) for name in Settings.model_fields}
    | {"GATEWAY_BENCH_API_KEY"}  # read by `bench` alone
)


def strays(known: Collection[str] = (), env_file: Path | None = ENV_FILE) -> list[str]:
    """Return a line for each GATEWAY_ variable that is no setting and not in `known`."""
    valid = VARIABLES | set(known)
    lines = []
    for name in sorted(variables(env_file)):
        if name.startswith(PREFIX) and name not in valid:
            near = _nearest(name, valid)
            hint = f"; did you mean {near}?" if near else ""
            lines.append(f"{name} is set, and nothing reads it{hint}")
    return lines


def _nearest(name: str, valid: Collection[str]) -> str | None:
    """Return the valid name that is probably meant, such as the name without a typo."""
    typos = difflib.get_close_matches(name, valid, n=1, cutoff=0.95)
    if typos:
        return typos[0]
    gaps = [place for place, letter in enumerate(name) if letter == "_"]
    longer = [
        valid_name
        for valid_name in valid
        if any(
            valid_name.startswith(name[: gap + 1]) and valid_name.endswith(name[gap:])
            for gap in gaps
        )
    ]
    if longer:
        return min(longer, key=lambda valid_name: (len(valid_name), valid_name))
    alike = difflib.get_close_matches(name, valid, n=1, cutoff=0.75)
    return alike[0] if alike else None


def in_words(value: object) -> str:
    match value:
        case None:
            return ""
        case bool():
            return str(value).lower()
        case list() | tuple():
            return ",".join(in_words(item) for item in value)
        case float():
            return f"{value:g}"
        case _:
            return str(value)
