"""The checks of a machine, which turn facts into findings with advice."""

import contextlib
import errno
import os
import re
import shutil
import socket
import ssl
from collections.abc import Iterable, Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Final
from urllib.request import ProxyHandler, build_opener

from gateway.doctor.report import Finding
from gateway.logs import human_bytes
from gateway.settings import Settings, SettingsInvalid, origin

COMPILED: Final = "compiled code"
LEAST_FREE_BYTES: Final = 16 << 20  # with less, even mlx's compiler fails


def machine_problems(settings: Settings) -> list[str]:
    problems = []
    if settings.tls_cert is not None and settings.tls_key is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:  # without a password, OpenSSL would ask for one on the terminal
            context.load_cert_chain(settings.tls_cert, settings.tls_key, password="")
        except OSError as error:
            files = f"GATEWAY_TLS_CERT={settings.tls_cert} and GATEWAY_TLS_KEY={settings.tls_key}"
            problems.append(
                f"{files}: should be a certificate chain and its key, in PEM and without a "
                f"password ({error.strerror or error})"
            )
    if settings.device == "gpu":
        from gateway.engine.device import choose_device  # mlx may not work here

        try:
            choose_device(settings.device)
        except ValueError as error:
            problems.append(f"GATEWAY_DEVICE=gpu: {error}")
    return problems


def require_machine(settings: Settings) -> None:
    if problems := machine_problems(settings):
        raise SettingsInvalid(problems)


def check_blas(device: str, described: str, gflops: float, hint: str | None) -> Finding:
    if device != "cpu":
        return Finding("blas", "ok", f"not needed on {device}.")
    if hint:
        return Finding("blas", "warn", hint)
    return Finding("blas", "ok", f"{described}; {gflops:.3g} GFLOP/s (512³, float32).")


def check_compiler(device: str, found: str | None) -> Finding:
    # mx.compile silently fuses nothing on a CPU without g++.
    if device != "cpu" or found:
        return Finding("compiler", "ok", found or f"not needed on {device}.")
    message = "there is no g++, so mlx runs unfused and slower. Install it: `apt-get install g++`."
    return Finding("compiler", "warn", message)


def check_packages(installed: Iterable[str]) -> Finding:
    builds = sorted(name for name in installed if name.startswith(("mlx-cpu", "mlx-cuda")))
    if len(builds) > 1:
        # Builds overwrite each other's files, so uninstalling one breaks the others.
        message = (
            f"{' and '.join(builds)} are both installed. Uninstall all of them, then install one: "
            f"`pip uninstall {' '.join(builds)}`; `make setup-cuda` does both."
        )
        return Finding("packages", "warn", message)
    return Finding("packages", "ok", f"{' and '.join(builds) or 'mlx'}, and no other build.")


def check_memory(limit_bytes: int, sizes: Mapping[str, int]) -> Finding:
    name = max(sizes, key=lambda each: sizes[each], default=None)
    may = f"models may hold {human_bytes(limit_bytes)}"
    if name is None or sizes[name] <= limit_bytes:
        return Finding("memory", "ok", f"{may}.")
    message = f"{name} would hold {human_bytes(sizes[name])}, and {may}. Use a smaller one."
    return Finding("memory", "warn", message)


def check_contexts(contexts: Mapping[str, int | None]) -> Finding:
    unknown = [name for name, tokens in contexts.items() if tokens is None]
    if unknown:
        message = "their files state no context (set `max_context:`), or cannot be read"
        return Finding("contexts", "warn", f"{', '.join(unknown)}: {message}.")
    listed = [f"{name} {tokens:,}" for name, tokens in contexts.items()]
    return Finding("contexts", "ok", f"in tokens: {', '.join(listed) or 'no model is on disk'}.")


def check_kept(kept: Mapping[str, int], needed: int) -> Finding:
    few = [f"{name} {tokens:,}" for name, tokens in kept.items() if tokens < needed]
    if not few:
        return Finding("prefixes", "ok", f"each keeps {needed:,} tokens of a prompt.")
    message = (
        f"an agent's prompt has {needed:,} tokens, and these models keep fewer: "
        f"{', '.join(few)}. Use a smaller model or `kv_bits`, or raise GATEWAY_PREFIX_CACHE_BYTES."
    )
    return Finding("prefixes", "warn", message)


