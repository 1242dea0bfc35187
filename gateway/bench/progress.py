"""A progress bar on a terminal's stderr; anywhere else, nothing."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway.bench.figures import Answer
from gateway.bench.load import Told

REFRESH_S = 0.5  # drawing costs time on the cores that are being measured


@asynccontextmanager
async def progress(total_s: float) -> AsyncIterator[Told]:
    """Show time going by, and how many answers came; give what is to be told of each."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    answers = errors = 0

    def told(answer: Answer) -> None:
        nonlocal answers, errors
        answers += 1
        errors += answer.error is not None

    columns = BarColumn(), TimeRemainingColumn(), TextColumn("{task.description}")
    console = Console(stderr=True)
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as shown:
        task, started = shown.add_task("", total=total_s), time.monotonic()

        async def draw() -> None:
            while True:
                done_s = min(total_s, time.monotonic() - started)
                said = f"{answers} answers, {errors} errors"
                shown.update(task, completed=done_s, description=said, refresh=True)
                await asyncio.sleep(REFRESH_S)

        drawing = asyncio.create_task(draw())
        try:
            yield told
        finally:
            drawing.cancel()
