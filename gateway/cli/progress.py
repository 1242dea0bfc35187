"""The progress of downloads and loads: one bar on a terminal, or else log lines."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gateway import logs
from gateway.cli import lazy
from gateway.jobs import Progress

log = logs.get("progress")

REFRESH_S = 0.2
LINE_S = 10.0  # seconds between two log lines


class Bar:
    """One bar on stderr for a download or load at a time. Log lines appear above it."""

    def __init__(self) -> None:
        progress = lazy.progress
        self._columns = (
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=20),
            progress.DownloadColumn(binary_units=True),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
        )
        console = lazy.Console(stderr=True)
        self._bar = progress.Progress(console=console, auto_refresh=False, transient=True)
        self._shown: tuple[str, str, bool] | None = None
        self._began = 0.0

    def show(self, now: Progress | None) -> None:
        shown = None if now is None else (now.event, now.model, now.total is None)
        if shown != self._shown:
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
            if shown is None or self._shown is None or shown[:2] != self._shown[:2]:
                self._began = time.monotonic()
            self._shown = shown
        if now is None:
            self._bar.refresh()
            return
        done = now.completed if now.total is None else min(now.completed, now.total)
        verb = "Warming up" if done == now.total else "Loading"
        if now.event == "model_download":
            verb = "Downloading"
        seconds = time.monotonic() - self._began
        text = f"{verb} {logs.fit(now.model, 32)} ({seconds:.0f} s)"
        if self._bar.task_ids:
            self._bar.update(self._bar.task_ids[0], description=text, completed=done, refresh=True)
        else:  # bytes that are there already do not count for the speed
            self._bar.columns = self._columns[: 2 if now.total is None else None]
            self._bar.add_task(text, total=now.total, completed=done)

    def __enter__(self) -> None:
        self._bar.start()

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


@contextmanager
def shown(look: Callable[[], Progress | None]) -> Iterator[None]:
    """Show what `look` returns, which runs on a thread of its own."""
    done = threading.Event()
    bar = Bar() if sys.stderr.isatty() else None

    def draw() -> None:
        while not done.wait(LINE_S if bar is None else REFRESH_S):
            now = None
            with contextlib.suppress(OSError):  # a file may have gone
                now = look()
            if done.is_set():
                return
            if bar is not None:
                bar.show(now)
            elif now is not None:
                known = {} if now.total is None else {"total_bytes": now.total}
                log.info(now.event, model=now.model, bytes=now.completed, **known)

    drawing = threading.Thread(target=draw, name="progress", daemon=True)
    with bar or contextlib.nullcontext():
        drawing.start()
        try:
            yield
        finally:
            done.set()
