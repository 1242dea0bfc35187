"""`mlx-gateway doctor`: checks whether this machine can serve, and how it could serve better."""

import asyncio
import faulthandler
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gateway import logs
from gateway.cli import lazy
from gateway.cli.agents import AGENT_CONTEXT
from gateway.cli.gateways import kept_tokens
from gateway.cli.terminal import ModelsFile, show
from gateway.doctor.machine import (
    COMPILED,
    check_blas,
    check_compiler,
    check_contexts,
    check_files,
    check_folder,
    check_hub,
    check_kept,
    check_memory,
    check_packages,
    check_port,
    machine_problems,
)
from gateway.doctor.report import COLUMNS, Checked, Finding, Report
from gateway.errors import GatewayError, ModelNotFound, ModelUnavailable
from gateway.registry import (
    Catalog,
    ChatSpec,
    ModelSpec,
    load_catalog,
    packaged,
    read_models,
)
from gateway.settings import Settings, SettingsInvalid, load_settings, strays, variables

if TYPE_CHECKING:
    from gateway.app.engines import MlxEngines
    from gateway.engine.hub import Hub

_PROBE_S = 120  # seconds to import mlx from a slow disk


def doctor(
    models: ModelsFile = None,
    engine: bool = typer.Option(False, "--engine", help="Test the engine: about a minute."),
    model: list[str] = typer.Option((), help="A model to test.", show_default="one per kind"),
    as_json: bool = typer.Option(False, "--json", help="Print JSON, for a bug report."),
    report: bool = typer.Option(False, "--report", help="Test the engine; print JSON to paste."),
) -> None:
    """Check whether this machine can serve, with advice; or, with --engine, test the engine.

    The exit status is 1 if this machine cannot serve, or if a test of the engine fails.
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
            raise typer.BadParameter("these need --engine", param_hint="--model / --json")
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
        run_probe(settings.models)  # if mlx crashes, only the probe's process ends
    except MlxBroken as error:
        return Report({}, [Finding("device", "fail", f"mlx does not work: {error}.")], absent)
    logs.configure("error", settings.log_format)
    faulthandler.enable()  # prints a traceback if mlx crashes later
    # Libraries may print to stdout, where the report belongs.
    with redirect_stdout(sys.stderr), _show_stages() as on_stage:
        report = asyncio.run(lazy.trial.check_models(present, settings, on_stage))
    return replace(report, models=[*report.models, *absent])


def choose(specs: Iterable[ModelSpec], is_here: Callable[[ModelSpec], bool]) -> list[ModelSpec]:
    """Choose a model of each kind: a package, else one on disk, else the first."""
    first: dict[str, ModelSpec] = {}
    # An adapter cannot be checked without its base model.
    whole = [spec for spec in specs if not isinstance(spec, ChatSpec) or spec.base is None]
    for spec in sorted(whole, key=lambda spec: (not packaged(spec.source), not is_here(spec))):
        first.setdefault(spec.kind, spec)
    return [first[kind] for kind in sorted(first, reverse=True)]


def check_model_files(spec: ModelSpec, settings: Settings) -> Finding | None:
    if isinstance(spec, ChatSpec) and spec.base is not None:
        command = f"mlx-gateway doctor --engine --model {spec.base}"
        return Finding("files", "skip", f"an adapter is tested by its base. Run: {command}")
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
    with lazy.Console(stderr=True).status("…") as status:
        yield lambda model, stage: status.update(f"{model}: {stage}")


def _check_machine(models: Path | None) -> Iterator[Finding]:
    yield check_packages(distribution.name for distribution in distributions())
    yield check_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    try:
        settings = load_settings({"models": models})
    except SettingsInvalid as error:  # all other checks need the settings
        yield from (Finding("settings", "fail", problem) for problem in error.problems)
        return
    reading = read_models(settings.models, variables())
    notes = strays(reading.variables)
    yield from (Finding("settings", "warn", f"{note}.") for note in notes)
    problems = machine_problems(settings)
    yield from (Finding("settings", "fail", f"{problem}.") for problem in problems)
    if not notes and not problems:
        yield Finding("settings", "ok", "each is known and within its bounds.")
    yield from (check_port(bind) for bind in settings.binds)
    yield from (Finding("models", "fail", problem) for problem in reading.problems)
    try:
        probe = run_probe(settings.models)
    except MlxBroken as error:
        advice = "Install mlx for this machine afresh, or set GATEWAY_DEVICE=cpu."
        yield Finding("device", "fail", f"mlx does not work: {error}. {advice}")
        return
    yield Finding("device", "ok", f"mlx computes on {probe.device}.")
    yield check_blas(probe.device, probe.blas, probe.gflops, probe.blas_hint)
    yield check_compiler(probe.device, shutil.which("g++"))
    yield from (check_folder(content, Path(name)) for content, name in probe.folders.items())
    sizes = {name: size for name, size in probe.sizes.items() if isinstance(size, int)}
    yield check_memory(probe.limit_bytes, sizes)
    yield check_contexts(probe.contexts)
    kept = {name: tokens for name, tokens in probe.kept.items() if tokens is not None}
    yield check_kept(kept, AGENT_CONTEXT)
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
    yield check_hub(ids, may_download=hub.may_download, refusal=refusal)


class MlxBroken(Exception):
    """Raised if mlx does not work here. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Facts about the machine and its models, from a process that imports mlx."""

    device: str
    limit_bytes: int
    # The bytes that each model would hold, or an error; None if the model is not on disk.
    sizes: Mapping[str, int | str | None]
    # Tokens of a prompt that fit into each model's prefix cache; None if unknown.
    kept: Mapping[str, int | None]
    # The context of each model on disk, in tokens; None if unknown.
    contexts: Mapping[str, int | None]
    # The library that multiplies matrices on a CPU, and advice if it is slow.
    blas: str
    blas_hint: str | None
    gflops: float
    # The folder of each kind of content, which may not exist yet.
    folders: Mapping[str, str]


def run_probe(models: Path) -> Probe:
    """Run `probe` in a separate process. Raises MlxBroken."""
    command = [sys.executable, "-c", f"from {__name__} import probe; probe()", str(models)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PROBE_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise MlxBroken(f"it did not answer in {_PROBE_S} seconds") from None
    if done.returncode < 0:
        raise MlxBroken(f"it was ended by {signal.Signals(-done.returncode).name}")
    if done.returncode > 0:
        raise MlxBroken((done.stderr.strip() or "it said nothing").splitlines()[-1])
    return Probe(**json.loads(done.stdout.splitlines()[-1]))


def probe() -> None:
    """Compute something on the device, and print a Probe as JSON."""
    from huggingface_hub import constants

    from gateway.app.self_tests import verdict_store
    from gateway.engine.blas import BLAS, cache_folder
    from gateway.engine.compiled_code import FOLDER
    from gateway.engine.inputs import read_inputs

    settings = load_settings({"models": Path(sys.argv[1])})
    hub = lazy.hub_of(settings, may_download=False)
    engines = lazy.engines.MlxEngines(settings)
    engines.begin()
    lazy.device.multiply()
    catalog = read_models(settings.models, variables()).catalog
    inputs = {spec.id: read_inputs(spec, hub) for spec in catalog.specs}
    folders = {
        "models": settings.hub_cache or constants.HF_HUB_CACHE,
        "self-tests": verdict_store(settings).folder,
        "kept prompts": settings.prefix_folder,
        "OpenBLAS's copy": cache_folder(os.environ, "openblas") if BLAS.kind == "wheel" else None,
        COMPILED: FOLDER if engines.device != "metal" else None,
        "temporary files": os.environ.get("TMPDIR") or "/tmp",
    }
    found = Probe(
        device=engines.device,
        limit_bytes=lazy.limits.budget_bytes(settings, engines.memory_bytes),
        sizes={spec.id: _size(spec, engines, hub) for spec in catalog.specs},
        kept={spec.id: kept_tokens(spec.id, catalog, settings) for spec in catalog.specs},
        contexts={name: each.max_tokens for name, each in inputs.items() if each is not None},
        blas=BLAS.described,
        blas_hint=BLAS.hint,
        gflops=lazy.device.gflops(),
        folders={content: str(folder) for content, folder in folders.items() if folder},
    )
    print(json.dumps(asdict(found)))
    engines.end()


def _size(spec: ModelSpec, engines: "MlxEngines", hub: "Hub") -> int | str | None:
    try:
        folder = lazy.hub.on_disk(spec, hub)
        if folder is None:
            return None
        size = asyncio.run(engines.size(spec, folder))
    except GatewayError as error:
        return str(error)
    return size.weights + size.kv
