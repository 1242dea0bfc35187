"""The commands about models.yaml and its models' files."""

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import typer

from gateway import logs
from gateway.app.named import read_served
from gateway.cli import lazy
from gateway.cli.progress import shown
from gateway.cli.terminal import (
    Discover,
    Host,
    ModelName,
    ModelsFile,
    Names,
    Port,
    fail,
    flags_of,
    show,
)
from gateway.doctor.machine import require_machine
from gateway.errors import GatewayError
from gateway.logs import human_bytes
from gateway.registry import (
    Catalog,
    ChatSpec,
    HubSource,
    ModelSpec,
    Reading,
    json_schema,
    read_short_names,
    repository_of,
)
from gateway.settings import (
    VARIABLES,
    Settings,
    explain,
    load_settings,
    origin,
    shipped_models_file,
    strays,
    variables,
)

if TYPE_CHECKING:
    from gateway.engine.hub import Hub

log = logs.get("models")

Row: TypeAlias = tuple[str, ...]


def check(
    names: Names = None,
    models: ModelsFile = None,
    discover: Discover = False,
) -> None:
    """Check the settings and the models file, without reading weights.

    Each mistake is printed with its file, its line and the nearest valid name.
    """
    settings = load_settings(flags_of(models, names, discover=discover))
    require_machine(settings)
    reading = read_served(settings)
    for note in (*reading.notes, *strays(reading.variables)):
        print(f"note: {note}")
    reading.require_valid()
    what = settings.models_file or "named"
    preloaded, max_models = reading.catalog.preloaded(), settings.cache_max_models
    if len(preloaded) > max_models:
        print(
            f"note: {what}: {len(preloaded)} models are loaded at start, and "
            f"GATEWAY_CACHE_MAX_MODELS is {max_models}: only the first {max_models} stay loaded"
        )
    count = len(reading.catalog.names())
    if not count:
        print(
            f"note: {what} lists no models, so none is served: see `mlx-gateway models recommend`"
        )
    print(f"{what}: {len(reading.catalog)} models by {count} names, no problems")


# A variable is masked if its name has one of these words or plurals, except TOKENS.
_SECRET = frozenset({"KEY", "APIKEY", "TOKEN", "SECRET", "PASSWORD", "PASS", "CREDENTIAL"})
# The values of a model's key `token_ids`, which are not secret.
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
    reading = read_served(settings)
    show(("Setting", "Value", "Source"), [*rows, *_of_models(reading)])
    for note in strays(reading.variables):
        print(f"note: {note}", file=sys.stderr)


def _of_models(reading: Reading) -> Iterator[tuple[str, str, str]]:
    for name in sorted(reading.variables & variables().keys() - VARIABLES):
        value, source = origin(name)
        if value is not None:
            is_choice = name.endswith("_TOKEN_IDS") and value in _CHOICES
            if not is_choice and any(map(_is_secret, name.upper().split("_"))):
                value = "**********"
            yield name, value, source


def _is_secret(word: str) -> bool:
    return word in _SECRET or (word != "TOKENS" and word.removesuffix("S") in _SECRET)


def init() -> None:
    """Write the models.yaml that the gateway comes with into this folder, to be edited."""
    file = Path("models.yaml")
    try:
        with file.open("x", encoding="utf-8") as own:
            own.write(shipped_models_file().read_text(encoding="utf-8"))
    except FileExistsError:
        fail(f"{file} is here already, and stays as it is.")
    except OSError as error:
        file.unlink(missing_ok=True)  # a full disk leaves half a file
        fail(f"{file} could not be written: {error.strerror}")
    print(f"Wrote {file}. `mlx-gateway serve` reads it here; `mlx-gateway check` validates it.")


def models(
    context: typer.Context,
    names: Names = None,
    models: ModelsFile = None,
    discover: Discover = False,
) -> None:
    """List the models: id, kind, whether they are on disk, their size, and any MTP head.

    Off a terminal, aliases and sources are columns too. Models that are found but cannot be served
    are listed with the reason.
    """
    if context.invoked_subcommand is None:
        settings = load_settings(flags_of(models, names, discover=discover))
        list_models(settings, is_long=not sys.stdout.isatty())


