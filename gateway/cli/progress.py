"""The progress of downloads and loads: one bar on a terminal, or else log lines."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from gateway import logs
from gateway.cli import lazy

if TYPE_CHECKING:
    from gateway.jobs import Progress

log = logs.get("progress")

REFRESH_S = 0.2
LINE_S = 10.0  # seconds between two log lines


class Bar:
    """One bar on stderr for a download or load at a time. Log lines appear above it."""

    def __init__(self) -> None:
        progress = lazy.progress
        ends = (progress.TextColumn("{task.description}"), progress.BarColumn(bar_width=20))
        bytes_read = progress.DownloadColumn(binary_units=True)
        speed, left = progress.TransferSpeedColumn(), progress.TimeRemainingColumn()
        self._known = (*ends, bytes_read, speed, left)
        self._unknown = (*ends, progress.TimeElapsedColumn())
        console = lazy.Console(stderr=True)
        self.lines = progress.Progress(console=console, auto_refresh=False, transient=True)
        self._shown: tuple[str, str, int | None] | None = None

    def show(self, now: "Progress | None") -> None:
        shown = now and (now.event, now.model, now.total)
        if shown != self._shown:
            self._shown = shown
            for task in self.lines.task_ids:
                self.lines.remove_task(task)
        if now is None:
            self.lines.refresh()
            return
        done = now.completed if now.total is None else min(now.completed, now.total)
        verb = "Downloading" if now.event == "model_download" else "Loading"
        if verb == "Loading" and done == now.total:
            verb = "Warming up"
        text = f"{verb} {logs.fit(now.model, 32)}"
        for task in self.lines.task_ids:
            self.lines.update(task, description=text, completed=done, refresh=True)
        if not self.lines.task_ids:  # bytes that are there already do not count for the speed
            self.lines.columns = self._known if now.total else self._unknown
            self.lines.add_task(text, total=now.total, completed=done)


@contextmanager
def shown(look: Callable[[], "Progress | None"]) -> Iterator[None]:
    """Show what `look` returns, which runs on a thread of its own."""
    done = threading.Event()
    bar = Bar() if sys.stderr.isatty() else None

    def draw() -> None:
        while not done.wait(LINE_S if bar is None else REFRESH_S):
            now = look()
            if done.is_set():
                break
            if bar is not None:
                bar.show(now)
            elif now is not None:
                known = {} if now.total is None else {"total_bytes": now.total}
                log.info(now.event, model=now.model, bytes=now.completed, **known)

    with bar.lines if bar is not None else contextlib.nullcontext():
        threading.Thread(target=draw, name="progress", daemon=True).start()
        try:
            yield
        finally:
            done.set()


@contextmanager
def loading(model: str) -> Iterator[None]:
    """Show on a terminal for how long a gateway in another process has been loading a model."""
    now = partial(lazy.Progress, "model_loading", model, 0, None)
    with shown(now) if sys.stderr.isatty() else contextlib.nullcontext():
        yield
