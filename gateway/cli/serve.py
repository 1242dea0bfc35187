"""`mlx-gateway serve`: runs the gateway, from reading the settings to the end of the drain."""

import asyncio
import contextlib
import faulthandler
import gc
import ipaddress
import json
import os
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import typer

from gateway import __version__, logs
from gateway.app.named import read_served
from gateway.cli import lazy
from gateway.cli.local_key import keep_key
from gateway.cli.models import fetch_preloaded
from gateway.cli.progress import shown
from gateway.cli.terminal import Discover, Host, ModelsFile, Names, Port, flags_of
from gateway.doctor.machine import bind_problem, require_machine
from gateway.errors import GatewayError
from gateway.registry import ChatSpec, ModelSpec
from gateway.settings import Settings, SettingsInvalid, load_settings, strays, with_port

if TYPE_CHECKING:
    import ssl

    from gateway.jobs import Progress
    from gateway.registry import Catalog
    from gateway.serving.ranks.links import Leader

log = logs.get("serve")

LAST_WORDS_S = 0.5  # seconds for clients to read the last answers
SHUTDOWN_S = 10  # seconds to close the models, after the drain
Specs: TypeAlias = Sequence[ModelSpec]
MOST_LISTED = 4  # models
PORT = Settings.model_fields["port"].default
ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_CHAT = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
_EMBEDDING: dict[str, Any] = {"input": "Hello"}


def serve(
    names: Names = None,
    models: ModelsFile = None,
    discover: Discover = False,
    host: Host = None,
    port: Port = None,
) -> None:
    """Serve the models of the models file, or those that are named, until Ctrl-C or SIGTERM."""
    # SIGHUP would end the process before `run` sets a handler.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    settings = load_settings(flags_of(models, names, discover=discover, host=host, port=port))
    require_machine(settings)
    is_watched = logs.is_console(settings.log_format) and settings.log_level == "info"
    # A person sees a bar and a greeting until the gateway is ready, and problems.
    logs.configure("warning" if is_watched else settings.log_level, settings.log_format)
    faulthandler.enable()  # prints a traceback if native code crashes
    reading = read_served(settings)
    reading.require_valid()
    where = str(settings.models_file or "named")
    if logs.is_console(settings.log_format):
        print(f"mlx-gateway {__version__} is starting ({where}).", file=sys.stderr, flush=True)
    log.info("starting", version=__version__, models=where)
    for note in (*reading.notes, *strays(reading.variables)):
        log.warning("settings_note", note=note)
    if settings.serve:  # a named model that cannot be downloaded ends the start
        fetch_preloaded(settings, reading.catalog)
    # Python's own handler would interrupt imports of native code, which may abort the process.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    # Everything below needs mlx.
    if lazy.device.BLAS.hint is not None:
        log.warning("slow_blas", hint=lazy.device.BLAS.hint)
    if "MLX_RANK" in os.environ:  # mlx.launch sets it
        _serve_as_rank(settings, reading.catalog)
    else:
        _serve_alone(settings, reading.catalog)


def _serve_alone(settings: Settings, catalog: "Catalog") -> None:
    engines = lazy.engines.MlxEngines(settings)
    with contextlib.suppress(KeyboardInterrupt):  # one more, after the loop's own handler has gone
        asyncio.run(run(lazy.gateway.Gateway(settings, catalog, engines), settings))
    # Python's end would abort if a daemon thread were in native code, such as an import.
    os._exit(0)


def _serve_as_rank(settings: Settings, catalog: "Catalog") -> None:
    group = lazy.sharding.join_group()
    if group is None:
        _serve_alone(settings, catalog)
    elif group.rank():
        follower = lazy.engines.MlxEngines(settings, lazy.ranks.Ranks(group))
        lazy.ranks.follow_rank_0(settings, group, follower)
    else:
        with lazy.ranks.leading(group) as ranks:
            engines = lazy.engines.MlxEngines(settings, ranks)
            served = lazy.gateway.Gateway(settings, catalog, engines, ranks.lost)
            asyncio.run(run(served, settings, ranks.leader))
        if ranks.lost() is not None:
            raise typer.Exit(lazy.links.STATUS_OF_A_LOSS)


def _make_tls(settings: Settings) -> "ssl.SSLContext | None":
    if settings.tls_cert is None:
        return None
    config = lazy.connections.Config()
    config.certfile, config.keyfile = str(settings.tls_cert), str(settings.tls_key)
    config.alpn_protocols = ["http/1.1"]
    return config.create_ssl_context()