def list_models(settings: Settings, *, is_long: bool, with_others: bool = False) -> None:
    """Show the served models and, if `with_others`, those on the disk that `serve NAME` serves."""
    reading = read_served(settings)
    reading.require_valid()
    hub = lazy.hub_of(settings, may_download=False)
    specs = [*reading.catalog.specs]
    if with_others:
        specs += (spec for spec in _find_others(settings, specs) if disk_state(spec, hub)[1])
    columns: Row = ("Id", "Kind", "Aliases", "Source", "On disk", "Size")
    rows: list[Row] = [
        (
            spec.id,
            spec.kind,
            ", ".join(alias.name for alias in spec.aliases),
            str(spec.source),
            *disk_state(spec, hub),
        )
        for spec in specs
    ]
    if not is_long:
        columns, *rows = [(*row[:2], *row[4:]) for row in (columns, *rows)]
    show(columns, rows)
    for model, why in reading.left_out.items():
        print(f"{model} is not served: {why}", file=sys.stderr)


def _find_others(settings: Settings, listed: Iterable[ModelSpec]) -> Iterator[ModelSpec]:
    """Yield the specs of short names and of the hub's cache, each repository once."""
    wider = {"serve": (*read_short_names(),), "discover": settings.discover or ("huggingface",)}
    seen = {repository_of(spec.source) for spec in listed}
    for spec in read_served(settings.model_copy(update=wider)).catalog.specs:
        if repository_of(spec.source) not in seen:
            seen.add(repository_of(spec.source))
            yield spec


def disk_state(spec: ModelSpec, hub: "Hub") -> tuple[str, str]:
    """Return whether a model is on the disk, and its size with what its files have beside it."""
    try:
        folder = lazy.hub.on_disk(spec, hub)
    except GatewayError:
        folder = None
    if folder is not None and lazy.hub.has_weights(folder):
        size = human_bytes(lazy.hub.stored_bytes(folder))
        return "yes", f"{size}, mtp_head" if _has_head(spec, folder) else size
    fetched = 0
    if isinstance(spec.source, HubSource):
        fetched = lazy.hub.fetched_bytes(spec, hub)
    if not fetched:
        return "no", ""
    return "in part", human_bytes(fetched)


def _has_head(spec: ModelSpec, files: Path) -> bool:
    """Return True if a chat model's files have a head that guesses tokens."""
    with contextlib.suppress(Exception):  # loading will report the error
        folder = lazy.Folder(spec.id, files)
        return isinstance(spec, ChatSpec) and bool(lazy.head_names.head_tensors(folder))
    return False


def pull(
    model: ModelName,
    models: ModelsFile = None,
) -> None:
    """Download a model, so that no request has to wait for it.

    An adapter's base and a draft model are downloaded too. Each file is checked by size and hash.
    A pull that is interrupted is completed by the next one.
    """
    settings = load_settings({"models": models, "serve": (model,)})
    logs.configure(settings.log_level, "json" if settings.log_format == "json" else "console")
    reading = read_served(settings, may_pull=True)
    reading.require_valid()
    for spec in _needed(reading.catalog.specs[0], settings.speculate_rows):
        folder = fetch(spec, lazy.hub_of(settings, may_download=True))
        print(f"{spec.id}: {human_bytes(lazy.hub.stored_bytes(folder))} in {folder}")


def fetch_preloaded(settings: Settings, catalog: Catalog) -> None:
    hub = lazy.hub_of(settings, may_download=settings.auto_pull)
    for preloaded in (spec for spec in catalog.specs if spec.preload):
        for spec in _needed(preloaded, settings.speculate_rows):
            if isinstance(spec.source, HubSource) and lazy.hub.on_disk(spec, hub) is None:
                log.info("model_download", model=spec.id, source=str(spec.source))
                fetch(spec, hub)


def _needed(spec: ModelSpec, speculate_rows: int) -> Iterator[ModelSpec]:
    yield spec
    if isinstance(spec, ChatSpec):
        for part in (spec.base_spec, spec.draft_in_use(speculate_rows)):
            if part is not None:
                yield from _needed(part, speculate_rows)


def fetch(spec: ModelSpec, hub: "Hub") -> Path:
    if isinstance(spec.source, HubSource) and not lazy.hub.is_installed(spec.source):
        total = lazy.hub.ask_hub(spec, hub)
        now = partial(lazy.Progress, "model_download", spec.id)
        with shown(lambda: now(lazy.hub.fetched_bytes(spec, hub), total)):
            lazy.hub.download(spec, hub)
    folder = lazy.hub.on_disk(spec, hub)
    assert folder is not None, "only the hub's models can be missing without an error"
    return folder


def schema() -> None:
    """Print the JSON Schema of models.yaml."""
    print(json.dumps(json_schema(), indent=2, ensure_ascii=False))
