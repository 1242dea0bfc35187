"""A replica: one whole gateway, its lane and caches, on one device, without a port of its own.

Its settings are those of its node's environment, but for what the ingress sees to.
"""

import asyncio
import contextlib
import importlib
import sys
from collections.abc import AsyncIterator, Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Final

import ray
import ray.serve._private.replica as ray_replica

from deploy.ray.choice import Call
from gateway import ids, logs, metrics
from gateway.api.in_flight import context_of
from gateway.app.gateway import Gateway
from gateway.app.loading import Engines
from gateway.app.prefix_files import lock
from gateway.errors import RegistryInvalid
from gateway.jobs import RoutingKeys
from gateway.registry import read_models
from gateway.serving.generation.batcher import ChatBatcher
from gateway.settings import Settings, load_settings, variables

Message = MutableMapping[str, Any]
# The rates of a key are those of all replicas together, and the page shows one gateway.
INGRESS_OWN: Final = {"requests_per_minute": None, "tokens_per_minute": None, "dashboard": False}
NAMES_MOST: Final = 2048  # of prefixes of a model, the newest: 16 KB a report
UNSENT_BYTES: Final = 64 * 1024  # of an answer: beyond it the gateway waits for the ingress
CLOSE_S: Final = 10.0


class Replica:
    """What Ray Serve runs. `engines` is `module:function`, of what makes Engines from Settings."""

    async def __init__(self, engines: str, settings: Mapping[str, Any]) -> None:  # type: ignore[misc]  # Ray awaits it
        _bind_privately()
        # Serve has put its own log in their place. Ray sends these to the ingress's terminal.
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        self._settings = load_settings(dict(settings)).model_copy(update=INGRESS_OWN)
        if (folder := self._settings.prefix_folder) is not None:
            update = {"prefix_folder": _take_folder(folder)}
            self._settings = self._settings.model_copy(update=update)
        logs.configure(self._settings.log_level, self._settings.log_format)
        reading = read_models(self._settings.models, variables())
        if reading.problems:
            raise RegistryInvalid(list(reading.problems))
        module, _, name = engines.partition(":")
        make: Callable[[Settings], Engines] = getattr(importlib.import_module(module), name)
        self._gateway = Gateway(self._settings, reading.catalog, make(self._settings))
        self._exchanges: set[asyncio.Task[None]] = set()
        self._lifespan = _Lifespan(self._gateway)
        await self._lifespan.begin()
        await self._gateway.is_preloaded.wait()

    async def __call__(
        self, call: Call, share: float, scope: Message, body: bytes
    ) -> AsyncIterator[tuple[list[Message], Mapping[str, Any]]]:
        """Yield a request's answer as ASGI messages, as many at a time as there are; with its head
        and its end, the timings so far. The request's client has left once this is closed.
        """
        scope = {**scope, "routing_keys": RoutingKeys(call.blocks, share)}
        exchange = _Exchange(body)
        task = asyncio.create_task(exchange.run(self._gateway, scope))
        self._exchanges.add(task)
        task.add_done_callback(self._exchanges.discard)
        try:
            while messages := await exchange.take():
                has_edge = "status" in messages[0] or not messages[-1].get("more_body", True)
                yield messages, _timings(scope) if has_edge else {}
        finally:
            exchange.leave()

    async def reload(self) -> None:
        """Read models.yaml again; raises ModelsFileInvalid."""
        await self._gateway.reload()

    async def ask(
        self, scope: Message, body: bytes
    ) -> tuple[str, int, list[tuple[bytes, bytes]], bytes]:
        """Return the replica's name, and the status, headers and body of a short answer."""
        exchange = _Exchange(body)
        await exchange.run(self._gateway, dict(scope), is_short=True)
        start, *rest = exchange.messages
        return ids.OWN_NAME, start["status"], start["headers"], b"".join(m["body"] for m in rest)

    def record_routing_stats(self) -> dict[str, Any]:
        """Return what the router chooses by. Of what is kept, salted digests alone."""
        models = self._gateway.models
        return {
            "models": [model for model, state in models.states().items() if state != "failed"],
            "tokens": _tokens(),
            "prefixes": {
                entry.spec.id: b"".join(entry.model.routing_keys[-NAMES_MOST:])
                for entry in models.entries
                if isinstance(entry.model, ChatBatcher)
            },
        }

    def record_replica_metadata(self) -> dict[str, Any]:
        """Return the name that the ids have of what is kept here."""
        return {"name": ids.OWN_NAME}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what the number of replicas follows."""
        return {"tokens": _tokens()}

    async def check_health(self) -> None:
        """Raise if the lane is stuck or dead: Ray then starts another replica."""
        if (status := self._gateway.health) != "ok":
            raise RuntimeError(f"the lane is {status}")

    async def __del__(self) -> None:
        """Finish what is under way, and free the models. Ray calls it once."""
        if hasattr(self, "_lifespan"):
            await self._gateway.drain()
            await self._lifespan.end()


class _Exchange:
    """One request inside the gateway: its body goes in, messages come out, a few at a time."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self.messages: list[Message] = []
        self._nbytes = 0
        self._is_over = False
        self._changed = asyncio.Event()
        self._taken = asyncio.Event()
        self._left = asyncio.Event()
        self._is_short = False

    async def run(self, gateway: Gateway, scope: Message, *, is_short: bool = False) -> None:
        """Let the gateway answer. A short answer is held whole."""
        self._is_short = is_short
        try:
            await gateway.asgi(scope, self._receive, self._send)
        finally:
            self._is_over = True
            self._changed.set()

    async def take(self) -> list[Message]:
        """Wait for messages, and return those there are; none at the end."""
        while not self.messages and not self._is_over:
            self._changed.clear()
            await self._changed.wait()
        messages, self.messages, self._nbytes = self.messages, [], 0
        self._taken.set()
        return messages

    def leave(self) -> None:
        """Disconnect, if the answer is not over."""
        self._left.set()
        self._taken.set()

    async def _receive(self) -> Message:
        if (body := self._body) is not None:
            self._body = None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        while self._nbytes > UNSENT_BYTES and not self._is_short and not self._left.is_set():
            self._taken.clear()
            await self._taken.wait()
        self.messages.append(message)
        self._nbytes += len(message.get("body", b""))
        self._changed.set()


