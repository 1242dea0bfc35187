"""Settings as lists: what each knob is set to and by whom, and the table of docs/settings.md."""

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.settings.fields import PREFIX, Settings
from gateway.settings.reading import ENV_FILE, Origin, provenance, variables


@dataclass(frozen=True, slots=True)
class Knob:
    """One setting as it stands; a secret's value is masked."""

    name: str
    env: str
    value: str
    source: Origin


def explain(
    settings: Settings, flags: Mapping[str, object] | None = None, env_file: Path | None = ENV_FILE
) -> list[Knob]:
    """List every knob with its value and where that came from.

    `flags` and `env_file` are those the settings were loaded with.
    """
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    dumped = settings.model_dump(mode="json")
    return [
        Knob(name, variable(name), _text(value), provenance(name, given, env_file)[1])
        for name, value in dumped.items()
    ]


def variable(name: str) -> str:
    """Name the environment variable of a field."""
    return f"{PREFIX}{name.upper()}"


VARIABLES = frozenset(
    {variable(name) for name in Settings.model_fields}
    | {"GATEWAY_BENCH_API_KEY"}  # read by a command of its own
)
"""The variables of all settings."""


def strays(known: Collection[str] = (), env_file: Path | None = ENV_FILE) -> list[str]:
    """List GATEWAY_ variables without effect, and the nearest name that has one for those unknown.

    `known` are those of models.yaml.
    """
    valid = VARIABLES | set(known)
    lines = []
    given = variables(env_file)
    for field, schema in Settings.model_json_schema()["properties"].items():
        text = given.get(variable(field))
        if schema.get("deprecated") and text and text.lower() != schema["default"]:
            lines.append(f"{variable(field)}={text}: {schema['description']}")
    for name in sorted(given):
        if name.startswith(PREFIX) and name not in valid:
            near = _nearest(name, valid)
            hint = f"; did you mean {near}?" if near else ""
            lines.append(f"{name} is set, and nothing reads it{hint}")
    return lines


def _nearest(name: str, valid: Collection[str]) -> str | None:
    """Find the name that has words more than this one, or else the most alike."""
    gaps = [place for place, letter in enumerate(name) if letter == "_"]
    longer = [
        each
        for each in valid
        if any(each.startswith(name[: gap + 1]) and each.endswith(name[gap:]) for gap in gaps)
    ]
    alike = difflib.get_close_matches(name, valid, n=1, cutoff=0.75)
    return min(longer, key=lambda each: (len(each), each)) if longer else next(iter(alike), None)


def environment_table() -> str:
    """Render every variable as the Markdown table of docs/settings.md."""
    properties: dict[str, dict[str, Any]] = Settings.model_json_schema()["properties"]
    lines = ["| Variable | Type | Default | What it does |", "| --- | --- | --- | --- |"]
    for name, schema in properties.items():
        cells = (f"`{variable(name)}`", _type(schema), _default(schema), schema["description"])
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _type(schema: Mapping[str, Any]) -> str:
    options = [each for each in schema.get("anyOf", [schema]) if each.get("type") != "null"]
    one: Mapping[str, Any] = options[0]
    if "enum" in one:
        return ", ".join(f"`{each}`" for each in one["enum"])
    if one["type"] == "array":
        return "list, with commas" if one["items"].get("format") != "password" else "secrets"
    if one.get("format") in ("path", "file-path"):
        return "path"
    names = {"integer": "integer", "number": "number", "boolean": "boolean", "string": "text"}
    return names[one["type"]] + _bounds(one)


def _bounds(schema: Mapping[str, Any]) -> str:
    low, above, high = (schema.get(key) for key in ("minimum", "exclusiveMinimum", "maximum"))
    parts = [
        f"≥ {low:,}" if low is not None else "",
        f"> {above:,}" if above is not None else "",
        f"≤ {high:,}" if high is not None else "",
    ]
    said = ", ".join(part for part in parts if part)
    return f" {said}" if said else ""


def _default(schema: Mapping[str, Any]) -> str:
    if "default_text" in schema:
        return str(schema["default_text"])
    text = _text(schema.get("default"))
    return f"`{text}`" if text else ""


def _text(value: object) -> str:
    """Write a value as one would in the environment."""
    match value:
        case None:
            return ""
        case bool():
            return "true" if value else "false"
        case list() | tuple():
            return ",".join(_text(each) for each in value)
        case float():
            return f"{value:g}"
        case _:
            return str(value)
