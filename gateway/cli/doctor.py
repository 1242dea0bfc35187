"""`mlx-gateway doctor`: can this machine serve, and what would make it serve better."""

import json
import resource
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import Enum, auto
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.app.hub import hub_of
from gateway.cli import _checks as checks
from gateway.cli._checks import Finding
from gateway.cli._options import ModelsFile
from gateway.cli._table import show
from gateway.errors import GatewayError, ModelNotFound
from gateway.registry import Catalog, ModelSpec, load_catalog, read_models
from gateway.settings import Settings, SettingsInvalid, load_settings, strays, variables

if TYPE_CHECKING:
    from gateway.engine.hub import Hub


def doctor(
    models: ModelsFile = None,
    engine: Annotated[
        bool, typer.Option("--engine", help="Test the engine on this device: about a minute.")
    ] = False,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="A model to test it with.", show_default="those that come with the gateway"
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the results as JSON, for a bug report.")
    ] = False,
    report: Annotated[
        bool,
        typer.Option("--report", help="Test the engine, and print a block about it to paste."),
    ] = False,
) -> None:
    """Check whether this machine can serve, with advice; or, with --engine, test the engine.

    The exit status is 1 if it cannot serve, or if a test of the engine fails.
    """
    if engine or report:
        form = Form.BLOCK if report else Form.JSON if as_json else Form.TABLE
        _try_engine(load_settings({"models": models}), model or (), form)
        return
    if model or as_json:
        raise typer.BadParameter("it goes with --engine", param_hint="--model / --json")
    found = list(_check_machine(models))
    show(("Check", "State", "What to do"), [(f.check, f.state, f.message) for f in found])
    if any(each.state == "fail" for each in found):
        raise SystemExit(1)


class Form(Enum):
    """How what was tried of the engine is printed."""

    TABLE = auto()
    JSON = auto()
    BLOCK = auto()


def _try_engine(settings: Settings, names: Sequence[str], form: Form) -> None:
    from gateway.doctor import checkup, report

    catalog = load_catalog(settings.models, variables())
    try:
        specs = [catalog.resolve(name).spec for name in names]
    except ModelNotFound as error:
        raise typer.BadParameter(str(error), param_hint="--model") from None
    if not specs:
        specs = checkup.choose(
            catalog.specs, lambda spec: checkup.check_files(spec, settings) is None
        )
    with _show_stages() as on_stage:
        found = checkup.check_models(specs, settings, on_stage)
    match form:
        case Form.TABLE:
            show(report.COLUMNS, found.rows())
        case Form.JSON:
            print(json.dumps(found.as_json(), indent=2, ensure_ascii=False))
        case Form.BLOCK:
            print(f"```json\n{found.as_block(datetime.now(UTC).date().isoformat())}\n```")
    if not found.has_passed:
        raise SystemExit(1)


@contextmanager
def _show_stages() -> Iterator[Callable[[str, str], None]]:
    """Show the stage under way on a terminal; yield what is called with model and stage."""
    from rich.console import Console

    with Console(stderr=True).status("…") as status:
        yield lambda model, stage: status.update(f"{model}: {stage}")


def _check_machine(models: Path | None) -> Iterator[Finding]:
    yield checks.check_packages(each.name for each in distributions())
    yield checks.check_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    try:
        settings = load_settings({"models": models})
    except SettingsInvalid as error:  # all other checks need them
        yield from (Finding("settings", "fail", each) for each in error.problems)
        return
    reading = read_models(settings.models, variables())
    notes = strays(reading.variables)
    yield from (Finding("settings", "warn", f"{note}.") for note in notes)
    problems = checks.machine_problems(settings)
    yield from (Finding("settings", "fail", f"{problem}.") for problem in problems)
    if not notes and not problems:
        yield Finding("settings", "ok", "each is known and within its bounds.")
    yield from (checks.check_port(bind) for bind in settings.binds)
    sizes = yield from _check_mlx(settings)
    if reading.problems:
        yield from (Finding("models", "fail", problem) for problem in reading.problems)
    else:
        yield from _check_models(reading.catalog, sizes, settings)


def _check_mlx(settings: Settings) -> Generator[Finding, None, Mapping[str, int | str | None]]:
    """Yield the findings of the device; return the models' sizes or problems, if mlx works."""
    try:
        probe = checks.run_probe(settings.models)
    except checks.MlxBroken as error:
        advice = "Install mlx for this machine afresh, or set GATEWAY_DEVICE=cpu."
        yield Finding("device", "fail", f"mlx does not work: {error}. {advice}")
        return {}
    yield Finding("device", "ok", f"mlx computes on {probe.device}.")
    yield checks.check_blas(probe.device, probe.blas, probe.gflops, probe.blas_hint)
    yield checks.check_compiler(probe.device, shutil.which("g++"))
    yield checks.check_temporary(Path(tempfile.gettempdir()), probe.device)
    sizes = {name: size for name, size in probe.sizes.items() if isinstance(size, int)}
    yield checks.check_memory(probe.limit_bytes, sizes)
    return probe.sizes


def _check_models(
    catalog: Catalog, sizes: Mapping[str, int | str | None], settings: Settings
) -> Iterator[Finding]:
    from gateway.engine.hub import on_disk

    hub = hub_of(settings, may_download=settings.auto_pull)
    problems = {name: problem for name, problem in sizes.items() if isinstance(problem, str)}
    missing: list[ModelSpec] = []
    for spec in catalog.specs:
        try:
            if on_disk(spec, hub) is None:
                missing.append(spec)
        except GatewayError as error:
            problems[spec.id] = str(error)
    yield from (Finding("models", "warn", problem) for problem in problems.values())
    whole = len(catalog) - len(problems) - len(missing)
    yield Finding("models", "ok", f"{whole} of {len(catalog)} are on disk.")
    refusal = _refusal(missing[0], hub) if missing and hub.may_download else None
    ids = [spec.id for spec in missing]
    yield checks.check_hub(ids, may_download=hub.may_download, refusal=refusal)


def _refusal(spec: ModelSpec, hub: "Hub") -> str | None:
    from gateway.engine.hub import ask_hub

    try:
        ask_hub(spec, hub)
    except GatewayError as error:
        return str(error)
    return None
