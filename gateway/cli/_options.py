"""Options that several commands have, and help that shows no type of what takes no value."""

from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

ModelsFile: TypeAlias = Annotated[
    Path | None,
    typer.Option("--models", help="The models file (GATEWAY_MODELS)."),
]
Host: TypeAlias = Annotated[
    str | None, typer.Option("--host", help="Address to listen on (GATEWAY_HOST).")
]
Port: TypeAlias = Annotated[
    int | None, typer.Option("--port", help="Port to listen on (GATEWAY_PORT); 0 picks one.")
]


class Command(TyperCommand):
    """A command whose help shows `--json`, not `--json <bool>`."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return its parameters; flags have no type to show."""
        return _without_types(super().get_params(ctx))


class Group(TyperGroup):
    """The same of the command that has the others."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return its parameters; flags have no type to show."""
        return _without_types(super().get_params(ctx))


def _without_types(params: list[Any]) -> list[Any]:
    for param in params:
        if isinstance(param, TyperOption) and param.is_flag:
            param.metavar = ""
    return params
