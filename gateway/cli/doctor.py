"""`mlx-gateway doctor`: can this machine serve, and what would make it serve better.

Its checks of the machine are below it, one function each: facts → a finding, with advice.
"""

import asyncio
import errno
import faulthandler
import json
import os
import resource
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path

import typer

from gateway import logs
from gateway.cli import lazy
from gateway.cli.terminal import ModelsFile, show
from gateway.cli.tools import AGENT_CONTEXT
from gateway.doctor.report import COLUMNS, Checked, Finding, Report
from gateway.errors import GatewayError, ModelNotFound, ModelUnavailable
from gateway.logs import human_bytes
from gateway.registry import (
    Catalog,
    ChatSpec,
    ModelSpec,
    load_catalog,
    packaged,
    read_models,
)
from gateway.settings import Settings, SettingsInvalid, load_settings, strays, variables

_PROBE_S = 120  # a cold import of mlx from a slow disk
COMPILED = "compiled code"
LEAST_FREE_BYTES = 16 << 20  # for what is written; with less, too, nothing is compiled


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
        run_probe(settings.models)  # an mlx that ends its process ends that one
    except MlxBroken as error:
        return Report({}, [Finding("device", "fail", f"mlx does not work: {error}.")], absent)
    logs.configure("error", settings.log_format)
    faulthandler.enable()  # a fault of mlx later on says where
    # What libraries print is no part of the report.
    with redirect_stdout(sys.stderr), _show_stages() as on_stage:
        report = asyncio.run(lazy.trial.check_models(present, settings, on_stage))
    return replace(report, models=[*report.models, *absent])


def choose(specs: Iterable[ModelSpec], is_here: Callable[[ModelSpec], bool]) -> list[ModelSpec]:
    """Choose a model of each kind: one on board, else one that is on disk, else the first."""
    first: dict[str, ModelSpec] = {}
    # An adapter is no model by itself.
    whole = [spec for spec in specs if not isinstance(spec, ChatSpec) or spec.base is None]
    for spec in sorted(whole, key=lambda spec: (not packaged(spec.source), not is_here(spec))):
        first.setdefault(spec.kind, spec)
    return [first[kind] for kind in sorted(first, reverse=True)]


def check_model_files(spec: ModelSpec, settings: Settings) -> Finding | None:
    """Return why a model cannot be checked, with what adds it; None if its files are on disk."""
    # Its weights are its base's.
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
    yield check_packages(distribution.name for distribution in distributions())
    yield check_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    try:
        settings = load_settings({"models": models})
    except SettingsInvalid as error:  # all other checks need them
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
    yield check_kept({name: kept for name, kept in probe.kept.items() if kept is not None})
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
    """mlx does not work here; the text is its error, or how its process ended."""


def machine_problems(settings: Settings) -> list[str]:
    """Return what is wrong with settings on this machine."""
    problems = []
    if settings.tls_cert is not None and settings.tls_key is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:  # with a password, even if a wrong one: OpenSSL would ask a terminal for it
            context.load_cert_chain(settings.tls_cert, settings.tls_key, password="")
        except OSError as error:  # SSLError is one
            files = f"GATEWAY_TLS_CERT={settings.tls_cert} and GATEWAY_TLS_KEY={settings.tls_key}"
            problems.append(
                f"{files}: should be a certificate chain and its key, in PEM and without a "
                f"password ({error.strerror or error})"
            )
    if settings.device == "gpu":
        try:
            lazy.device.choose_device(settings.device)
        except ValueError as error:
            problems.append(f"GATEWAY_DEVICE=gpu: {error}")
    return problems


def require_machine(settings: Settings) -> None:
    """Raise SettingsInvalid if something is wrong with settings on this machine."""
    if problems := machine_problems(settings):
        raise SettingsInvalid(problems)


