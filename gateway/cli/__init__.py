"""The command line: one file per command, with a function of the same name.

serve         the gateway itself, until it is stopped
check         validates the settings and models.yaml
config        every setting in force, and its source
models        what models.yaml offers, and what of it is on disk
pull          downloads models
schema        the JSON Schema of models.yaml
doctor        checks the machine or, with --engine, the models
bench         measures a server
launch        runs a tool, Claude Code for instance, on a gateway
connect       prints what makes a tool use a gateway
_checks       doctor's checks, one function each
_probe        a process for doctor's facts that need mlx
_greeting     what a terminal shows once the gateway is ready
_tools        the tools of launch and connect, and what each needs
_gateways     finds the gateway for them, or starts one
_options      options that several commands have
_table        a table on a terminal, tab-separated lines elsewhere

Commands import what they need when they run: only `serve` and `doctor --engine` import mlx. Exit
status: 1 for what cannot be served, downloaded or answered, 2 for wrong usage or settings.
"""

import contextlib
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pkgutil import iter_modules
from typing import Annotated

import typer

from gateway import __version__
from gateway.cli._options import Command, Group
from gateway.errors import BlasUnusable, RegistryInvalid
from gateway.settings import SettingsInvalid, origin, variable


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; a wrong setting or file ends it with a message instead of a traceback."""
    try:
        _share_blas()
        _application()(args=arguments, prog_name="mlx-gateway")
    except (SettingsInvalid, BlasUnusable) as error:
        _quit(error, 2)
    except RegistryInvalid as error:
        _quit(error, 1)


def _share_blas() -> None:
    """Copy GATEWAY_BLAS from .env to the environment, for it is needed before settings are read.

    Processes that commands start inherit it.
    """
    name = variable("blas")
    with contextlib.suppress(UnicodeDecodeError):  # reported when the settings are read
        text, _ = origin(name)
        if text is not None:
            os.environ[name] = text


def _application() -> typer.Typer:
    app = typer.Typer(
        help="The OpenAI-compatible gateway for MLX models.",
        cls=Group,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    names = (module.name for module in iter_modules(__path__) if not module.name.startswith("_"))
    for name in sorted(names, key=lambda name: (name != "serve", name)):
        command = getattr(import_module(f"{__name__}.{name}"), name)
        app.command(name, cls=Command)(command)

    @app.callback()
    def _root(
        _: Annotated[
            bool,
            typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
        ] = False,
    ) -> None:
        """Serve MLX models to OpenAI's clients."""

    return app


def _version(is_asked: bool) -> None:
    if is_asked:
        try:
            installed = version("mlx-gateway")
        except PackageNotFoundError:  # run from a checkout
            installed = __version__
        print(f"mlx-gateway {installed}")
        raise typer.Exit


def _quit(error: Exception, status: int) -> None:
    print(error, file=sys.stderr)
    raise SystemExit(status)
