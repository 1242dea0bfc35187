"""`mlx-gateway launch`: sets a tool up for this gateway and runs it; `connect` prints the setup."""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Annotated, TypeAlias

import typer

from gateway.app.named import load_served, parse_name
from gateway.cli.agents import NO_KEY, TOOLS, NoModel, Service, Tool, choose
from gateway.cli.gateways import (
    NoGateway,
    address,
    catalog_offers,
    find,
    first_key,
    kept_tokens,
    list_offers,
    reached,
)
from gateway.cli.serve import key_in_shell
from gateway.cli.terminal import ModelsFile, fail
from gateway.registry import read_short_names, source_id
from gateway.settings import Settings, load_settings, origin, variable

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# The terminal sends Ctrl-C and Ctrl-\ to the tool as well as to this process.
FROM_KEYS = (signal.SIGINT, signal.SIGQUIT)

ToolName: TypeAlias = Annotated[str, typer.Argument(help=f"One of {', '.join(TOOLS)}.")]
Model: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="The chat model, by any name that `serve` takes.", show_default="the first that suits"
    ),
]
SmallModel: TypeAlias = Annotated[
    str | None,
    typer.Option(help="A model for titles and other small jobs.", show_default="the same"),
]


def launch(
    tool: ToolName,
    arguments: Annotated[
        list[str] | None, typer.Argument(help="The tool's own arguments, after `--`.")
    ] = None,
    model: Model = None,
    small_model: SmallModel = None,
    models: ModelsFile = None,
) -> None:
    """Run a tool, such as claude, on the gateway that is running, or on a new one.

    A new gateway is stopped when the tool ends. The exit status is the tool's.
    """
    chosen, settings = _read_tool(tool), load_settings({"models": models})
    program = shutil.which(chosen.command)
    if program is None:
        asked = f" --model {shlex.quote(model)}" if model else ""
        commands = f"  {chosen.install}\n  mlx-gateway launch {chosen.command}{asked}"
        fail(f"{chosen.command} is not installed. Run:\n{commands}")
    signals = Signals()
    with signals.handled():
        try:
            url, settings, model = _find_gateway(settings, model)
            service = _choose_models(url, settings, chosen, model, small_model)
            with reached(url, settings, signals.deferred) as ready:
                command = (program, *(arguments or ()))
                status = _run(chosen, command, replace(service, url=ready), settings, signals)
        except (NoGateway, NoModel) as error:
            fail(error)
    raise SystemExit(status)


def connect(
    tool: ToolName,
    model: Model = None,
    small_model: SmallModel = None,
    models: ModelsFile = None,
    show_key: Annotated[
        bool,
        typer.Option("--show-key", help="Print the key itself, not the variable that holds it."),
    ] = False,
) -> None:
    """Print the shell commands that make a tool use this gateway.

    To run them: eval "$(mlx-gateway connect claude)"
    """
    chosen, settings = _read_tool(tool), load_settings({"models": models})
    try:
        url, settings, model = _find_gateway(settings, model)
        service = _choose_models(url, settings, chosen, model, small_model)
    except (NoGateway, NoModel) as error:
        fail(error)
    if not service.url:
        fail("The gateway's port is not known: set GATEWAY_PORT.")
    key = _shown_key(settings, is_shown=show_key)
    for line in chosen.shell_lines(chosen.set_up(service), key):
        print(line)


def _read_tool(name: str) -> Tool:
    if name not in TOOLS:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(TOOLS)}", param_hint="TOOL")
    return TOOLS[name]


def _find_gateway(settings: Settings, model: str | None) -> tuple[str | None, Settings, str | None]:
    """Return the running gateway's URL, the settings, and the model's id or alias.

    The URL is None if no gateway runs. The settings make a new gateway serve the model too.
    """
    url = find(settings)
    if model is None:
        return url, settings, model
    try:
        source = parse_name(model)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--model") from None
    has_files = source is not None or model in read_short_names()
    if url is None and has_files and model not in load_served(settings).names():
        settings = settings.model_copy(update={"serve": (*settings.serve, model)})
    return url, settings, model if source is None else source_id(source)


def _choose_models(
    url: str | None, settings: Settings, tool: Tool, model: str | None, small_model: str | None
) -> Service:
    catalog = load_served(settings)
    if url is None:
        offers = catalog_offers(catalog, settings)
    else:
        offers = list_offers(url, settings, catalog)
    file = settings.models if "models" in settings.model_fields_set else None
    large = choose(offers, model, tool, file, known=() if url is None else read_short_names())
    kept = kept_tokens(large.id, catalog, settings) if tool.least_context else None
    if kept is not None and large.context is not None and kept < large.context:
        message = f"{large.name} caches about {kept:,} tokens of a prompt of {large.context:,}"
        print(f"{message}; each request processes the rest again.", file=sys.stderr)
    small = large if small_model is None else choose(offers, small_model, tool, file)
    about = (large.name, small.name, large.context)
    return Service(url or address(settings) or "", *about, modalities=large.modalities)


def _shown_key(settings: Settings, *, is_shown: bool) -> str:
    key, name = first_key(settings), variable("api_keys")
    if key is None or is_shown:
        return shlex.quote(key or NO_KEY)
    if origin(name)[1] != "environment":
        message = f"# {name} is in .env: export it, or print the key with --show-key."
        print(message, file=sys.stderr)
    return f'"{key_in_shell(settings)}"'


class Signals:
    """Handles signals: passes them on to the tool or, before it runs, ends this process."""

    def __init__(self) -> None:
        self.tool: subprocess.Popen[bytes] | None = None
        self._has_ended = False
        self._early: list[int] | None = None  # signals to handle later; None: none are deferred

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Handle signals inside the context, except those that this process ignored before."""
        before = {number: signal.getsignal(number) for number in SIGNALS}
        handled = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
        for number in handled:
            signal.signal(number, self._handle)
        try:
            yield
        finally:
            for number in handled:
                signal.signal(number, before[number])

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Handle signals only at the end of the context, not inside it."""
        self._early = []
        try:
            yield
        finally:
            early, self._early = self._early, None
            for number in early:
                self._handle(number, None)

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        with self.deferred():
            self.tool = subprocess.Popen(command, env=environment)
        return self.tool.wait()

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self._early is not None:
            self._early.append(number)
        elif self.tool is not None:
            # The terminal has already sent the signal of a key to the tool.
            if not (number in FROM_KEYS and _is_in_foreground()):
                self.tool.send_signal(number)  # no effect once the tool has ended
        elif not self._has_ended:
            self._has_ended = True
            raise SystemExit(128 + number)


def _is_in_foreground() -> bool:
    """Return True if the terminal's Ctrl-C is sent to this process."""
    try:
        with open("/dev/tty", "rb", buffering=0) as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def _run(
    tool: Tool, command: Sequence[str], service: Service, settings: Settings, signals: Signals
) -> int:
    with contextlib.ExitStack() as stack:
        with signals.deferred():
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mlx-gateway-"))
        setup = tool.set_up(replace(service, folder=folder))
        for name, text in setup.files.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        environment = tool.environment(setup, first_key(settings), os.environ)
        status = signals.start([command[0], *setup.arguments, *command[1:]], environment)
    return 128 - status if status < 0 else status  # -2: signal 2 ended the tool
