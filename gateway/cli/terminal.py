"""Options that several commands share, and output: tables and messages."""

import contextlib
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeAlias

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from gateway import logs
from gateway.app.named import load_served
from gateway.cli import lazy
from gateway.registry import read_short_names
from gateway.settings import load_settings

ModelsFile: TypeAlias = Annotated[
    Path | None,
    typer.Option("--models", help="The models file (GATEWAY_MODELS)."),
]


def complete_model(context: typer.Context, incomplete: str) -> list[str]:
    """Return the names of models.yaml and the catalogue that begin like this, for a shell.

    `run` is offered chat models alone.
    """
    kinds = {name: entry["kind"] for name, entry in read_short_names().items()}
    with contextlib.suppress(Exception):  # a shell has no place for messages
        kinds |= {model.name: model.spec.kind for model in load_served(load_settings({}))}
    wanted = ("chat",) if context.info_name == "run" else kinds.values()
    return sorted(name for name in kinds if name.startswith(incomplete) and kinds[name] in wanted)


ModelName: TypeAlias = Annotated[
    str,
    typer.Argument(
        help="The model's id, an alias, or any name that `serve` takes.",
        autocompletion=complete_model,
    ),
]
GatewayPort: TypeAlias = Annotated[
    int | None, typer.Option("--port", min=1, help="Port of the running gateway (GATEWAY_PORT).")
]
Names: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(
        help="Models to serve by name: hub:org/name, a folder, a GGUF file, or ids "
        "(GATEWAY_SERVE). Without --models, only these are served.",
        autocompletion=complete_model,
    ),
]
Discover: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--discover",
        help="Serve models in Hugging Face's cache and LM Studio's folder (GATEWAY_DISCOVER).",
    ),
]
Host: TypeAlias = Annotated[
    str | None, typer.Option("--host", help="Address to listen on (GATEWAY_HOST).")
]
Port: TypeAlias = Annotated[
    int | None, typer.Option("--port", help="Port to listen on (GATEWAY_PORT); 0 picks one.")
]


def flags_of(
    models: Path | None, names: list[str] | None, *, discover: bool, **others: object
) -> dict[str, object]:
    places = ("huggingface", "lmstudio") if discover else None
    return {"models": models, "serve": names or None, "discover": places, **others}


class Command(TyperCommand):
    """A command whose help shows `--json`, not `--json <bool>`."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


class Group(TyperGroup):
    """A group of commands, whose flags are shown without a type."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


class Listing(Group):
    """A group that takes models' names as arguments, unless the first argument is a subcommand."""

    _takes_names = True

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        self._takes_names = not args or args[0] not in self.commands
        ctx.allow_interspersed_args = self._takes_names  # options may follow names
        return super().parse_args(ctx, args)

    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)
        return [param for param in params if self._takes_names or isinstance(param, TyperOption)]


def _without_types(params: list[Any]) -> list[Any]:
    for param in params:
        if isinstance(param, TyperOption) and param.is_flag:
            param.metavar = ""
    return params


def show(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table on a terminal, or else tab-separated lines without a heading."""
    rows = [[logs.one_line(cell) for cell in row] for row in rows]  # others wrote some
    if not sys.stdout.isatty():
        for row in rows:
            print("\t".join(row))
        return
    headers = [lazy.Column(name, overflow="fold") for name in columns]
    table = lazy.Table(*headers, box=lazy.SIMPLE_HEAD)
    for row in rows:
        table.add_row(*row)
    lazy.Console(markup=False, emoji=False, highlight=False).print(table)


def fail(error: object, status: int = 1) -> NoReturn:
    print(*map(logs.one_line, str(error).split("\n")), sep="\n", file=sys.stderr)
    raise SystemExit(status)
