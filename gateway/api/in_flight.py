"""Keeps the contexts of requests in flight, to list, drain and cancel requests, also when a client
disconnects. Keeps the last errors, and counts the watchers of the dashboard.
"""

import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from gateway import metrics
from gateway.api.bodies import Body
from gateway.clock import Timings
from gateway.errors import GatewayError, ShuttingDown, TooManyWatchers
from gateway.jobs import RoutingKeys

if TYPE_CHECKING:
    from gateway.api.traces import Trace

T = TypeVar("T")

CLIENT_CLOSED = 499  # nginx's status for a client that closed the connection; it is only logged
LAST_ERRORS = 50
MOST_WATCHERS = 4


@dataclass(slots=True, kw_only=True, eq=False)
class RequestContext:
    """The state of a request from its first byte to the end of its answer, and its task.

    The outermost middleware stores it in the ASGI scope, and `context_of` reads it from there.
    """

    scope: Scope
    headers: Mapping[bytes, bytes]  # the first header of each name
    request_id: str
    is_anthropic: bool  # True: answers and errors have Anthropic's format
    body: Body  # counts the bytes of the request's body
    unread: Body  # counts the bytes of the answer that the client has not read
    # A router's keys for the prefixes of the prompt, which the router stores in the scope.
    routing_keys: RoutingKeys = field(default_factory=RoutingKeys)
    timings: Timings = field(default_factory=Timings)
    trace: "Trace | None" = None  # None if this path is not traced, or tracing is off
    _task: "asyncio.Task[object] | None" = field(default_factory=asyncio.current_task)

    # The guard sets these before any handler runs, except `rate_headers`, which `Rates` sets.
    is_known: bool = False  # True: the caller may list models
    key_id: str | None = None  # None if no keys are set
    cache_salt: str = ""  # keeps the cached prompts of different keys apart
    rate_headers: Callable[[], Iterable[tuple[bytes, bytes]]] = tuple  # x-ratelimit-* headers

    # These are set while the request is served:
    asked: float | None = None  # when its deadline began to run, set by Service.caller
    is_watch: bool = False  # True for the dashboard's samples, which last until the watcher leaves
    status: int | None = None  # set by the outermost middleware, when the answer begins
    error: str | None = None  # the error's code, set when an error is sent to the client
    cancellation: GatewayError | None = None  # the error for the client, set by `cancel`

    def cancel(self, reason: GatewayError) -> None:
        """Cancel the request's task, which frees all that it holds, as if its client had left."""
        if self.cancellation is None and self._task is not None:
            self.cancellation = reason
            self._task.cancel()

    def uncancel(self) -> None:
        """Undo the task's cancellation, so that it can send the reason to the client."""
        if self._task is not None:
            self._task.uncancel()


def context_of(request: Mapping[str, Any]) -> RequestContext:
    """Return the context of a request, or of its scope."""
    context: RequestContext = request["gateway"]
    return context


class InFlight:
    """The requests in flight. A drain waits for them and cancels those that remain."""

    def __init__(self) -> None:
        self.is_draining = False
        # Numbers are unique, and request ids may not be, since clients may choose them.
        self._numbers = itertools.count(1)
        self._requests: dict[int, RequestContext] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._errors: deque[dict[str, Any]] = deque(maxlen=LAST_ERRORS)

    @contextlib.contextmanager
    def track(self, context: RequestContext) -> Iterator[None]:
        """Count a request as in flight inside the `with` block."""
        number = next(self._numbers)
        self._requests[number] = context
        self._idle.clear()
        try:
            yield
        finally:
            del self._requests[number]
            if not self._requests:
                self._idle.set()

    @property
    def requests(self) -> Mapping[int, RequestContext]:
        """Return the requests in flight by their numbers, the oldest first."""
        return dict(self._requests)

    @property
    def errors(self) -> Sequence[dict[str, Any]]:
        """Return the last errors, the newest first."""
        return tuple(reversed(self._errors))

    def note_error(self, context: RequestContext, status: int, seconds: float) -> None:
        """Add an error that was sent to a client to the list of last errors."""
        # The error's message is left out: it may quote the client's text.
        self._errors.append(
            {
                "at": time.time(),
                "request_id": context.request_id,
                "method": context.scope["method"],
                "route": context.scope["route"].path,
                "model": context.timings.model,
                "status": status,
                "code": context.error,
                "ms": round(1000 * seconds, 1),
            }
        )

    async def drain(self, timeout_s: float) -> bool:
        """Admit no more requests; return True if those in flight ended in time."""
        self.is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        return not self._requests

    def cancel(self) -> None:
        """Cancel all requests in flight, with ShuttingDown as the reason."""
        for context in self.requests.values():
            context.cancel(ShuttingDown())


class Watchers:
    """At most MOST_WATCHERS clients that get a sample each second: admins one, others another."""

    def __init__(self) -> None:
        self.count = 0
        self._samples: dict[bool, tuple[int, bytes]] = {}

    @contextlib.contextmanager
    def place(self, *, is_reserved: bool = False) -> Iterator[None]:
        """Take one of the places inside the `with` block; the last one only if `is_reserved`.

        Raises TooManyWatchers if no place is free.
        """
        # The last place is kept for admins, so that other watchers cannot lock them out.
        watcher_limit = MOST_WATCHERS if is_reserved else MOST_WATCHERS - 1
        if self.count >= watcher_limit:
            raise TooManyWatchers(watcher_limit)
        self.count += 1
        try:
            yield
        finally:
            self.count -= 1
            if not self.count:
                self._samples.clear()

    def sample(self, second: int, make: Callable[[bool], bytes], *, is_admin: bool) -> bytes:
        """Return the sample of this second for admins or for others. The first call makes it."""
        sample = self._samples.get(is_admin)
        if sample is None or sample[0] != second:
            sample = self._samples[is_admin] = (second, make(is_admin))
        return sample[1]


@contextlib.asynccontextmanager
async def while_connected(receive: Receive) -> AsyncIterator[None]:
    """Cancel the body of the `async with` if the client disconnects.

    Raises ClientDisconnect in that case, in which no answer has to be sent.
    """
    task = asyncio.current_task()
    assert task is not None
    is_over = False

    def cancel_task(_: asyncio.Task[None]) -> None:
        if not is_over:
            task.cancel()

    disconnect = asyncio.ensure_future(wait_for_disconnect(receive))
    disconnect.add_done_callback(cancel_task)
    try:
        yield
    except asyncio.CancelledError:
        # The task may also have been cancelled for another reason: that cancellation goes on.
        if disconnect.done() and task.uncancel() == 0:  # the disconnect was the only reason
            raise ClientDisconnect from None
        raise
    finally:
        is_over = True
        disconnect.cancel()


async def wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client disconnects. Nothing else may call `receive` meanwhile."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def run_unless(disconnect: asyncio.Task[None], work: Coroutine[Any, Any, T]) -> T:
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        await cancel(task)


async def cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait([task])


def count_cancelled(timings: Timings) -> None:
    """Count a request that was cancelled, or whose client left, by the stage it was in. If it has
    several jobs, the stage is that of the first job that still runs.
    """
    stages = (part.stage for part in (timings, *timings.parallel) if part.stage is not None)
    stage = next(stages, None)
    if timings.model is not None and stage is not None:
        metrics.of(metrics.CANCELLED, timings.model, stage).inc()
