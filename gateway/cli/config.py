"""`mlx-gateway config`: every setting as it stands, and where it came from."""

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from gateway.cli._table import show
from gateway.registry import read_models
from gateway.settings import (
    Settings,
    explain,
    load_settings,
    origin,
    strays,
    variable,
    variables,
)

_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD")


def config(
    models: Annotated[Path | None, typer.Option(help="The file of models.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 picks one.")] = None,
) -> None:
    """Print every setting with its value and source: default, .env, environment or flag."""
    flags = {"models": models, "host": host, "port": port}
    settings = load_settings(flags)
    rows = [(knob.env, knob.value, knob.source) for knob in explain(settings, flags)]
    asked = read_models(settings.models, variables()).variables
    show(("Setting", "Value", "Source"), [*rows, *_of_models(asked)])
    for note in strays(asked):
        print(f"note: {note}", file=sys.stderr)


def _of_models(asked: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """List the variables that models.yaml asks for, where they are set."""
    own = {variable(name) for name in Settings.model_fields}
    for name in sorted(set(asked) - own):
        value, source = origin(name)
        if value is not None:
            # MAX_BATCH_TOKENS is no secret: only whole words of a name count
            secret = any(_SECRET.fullmatch(word) for word in name.upper().split("_"))
            yield name, "**********" if secret else value, source
