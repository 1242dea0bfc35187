"""A conversation with a gateway's models: its messages, commands, and pictures by path."""

import base64
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gateway.app.named import load_served
from gateway.cli import lazy
from gateway.cli.answers import Piece, Refused, ask, clean
from gateway.cli.gateways import NoGateway, first_key, list_offers
from gateway.cli.terminal import show
from gateway.errors import RegistryInvalid
from gateway.registry import Catalog, read_short_names, similar_models
from gateway.settings import Settings

FAILURES: Final = (NoGateway, OSError, Refused)
COMMANDS: Final = {
    "/clear": "forget the conversation",
    "/system [TEXT]": "set the system prompt; without TEXT, remove it",
    "/think [on|off]": "let the model think, or not",
    "/model [NAME]": "go on with another model; without NAME, list them",
    "/save FILE": "write the conversation to a new file, as JSON",
    "/help": "list the commands and keys",
    "/bye": "leave, as Ctrl-D does",
    "Alt-Enter (Esc, Enter)": "go on in a new line",
    "Ctrl-C": "stop the answer, or drop the line; once more, leave",
}
_ENDINGS: Final = r"\.(?:png|jpe?g|webp|gif|bmp)"
# A path in quotes, or one whose blanks are escaped, as terminals write a file that is dropped on
# them. They do not escape U+202F, which is in the names of macOS's screenshots.
_PATH: Final = re.compile(
    rf"""'([^'\n]+{_ENDINGS})'|"([^"\n]+{_ENDINGS})\""""
    rf"""|(?<![^ \t\n])((?:\\.|[^ \t\n'"\\])+?{_ENDINGS})(?=[?!.,;:)]*(?:[ \t\n]|\Z))""",
    re.IGNORECASE,
)


def parse_command(line: str) -> tuple[str, str] | None:
    """Return a command and its argument, or None if a line is a prompt, as `/tmp/cat.png` is.

    A blank before it makes a prompt of a command.
    """
    match = re.fullmatch(r"(/\w*)(?:\s+(.*))?", line.rstrip(), re.DOTALL)
    return None if match is None else (match[1], match[2] or "")


def find_pictures(text: str) -> list[Path]:
    """Return the pictures whose paths are in a prompt, each with a slash: a name alone is text."""
    paths = (one or two or re.sub(r"\\(.)", r"\1", bare) for one, two, bare in _PATH.findall(text))
    whole = map(os.path.expanduser, paths)
    return [Path(path) for path in whole if "/" in path and os.path.isfile(path)]


def make_question(text: str, pictures: Sequence[Path]) -> dict[str, Any]:
    """Return a user's message. Raises OSError of a picture."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": text}] if text else []
    for picture in pictures:
        data = base64.b64encode(picture.read_bytes()).decode()
        url = f"data:image/{picture.suffix[1:].lower()};base64,{data}"
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return {"role": "user", "content": parts if pictures else text}


@dataclass
class Conversation:
    """The messages between a user and the models of a gateway."""

    url: str
    settings: Settings
    model: str
    system: str | None = None
    thinks: bool | None = None  # None: as the model does by itself
    turns: list[dict[str, Any]] = field(default_factory=list)

    def body(self) -> dict[str, Any]:
        """Return the body of a request for the next answer."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        body: dict[str, Any] = {"model": self.model, "messages": [*system, *self.turns]}
        if self.thinks is not None:
            body["chat_template_kwargs"] = {"enable_thinking": self.thinks}
        return body

    def chats(self) -> list[str]:
        offers = list_offers(self.url, self.settings, Catalog(()))
        return [offer.name for offer in offers if offer.kind == "chat"]

    def choose(self, name: str, new: str = "") -> None:
        """Go on with a model. Raises Refused, with commands to run next.

        `new` is a name of the model that a new gateway takes, if one is known.
        """
        chats = self.chats()
        if name not in chats:
            known = [each for each, entry in read_short_names().items() if entry["kind"] == "chat"]
            with suppress(RegistryInvalid):  # a new gateway reports it
                known += [
                    each.name for each in load_served(self.settings) if each.spec.kind == "chat"
                ]
            is_known = new or "/" in name or name in known
            names = [new or name] if is_known else similar_models(name, known, 1)
            chats = [*dict.fromkeys((*similar_models(name, chats, 1), *chats))]
            lines = [f"The gateway at {self.url} does not serve the chat model {name}. Run one of:"]
            lines += [f"  mlx-gateway run {shlex.quote(chat)}" for chat in chats]
            lines += [
                f"  GATEWAY_PORT=0 mlx-gateway run {shlex.quote(each)}  # on a new gateway"
                for each in names
            ]
            raise Refused("\n".join((*lines, "  mlx-gateway models recommend")))
        self.model = name

    def answer(self, question: str, pictures: Sequence[Path] = ()) -> None:
        """Show an answer as it is written, and keep what was said, whole or not."""
        self.turns.append(make_question(question, pictures))
        try:
            asked = ask(self.url, first_key(self.settings), self.body())
            with closing(asked), closing(self.hear(asked)) as heard:
                (lazy.screen.Screen(lazy.Console()).draw if sys.stdout.isatty() else write)(heard)
        finally:
            if self.turns[-1]["role"] == "user":  # without an answer, the question is taken back
                self.turns.pop()

    def hear(self, pieces: Iterable[Piece]) -> Generator[Piece, None, None]:
        """Yield an answer, and keep it as far as it comes."""
        text = thoughts = ""
        try:
            for piece in pieces:
                text, thoughts = text + piece.text, thoughts + piece.thoughts
                yield piece
        finally:
            if text or thoughts:
                turn = {"role": "assistant", "content": text, "reasoning_content": thoughts or None}
                self.turns.append(turn)

    def hold(self, read: Callable[[], str]) -> None:
        """Answer prompts until the user leaves. Ctrl-C ends an answer; once more, it leaves."""
        is_stopped = False
        while True:
            try:
                line, is_stopped = clean(read()), False
                self.take(line)
            except EOFError:
                return
            except KeyboardInterrupt:
                if is_stopped:
                    return
                is_stopped = True
                print("stopped (Ctrl-C once more leaves)")
            except FAILURES as error:
                print(clean(error), file=sys.stderr)

    def take(self, line: str) -> None:
        """Do a command, or answer a prompt. Raises EOFError if the user leaves."""
        match parse_command(line):
            case None if line.strip():
                self.answer(line, find_pictures(line))
            case "/bye", _:
                raise EOFError
            case "/clear", _:
                self.turns.clear()
            case "/system", text:
                self.system = text or None
            case "/think", "" | "on" | "off" as wish:
                self.thinks = wish != "off"
                print(f"thinking is {'on' if self.thinks else 'off'}")
            case "/model", "":
                print(clean("\n".join(self.chats())))
            case "/model", name:
                self.choose(name)
            case "/save", file if file:
                with open(os.path.expanduser(file), "x", encoding="utf-8") as out:
                    json.dump(self.body(), out, ensure_ascii=False, indent=2)
            case "/help", _:
                show(("Command or key", "Effect"), COMMANDS.items())
            case _, _:
                hint = "/help lists the commands. With a blank before it, it is a prompt."
                raise Refused(f"{line.strip()} is not understood: {hint}")


def write(pieces: Iterable[Piece]) -> None:
    """Write the text of an answer, without its thoughts, and a line feed at its end."""
    last = "\n"
    try:
        for piece in pieces:
            last = piece.text or last
            print(piece.text, end="", flush=True)
    finally:
        print(end="" if last.endswith("\n") else "\n", flush=True)