class Serving(Protocol):
    """An application that can be served: a gateway, or a router in front of several."""

    asgi: Any
    has_tried: asyncio.Event  # set when the models have been loaded, or have failed
    is_preloaded: asyncio.Event
    local_key: str | None  # opens /admin to this user's commands

    def specs(self) -> Sequence[ModelSpec]: ...

    def loaded(self) -> Sequence[ModelSpec]: ...

    def progress(self) -> "Progress | None":
        """Return the progress of a download or load. Runs on a thread, and may read the disk."""

    async def reload(self) -> object:
        """Read models.yaml again. Raises ModelsFileInvalid, and changes nothing, on a problem."""

    async def drain(self) -> None: ...


async def run(gateway: Serving, settings: Settings, leader: "Leader | None" = None) -> None:
    """Serve until this process or another rank gets SIGTERM or SIGINT, then drain."""
    connections = lazy.connections
    connections.install(settings.send_timeout_s, _make_tls(settings))
    stop, signals, progress = asyncio.Event(), list[None](), contextlib.ExitStack()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        # A handler of the loop runs between callbacks, so it interrupts no code.
        loop.add_signal_handler(number, _stop, stop, signals, progress)
    if leader is not None:
        leader.on_stop = partial(loop.call_soon_threadsafe, stop.set)

    hangup = asyncio.Event()
    loop.add_signal_handler(signal.SIGHUP, hangup.set)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
    reloading = asyncio.create_task(_reload_at(hangup, gateway), name="reload")

    async def until_drained() -> None:
        await stop.wait()
        log.info("draining")
        reloading.cancel()  # no request could use the models that it loads
        await gateway.drain()
        # Hypercorn closes idle connections but, since Python 3.12.1, would wait for all others.
        loop.call_later(LAST_WORDS_S, connections.Connection.crowd.abort_all)

    config = connections.Config()
    config.keep_alive_timeout = settings.keep_alive_timeout_s
    config.h11_max_incomplete_size = settings.read_header_bytes
    loop.set_exception_handler(connections.make_exception_handler())
    config.read_timeout = None  # a limit would also cut long answers short
    config.graceful_timeout = 1
    config.shutdown_timeout = SHUTDOWN_S
    config.include_server_header = False
    config.accesslog = None
    config.errorlog = None
    try:
        with listen(settings.binds, scheme=settings.scheme) as config.bind, progress:
            progress.callback(logs.configure, settings.log_level, settings.log_format)
            progress.enter_context(shown(partial(_look, gateway)))
            places = find_places(config.bind)  # Hypercorn may close the sockets later
            work = _ready(gateway, settings, places, progress)
            readying = asyncio.create_task(work, name="ready")
            with contextlib.ExitStack() as keys:
                for place in places:
                    keys.enter_context(keep_key(gateway.local_key, place.host, place.port))
                await lazy.serve(gateway.asgi, config, shutdown_trigger=until_drained)
            readying.cancel()
    except lazy.LifespanTimeoutError as error:  # a call hangs, and only an exit can end it
        log.critical("stuck", error=str(error))
        faulthandler.dump_traceback()
        os._exit(os.EX_SOFTWARE)


def _look(gateway: Serving) -> "Progress | None":
    now = gateway.progress()
    # Without a bar, the engines log downloads.
    is_told = now is not None and now.event == "model_download" and not sys.stderr.isatty()
    return None if is_told else now


async def _ready(
    gateway: Serving, settings: Settings, places: Sequence["Place"], progress: contextlib.ExitStack
) -> None:
    await gateway.has_tried.wait()
    progress.close()
    await gateway.is_preloaded.wait()
    # Imported modules are never freed, so garbage collection need not traverse them.
    gc.collect()
    gc.freeze()
    if logs.is_console(settings.log_format):
        greeting = write_greeting(places, gateway.specs(), gateway.loaded(), settings)
        print(greeting, file=sys.stderr, flush=True)


async def _reload_at(hangup: asyncio.Event, gateway: Serving) -> None:
    while True:
        await hangup.wait()
        hangup.clear()
        try:
            await gateway.reload()
        except GatewayError:  # the gateway has logged it
            pass
        except Exception:  # the loop must handle later SIGHUPs
            log.exception("reload_failed")


def _stop(stop: asyncio.Event, signals: list[None], progress: contextlib.ExitStack) -> None:
    """Start the drain at the first signal; exit at once at the second."""
    # `stop` may be set by another rank's request, so it does not show a second signal.
    if signals:
        os._exit(1)
    signals.append(None)
    progress.close()
    stop.set()


@contextlib.contextmanager
def listen(binds: Sequence[str], *, scheme: str) -> Iterator[list[str]]:
    """Listen on every bind, and yield the binds for Hypercorn. Remove Unix sockets at exit."""
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
    host, _, port = bind.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        backlog = lazy.connections.BACKLOG
        listener = socket.create_server((host, int(port)), family=family, backlog=backlog)
    except OSError as error:
        raise SettingsInvalid([bind_problem(bind, error)]) from None
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    log.info("serving", url=f"{scheme}://{with_port(host, listener.getsockname()[1])}")
    return listener


@contextlib.contextmanager
def _unix_listener(path: Path) -> Iterator[socket.socket]:
    """Listen on a path, and remove its file at exit unless another process has replaced it."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        if path.is_socket() and not _is_answered(path):  # an ended process left it behind
            path.unlink()
        listener.bind(str(path))
        listener.listen(lazy.connections.BACKLOG)
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
    with socket.socket(socket.AF_UNIX) as client:
        client.setblocking(False)  # a full backlog counts as answered
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
    return True


@dataclass(frozen=True, slots=True)
class Place:
    """The address of a listening socket: a port of a host, or a path."""

    host: str
    port: int | None = None


def find_places(opened: Sequence[str]) -> list[Place]:
    places = [_place(int(bind.removeprefix("fd://"))) for bind in opened if bind[:5] == "fd://"]
    return sorted(filter(None, places), key=lambda each: each.port is None)


def _place(descriptor: int) -> Place | None:
    with socket.socket(fileno=os.dup(descriptor)) as listener:
        name = listener.getsockname()
        if listener.family in (socket.AF_INET, socket.AF_INET6):
            return Place(name[0], name[1])
    if isinstance(name, str) and name:
        return Place(os.path.abspath(name))
    return None


def write_greeting(places: Sequence[Place], specs: Specs, loaded: Specs, settings: Settings) -> str:
    """Return what a person wants to know: the address, the models and how to ask one."""
    if not places:
        return "mlx-gateway is ready."
    place, scheme = places[0], settings.scheme
    if place.port is None:
        url, where = f"{scheme}://localhost", f"unix:{place.host}"
        options = ["--unix-socket", shlex.quote(place.host)]
    else:
        host = ANYWHERE.get(place.host, place.host)
        url = where = f"{scheme}://{with_port(host, place.port)}"
        options = _host_header(host, settings)
    ready = f"mlx-gateway is ready on {where} (Ctrl-C stops it)."
    if settings.has_dashboard and place.port is not None:
        ready += f"\nDashboard: {url}/dashboard"
    if not specs:
        return f"{ready}\n\nIt serves no models: see `mlx-gateway models recommend`."
    spec = min(loaded or specs, key=lambda spec: not isinstance(spec, ChatSpec))
    if settings.tls_cert:
        options.append("--insecure")  # few certificates are valid for this address
    if settings.api_keys:
        options.append(f'-H "Authorization: Bearer {key_in_shell(settings)}"')
    path, question = "/v1/embeddings", _EMBEDDING
    if isinstance(spec, ChatSpec):
        path, question = "/v1/chat/completions", _CHAT
    body = json.dumps({"model": spec.id, **question})
    ask = ["Ask it something, in another terminal:"]
    # `run` asks 127.0.0.1, and trusts no certificate that is only for this gateway.
    is_asked = place.host in ("127.0.0.1", "0.0.0.0") and not settings.tls_cert
    if isinstance(spec, ChatSpec) and is_asked:
        port = "" if place.port == PORT else f"GATEWAY_PORT={place.port} "
        ask.append(f"{port}{_find_command()} run {shlex.quote(spec.id)}")
    ask.append(" ".join(["curl", *options, shlex.quote(url + path), "-d", shlex.quote(body)]))
    return "\n\n".join([ready, _list_models(specs, loaded), "\n".join(ask)])


def _find_command() -> str:
    """Return the command as a shell finds it: with its folder, if that is not on the PATH."""
    own = Path(sys.argv[0])
    if own.name != "mlx-gateway" or shutil.which(own.name):
        return "mlx-gateway"
    return shlex.quote(os.path.abspath(own))


def _list_models(specs: Specs, loaded: Specs) -> str:
    listed = [*loaded, *(spec for spec in specs if spec not in loaded)]
    listed = listed[: max(MOST_LISTED, len(loaded))]
    width, rest = max(len(spec.id) for spec in listed), len(specs) - len(listed)
    states = {True: "loaded", False: "on first use"}
    rows = [f"{spec.id:{width}}  {spec.kind:9}  {states[spec in loaded]}" for spec in listed]
    rows += [f"and {rest} more on first use: mlx-gateway models"] if rest else []
    return "\n".join(rows)


def _host_header(host: str, settings: Settings) -> list[str]:
    # A gateway without keys accepts only known names in the header Host, as a defence against web
    # pages.
    is_known = settings.api_keys or {host, "*"} & set(settings.allowed_hosts)
    if is_known or ipaddress.ip_address(host).is_loopback:
        return []
    return ["-H 'Host: localhost'"]


def key_in_shell(settings: Settings) -> str:
    """Return a word that a shell expands to the first API key, if GATEWAY_API_KEYS is exported."""
    return "${GATEWAY_API_KEYS%%,*}" if len(settings.api_keys) > 1 else "$GATEWAY_API_KEYS"
