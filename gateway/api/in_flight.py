"""The requests in flight, and the dashboard's watchers."""

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

CLIENT_CLOSED = 499  # nginx's status for a client that disconnected; it is only logged
LAST_ERRORS = 50
MOST_WATCHERS = 4


@dataclass(slots=True, kw_only=True, eq=False)
class RequestContext:
    """The state of a request, from its first byte to the end of its answer."""

    scope: Scope
    headers: Mapping[bytes, bytes]  # the first value of each header
    request_id: str
    is_anthropic: bool  # True: the answer has Anthropic's format
    body: Body  # memory of the request's body
    unread: Body  # memory of the answer that the client has not read
    # Keys of the prompt's beginnings, which a router stores in the scope.
    routing_keys: RoutingKeys = field(default_factory=RoutingKeys)
    timings: Timings = field(default_factory=Timings)
    trace: "Trace | None" = None
    _task: "asyncio.Task[object] | None" = field(default_factory=asyncio.current_task)

    # The guard sets these before any handler runs; `Rates` sets `rate_headers`.
    is_known: bool = False  # True: the caller may list models
    is_admin: bool = False  # True: the caller has sent a key that opens /admin
    key_id: str | None = None
    cache_salt: str = ""  # keeps the cached prompts of different keys apart
    rate_headers: Callable[[], Iterable[tuple[bytes, bytes]]] = tuple

    asked: float | None = None  # when the request's time limit began, set by Service.caller
    is_cohere: bool = False  # True: errors have Cohere's `message` too
    is_watch: bool = False  # True: the request is for the dashboard's samples
    status: int | None = None
    error: str | None = None  # code of the error that was sent to the client
    cancellation: GatewayError | None = None

    def cancel(self, reason: GatewayError) -> None:
        """Cancel the request's task, as if the client had disconnected."""
        if self.cancellation is None and self._task is not None:
            self.cancellation = reason
            self._task.cancel()

    def uncancel(self) -> None:
        """Undo the cancellation, so that the task can send the reason to the client."""
        if self._task is not None:
            self._task.uncancel()


def context_of(request: Mapping[str, Any]) -> RequestContext:
    context: RequestContext = request["gateway"]
    return context


class InFlight:
    """The requests in flight, and the last errors."""

    def __init__(self) -> None:
        self.is_draining = False
        # Clients may choose request ids, so only numbers are unique.
        self._numbers = itertools.count(1)
        self._requests: dict[int, RequestContext] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._errors: deque[dict[str, Any]] = deque(maxlen=LAST_ERRORS)

    @contextlib.contextmanager
    def track(self, context: RequestContext) -> Iterator[None]:
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
        return dict(self._requests)

    @property
    def errors(self) -> Sequence[dict[str, Any]]:
        return tuple(reversed(self._errors))

    def note_error(self, context: RequestContext, status: int, seconds: float) -> None:
        # The error's message is left out, since it may quote the client's text.
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
        for context in self.requests.values():
            context.cancel(ShuttingDown())


class Watchers:
    """At most MOST_WATCHERS clients that get a sample each second."""

    def __init__(self) -> None:
        self.count = 0
        self._samples: dict[bool, tuple[int, bytes]] = {}

    @contextlib.contextmanager
    def place(self, *, is_reserved: bool = False) -> Iterator[None]:
        """Take a place inside the `with` block, or raise TooManyWatchers."""
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
        """Return this second's sample for admins or for others; the first call makes it."""
        sample = self._samples.get(is_admin)
        if sample is None or sample[0] != second:
            sample = self._samples[is_admin] = (second, make(is_admin))
        return sample[1]


@contextlib.asynccontextmanager
async def while_connected(receive: Receive) -> AsyncIterator[None]:
    """Cancel the `async with` block and raise ClientDisconnect if the client disconnects."""
    task = asyncio.current_task()
    assert task is not None
    is_over = False

    def cancel_task(_: asyncio.Task[None]) -> None:
        if not is_over:
            task.cancel()

    disconnect: asyncio.Task[None] | None = None

    def watch() -> None:
        nonlocal disconnect
        disconnect = asyncio.ensure_future(wait_for_disconnect(receive))
        disconnect.add_done_callback(cancel_task)

    # A block that never waits, such as for cached vectors, needs no task that watches.
    start = asyncio.get_running_loop().call_soon(watch)
    try:
        yield
    except asyncio.CancelledError:
        # If the task was also cancelled for another reason, that cancellation goes on.
        if disconnect is not None and disconnect.done() and task.uncancel() == 0:
            raise ClientDisconnect from None
        raise
    finally:
        is_over = True
        start.cancel()
        if disconnect is not None:
            disconnect.cancel()


async def wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client disconnects; nothing else may call `receive` meanwhile."""
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
    """Count a cancelled request by the stage of its first job that still runs."""
    stages = (part.stage for part in (timings, *timings.parallel) if part.stage is not None)
    stage = next(stages, None)
    if timings.model is not None and stage is not None:
        metrics.of(metrics.CANCELLED, timings.model, stage).inc()
