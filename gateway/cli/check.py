"""`mlx-gateway check`: validate the settings and models.yaml; no weights are read."""

from pathlib import Path
from typing import Annotated

import typer

from gateway.errors import RegistryInvalid
from gateway.registry import read_models
from gateway.settings import load_settings, strays, variables


def check(
    models: Annotated[Path | None, typer.Option(help="The file of models.")] = None,
) -> None:
    """Report everything wrong with models.yaml: file, line and the nearest valid name."""
    settings = load_settings({"models": models})
    reading = read_models(settings.models, variables())
    for note in (*reading.notes, *strays(reading.variables)):
        print(f"note: {note}")
    if reading.problems:
        raise RegistryInvalid(list(reading.problems))
    names = len(reading.catalog.names())
    print(f"{settings.models}: {len(reading.catalog)} models by {names} names, no problems")
