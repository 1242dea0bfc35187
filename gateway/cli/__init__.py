"""The command line: each file here is a command, its function named after the file.

Commands import what they need when they run: only `serve` and `bench --engine` import mlx. Exit
status: 1 for what cannot be served, fetched or answered, 2 for wrong usage or settings.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from pkgutil import iter_modules

import typer

from gateway.errors import RegistryInvalid
from gateway.settings import SettingsInvalid


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; a wrong setting or file ends it with its lines on stderr, no traceback."""
    try:
        _application()(args=arguments, prog_name="mlx-gateway")
    except SettingsInvalid as error:
        _quit(error, 2)
    except RegistryInvalid as error:
        _quit(error, 1)


def _application() -> typer.Typer:
    app = typer.Typer(
        help="The OpenAI-compatible gateway for MLX models.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    names = (each.name for each in iter_modules(__path__) if not each.name.startswith("_"))
    for name in sorted(names, key=lambda name: (name != "serve", name)):
        command = getattr(import_module(f"{__name__}.{name}"), name)
        app.command(name)(command)

    @app.callback()
    def _root() -> None:
        """Keep commands named, however few there are."""

    return app


def _quit(error: Exception, status: int) -> None:
    print(error, file=sys.stderr)
    raise SystemExit(status)
