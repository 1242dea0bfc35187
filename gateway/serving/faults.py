"""Reactions to errors of the device, and restarts of background tasks."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final

from gateway import logs, metrics
from gateway.errors import DeviceLost, EngineFailed, Fault, GatewayError, OutOfMemory
from gateway.panics import raise_panics

log = logs.get("device")

UNKNOWN_FAULTS: Final = 2  # faults of unknown cause after which the device is probed
PROBES: Final = 2  # consecutive failed probes after which the device counts as lost
RESTART_PAUSE_S: Final = (
    0.1  # seconds, since a task that always fails must not take all of the loop's time
)
PROBE_PAUSE_S: Final = 1.0  # seconds between probes, since a GPU fails all work while it restarts


class DeviceHealth:
    """The state of the device, as the errors of all models show it.

    The device is lost after a permanent error, or once a model's fixed test prompt has failed
    PROBES times in a row for unknown reasons. `see`, `note` and `shed` must run on the lane.
    """

    def __init__(
        self,
        classify: Callable[[BaseException], Fault] = lambda _: Fault.UNKNOWN,
        name: Callable[[Exception], Exception] = lambda error: error,
    ) -> None:
        self._classify, self._name = classify, name
        self._unknown = 0
        self._shedders: list[Callable[[], object]] = []
        self.lost: str | None = None  # the error that showed the loss of the device

    def check(self) -> None:
        if self.lost is not None:
            raise DeviceLost

    def classify(self, error: Exception) -> Fault:
        """Return an error's kind of fault.

        A GatewayError has the kind of its cause, or ROW if that kind is missing or UNKNOWN.
        """
        if not isinstance(error, GatewayError):
            return self._classify(error)
        fault = Fault.ROW if error.__cause__ is None else self._classify(error.__cause__)
        if fault is Fault.UNKNOWN:
            return Fault.ROW
        return fault

    def see(self, error: Exception) -> Exception:
        """Return the error to raise in the caller, which may be DeviceLost."""
        error = self._name(error)
        if self.classify(error) is not Fault.FATAL:
            return error
        self._lose(f"{type(error).__name__}: {error}")
        return DeviceLost()

    def note(self, fault: Fault, message: str, probe: Callable[[], None]) -> None:
        """Record a fault, and probe the device after UNKNOWN_FAULTS unknown ones.

        Raises DeviceLost if the device is lost.
        """
        if fault is Fault.FATAL:
            self._lose(message)
        if fault is Fault.UNKNOWN:
            self._unknown += 1
            if self._unknown >= UNKNOWN_FAULTS:
                self._unknown = 0
                self._probe(probe)
        self.check()

    def _probe(self, probe: Callable[[], None]) -> None:
        for number in range(PROBES):
            time.sleep(PROBE_PAUSE_S * number)
            try:
                raise_panics(probe)()
            except Exception as error:
                fault, message = self.classify(error), f"{type(error).__name__}: {error}"
                log.warning("device_probe_failed", fault=fault.value, error=message[:500])
                if fault is Fault.FATAL:
                    self._lose(message)
                if fault is not Fault.UNKNOWN:
                    return
            else:
                return
        self._lose(message)

    def _lose(self, message: str) -> None:
        if self.lost is None:
            self.lost = message[:500]
            log.critical("device_lost", error=self.lost)

    @contextmanager
    def shedding(self, shed: Callable[[], object]) -> Iterator[None]:
        """While entered, call `shed` on the lane's thread whenever memory runs out."""
        self._shedders.append(shed)
        try:
            yield
        finally:
            self._shedders.remove(shed)

    def shed(self) -> None:
        """Free memory that is only kept for reuse, such as prefix caches. Raises no error."""
        metrics.SHEDDINGS.inc()
        for shed in tuple(self._shedders):
            try:
                shed()
            except Exception as error:
                log.warning("memory_not_shed", error=str(error)[:500])
                self.see(error)

    def as_error(self, model: str, error: Exception) -> GatewayError:
        if isinstance(error, GatewayError):
            return error
        if self.lost is not None:
            return DeviceLost()
        if self.classify(error) is Fault.PRESSURE:
            return OutOfMemory(model)
        return EngineFailed(model, str(error))


async def run_forever(
    name: str,
    work: Callable[[], Awaitable[None]],
    on_error: Callable[[Exception], None] = lambda _: None,
) -> None:
    """Call `work` until cancelled; after an error, `on_error` must end the lost requests."""
    while True:
        try:
            await work()
        except Exception as error:  # a bug of the gateway, since `work` handles engines' errors
            log.error("worker_failed", worker=name, exc_info=True)
            on_error(error)
        await asyncio.sleep(RESTART_PAUSE_S)
