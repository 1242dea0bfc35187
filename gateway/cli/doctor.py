"""`mlx-gateway doctor`: can this machine serve, and what would make it serve better."""

import asyncio
import faulthandler
import json
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path

import typer

from gateway import logs
from gateway.cli import checks, lazy
from gateway.cli.terminal import ModelsFile, show
from gateway.doctor.report import COLUMNS, Checked, Finding, Report
from gateway.errors import GatewayError, ModelNotFound, ModelUnavailable
from gateway.registry import (
    Catalog,
    ChatSpec,
    ModelSpec,
    PackageSource,
    load_catalog,
    read_models,
)
from gateway.settings import Settings, SettingsInvalid, load_settings, strays, variables


def doctor(
    models: ModelsFile = None,
    engine: bool = typer.Option(False, "--engine", help="Test the engine: about a minute."),
    model: list[str] = typer.Option((), help="To test it with.", show_default="those on board"),
    as_json: bool = typer.Option(False, "--json", help="Print JSON, for a bug report."),
    report: bool = typer.Option(False, "--report", help="Test it; print a block to paste."),
) -> None:
    """Check whether this machine can serve, with advice; or, with --engine, test the engine.

    The exit status is 1 if it cannot serve, or if a test of the engine fails.
    """
    if engine or report:
        settings = load_settings({"models": models})
        checked = _check_engine(settings, model)
        if report:
            print(f"```json\n{checked.as_block(datetime.now(UTC).date().isoformat())}\n```")
        elif as_json:
            print(json.dumps(checked.as_json(), indent=2, ensure_ascii=False))
        else:
            show(COLUMNS, checked.rows())
        has_passed = checked.has_passed
    else:
        if model or as_json:
            raise typer.BadParameter("it goes with --engine", param_hint="--model / --json")
        findings = list(_check_machine(models))
        show(("Check", "State", "What to do"), [(f.check, f.state, f.message) for f in findings])
        has_passed = all(finding.state != "fail" for finding in findings)
    if not has_passed:
        raise SystemExit(1)


def _check_engine(settings: Settings, names: Sequence[str]) -> Report:
    catalog = load_catalog(settings.models, variables())
    try:
        specs = [catalog.resolve(name).spec for name in names]
    except ModelNotFound as error:
        raise typer.BadParameter(str(error), param_hint="--model") from None
    if not specs:
        specs = choose(catalog.specs, lambda spec: check_model_files(spec, settings) is None)
    present, absent = [], []
    for spec in specs:
        finding = check_model_files(spec, settings)
        if finding is None:
            present.append(spec)
        else:
            absent.append(Checked(spec, [finding]))
    try:
        checks.run_probe(settings.models)  # an mlx that ends its process ends that one
    except checks.MlxBroken as error:
        return Report({}, [Finding("device", "fail", f"mlx does not work: {error}.")], absent)
    logs.configure("error", settings.log_format)
    faulthandler.enable()  # a fault of mlx later on says where
    # What libraries print is no part of the report.
    with redirect_stdout(sys.stderr), _show_stages() as on_stage:
        report = asyncio.run(lazy.trial.check_models(present, settings, on_stage))
    return replace(report, models=[*report.models, *absent])


def choose(specs: Iterable[ModelSpec], is_here: Callable[[ModelSpec], bool]) -> list[ModelSpec]:
    """Choose a model of each kind: one on board, else one that is on disk, else the first. An
    adapter is none by itself.
    """
    first: dict[str, ModelSpec] = {}
    whole = [spec for spec in specs if not isinstance(spec, ChatSpec) or spec.base is None]
    for spec in sorted(
        whole, key=lambda spec: (not isinstance(spec.source, PackageSource), not is_here(spec))
    ):
        first.setdefault(spec.kind, spec)
    return [first[kind] for kind in sorted(first, reverse=True)]


def check_model_files(spec: ModelSpec, settings: Settings) -> Finding | None:
    """Return why a model cannot be checked, with what adds it; None if its files are on disk."""
    if isinstance(spec, ChatSpec) and spec.base is not None:
        command = f"mlx-gateway doctor --engine --model {spec.base}"
        return Finding("files", "skip", f"an adapter is run by its base. Run: {command}")
    try:
        if lazy.hub.on_disk(spec, lazy.hub_of(settings, may_download=False)) is not None:
            return None
    except ModelUnavailable as error:
        return Finding("files", "skip", str(error))
    except GatewayError as error:
        return Finding("files", "fail", str(error))
    return Finding("files", "skip", f"not on disk. Run: mlx-gateway pull {spec.id}")


@contextmanager
def _show_stages() -> Iterator[Callable[[str, str], None]]:
    """Show the stage under way on a terminal; yield what is called with model and stage."""
    with lazy.Console(stderr=True).status("…") as status:
        yield lambda model, stage: status.update(f"{model}: {stage}")


def _check_machine(models: Path | None) -> Iterator[Finding]:
    yield checks.check_packages(distribution.name for distribution in distributions())
    yield checks.check_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    try:
        settings = load_settings({"models": models})
    except SettingsInvalid as error:  # all other checks need them
        yield from (Finding("settings", "fail", problem) for problem in error.problems)
        return
    reading = read_models(settings.models, variables())
    notes = strays(reading.variables)
    yield from (Finding("settings", "warn", f"{note}.") for note in notes)
    problems = checks.machine_problems(settings)
    yield from (Finding("settings", "fail", f"{problem}.") for problem in problems)
    if not notes and not problems:
        yield Finding("settings", "ok", "each is known and within its bounds.")
    yield from (checks.check_port(bind) for bind in settings.binds)
    yield from (Finding("models", "fail", problem) for problem in reading.problems)
    try:
        probe = checks.run_probe(settings.models)
    except checks.MlxBroken as error:
        advice = "Install mlx for this machine afresh, or set GATEWAY_DEVICE=cpu."
        yield Finding("device", "fail", f"mlx does not work: {error}. {advice}")
        return
    yield Finding("device", "ok", f"mlx computes on {probe.device}.")
    yield checks.check_blas(probe.device, probe.blas, probe.gflops, probe.blas_hint)
    yield checks.check_compiler(probe.device, shutil.which("g++"))
    yield checks.check_temporary(Path(tempfile.gettempdir()), probe.device)
    sizes = {name: size for name, size in probe.sizes.items() if isinstance(size, int)}
    yield checks.check_memory(probe.limit_bytes, sizes)
    if not reading.problems:
        yield from _check_models(reading.catalog, probe.sizes, settings)


def _check_models(
    catalog: Catalog, sizes: Mapping[str, int | str | None], settings: Settings
) -> Iterator[Finding]:
    problems = [problem for problem in sizes.values() if isinstance(problem, str)]
    yield from (Finding("models", "warn", problem) for problem in problems)
    missing = [spec for spec in catalog.specs if sizes[spec.id] is None]
    whole = len(catalog) - len(problems) - len(missing)
    yield Finding("models", "ok", f"{whole} of {len(catalog)} are on disk.")
    hub = lazy.hub_of(settings, may_download=settings.auto_pull)
    refusal = None
    if missing and hub.may_download:
        try:
            lazy.hub.ask_hub(missing[0], hub)
        except GatewayError as error:
            refusal = str(error)
    ids = [spec.id for spec in missing]
    yield checks.check_hub(ids, may_download=hub.may_download, refusal=refusal)
