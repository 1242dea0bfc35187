"""A conversation in the terminal: its messages, commands, and pictures by path."""

import base64
import json
import os
import re
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

COMMANDS: Final = {
    "/clear": "forget the conversation",
    "/system [TEXT]": "set the system prompt; without TEXT, remove it",
    "/think [on|off|show]": "let the model think or not; print its last thoughts",
    "/model [NAME]": "go on with another model; without NAME, list them",
    "/save FILE": "write the conversation to a new file, as JSON",
    "/help": "list the commands and keys",
    "/bye": "leave, as Ctrl-D and /exit do",
    'Alt-Enter, \\ Enter, """': "go on in a new line",
    "Ctrl-C": "stop the answer, or empty the line; twice, leave",
}
_NAMES: Final = ("/bye", "/clear", "/exit", "/help", "/model", "/save", "/system", "/think")
_ENDINGS: Final = r"\.(?:png|jpe?g|webp|gif|bmp)"
# A path in quotes, or one whose blanks are escaped, as terminals write a file that is dropped on
# them. They do not escape U+202F, which is in the names of macOS's screenshots.
_PATH: Final = re.compile(
    rf"""'([^'\n]+{_ENDINGS})'|"([^"\n]+{_ENDINGS})\""""
    rf"""|(?<![^ \t\n])((?:\\.|[^ \t\n'"\\])+?{_ENDINGS})(?=[?!.,;:)]*(?:[ \t\n]|\Z))""",
    re.IGNORECASE,
)


class Refused(Exception):
    """Raised if something cannot be done as it was typed. The message gives the next step."""


def parse_command(line: str) -> tuple[str, str] | None:
    """Return a command and its argument, or None if a line is a prompt, as `/tmp/cat.png` is.

    Raises Refused for an unknown command.
    """
    match = re.fullmatch(r"(/\w*)(?:\s+(.*))?", line.strip(), re.DOTALL)
    if match is not None and match[1] not in _NAMES:
        nearest = get_close_matches(match[1], _NAMES, 1) or ["/help"]
        raise Refused(f"{match[1]} is not a command. Did you mean {nearest[0]}?")
    return None if match is None else (match[1], (match[2] or "").strip())


def find_pictures(text: str) -> tuple[str, list[Path], list[Path]]:
    """Return a prompt without the paths of pictures in it, those paths, and those of no file."""
    found: list[Path] = []
    missing: list[Path] = []

    def take(match: re.Match[str]) -> str:
        given = match[1] or match[2] or re.sub(r"\\(.)", r"\1", match[3])
        path = Path(os.path.expanduser(given))
        if path.is_file():
            found.append(path)
            return ""
        missing.extend([path] if path.is_absolute() else ())
        return match[0]

    return _PATH.sub(take, text).strip(), found, missing


def continued(text: str) -> str | None:
    """Return a prompt that goes on in a new line, with that line; None if the prompt is whole."""
    if text.count('"""') % 2:
        return f"{text}\n"
    return f"{text[:-1]}\n" if text.endswith("\\") else None


def unquoted(text: str) -> str:
    """Return a prompt without triple quotes around it."""
    match = re.fullmatch(r'\s*"""\n?(.*?)\n?"""\s*', text, re.DOTALL)
    return match[1] if match else text


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of an answer, without control characters."""

    text: str = ""
    thoughts: str = ""
    finish: str | None = None  # the reason of the end, as OpenAI names it


@dataclass
class Conversation:
    """The messages between a user and a model, which reads images if it `sees`."""

    model: str
    system: str | None = None
    thinks: bool | None = None  # None: as the model does by itself
    sees: bool = False
    finish: str | None = None  # why the last answer ended, as OpenAI names it; None: it was stopped
    turns: list[dict[str, Any]] = field(default_factory=list)

    def messages(self) -> list[dict[str, Any]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.turns]

    def body(self) -> dict[str, Any]:
        """Return the body of a request for the next answer."""
        body: dict[str, Any] = {"model": self.model, "messages": self.messages()}
        if self.thinks is not None:
            body["chat_template_kwargs"] = {"enable_thinking": self.thinks}
        return body

    def ask(self, text: str, pictures: Sequence[Path] = ()) -> None:
        """Add a question. Raises Refused if the model does not see, and OSError of a picture."""
        if pictures and not self.sees:
            problem = f"{self.model} does not read images, so {pictures[0]} is not sent."
            raise Refused(f"{problem} `mlx-gateway models recommend` says which models do.")
        parts: list[dict[str, Any]] = [{"type": "text", "text": text}] if text else []
        for picture in pictures:
            data = base64.b64encode(picture.read_bytes()).decode()
            url = f"data:image/{picture.suffix[1:].lower()};base64,{data}"
            parts.append({"type": "image_url", "image_url": {"url": url}})
        self.turns.append({"role": "user", "content": parts if pictures else text})

    def hear(self, pieces: Iterable[Piece]) -> Generator[Piece, None, None]:
        """Yield an answer, and keep it as far as it comes; without any, take the question back."""
        said, self.finish = [], None
        try:
            for piece in pieces:
                said.append(piece)
                self.finish = piece.finish
                yield piece
        finally:
            text = "".join(piece.text for piece in said)
            thoughts = "".join(piece.thoughts for piece in said) or None
            if text or thoughts:
                turn = {"role": "assistant", "content": text, "reasoning_content": thoughts}
                self.turns.append(turn)
            else:
                self.turns.pop()

    def thoughts(self) -> str:
        """Return the last thoughts."""
        thoughts = (turn.get("reasoning_content") for turn in reversed(self.turns))
        return next(filter(None, thoughts), "There are no thoughts.")

    def save(self, file: Path) -> None:
        """Write the conversation to a new file. Raises Refused, and OSError."""
        try:
            with file.open("x", encoding="utf-8") as out:
                saved = {"model": self.model, "messages": self.messages()}
                json.dump(saved, out, ensure_ascii=False, indent=2)
        except FileExistsError:
            raise Refused(f"{file} is there already, and stays: name a new file.") from None
