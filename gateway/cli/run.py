"""`mlx-gateway run`: asks a model once, or talks with it on a terminal."""

import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import typer

from gateway import logs
from gateway.app.named import parse_name, read_served
from gateway.cli import lazy
from gateway.cli.agents import NoModel, Offer
from gateway.cli.answers import AnswerFailed, ask, clean
from gateway.cli.conversation import COMMANDS, Conversation, Refused, find_pictures, parse_command
from gateway.cli.gateways import NoGateway, find, first_key, list_offers, reached
from gateway.cli.launch import Signals
from gateway.cli.models import fetch_preloaded
from gateway.cli.terminal import ModelsFile, fail, show
from gateway.registry import Catalog, source_id
from gateway.settings import Settings, load_settings

_FAILURES = (AnswerFailed, NoGateway, NoModel, OSError, Refused)


def run(
    model: str = typer.Argument(help="A chat model, by any name that `serve` takes."),
    prompt: str | None = typer.Argument(None, help="The question; without it, a conversation."),
    system: str | None = typer.Option(None, help="The system prompt."),
    think: bool | None = typer.Option(
        None, "--think/--no-think", help="Let the model think or not.", show_default="by model"
    ),
    image: list[Path] = typer.Option([], exists=True, help="A picture to ask about; repeatable."),
    no_history: bool = typer.Option(False, "--no-history", help="Keep no prompts for later."),
    models: ModelsFile = None,
) -> None:
    """Ask a model, or talk with it, on the gateway that is running, or on a new one.

    Text from a pipe is added to the question. A new gateway is stopped at the end.
    """
    settings, piped = load_settings({"models": models}), _read_pipe()
    text, pictures, missing = find_pictures(prompt or "")
    question = "\n\n".join(filter(str.strip, (text, piped or "")))
    is_asked = prompt is not None or piped is not None or not sys.stdout.isatty()
    if is_asked and not question and not pictures:
        raise typer.BadParameter("there is no question", param_hint="PROMPT")
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    signals = Signals()
    with signals.handled():
        try:
            url, settings, name = _prepare(settings, model)
            with reached(url, settings, signals.deferred) as ready:
                talk = Talk(Conversation(name, system, think), ready, settings, [*image, *pictures])
                talk.choose(name)
                if is_asked:
                    talk.answer(question, missing)
                else:
                    talk.hold(lazy.editor.read_prompts(keeps_history=not no_history))
        except BrokenPipeError:
            # Python would report the pipe once more at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except _FAILURES as error:
            fail(clean(error))


def _read_pipe() -> str | None:
    try:
        return None if sys.stdin.isatty() else sys.stdin.buffer.read().decode()
    except UnicodeDecodeError:
        problem = "standard input is not UTF-8 text (--image sends a picture)"
        raise typer.BadParameter(problem, param_hint="PROMPT") from None


def _prepare(settings: Settings, model: str) -> tuple[str | None, Settings, str]:
    """Return the running gateway's URL, settings for a new gateway, and the model's id or alias.

    If no gateway runs, the URL is None, and the model's files are downloaded.
    """
    try:
        source = parse_name(model)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="MODEL") from None
    url, name = find(settings), model if source is None else source_id(source)
    if url is None:
        logs.configure("warning", settings.log_format)
        settings = settings.model_copy(update={"serve": (model,)})
        reading = read_served(settings)
        reading.require_valid()
        choose([Offer(name, name, reading.catalog.resolve(name).spec.kind)], name, "")
        fetch_preloaded(settings, reading.catalog)
    return url, settings, name


def choose(offers: Sequence[Offer], name: str, url: str) -> Offer:
    """Return the offer of a chat model. Raises NoModel, with commands to run next."""
    named = next((offer for offer in offers if offer.name == name), None)
    if named is not None and named.kind == "chat":
        return named
    chats = [offer.id for offer in offers if offer.kind == "chat" and offer.name == offer.id]
    lines = [*(f"  mlx-gateway run {shlex.quote(chat)}" for chat in chats)]
    lines.append("  mlx-gateway models recommend")
    if named is not None:
        problem = f"{name} does not chat: it is a model for {named.kind}."
    else:
        problem = f"The gateway at {url} does not serve {name}."
        lines.append(f"  GATEWAY_PORT=0 mlx-gateway run {shlex.quote(name)}  # on a new gateway")
    raise NoModel("\n".join((problem, "Run one of:", *lines)))


@dataclass
class Talk:
    """A conversation with a gateway's models."""

    chat: Conversation
    url: str
    settings: Settings
    pictures: list[Path]  # sent with the next question

    def offers(self) -> list[Offer]:
        return list_offers(self.url, self.settings, Catalog(()))

    def choose(self, name: str) -> None:
        """Go on with a model. Raises NoModel, and Refused if it cannot read earlier pictures."""
        sees = "image" in choose(self.offers(), name, self.url).modalities
        if not sees and any(isinstance(turn["content"], list) for turn in self.chat.turns):
            raise Refused(f"{name} does not read the pictures that were sent: /clear them first.")
        self.chat.model, self.chat.sees = name, sees

    def answer(self, question: str, missing: Sequence[Path]) -> None:
        """Show an answer as it is written, and keep what was said, whole or not."""
        for path in missing:
            print(clean(f"{path} is no file: only its name is sent."), file=sys.stderr)
        pictures, self.pictures = self.pictures, []
        self.chat.ask(question, pictures)
        with closing(ask(self.url, first_key(self.settings), self.chat.body())) as asked:
            lazy.screen.show(self.chat.hear(asked))
        if self.chat.finish != "stop":
            print(f"The answer is not whole ({self.chat.finish}).", file=sys.stderr)

    def hold(self, lines: Iterator[str]) -> None:
        """Answer lines until the user leaves. Ctrl-C ends an answer, not this process."""
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            for line in lines:
                try:
                    if self._take(line):
                        return
                except KeyboardInterrupt:
                    print("stopped")
                except _FAILURES as error:
                    print(clean(error), file=sys.stderr)
        finally:
            signal.signal(signal.SIGINT, before)

    def _take(self, line: str) -> bool:
        """Do a command, or answer a prompt. Return True if the user leaves."""
        match parse_command(line):
            case None if line.strip():
                question, pictures, missing = find_pictures(line)
                self.pictures += pictures
                self.answer(question, missing)
            case "/bye" | "/exit", _:
                return True
            case "/clear", _:
                self.chat.turns.clear()
            case "/system", text:
                self.chat.system = text or None
            case "/think", "show":
                print(self.chat.thoughts())
            case "/think", "on" | "off" | "" as wish:
                self.chat.thinks = not self.chat.thinks if not wish else wish == "on"
                print(f"thinking is {'on' if self.chat.thinks else 'off'}")
            case "/model", "":
                print(clean("\n".join(each.name for each in self.offers() if each.kind == "chat")))
            case "/model", name:
                self.choose(name)
            case "/save", file if file:
                self.chat.save(Path(file).expanduser())
            case "/help", _:
                show(("Command or key", "Effect"), COMMANDS.items())
            case name, _:
                raise Refused(next(usage for usage in COMMANDS if usage.startswith(name)))
        return False
