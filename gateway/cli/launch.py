"""`mlx-gateway launch`: a tool, with all that makes it use this gateway."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer

from gateway.cli._gateways import NoGateway, find, first_key, started, wait_ready
from gateway.cli._options import ModelsFile
from gateway.cli._tools import TOOLS, NoModel, Service, Tool
from gateway.cli.connect import choose_both, offered, read_tool
from gateway.registry import load_catalog
from gateway.settings import Settings, load_settings, variables

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
FROM_KEYS = (signal.SIGINT, signal.SIGQUIT)  # a terminal sends them to all that run in it


def launch(
    tool: Annotated[str, typer.Argument(help=f"One of {', '.join(TOOLS)}.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="The tool's own arguments, after `--`.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The chat model.", show_default="the first that suits")
    ] = None,
    small_model: Annotated[
        str | None,
        typer.Option(help="A model for titles and other small jobs.", show_default="the same"),
    ] = None,
    models: ModelsFile = None,
) -> None:
    """Run a tool, such as claude, on the gateway that is running, or else on a new one.

    A new gateway is stopped when the tool ends. The exit status is the tool's.
    """
    chosen, settings = read_tool(tool), load_settings({"models": models})
    if (program := shutil.which(chosen.command)) is None:
        _quit(f"{chosen.command} is not installed. Install it: `{chosen.install}`.")
    catalog = load_catalog(settings.models, variables())
    signals = Signals()
    with signals.handled():
        try:
            url = find(settings)
            large, small = choose_both(offered(url, settings, catalog), model, small_model, chosen)
            with _gateway(url, settings, signals) as ready:
                service = Service(ready, large.name, small.name, large.context)
                status = _run(chosen, (program, *(arguments or ())), service, settings, signals)
        except (NoGateway, NoModel) as error:
            _quit(str(error))
    raise SystemExit(status)


def _quit(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    raise SystemExit(1)


class Signals:
    """What signals do: end this process in order or, once a tool runs, go to that."""

    def __init__(self) -> None:
        self.tool: subprocess.Popen[bytes] | None = None
        self._has_ended = False
        self._early: list[int] | None = None  # those that are deferred

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Handle those that are not ignored."""
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
        """Handle those that come meanwhile at the end, so that nothing is left half begun."""
        self._early = []
        try:
            yield
        finally:
            early, self._early = self._early, None
            for number in early:
                self._handle(number, None)

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """Run the tool until it ends; return its status. A signal while it starts is its, too."""
        with self.deferred():
            self.tool = subprocess.Popen(command, env=environment)
        return self.tool.wait()

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self._early is not None:
            self._early.append(number)
        elif self.tool is not None:
            if not (number in FROM_KEYS and _is_in_foreground()):
                self.tool.send_signal(number)  # nothing, if it has ended
        elif not self._has_ended:
            self._has_ended = True
            raise SystemExit(128 + number)


def _is_in_foreground() -> bool:
    """Return True if this process has a terminal, whose keys send signals to it."""
    try:
        with open("/dev/tty", "rb", buffering=0) as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


@contextlib.contextmanager
def _gateway(found: str | None, settings: Settings, signals: Signals) -> Iterator[str]:
    """Yield the URL of a gateway that is ready: the one that was found, or else a new one.

    If the new one ends before its time, say so at the end.
    """
    if found is not None:
        wait_ready(found)
        yield found
        return
    print("Starting a gateway…", file=sys.stderr)
    with started(settings, signals.deferred) as gateway:
        yield gateway.url
        try:
            gateway.require_alive()
        except NoGateway as error:
            print(error, file=sys.stderr)


def _run(
    tool: Tool,
    command: Sequence[str],
    service: Service,
    settings: Settings,
    signals: Signals,
) -> int:
    """Run a tool until it ends, and return its status as shells have it."""
    tool = tool.filled(service)
    with contextlib.ExitStack() as stack:
        with signals.deferred():
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mlx-gateway-"))
        for name, text in tool.files.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        environment = tool.environment(first_key(settings), os.environ, folder)
        status = signals.start([command[0], *tool.arguments, *command[1:]], environment)
    return status if status >= 0 else 128 - status
