"""The commands about models.yaml and its models' files: check, config, models, pull and schema."""

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.cli import lazy
from gateway.cli.doctor import require_machine
from gateway.cli.terminal import Host, ModelsFile, Port, fail, show
from gateway.errors import GatewayError, RegistryInvalid
from gateway.logs import human_bytes
from gateway.registry import (
    ChatSpec,
    HubSource,
    ModelSpec,
    Reading,
    json_schema,
    load_catalog,
    read_models,
)
from gateway.settings import (
    VARIABLES,
    explain,
    load_settings,
    origin,
    strays,
    variables,
)

if TYPE_CHECKING:
    from gateway.engine.hub import Hub

REFRESH_S = 0.2


def check(models: ModelsFile = None) -> None:
    """Check the settings and the models file, without reading weights.

    Each mistake is a line with file, line and the nearest valid name.
    """
    settings = load_settings({"models": models})
    require_machine(settings)
    reading = read_models(settings.models, variables())
    for note in (*reading.notes, *strays(reading.variables)):
        print(f"note: {note}")
    if reading.problems:
        raise RegistryInvalid(list(reading.problems))
    preloaded, max_models = reading.catalog.preloaded(), settings.cache_max_models
    if len(preloaded) > max_models:
        print(
            f"note: {settings.models} preloads {len(preloaded)} models, and "
            f"GATEWAY_CACHE_MAX_MODELS is {max_models}: only the last {max_models} stay loaded"
        )
    names = len(reading.catalog.names())
    print(f"{settings.models}: {len(reading.catalog)} models by {names} names, no problems")


# Words of a variable's name that hide its value, in the plural too but for TOKENS, a number.
_SECRET = frozenset({"KEY", "APIKEY", "TOKEN", "SECRET", "PASSWORD", "PASS", "CREDENTIAL"})
# What a model's key `token_ids` may be, which is no secret.
_CHOICES = frozenset({"accept", "reject"})


def config(
    models: ModelsFile = None,
    host: Host = None,
    port: Port = None,
) -> None:
    """Print every setting with its value and where it comes from."""
    flags = {"models": models, "host": host, "port": port}
    settings = load_settings(flags)
    rows = [(knob.env, knob.value, knob.source) for knob in explain(settings, flags)]
    reading = read_models(settings.models, variables())
    show(("Setting", "Value", "Source"), [*rows, *_of_models(reading)])
    for note in strays(reading.variables):
        print(f"note: {note}", file=sys.stderr)


def _of_models(reading: Reading) -> Iterator[tuple[str, str, str]]:
    """Yield the variables of models.yaml that are set: those of models' keys, and any ${…}."""
    # `explain` lists the settings.
    for name in sorted(reading.variables & variables().keys() - VARIABLES):
        value, source = origin(name)
        if value is not None:
            is_choice = name.endswith("_TOKEN_IDS") and value in _CHOICES
            if not is_choice and any(map(_is_secret, name.upper().split("_"))):
                value = "**********"
            yield name, value, source


def _is_secret(word: str) -> bool:
    return word in _SECRET or (word != "TOKENS" and word.removesuffix("S") in _SECRET)


def models(context: typer.Context, models: ModelsFile = None) -> None:
    """List the models: id, kind, aliases, source, whether they are on disk, and their size."""
    if context.invoked_subcommand is not None:
        return
    settings = load_settings({"models": models})
    catalog = load_catalog(settings.models, variables())
    hub = lazy.hub_of(settings, may_download=False)
    rows = [
        (
            spec.id,
            spec.kind,
            ", ".join(alias.name for alias in spec.aliases),
            str(spec.source),
            *_on_disk(spec, hub),
        )
        for spec in catalog.specs
    ]
    show(("Id", "Kind", "Aliases", "Source", "On disk", "Size"), rows)


def _on_disk(spec: ModelSpec, hub: "Hub") -> tuple[str, str]:
    """Return whether a model is on disk, wholly or in part, and its size there."""
    try:
        folder = lazy.hub.on_disk(spec, hub)
    except GatewayError:
        folder = None
    if folder is not None and lazy.hub.has_weights(folder):
        return "yes", human_bytes(lazy.hub.stored_bytes(folder))
    fetched = 0
    if isinstance(spec.source, HubSource):
        fetched = lazy.hub.fetched_bytes(spec, hub)
    if not fetched:
        return "no", ""
    return "in part", human_bytes(fetched)


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
    hub = lazy.hub_of(settings, may_download=True)
    try:
        spec = catalog.resolve(model).spec
        for source_spec in _needed(spec, settings.speculate_rows):
            _fetch(source_spec, hub)
    except GatewayError as error:
        fail(error)


def _needed(spec: ModelSpec, speculate_rows: int) -> Iterator[ModelSpec]:
    """Yield a model and those that are loaded with it."""
    yield spec
    if isinstance(spec, ChatSpec):
        for part in (spec.base_spec, spec.draft_in_use(speculate_rows)):
            if part is not None:
                yield from _needed(part, speculate_rows)


def _fetch(spec: ModelSpec, hub: "Hub") -> None:
    """Download one model, and print where it is."""
    if isinstance(spec.source, HubSource):
        total = lazy.hub.ask_hub(spec, hub)
        with _progress(spec.id, total, lambda: lazy.hub.fetched_bytes(spec, hub)):
            lazy.hub.download(spec, hub)
    folder = lazy.hub.on_disk(spec, hub)
    assert folder is not None, "only the hub's models can be missing without an error"
    print(f"{spec.id}: {human_bytes(lazy.hub.stored_bytes(folder))} in {folder}")


@contextmanager
def _progress(name: str, total: int, fetched: Callable[[], int]) -> Iterator[None]:
    """Show the download on stderr."""
    if not sys.stderr.isatty():  # a log would have a line for each step
        yield
        return
    progress = lazy.progress
    bar = progress.Progress(
        "{task.description}",
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        console=lazy.Console(stderr=True),
        transient=True,
    )
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


def schema() -> None:
    """Print the JSON Schema of models.yaml."""
    print(json.dumps(json_schema(), indent=2, ensure_ascii=False))
