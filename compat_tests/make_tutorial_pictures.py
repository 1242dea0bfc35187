"""Make the tutorial's pictures anew: a terminal (by tmux) and the dashboard's panel, in Chromium.

Run `python -m compat_tests.make_tutorial_pictures`. The answers are those of the models that the
repository has: SmolLM2, MiniLM and demo/vision.
"""

import io
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from compat_tests.conftest import SHIPPED, started
from compat_tests.dashboard.conftest import CHROMIUM
from tests.processes import DEMO, ROOT

DOCS = ROOT / "docs"
COLUMNS, ROWS = 84, 30
CHAT: Sequence[str] = ("What is the capital of France?", "And of Italy?", "/help")
PICTURE = ROOT / "demo" / "vision" / "pictures" / "shapes.png"
PROMPT, HINT = ">>>", "Ask something. /help lists the commands."
QUESTION = "Which colour is the circle?"


def tmux(*arguments: str) -> str:
    done = subprocess.run(["tmux", *arguments], capture_output=True, text=True, check=True)
    return done.stdout


@contextmanager
def terminal(command: str) -> Iterator[str]:
    """Run a command on a terminal of its own, and give the name of its session."""
    name = "tutorial"
    size = ("-x", str(COLUMNS), "-y", str(ROWS))
    tmux("new-session", "-d", "-s", name, *size, command)
    try:
        yield name
    finally:
        tmux("kill-session", "-t", name)


def wait_for_lines(session: str, count: int, *last: str) -> None:
    """Wait until a terminal shows as many prompts, and one of these lines as the last."""
    for _ in range(600):
        lines = tmux("capture-pane", "-p", "-t", session).strip().splitlines()
        prompts = [line for line in lines if line.startswith(">>>")]
        if len(prompts) == count and lines[-1] in last:
            return
        time.sleep(0.1)
    raise TimeoutError("\n".join(lines))


def draw_terminal(page: Any, written: str, path: Path) -> None:
    """Write a picture of a terminal's text with its colours."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text.from_ansi(written.rstrip()))
    code = console.export_html(theme=MONOKAI, inline_styles=True, code_format="{code}")
    style = (  # MONOKAI's own background and foreground
        "margin:0;padding:14px 18px;background:#0c0c0c;color:#d9d9d9;width:max-content;"
        "font:15px/1.4 'DejaVu Sans Mono',monospace"
    )
    page.set_content(f"<body style='margin:0'><pre id=t style=\"{style}\">{code}</pre>")
    page.locator("#t").screenshot(path=path)


def picture_of_a_conversation(browser: Any, folder: Path) -> None:
    with started(folder, SHIPPED) as url:
        port = url.rpartition(":")[2]
        variables = {"GATEWAY_PORT": port, "XDG_STATE_HOME": str(folder), "COLORTERM": "truecolor"}
        given = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
        program = f"{shlex.quote(sys.executable)} -m gateway run smollm2-135m"
        typed = "printf '$ mlx-gateway run smollm2-135m\\n'"
        with terminal(f"{typed}; cd {shlex.quote(str(ROOT))}; env {given} {program}") as session:
            for count, line in enumerate(CHAT, 1):
                wait_for_lines(session, count, PROMPT, f"{PROMPT} {HINT}")
                tmux("send-keys", "-t", session, line)
                wait_for_lines(session, count, f"{PROMPT} {line}")
                tmux("send-keys", "-t", session, "Enter")
            wait_for_lines(session, len(CHAT) + 1, PROMPT, f"{PROMPT} {HINT}")
            written = tmux("capture-pane", "-e", "-p", "-t", session)
    page = browser.new_page(viewport={"width": 1200, "height": 900}, device_scale_factor=1.5)
    draw_terminal(page, written, DOCS / "tutorial-terminal.png")


def picture_of_the_panel(browser: Any, folder: Path) -> None:
    with started(folder, DEMO) as url:
        page = browser.new_page(viewport={"width": 900, "height": 1400}, device_scale_factor=1.5)
        page.goto(f"{url}/dashboard")
        page.locator("#chat option", has_text="demo-vision").wait_for(state="attached")
        page.select_option("#chat select", "demo-vision")
        page.locator("#chat input[type=file]").set_input_files(PICTURE)
        page.locator("#chat .pictures img").wait_for()
        page.locator("#chat [name=text]").fill(QUESTION)
        page.get_by_role("button", name="Send").click()
        page.locator("#chat .result", has_text="in total").wait_for(timeout=120_000)
        page.locator("section", has=page.locator("#chat")).screenshot(
            path=DOCS / "tutorial-picture.png"
        )


def main() -> None:
    assert shutil.which("tmux"), "Install tmux."
    with (
        tempfile.TemporaryDirectory() as folder,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        for make in (picture_of_a_conversation, picture_of_the_panel):
            own = Path(folder) / make.__name__
            own.mkdir()
            make(browser, own)
        browser.close()


if __name__ == "__main__":
    main()
