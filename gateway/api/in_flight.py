"""The requests in flight: the context of each, which is listed, waited for and cancelled, also
because its client has left; the last errors; the watchers of the dashboard.
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
    """A request from its first byte to the end of its answer, and the task that serves it.

    The outermost middleware makes it and leaves it in the scope, where `context_of` finds it.
    """

    scope: Scope
    headers: Mapping[bytes, bytes]  # the first header of each name
    request_id: str
    is_anthropic: bool  # the answer has Anthropic's form, even an error
    body: Body  # counts the bytes of its body
    unread: Body  # counts the bytes of its answer that the client has not read
    # A router's names for the beginnings of the prompt. The router leaves them in the scope.
    routing_keys: RoutingKeys = field(default_factory=RoutingKeys)
    timings: Timings = field(default_factory=Timings)
    trace: "Trace | None" = None  # None if this path has no trace, or none are sent
    _task: "asyncio.Task[object] | None" = field(default_factory=asyncio.current_task)

    # The guard sets these before any handler runs; the rates set the last one:
    is_known: bool = False  # True: the caller may list models
    key_id: str | None = None  # None if no keys are set
    cache_salt: str = ""  # keeps the cached prompts of different keys apart
    rate_headers: Callable[[], Iterable[tuple[bytes, bytes]]] = tuple  # the allowance that is left

    # These are set while the request is served:
    asked: float | None = None  # the start of its deadline, set by Service.caller
    is_watch: bool = False  # True for the dashboard's samples, which last as long as somebody looks
    status: int | None = None  # set by the outermost middleware, when the answer begins
    error: str | None = None  # the code, set by the sender of an error to the client
    cancellation: GatewayError | None = None  # the client's error, set by `cancel`

    def cancel(self, reason: GatewayError) -> None:
        """Cancel its task: everything it held is freed, as if its client had left."""
        if self.cancellation is None and self._task is not None:
            self.cancellation = reason
            self._task.cancel()

    def uncancel(self) -> None:
        """Take the cancellation as handled: the task goes on, to tell the reason."""
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
        # Numbers are unique. Ids may not be: clients may send one.
        self._numbers = itertools.count(1)
        self._requests: dict[int, RequestContext] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._errors: deque[dict[str, Any]] = deque(maxlen=LAST_ERRORS)

    @contextlib.contextmanager
    def track(self, context: RequestContext) -> Iterator[None]:
        """Track one request while entered."""
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
        """Keep an error that a request was answered with."""
        # The error's message is left out: it may repeat the caller's text.
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
        """Cancel the requests in flight, as the gateway stops."""
        for context in self.requests.values():
            context.cancel(ShuttingDown())


class Watchers:
    """A few clients at most, who get a sample each second. A sample is made once, for all."""

    def __init__(self) -> None:
        self.count = 0
        self._samples: dict[bool, tuple[int, bytes]] = {}

    @contextlib.contextmanager
    def place(self, *, is_reserved: bool = False) -> Iterator[None]:
        """Take a place while entered; the last one only if it `is_reserved`.

        Raises TooManyWatchers if none is free.
        """
        # Other watchers cannot lock an admin out.
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
        """Return the sample of a second, made by the first who asks: for admins or for others."""
        sample = self._samples.get(is_admin)
        if sample is None or sample[0] != second:
            sample = self._samples[is_admin] = (second, make(is_admin))
        return sample[1]


@contextlib.asynccontextmanager
async def while_connected(receive: Receive) -> AsyncIterator[None]:
    """Cancel the body if the client disconnects.

    Raises ClientDisconnect then, which needs no answer.
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
        # Somebody else may have cancelled the task too: that cancellation goes on.
        if disconnect.done() and task.uncancel() == 0:  # this is the only cancellation
            raise ClientDisconnect from None
        raise
    finally:
        is_over = True
        disconnect.cancel()


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has disconnected. Nothing else may call `receive` meanwhile."""
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
    """Count a client that left before its answer was complete, once, by the stage of the request:
    that of its first job still running, if it has several.
    """
    stages = (part.stage for part in (timings, *timings.parallel) if part.stage is not None)
    stage = next(stages, None)
    if timings.model is not None and stage is not None:
        metrics.of(metrics.CANCELLED, timings.model, stage).inc()
