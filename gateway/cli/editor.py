"""Reads the prompts of a conversation on a terminal, with editing and a history."""

import os
from collections.abc import Iterator
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from gateway.cli.conversation import continued, unquoted


def history_file() -> Path:
    """Return the file of the user's history, which others cannot read. Raises OSError."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    folder = Path(state) / "mlx-gateway"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = folder / "history"
    os.close(os.open(file, os.O_CREAT, 0o600))
    return file


def read_prompts(*, keeps_history: bool) -> Iterator[str]:
    """Yield prompts until the user leaves. Raises OSError if the history cannot be kept."""
    session: PromptSession[str] = PromptSession(
        history=FileHistory(history_file()) if keeps_history else None,
        multiline=True,
        key_bindings=_bindings(),
        prompt_continuation="... ",
        placeholder="Ask something. /help lists the commands.",
    )
    interrupts = 0  # since the last prompt
    while interrupts < 2:
        try:
            line = session.prompt("\n>>> ")
        except EOFError:
            return
        except KeyboardInterrupt:
            interrupts += 1
            print("Ctrl-C once more, or /bye, leaves." if interrupts == 1 else "")
        else:
            interrupts = 0
            yield unquoted(line)


def _bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("enter")
    def _send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        longer = continued(buffer.text)
        if longer is None:
            buffer.validate_and_handle()
        else:
            buffer.text, buffer.cursor_position = longer, len(longer)

    @bindings.add("escape", "enter")
    def _break(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings
