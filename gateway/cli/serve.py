"""`mlx-gateway serve`: the gateway itself, from settings to the last byte of the drain."""

import asyncio
import contextlib
import faulthandler
import gc
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import typer

from gateway import __version__, logs
from gateway.cli._checks import bind_problem, machine_problems
from gateway.cli._greeting import find_places, write_greeting
from gateway.cli._options import Host, ModelsFile, Port
from gateway.errors import GatewayError, RegistryInvalid
from gateway.registry import read_models
from gateway.settings import Settings, SettingsInvalid, load_settings, strays, variables

if TYPE_CHECKING:
    import ssl

    from gateway.registry import Catalog, ModelSpec
    from gateway.serving.ranks.links import Leader

log = logs.get("serve")

BACKLOG = 2048
LAST_WORDS_S = 0.5  # for clients to read what was written before the drain's end
SHUTDOWN_S = 10  # to close the models, after the drain


def serve(
    models: ModelsFile = None,
    host: Host = None,
    port: Port = None,
) -> None:
    """Serve the models of the models file, until Ctrl-C or SIGTERM."""
    # A SIGHUP would end the process until there is a handler: it stays pending till then.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    settings = load_settings({"models": models, "host": host, "port": port})
    if problems := machine_problems(settings):
        raise SettingsInvalid(problems)
    logs.configure(settings.log_level, settings.log_format)
    faulthandler.enable()  # a crash of native code prints its traceback
    reading = read_models(settings.models, variables())
    if reading.problems:
        raise RegistryInvalid(list(reading.problems))
    log.info("starting", version=__version__, models=str(settings.models))
    for note in (*reading.notes, *strays(reading.variables)):
        log.warning("settings_note", note=note)
    # From here on mlx is needed. What takes a second to import, mlx-lm, comes with the models.
    from gateway.app.engines import mlx_engines
    from gateway.app.gateway import Gateway
    from gateway.engine import device

    if device.BLAS.hint is not None:
        log.warning("slow_blas", hint=device.BLAS.hint)
    if "MLX_RANK" in os.environ:  # of mlx.launch; its imports take a twentieth of a second
        _serve_as_rank(settings, reading.catalog)
    else:
        asyncio.run(run(Gateway(settings, reading.catalog, mlx_engines(settings)), settings))


def _serve_as_rank(settings: Settings, catalog: "Catalog") -> None:
    """Serve as rank 0 of the group that this process was started in, or follow rank 0."""
    from gateway.app.engines import mlx_engines
    from gateway.app.gateway import Gateway
    from gateway.app.ranks import Ranks, follow_rank_0, leading
    from gateway.engine.models.sharding import join_group
    from gateway.serving.ranks.links import STATUS_OF_A_LOSS

    if (group := join_group()) is None:
        asyncio.run(run(Gateway(settings, catalog, mlx_engines(settings)), settings))
    elif group.rank():
        follow_rank_0(settings, group, mlx_engines(settings, Ranks(group)))
    else:
        with leading(group) as ranks:
            served = Gateway(settings, catalog, mlx_engines(settings, ranks), ranks.lost)
            asyncio.run(run(served, settings, ranks.leader))
        if ranks.lost() is not None:
            raise typer.Exit(STATUS_OF_A_LOSS)


def _make_tls(settings: Settings) -> "ssl.SSLContext | None":
    """Return what speaks TLS for connections, if settings name a certificate."""
    from hypercorn.config import Config

    config = Config()
    config.certfile = str(settings.tls_cert) if settings.tls_cert else None
    config.keyfile = str(settings.tls_key) if settings.tls_key else None
    config.alpn_protocols = ["http/1.1"]
    return config.create_ssl_context()


class Served(Protocol):
    """What can be served: a gateway, or what stands in front of several."""

    asgi: Any  # an ASGI application
    is_preloaded: asyncio.Event

    def loaded(self) -> Sequence["ModelSpec"]:
        """Return the models that are loaded."""

    async def reload(self) -> object:
        """Read models.yaml again; raises ModelsFileInvalid, and then nothing has changed."""

    async def drain(self) -> None:
        """Refuse new requests and wait for those under way."""


