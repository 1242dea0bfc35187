"""Servers and workers for the length of a block: each a process of its own, stopped by its id."""

import asyncio
import json
import os
import socket
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryFile
from types import MappingProxyType
from typing import IO, Any

import aiohttp

START_S, STOP_S = 120, 20
POLL_S = 0.02
READY = ("/ready", "/health")  # ours says at the first that its models are loaded; others have none
CHECKOUT = Path(__file__).parents[1]
# OpenBLAS for mlx-lm's server too: gateway.engine loads it before mlx is imported.
_MLX_LM = "import sys, gateway.engine; from mlx_lm.server import main; sys.exit(main())"


class DidNotStart(Exception):
    """A server that ended, or never answered: its last lines say why."""


@asynccontextmanager
async def gateway(
    models: Path, *, ready_at: str | None = None, **environment: str
) -> AsyncIterator[str]:
    """Serve a models.yaml with these variables and no other GATEWAY_ ones; give the address.

    It is given once /ready or the path `ready_at` answers 200.
    """
    command = ("-m", "gateway", "serve", "--models", str(models), "--port", "0")
    given = {"GATEWAY_LOG_FORMAT": "json", **environment}
    # it starts in the models' own folder: the current one may have a .env
    paths = READY if ready_at is None else (ready_at,)
    async with _running(command, _logged_url, given, models.parent, paths) as url:
        yield url


@asynccontextmanager
async def mlx_lm(model: Path) -> AsyncIterator[str]:
    """Serve a model with mlx-lm's own server."""
    port = str(_free_port())
    command = ("-c", _MLX_LM, "--model", str(model), "--port", port, "--log-level", "WARNING")
    url = f"http://127.0.0.1:{port}"
    async with _running(command, lambda _: url) as running:
        yield running


@asynccontextmanager
async def mlx_vlm(python: Path, model: Path) -> AsyncIterator[str]:
    """Serve a model with mlx-vlm's server, of another environment, on the OpenBLAS used here."""
    port = str(_free_port())
    command = ("-m", "mlx_vlm.server", "--model", str(model), "--host", "127.0.0.1", "--port", port)
    url = f"http://127.0.0.1:{port}"
    async with _running(
        command, lambda _: url, _same_blas(), model.parent, python=python
    ) as running:
        yield running


def _same_blas() -> dict[str, str]:
    """Return variables with which another Python loads this one's OpenBLAS; none off Linux."""
    import gateway.engine  # noqa: F401

    if not sys.platform.startswith("linux"):
        return {}
    loaded = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    files = [Path(line.split()[-1]) for line in loaded if line.endswith((".so", ".0"))]
    found = {"LD_PRELOAD": "mlx-gateway/openblas/", "LD_LIBRARY_PATH": "scipy_openblas32/"}
    named = {name: [file for file in files if part in str(file)] for name, part in found.items()}
    if not all(named.values()):
        return {}
    return {
        "LD_PRELOAD": str(named["LD_PRELOAD"][0]),
        "LD_LIBRARY_PATH": str(named["LD_LIBRARY_PATH"][0].parent),
    }


@asynccontextmanager
async def echo() -> AsyncIterator[str]:
    """Serve the bare Starlette application of `echo`."""
    port = str(_free_port())
    url = f"http://127.0.0.1:{port}"
    command = ("-m", "benchmarks.echo", port)
    async with _running(command, lambda _: url, folder=CHECKOUT) as running:
        yield running


class Worker:
    """A process that answers each line of JSON with another, and may write other lines between."""

    def __init__(self, process: Process) -> None:
        self._process = process

    async def ask(self, body: Any) -> Any:
        """Write a line, unless it is None, and read one; raise DidNotStart if it ended instead."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if body is not None:
            self._process.stdin.write(json.dumps(body).encode() + b"\n")
        while line := await self._process.stdout.readline():
            if line.startswith(b"{"):
                return json.loads(line)
        assert self._process.stderr is not None
        raise DidNotStart((await self._process.stderr.read()).decode(errors="replace"))


@asynccontextmanager
async def worker(*command: str | Path, folder: Path | None = None) -> AsyncIterator[Worker]:
    """Start a program that answers lines. Raises DidNotStart if it is not installed."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command, cwd=folder, stdin=PIPE, stdout=PIPE, stderr=PIPE
        )
    except FileNotFoundError as error:
        raise DidNotStart(f"{command[0]} is not installed") from error
    try:
        yield Worker(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def _running(
    command: Sequence[str],
    find: Callable[[str], str | None],
    environment: Mapping[str, str] = MappingProxyType({}),
    folder: Path | None = None,
    paths: Sequence[str] = READY,
    python: str | Path = sys.executable,
) -> AsyncIterator[str]:
    """Start Python with a command, wait until it answers, and stop it at the end.

    `find` reads the address from the process's output, once it is there.
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GATEWAY_")}
    with TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            python,
            *command,
            env={**clean, **environment},
            cwd=folder,
            stdout=log,
            stderr=log,
        )
        try:
            yield await _ready(process, log, find, paths)
        finally:
            await _stop(process)


async def _stop(process: Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(STOP_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


async def _ready(
    process: Process,
    log: IO[bytes],
    find: Callable[[str], str | None],
    paths: Sequence[str],
) -> str:
    deadline = time.monotonic() + START_S
    async with aiohttp.ClientSession() as session:
        while process.returncode is None and time.monotonic() < deadline:
            if (url := find(_written(log))) is not None and await _answers(session, url, paths):
                return url
            await asyncio.sleep(POLL_S)
    raise DidNotStart(_written(log)[-2000:])


async def _answers(session: aiohttp.ClientSession, url: str, paths: Sequence[str]) -> bool:
    """Tell whether the first of the paths that is there answers 200."""
    for path in paths:
        try:
            async with session.get(url + path) as response:
                if response.status != 404:
                    return response.status == 200
        except (aiohttp.ClientError, OSError):
            return False
    return False


def _written(log: IO[bytes]) -> str:
    # pread leaves the place alone at which the process goes on writing
    return os.pread(log.fileno(), 1 << 20, 0).decode(errors="replace")


def _logged_url(written: str) -> str | None:
    for line in written.rpartition("\n")[0].splitlines():  # whole lines only
        if '"serving"' in line:
            url = json.loads(line).get("url")
            return None if url is None else str(url)
    return None


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
