"""`mlx-gateway pull`: a model's files from the hub, before the first request asks for them."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.app.hub import hub_of
from gateway.cli._options import ModelsFile
from gateway.errors import GatewayError
from gateway.logs import human_bytes
from gateway.registry import ChatSpec, HubSource, ModelSpec, load_catalog
from gateway.settings import load_settings, variables

if TYPE_CHECKING:
    from gateway.engine.hub import Hub

REFRESH_S = 0.2


def pull(
    model: Annotated[str, typer.Argument(help="The model's id, or an alias.")],
    models: ModelsFile = None,
) -> None:
    """Download a model, so that no request has to wait for it.

    An adapter's base and a draft model are downloaded too. Each file is checked by size and hash.
    A pull that is interrupted is completed by the next one.
    """
    settings = load_settings({"models": models})
    catalog = load_catalog(settings.models, variables())
    hub = hub_of(settings, may_download=True)
    try:
        spec = catalog.resolve(model).spec
        for source_spec in _needed(spec, settings.speculate_rows):
            _fetch(source_spec, hub)
    except GatewayError as error:
        print(error, file=sys.stderr)
        raise SystemExit(1) from None


def _needed(spec: ModelSpec, speculate_rows: int) -> Iterator[ModelSpec]:
    """Yield a model and those that are loaded with it."""
    yield spec
    if isinstance(spec, ChatSpec):
        for part in (spec.base_spec, spec.draft_in_use(speculate_rows)):
            if part is not None:
                yield from _needed(part, speculate_rows)


def _fetch(spec: ModelSpec, hub: "Hub") -> None:
    """Download one model, if the hub has it, and print where it is."""
    from gateway.engine.hub import ask_hub, download, fetched_bytes, on_disk, stored_bytes

    if isinstance(spec.source, HubSource):
        total = ask_hub(spec, hub)
        with _progress(spec.id, total, lambda: fetched_bytes(spec, hub)):
            folder = download(spec, hub)
    else:
        found = on_disk(spec, hub)
        assert found is not None, "only the hub's models can be missing without an error"
        folder = found
    print(f"{spec.id}: {human_bytes(stored_bytes(folder))} in {folder}")


@contextmanager
def _progress(name: str, total: int, fetched: Callable[[], int]) -> Iterator[None]:
    """Show the download on stderr, if that is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn
    from rich.progress import TransferSpeedColumn as SpeedColumn

    columns = "{task.description}", BarColumn(), DownloadColumn(binary_units=True), SpeedColumn()
    bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
    task, done = bar.add_task(name, total=total), threading.Event()

    def draw() -> None:
        while not done.wait(REFRESH_S):
            bar.update(task, completed=min(total, fetched()))

    drawing = threading.Thread(target=draw, daemon=True)
    with bar:
        drawing.start()
        try:
            yield
        finally:
            done.set()
            drawing.join()
