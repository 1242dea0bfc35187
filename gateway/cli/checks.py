"""The checks of doctor, one function each: the machine's facts → a finding, with advice."""

import errno
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gateway.cli import lazy
from gateway.doctor.report import Finding
from gateway.logs import human_bytes
from gateway.settings import Settings, SettingsInvalid

_PROBE_S = 120  # a cold import of mlx from a slow disk


class MlxBroken(Exception):
    """mlx does not work here; the text is its error, or how its process ended."""


def machine_problems(settings: Settings) -> list[str]:
    """Return what is wrong with settings on this machine: TLS files that cannot be used, a GPU that
    is not there.
    """
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
    """What a process with mlx found.

    `limit_bytes` is what models may hold; `sizes` has each model's bytes, or its problem. `gflops`
    is the speed of the device, `blas` the library that multiplies on a CPU, and `blas_hint` what to
    do if that is slow.
    """

    device: str
    limit_bytes: int
    sizes: Mapping[str, int | str | None]
    blas: str
    blas_hint: str | None
    gflops: float


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
    """Check that g++ is installed: without it mx.compile silently fuses nothing on the CPU."""
    if device != "cpu" or found:
        return Finding("compiler", "ok", found or f"not needed on {device}.")
    message = "there is no g++, so mlx runs unfused and slower. Install it: `apt-get install g++`."
    return Finding("compiler", "warn", message)


def check_packages(installed: Iterable[str]) -> Finding:
    """Check that one build of MLX is installed: those for CPU and CUDA overwrite each other."""
    builds = sorted(name for name in installed if name.startswith(("mlx-cpu", "mlx-cuda")))
    if len(builds) > 1:
        # The files have the same names: the first that is uninstalled takes the others' along.
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


def check_temporary(folder: Path, device: str) -> Finding:
    """Check the temporary folder, where mlx keeps compiled code: no other user may write to it."""
    if not os.access(folder, os.W_OK):
        return Finding("tmpdir", "fail", f"{folder} cannot be written to. Set TMPDIR.")
    if os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0):
        message = f"nothing in {folder} may run, and mlx compiles there. Set TMPDIR elsewhere."
        return Finding("tmpdir", "warn", message)
    if device == "cpu" and folder.stat().st_mode & 0o002:
        message = (
            f"others may write to {folder}, where mlx compiles. Set TMPDIR to a folder of yours."
        )
        return Finding("tmpdir", "warn", message)
    return Finding("tmpdir", "ok", f"{folder}.")


def check_files(limit: int) -> Finding:
    """Check the limit of open files: each connection is one."""
    if limit < 1024:
        message = f"{limit} files may be open, so fewer clients. Raise it: `ulimit -n 4096`."
        return Finding("files", "warn", message)
    return Finding("files", "ok", f"{limit} may be open.")