@dataclass(frozen=True, slots=True)
class Probe:
    """What a process with mlx found."""

    device: str
    # That models may hold.
    limit_bytes: int
    # Each model's bytes, or its problem; None if it is not on disk.
    sizes: Mapping[str, int | str | None]
    # How many tokens of a prompt each keeps at most; None if that is not known.
    kept: Mapping[str, int | None]
    # The tokens that each model on disk may be given; None if its files do not say.
    contexts: Mapping[str, int | None]
    # The library that multiplies on a CPU, and what to do if it is a slow one.
    blas: str
    blas_hint: str | None
    # The speed of the device.
    gflops: float
    # Names of the content, and the folder of each, which may not exist yet.
    folders: Mapping[str, str]


def run_probe(models: Path) -> Probe:
    """Run `probe` in a process of its own; raises MlxBroken."""
    command = [sys.executable, "-m", "gateway.cli.probe", str(models)]
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


def check_blas(device: str, described: str, gflops: float, hint: str | None) -> Finding:
    """Check which library multiplies matrices on the CPU, and how fast."""
    if device != "cpu":
        return Finding("blas", "ok", f"not needed on {device}.")
    if hint:
        return Finding("blas", "warn", hint)
    return Finding("blas", "ok", f"{described}; {gflops:.3g} GFLOP/s (512³, float32).")


def check_compiler(device: str, found: str | None) -> Finding:
    """Check that g++ is installed."""
    # Without it mx.compile silently fuses nothing on the CPU.
    if device != "cpu" or found:
        return Finding("compiler", "ok", found or f"not needed on {device}.")
    message = "there is no g++, so mlx runs unfused and slower. Install it: `apt-get install g++`."
    return Finding("compiler", "warn", message)


def check_packages(installed: Iterable[str]) -> Finding:
    """Check that one build of MLX is installed."""
    builds = sorted(name for name in installed if name.startswith(("mlx-cpu", "mlx-cuda")))
    if len(builds) > 1:
        # They overwrite each other's files: the first that is uninstalled takes the others' along.
        message = (
            f"{' and '.join(builds)} are both installed. Uninstall all of them, then install one: "
            f"`pip uninstall {' '.join(builds)}`; `make setup-cuda` does both."
        )
        return Finding("packages", "warn", message)
    return Finding("packages", "ok", f"{' and '.join(builds) or 'mlx'}, and no other build.")


def check_memory(limit_bytes: int, sizes: Mapping[str, int]) -> Finding:
    """Check that the largest model fits in the memory that models may hold."""
    name = max(sizes, key=lambda each: sizes[each], default=None)
    may = f"models may hold {human_bytes(limit_bytes)}"
    if name is None or sizes[name] <= limit_bytes:
        return Finding("memory", "ok", f"{may}.")
    message = f"{name} would hold {human_bytes(sizes[name])}, and {may}. Use a smaller one."
    return Finding("memory", "warn", message)


def check_contexts(contexts: Mapping[str, int | None]) -> Finding:
    """List how many tokens each model on disk may be given."""
    unknown = [name for name, tokens in contexts.items() if tokens is None]
    if unknown:
        message = "their files say no context, which `max_context:` may set, or cannot be read"
        return Finding("contexts", "warn", f"{', '.join(unknown)}: {message}.")
    listed = [f"{name} {tokens:,}" for name, tokens in contexts.items()]
    return Finding("contexts", "ok", f"in tokens: {', '.join(listed) or 'no model is on disk'}.")


def check_kept(kept: Mapping[str, int]) -> Finding:
    """Check that of an agent's first prompt all is kept, for those that follow."""
    few = [f"{name} {tokens:,}" for name, tokens in kept.items() if tokens < AGENT_CONTEXT]
    if not few:
        return Finding("prefixes", "ok", f"each keeps {AGENT_CONTEXT:,} tokens of a prompt.")
    message = (
        f"of a prompt so many tokens are kept, and an agent's has {AGENT_CONTEXT:,}: "
        f"{', '.join(few)}. Use a smaller model or `kv_bits`, or raise GATEWAY_PREFIX_CACHE_BYTES."
    )
    return Finding("prefixes", "warn", message)


