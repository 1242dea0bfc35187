"""The meaning of errors: the device's for the process (continue, give memory back, end), and a
background task's for the task (restart).
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final

from gateway import logs, metrics
from gateway.errors import DeviceLost, EngineFailed, Fault, GatewayError, OutOfMemory
from gateway.panics import raise_panics

log = logs.get("device")

UNKNOWN_FAULTS: Final = 2  # faults of unknown cause until the model reads a prompt of its own
PROBES: Final = 2  # probes that have to fail in a row before the device counts as lost
RESTART_PAUSE_S: Final = 0.1  # a task that always fails must not fill the loop
PROBE_PAUSE_S: Final = 1.0  # pause between probes: a GPU that restarts fails all work meanwhile


class DeviceHealth:
    """The device as its errors show it, for all models: `note` and `shed` run on the lane's thread.

    A caller's prompt alone never makes the device count as lost. That takes an error which is known
    to last, or a model's own prompt, failing twice in a row for no known reason.
    """

    def __init__(
        self,
        classify: Callable[[BaseException], Fault] = lambda _: Fault.UNKNOWN,
        name: Callable[[Exception], Exception] = lambda error: error,
    ) -> None:
        self._classify, self._name = classify, name
        self._unknown = 0
        self._shedders: list[Callable[[], object]] = []
        self.lost: str | None = None  # the error after which the device does not come back

    def check(self) -> None:
        """Raise DeviceLost if the device has been lost."""
        if self.lost is not None:
            raise DeviceLost

    def classify(self, error: Exception) -> Fault:
        """Return the fault that an error shows. A GatewayError counts by its cause, if any."""
        if not isinstance(error, GatewayError):
            return self._classify(error)
        fault = Fault.ROW if error.__cause__ is None else self._classify(error.__cause__)
        if fault is Fault.UNKNOWN:
            return Fault.ROW
        return fault

    def see(self, error: Exception) -> Exception:
        """Return the error that a caller of the device gets: DeviceLost for one that lasts, else
        one that names any other failed part of the machine. On the lane's thread.
        """
        error = self._name(error)
        if self.classify(error) is not Fault.FATAL:
            return error
        self._lose(f"{type(error).__name__}: {error}")
        return DeviceLost()

    def note(self, fault: Fault, message: str, probe: Callable[[], None]) -> None:
        """Note a fault that a pass has met; raise DeviceLost if the device is lost with it.

        After UNKNOWN_FAULTS of unknown cause, `probe` reads a prompt of the model's own, to find
        out whether the device still works.
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
        """While entered, `shed` is called, on the lane's thread, when memory runs out."""
        self._shedders.append(shed)
        try:
            yield
        finally:
            self._shedders.remove(shed)

    def shed(self) -> None:
        """Give back the memory that is kept for later: prefixes, and freed buffers. Errors of this,
        such as a late one of MLX's, are only noted.
        """
        metrics.SHEDDINGS.inc()
        for shed in tuple(self._shedders):
            try:
                shed()
            except Exception as error:
                log.warning("memory_not_shed", error=str(error)[:500])
                self.see(error)

    def as_error(self, model: str, error: Exception) -> GatewayError:
        """Return the error for a caller whose row has failed with this one."""
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
    """Call `work` until cancelled. `on_error` has to end requests whose work was lost."""
    while True:
        try:
            await work()
        except Exception as error:  # a bug of ours: engines' errors are handled below
            log.error("worker_failed", worker=name, exc_info=True)
            on_error(error)
        await asyncio.sleep(RESTART_PAUSE_S)