class _Lifespan:
    """The gateway's start and end, by ASGI's protocol for it."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._asked: asyncio.Queue[str] = asyncio.Queue()
        self._answers: asyncio.Queue[Message] = asyncio.Queue()

    async def begin(self) -> None:
        scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}
        self._task = asyncio.ensure_future(self._gateway.asgi(scope, self._receive, self._send))
        await self._ask("startup")

    async def end(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._ask("shutdown")

    async def _ask(self, word: str) -> None:
        self._asked.put_nowait(f"lifespan.{word}")
        answer = await self._answers.get()
        if answer["type"] != f"lifespan.{word}.complete":
            raise RuntimeError(answer.get("message", answer["type"]))

    async def _receive(self) -> Message:
        return {"type": await self._asked.get()}

    async def _send(self, message: Message) -> None:
        self._answers.put_nowait(message)


def _tokens() -> int:
    """Return the number of tokens that wait or run."""
    return int(metrics.total(metrics.QUEUE_TOKENS))


def _timings(scope: Message) -> Mapping[str, Any]:
    """Return what the ingress's log line, header and rates need, as plain values."""
    if "gateway" not in scope:
        return {}
    timings = context_of(scope).timings
    return {
        "model": timings.model,
        "seconds": {str(stage): seconds for stage, seconds in timings.seconds.items()},
        "tokens_in": timings.tokens - timings.tokens_out,
        "tokens_out": timings.tokens_out,
    }


def _take_folder(parent: Path) -> Path:
    """Return the first folder for kept prompts that no other replica has, until this process ends.
    A replica that is started again finds its own, or that of another that has ended.
    """
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    number = 0
    while True:
        try:
            lock(parent / f"replica-{number}.lock")
        except BlockingIOError:
            number += 1
        else:
            return parent / f"replica-{number}"


def _bind_privately() -> None:
    """Have Ray listen for this replica's calls on its node's own address, not on all of them.

    Ray 2.60 has no setting for it (`_on_initialized` in serve/_private/replica.py says [::]:0), and
    calls that come are unpickled. Where this is no longer so, a test of the sockets fails.
    """
    add_port = ray_replica.add_port_to_grpc_server

    def add_private_port(server: Any, address: str) -> int:
        host = ray.util.get_node_ip_address()
        return int(add_port(server, address.replace("[::]", host)))

    ray_replica.add_port_to_grpc_server = add_private_port