async def run(gateway: Served, settings: Settings, leader: "Leader | None" = None) -> None:
    """Serve until SIGTERM or SIGINT, here or at another rank, then drain."""
    from hypercorn.asyncio import serve as hypercorn_serve
    from hypercorn.config import Config
    from hypercorn.utils import LifespanTimeoutError

    from gateway.server import connections

    connections.install(settings.send_timeout_s, _make_tls(settings))
    stop, signals = asyncio.Event(), list[None]()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _stop, stop, signals)
    if leader is not None:
        leader.on_stop = partial(loop.call_soon_threadsafe, stop.set)

    hangup = asyncio.Event()
    loop.add_signal_handler(signal.SIGHUP, hangup.set)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
    reloading = asyncio.create_task(_reload_at(hangup, gateway), name="reload")

    async def until_drained() -> None:
        await stop.wait()
        log.info("draining")
        reloading.cancel()  # no request would use what it loads
        await gateway.drain()
        # Hypercorn closes idle connections; from Python 3.12.1 on it waits for all others.
        loop.call_later(LAST_WORDS_S, connections.Connection.crowd.abort_all)

    config = Config()
    config.backlog = BACKLOG
    config.keep_alive_timeout = settings.keep_alive_timeout_s
    config.h11_max_incomplete_size = settings.read_header_bytes
    loop.set_exception_handler(connections.make_exception_handler())
    config.read_timeout = None  # it would also cut long answers short
    config.graceful_timeout = 1
    config.shutdown_timeout = SHUTDOWN_S
    config.include_server_header = False
    config.accesslog = None
    config.errorlog = None
    scheme = "https" if settings.tls_cert else "http"
    try:
        with listen(settings.binds, scheme=scheme) as config.bind:
            readying = asyncio.create_task(_ready(gateway, settings, config.bind), name="ready")
            await hypercorn_serve(gateway.asgi, config, shutdown_trigger=until_drained)
            readying.cancel()
    except LifespanTimeoutError as error:  # a call is stuck, and only exit ends it
        log.critical("stuck", error=str(error))
        faulthandler.dump_traceback()
        os._exit(os.EX_SOFTWARE)  # as for any stall


async def _ready(gateway: Served, settings: Settings, opened: Sequence[str]) -> None:
    """Once the preloaded models are ready, freeze what is there, and greet on a terminal."""
    where = find_places(opened)  # before the wait, in which Hypercorn may close them
    await gateway.is_preloaded.wait()
    # Imported modules stay: the garbage collector need not traverse their hundred thousand objects
    # again and again in the middle of requests.
    gc.collect()
    gc.freeze()
    if logs.is_console(settings.log_format):
        print(f"\n{write_greeting(where, gateway.loaded(), settings)}", file=sys.stderr, flush=True)


async def _reload_at(hangup: asyncio.Event, gateway: Served) -> None:
    """Reload models.yaml at each SIGHUP; a wrong file is logged and changes nothing."""
    while True:
        await hangup.wait()
        hangup.clear()
        try:
            await gateway.reload()
        except GatewayError:  # the gateway has logged it
            pass
        except Exception:  # the next SIGHUP is still handled
            log.exception("reload_failed")


def _stop(stop: asyncio.Event, signals: list[None]) -> None:
    """Start the drain at the first signal; exit at once at the second. Another rank may have asked
    for the drain before, as when Ctrl-C goes to all.
    """
    if signals:
        os._exit(1)
    signals.append(None)
    stop.set()


@contextlib.contextmanager
def listen(binds: Sequence[str], *, scheme: str) -> Iterator[list[str]]:
    """Listen on every bind; yield the binds for Hypercorn. Unix sockets are removed at exit."""
    with contextlib.ExitStack() as stack:
        opened = []
        for bind in binds:
            if bind.startswith("unix:"):
                listener = stack.enter_context(_unix_listener(Path(bind.removeprefix("unix:"))))
                log.info("serving", bind=bind)
                opened.append(f"fd://{listener.detach()}")
            elif "://" in bind:
                log.info("serving", bind=bind)
                opened.append(bind)
            else:
                opened.append(f"fd://{_tcp_listener(bind, scheme).detach()}")
        yield opened


def _tcp_listener(bind: str, scheme: str) -> socket.socket:
    """Listen on a host and port, and log the port, which may have been 0."""
    host, _, port = bind.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, int(port)), family=family, backlog=BACKLOG)
    except OSError as error:
        raise SettingsInvalid([bind_problem(bind, error)]) from None
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    shown = f"[{host}]" if family == socket.AF_INET6 else host
    log.info("serving", url=f"{scheme}://{shown}:{listener.getsockname()[1]}")
    return listener


@contextlib.contextmanager
def _unix_listener(path: Path) -> Iterator[socket.socket]:
    """Listen on a path, and remove its file at exit unless another process has replaced it.

    A socket that a process left behind is replaced; one that a process listens on is an error.
    """
    listener = socket.socket(socket.AF_UNIX)
    try:
        if path.is_socket() and not _is_answered(path):
            path.unlink()
        listener.bind(str(path))
        listener.listen(BACKLOG)
        made = path.stat()
    except OSError as error:
        listener.close()
        raise SettingsInvalid([bind_problem(f"unix:{path}", error)]) from None
    try:
        yield listener
    finally:
        with contextlib.suppress(OSError):
            now = path.stat()  # inode numbers are reused, so compare the time too
            if os.path.samestat(now, made) and now.st_mtime_ns == made.st_mtime_ns:
                path.unlink()


def _is_answered(path: Path) -> bool:
    """Return True if a process listens on a socket's path."""
    with socket.socket(socket.AF_UNIX) as client:
        client.setblocking(False)  # a full backlog counts as answered
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
    return True