def check_hub(missing: Sequence[str], *, may_download: bool, refusal: str | None) -> Finding:
    """Check that missing models can be downloaded; `refusal` is the hub's error for the first."""
    if not missing:
        return Finding("hub", "ok", "nothing is to be fetched.")
    first = missing[0]
    if len(missing) > 1:
        first += f" and {len(missing) - 1} more"
    pull = f"`mlx-gateway pull {missing[0]}`"
    if not may_download:
        message = f"{first}: not on disk, and GATEWAY_AUTO_PULL is off. Run {pull}."
        return Finding("hub", "warn", message)
    if refusal is not None:
        return Finding("hub", "warn", f"{refusal} When that is mended: {pull}.")
    return Finding("hub", "ok", f"{first}: fetched at the first request, or by {pull}.")


def check_port(bind: str) -> Finding:
    """Check that the gateway can listen on a bind, by listening on it for a moment."""
    if bind.startswith("fd://"):
        return Finding("port", "ok", f"{bind} is inherited.")
    if bind.startswith("unix:"):
        folder = Path(bind.removeprefix("unix:")).absolute().parent
        if os.access(folder, os.W_OK):
            return Finding("port", "ok", f"{bind} can be made.")
        return Finding("port", "fail", f"nothing can be made in {folder}. Set GATEWAY_BIND.")
    host, _, number = bind.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host.strip("[]"), int(number)), family=family):
            return Finding("port", "ok", f"{bind} is free.")
    except OSError as error:
        return Finding("port", "fail", bind_problem(bind, error))


def bind_problem(bind: str, error: OSError) -> str:
    """Return why nothing can listen on a bind, and what to do."""
    reason = (error.strerror or str(error)).partition(" (")[0]  # asyncio repeats the address
    is_path = bind.startswith("unix:")
    match error.errno:
        case errno.EADDRINUSE:
            advice = "Is a gateway running already? If not, choose another "
            advice += "path: GATEWAY_BIND." if is_path else "port: GATEWAY_PORT."
        case errno.EACCES if not is_path:
            advice = "Set GATEWAY_PORT to one above 1023."
        case _ if is_path:
            advice = "Set GATEWAY_BIND to another path."
        case _:
            advice = "Set GATEWAY_HOST to an address of this machine."
    return f"{bind}: {reason}. {advice}"


def check_folder(content: str, folder: Path) -> Finding:
    """Check that there is room in a folder that is written to, and that code in it is safe."""
    there = next(each for each in (folder, *folder.absolute().parents) if os.path.isdir(each))
    free = shutil.disk_usage(there).free
    found = f"{human_bytes(free)} free for {content} in {folder}."
    if not os.access(there, os.W_OK):
        return Finding("disk", "warn", f"{folder} cannot be written to, for {content}.")
    if free < LEAST_FREE_BYTES:
        return Finding("disk", "fail", f"{found} Make room there.")
    # Without a cache of the user's own, mlx compiles in the temporary folder.
    may_run = not os.statvfs(there).f_flag & getattr(os, "ST_NOEXEC", 0)
    if content == COMPILED and (there.stat().st_mode & 0o002 or not may_run):
        problem = "Others may write what is run there" if may_run else "Nothing may run there"
        return Finding("disk", "warn", f"{found} {problem}: set XDG_CACHE_HOME to your own folder.")
    return Finding("disk", "ok", found)


def check_files(limit: int) -> Finding:
    """Check the limit of open files."""
    if limit < 1024:  # each connection is one
        message = f"{limit} files may be open, so fewer clients. Raise it: `ulimit -n 4096`."
        return Finding("files", "warn", message)
    return Finding("files", "ok", f"{limit} may be open.")
