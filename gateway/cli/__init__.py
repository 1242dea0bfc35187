"""The command line. Each command is a function of the same name.

serve      runs the gateway until it is stopped
run        asks a model, or talks with it on a terminal
models     commands about models.yaml and its models: check, config, init, models, pull, schema
recommend  the command `models recommend`: lists the models of the catalogue that fit a machine
doctor     checks the machine or, with --engine, the models
bench      measures a server
launch     runs a tool, such as Claude Code, on a gateway; connect prints its setup
conversation  the messages, commands and pictures of `run`
answers    reads answers from a gateway, without control characters
screen     shows answers while they are written
editor     reads prompts on a terminal
agents     the setups of the coding agents and tools that launch and connect know
gateways   finds the running gateway for a tool, or starts one
terminal   options that several commands share, and tables
lazy       modules that are imported at their first use, such as mlx

The exit status is 2 for wrong usage or settings, and 1 for other failures.
"""

import contextlib
import errno
import os
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from gateway import __version__
from gateway.cli import bench, doctor, launch, models, recommend, run, serve
from gateway.cli.terminal import Command, Group, Listing, fail
from gateway.errors import BlasUnusable, GatewayError, RegistryInvalid
from gateway.settings import SettingsInvalid, origin, variable

COMMANDS: tuple[Callable[..., None], ...] = (
    run.run,
    serve.serve,
    bench.bench,
    models.check,
    models.config,
    launch.connect,
    doctor.doctor,
    models.init,
    launch.launch,
    models.pull,
    models.schema,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command. Invalid settings and files end it with a message, not a traceback."""
    try:
        _share_blas()
        _application()(args=arguments, prog_name="mlx-gateway")
    except (SettingsInvalid, BlasUnusable) as error:
        fail(error, 2)
    except (RegistryInvalid, GatewayError) as error:
        fail(error)
    except OSError as error:
        # A bad temporary folder has the errno of a missing file: only the text differs.
        if error.errno != errno.ENOSPC and "temporary directory" not in str(error):
            raise
        fail(error)


def _share_blas() -> None:
    # GATEWAY_BLAS is used before the settings are read, and by processes that commands start.
    name = variable("blas")
    with contextlib.suppress(UnicodeDecodeError):  # reading the settings reports the error
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
    for command in COMMANDS:
        app.command(command.__name__, cls=Command)(command)
    listing = typer.Typer(cls=Listing)
    listing.callback(invoke_without_command=True)(models.models)
    listing.command("recommend", cls=Command)(recommend.recommend)
    app.add_typer(listing, name="models")

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
        except PackageNotFoundError:  # the command runs from a checkout
            installed = __version__
        print(f"mlx-gateway {installed}")
        raise typer.Exit
