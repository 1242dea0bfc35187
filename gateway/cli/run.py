"""`mlx-gateway run`: asks a model once, or talks with it on a terminal."""

import os
import signal
import sys
from pathlib import Path

import typer

from gateway import logs
from gateway.app.named import load_served, parse_name
from gateway.cli import lazy
from gateway.cli.answers import Refused, clean
from gateway.cli.conversation import FAILURES, Conversation
from gateway.cli.gateways import find, reached
from gateway.cli.launch import Signals
from gateway.cli.models import fetch_preloaded
from gateway.cli.terminal import ModelsFile, complete_model, fail
from gateway.registry import source_id
from gateway.settings import Settings, load_settings


def run(
    model: str = typer.Argument(
        help="A chat model, by any name that `serve` takes.", autocompletion=complete_model
    ),
    prompt: str = typer.Argument("", help="The question; without it, a conversation."),
    system: str | None = typer.Option(None, help="The system prompt."),
    think: bool | None = typer.Option(
        None, "--think/--no-think", help="Let the model think or not.", show_default="by model"
    ),
    image: list[Path] = typer.Option(
        [], exists=True, dir_okay=False, help="A picture to ask about; repeatable."
    ),
    no_history: bool = typer.Option(False, "--no-history", help="Keep no prompts for later."),
    models: ModelsFile = None,
) -> None:
    """Ask a model, or talk with it, on the gateway that is running, or on a new one.

    Text from a pipe is added to the question. A new gateway is stopped at the end.
    """
    if sys.stdin is None or sys.stdout is None:
        raise typer.BadParameter("standard input or output is closed; try `</dev/null >FILE`")
    settings, is_terminal = load_settings({"models": models}), sys.stdin.isatty()
    if not model:
        raise typer.BadParameter("there is no name", param_hint="MODEL")
    for name, text in {"MODEL": model, "PROMPT": prompt, "--system": system or ""}.items():
        if text.encode(errors="ignore").decode() != text:
            raise typer.BadParameter("it is not UTF-8", param_hint=name)
    try:
        source = parse_name(model)
        piped = "" if is_terminal else sys.stdin.buffer.read().decode()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    question = "\n\n".join(filter(str.strip, (prompt, piped)))
    talks = is_terminal and sys.stdout.isatty() and not (prompt or image)
    if not (talks or question or image):
        raise typer.BadParameter("there is no question", param_hint="PROMPT")
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    url, name = find(settings), model if source is None else source_id(source)
    signals = Signals()
    with signals.handled():
        try:
            if url is None:
                settings = settings.model_copy(update={"serve": (model,)})
                _fetch(settings, name)
            with reached(url, settings, signals.deferred) as ready:
                chat = Conversation(ready, settings, name, system, think)
                chat.choose(name, model if source else "")
                if talks:
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                    chat.hold(lazy.screen.make_reader(keeps_history=not no_history))
                else:
                    chat.answer(question, image)
        except BrokenPipeError:
            # Python would report the pipe once more at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except FAILURES as error:
            fail(clean(error))


def _fetch(settings: Settings, name: str) -> None:
    """Download the model of a new gateway. Raises Refused if it does not chat."""
    logs.configure("warning", settings.log_format)
    catalog = load_served(settings)
    kind = catalog.resolve(name).spec.kind
    if kind != "chat":
        hint = "`mlx-gateway models recommend` lists models that do."
        raise Refused(f"{name} does not chat: it is a model for {kind}. {hint}")
    fetch_preloaded(settings, catalog)
