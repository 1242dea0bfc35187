"""`mlx-gateway config`: every setting and variable in force, and where it came from."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from gateway.cli._table import show
from gateway.registry import Reading, read_models
from gateway.settings import VARIABLES, explain, load_settings, origin, strays, variables

_SECRET = frozenset({"KEY", "TOKEN", "SECRET", "PASSWORD"})
"""Words of a variable's name that hide its value; `token_ids` is a key of models, and no secret."""


def config(
    models: Annotated[Path | None, typer.Option(help="The file of models.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 picks one.")] = None,
) -> None:
    """Print every setting with its value and source: default, .env, environment or flag."""
    flags = {"models": models, "host": host, "port": port}
    settings = load_settings(flags)
    rows = [(knob.env, knob.value, knob.source) for knob in explain(settings, flags)]
    reading = read_models(settings.models, variables())
    show(("Setting", "Value", "Source"), [*rows, *_of_models(reading)])
    for note in strays(reading.variables):
        print(f"note: {note}", file=sys.stderr)


def _of_models(reading: Reading) -> Iterator[tuple[str, str, str]]:
    """Yield the variables of models.yaml that are set: those of models' keys, and any ${…}."""
    for name in sorted(reading.variables & variables().keys() - VARIABLES):
        value, source = origin(name)
        if value is not None:
            words = name.upper().removesuffix("_TOKEN_IDS").split("_")
            is_secret = not _SECRET.isdisjoint(words)
            yield name, "**********" if is_secret else value, source