def check_hub(missing: Sequence[str], *, may_download: bool, refusal: str | None) -> Finding:
    if not missing:
        return Finding("hub", "ok", "there is nothing to download.")
    first = missing[0]
    if len(missing) > 1:
        first += f" and {len(missing) - 1} more"
    pull = f"`mlx-gateway pull {missing[0]}`"
    if not may_download:
        message = f"{first}: not on disk, and GATEWAY_AUTO_PULL is off. Run {pull}."
        return Finding("hub", "warn", message)
    if refusal is not None:
        return Finding("hub", "warn", f"{refusal} Once that is fixed, run {pull}.")
    return Finding("hub", "ok", f"{first}: fetched at the first request, or by {pull}.")


def check_port(bind: str) -> Finding:
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
        is_served = error.errno == errno.EADDRINUSE and _is_gateway(f"http://{bind}")
        return Finding("port", "warn" if is_served else "fail", bind_problem(bind, error))


def bind_problem(bind: str, error: OSError) -> str:
    reason = (error.strerror or str(error)).partition(" (")[0]  # asyncio adds the address in (…)
    is_path, (host, _, port) = bind.startswith("unix:"), bind.rpartition(":")
    match error.errno:
        case errno.EADDRINUSE if is_path:
            advice = "Is a gateway running already? If not, choose another path: GATEWAY_BIND."
        case errno.EADDRINUSE:
            advice = f"Change {_origin('port', port)}: 0 picks a free port."
            if _is_gateway(f"http://{bind}"):
                advice = f"A gateway answers there: ask it by `mlx-gateway run MODEL`. {advice}"
        case errno.EACCES if not is_path:
            advice = f"Set {_origin('port', port)} to one above 1023."
        case _ if is_path:
            advice = "Set GATEWAY_BIND to another path."
        case _:
            advice = f"Set {_origin('host', host)} to an address of this machine."
    return f"{bind}: {reason}. {advice}"


def _origin(key: str, text: str) -> str:
    """Return the variable that has this host or port, or else the flag."""
    is_whole = re.compile(rf"(?<![\w.]){re.escape(text)}(?![\w.])").search
    names = ("GATEWAY_BIND", f"GATEWAY_{key.upper()}")
    return next((name for name in names if is_whole(origin(name)[0] or "")), f"--{key}")


def _is_gateway(url: str) -> bool:
    # A proxy would get even requests to this machine.
    with contextlib.suppress(OSError, HTTPException, ValueError):
        return b'"mlx-gateway"' in build_opener(ProxyHandler({})).open(url, timeout=1).read(256)
    return False


def check_folder(content: str, folder: Path) -> Finding:
    there = next(each for each in (folder, *folder.absolute().parents) if os.path.isdir(each))
    free = shutil.disk_usage(there).free
    found = f"{human_bytes(free)} free for {content} in {folder}."
    if not os.access(there, os.W_OK):
        return Finding("disk", "warn", f"{folder} cannot be written to, for {content}.")
    if free < LEAST_FREE_BYTES:
        return Finding("disk", "fail", f"{found} Make room there.")
    # mlx compiles in the temporary folder unless the user has a cache folder.
    may_run = not os.statvfs(there).f_flag & getattr(os, "ST_NOEXEC", 0)
    if content == COMPILED and (there.stat().st_mode & 0o002 or not may_run):
        problem = "Others may write programs there" if may_run else "Nothing may run there"
        return Finding("disk", "warn", f"{found} {problem}: set XDG_CACHE_HOME to your own folder.")
    return Finding("disk", "ok", found)


def check_files(limit: int) -> Finding:
    if limit < 1024:
        message = f"{limit} files may be open, and each client needs one. Run `ulimit -n 4096`."
        return Finding("files", "warn", message)
    return Finding("files", "ok", f"{limit} may be open.")
