"""The command line. Each command is a function of the same name.

serve      runs the gateway until it is stopped
run        asks a model, or talks with it on a terminal
models     commands about models.yaml and its models: check, config, init, models, pull, schema
library    commands about models here and in the running gateway: list, load, ps, show, stop
removal    the command `rm`: removes a model's files from the hub's cache
recommend  the command `models recommend`: lists the models of the catalogue that fit a machine
doctor     checks the machine or, with --engine, the models
bench      measures a server
launch     runs a tool, such as Claude Code, on a gateway; connect prints its setup
conversation  the messages, commands and pictures of `run`
answers    reads answers from a gateway, without control characters
screen     reads prompts and shows answers on a terminal
agents     the setups of the coding agents and tools that launch and connect know
gateways   finds the running gateway, or starts one for a tool; asks it about its models
local_key  the key that opens /admin of a gateway on loopback to its user's commands
progress   shows the progress of downloads and loads
terminal   options that several commands share, and tables
lazy       modules that are imported at their first use, such as mlx

The exit status is 2 for wrong usage or settings, and 1 for other failures.
"""

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from gateway import __version__
from gateway.cli import bench, doctor, launch, library, models, recommend, removal, run, serve
from gateway.cli.gateways import NoGateway
from gateway.cli.terminal import Command, Group, Listing, fail
from gateway.errors import BlasUnusable, GatewayError, RegistryInvalid
from gateway.settings import SettingsInvalid, origin, variable

# In the order of the help, by its headings.
COMMANDS: Mapping[str, Sequence[Callable[..., None]]] = {
    "Serve and ask": (serve.serve, run.run),
    "Models": (
        *(library.list_, models.pull, library.show, library.ps, library.load, library.stop),
        removal.rm,
    ),
    "Tools": (launch.launch, launch.connect),
    "Machine and settings": (
        *(doctor.doctor, bench.bench, models.check, models.config, models.init, models.schema),
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command. Invalid settings and files end it with a message, not a traceback."""
    try:
        _share_blas()
        _application()(args=arguments, prog_name="mlx-gateway")
    except (SettingsInvalid, BlasUnusable) as error:
        fail(error, 2)
    except RegistryInvalid as error:
        verb = [*(sys.argv[1:] if arguments is None else arguments), ""][0]
        typed = verb if verb in ("run", "pull", "show", "check", "models") else "serve"
        fail(str(error).replace("Run `mlx-gateway serve ", f"Run `mlx-gateway {typed} "))
    except (GatewayError, NoGateway) as error:
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
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for heading, commands in COMMANDS.items():
        for command in commands:
            name = command.__name__.rstrip("_")
            app.command(name, cls=Command, rich_help_panel=heading)(command)
    listing = typer.Typer(cls=Listing)
    listing.callback(invoke_without_command=True)(models.models)
    listing.command("recommend", cls=Command)(recommend.recommend)
    app.add_typer(listing, name="models", rich_help_panel="Models")

    @app.callback()
    def _root(
        _: Annotated[
            bool,
            typer.Option(
                "-v", "--version", callback=_version, is_eager=True, help="Print the version."
            ),
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
