"""`mlx-gateway connect`: what makes a tool use this gateway, as lines for a shell."""

import shlex
import sys
from typing import Annotated

import typer

from gateway.cli._gateways import (
    NoGateway,
    address,
    catalog_offers,
    find,
    first_key,
    list_offers,
)
from gateway.cli._options import ModelsFile
from gateway.cli._tools import NO_KEY, TOOLS, NoModel, Offer, Service, Tool, choose
from gateway.registry import Catalog, load_catalog
from gateway.settings import Settings, load_settings, origin, variable, variables


def connect(
    tool: Annotated[str, typer.Argument(help=f"One of {', '.join(TOOLS)}.")],
    model: Annotated[
        str | None, typer.Option(help="The chat model.", show_default="the first that suits")
    ] = None,
    small_model: Annotated[
        str | None,
        typer.Option(help="A model for titles and other small jobs.", show_default="the same"),
    ] = None,
    models: ModelsFile = None,
    show_key: Annotated[
        bool,
        typer.Option("--show-key", help="Print the key itself, not the variable that holds it."),
    ] = False,
) -> None:
    """Print the shell commands that make a tool use this gateway.

    To run them: eval "$(mlx-gateway connect claude)"
    """
    chosen, settings = read_tool(tool), load_settings({"models": models})
    catalog = load_catalog(settings.models, variables())
    try:
        url = find(settings)
        offers = offered(url, settings, catalog)
        if url is None and (url := address(settings)) is None:
            raise NoGateway("No port is set at which a gateway would be: set GATEWAY_PORT.")
        large, small = choose_both(offers, model, small_model, chosen)
    except (NoGateway, NoModel) as error:
        print(error, file=sys.stderr)
        raise SystemExit(1) from None
    service = Service(url, large.name, small.name, large.context)
    for line in chosen.filled(service).shell_lines(_key(settings, is_shown=show_key)):
        print(line)


def read_tool(name: str) -> Tool:
    """Return the tool of this name; raises BadParameter with those there are."""
    if name not in TOOLS:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(TOOLS)}", param_hint="TOOL")
    return TOOLS[name]


def offered(url: str | None, settings: Settings, catalog: Catalog) -> list[Offer]:
    """Return what the gateway at a URL offers, or else what a new one would; raises NoGateway."""
    return catalog_offers(catalog, settings) if url is None else list_offers(url, settings, catalog)


def choose_both(
    offers: list[Offer], model: str | None, small_model: str | None, tool: Tool
) -> tuple[Offer, Offer]:
    """Return the model for a tool and the one for its small jobs; raises NoModel."""
    large = choose(offers, model, tool)
    return large, large if small_model is None else choose(offers, small_model, tool)


def _key(settings: Settings, *, is_shown: bool) -> str:
    """Return what a shell expands to the key: the variable that it is in, unless it is shown."""
    key, name = first_key(settings), variable("api_keys")
    if key is None or is_shown:
        return shlex.quote(key or NO_KEY)
    if origin(name)[1] != "environment":
        message = f"# {name} is in .env: export it, or print the key with --show-key."
        print(message, file=sys.stderr)
    return f'"${{{name}%%,*}}"' if len(settings.api_keys) > 1 else f'"${name}"'
