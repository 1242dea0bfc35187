"""The meaning of errors: a device's for the process, a background task's for itself."""

import asyncio
from collections.abc import Callable

import pytest

from gateway.errors import DeviceLost, EngineFailed, Fault, ModelLoadFailed, OutOfMemory
from gateway.serving import faults
from gateway.serving.faults import PROBES, UNKNOWN_FAULTS, DeviceHealth, run_forever


def by_text(error: BaseException) -> Fault:
    return Fault(str(error)) if str(error) in set(Fault) else Fault.UNKNOWN


@pytest.fixture
def health(monkeypatch: pytest.MonkeyPatch) -> DeviceHealth:
    """Give a DeviceHealth that knows errors by their text and probes without a pause."""
    monkeypatch.setattr(faults, "PROBE_PAUSE_S", 0.0)
    return DeviceHealth(by_text)


def failing(*texts: str) -> Callable[[], None]:
    """Give a probe that fails with these, then passes."""
    rest = list(texts)

    def probe() -> None:
        if rest:
            raise RuntimeError(rest.pop(0))

    return probe


def note_unknown(health: DeviceHealth, probe: Callable[[], None]) -> None:
    for _ in range(UNKNOWN_FAULTS):
        health.note(Fault.UNKNOWN, "x", probe)


def test_a_fatal_error_is_remembered(health: DeviceHealth) -> None:
    with pytest.raises(DeviceLost):
        health.note(Fault.FATAL, "gone", failing())
    assert health.lost == "gone"
    with pytest.raises(DeviceLost):
        health.check()
    assert isinstance(health.as_error("m", RuntimeError("x")), DeviceLost)


def test_any_number_of_faults_whose_cause_is_known_ends_nothing(health: DeviceHealth) -> None:
    for _ in range(50):
        health.note(Fault.ROW, "x", failing("x", "x"))
        health.note(Fault.PRESSURE, "x", failing("x", "x"))
        health.note(Fault.COMPILER, "x", failing("x", "x"))
    assert health.lost is None


def test_unknown_faults_end_nothing_while_the_probe_passes(health: DeviceHealth) -> None:
    for _ in range(50):
        note_unknown(health, failing())
    note_unknown(health, failing("x"))  # it is tried again
    assert health.lost is None


def test_as_many_failed_probes_as_may_be_lose_the_device(health: DeviceHealth) -> None:
    with pytest.raises(DeviceLost):
        note_unknown(health, failing(*["why"] * PROBES))
    assert health.lost == "RuntimeError: why"


@pytest.mark.parametrize("known", [Fault.ROW, Fault.PRESSURE, Fault.COMPILER])
def test_a_probe_that_fails_for_a_known_reason_ends_nothing(
    health: DeviceHealth, known: Fault
) -> None:
    """A model that cannot run here would fail after each restart as well."""
    note_unknown(health, failing("x", known.value))
    assert health.lost is None


def test_errors_of_ours_are_the_devices_only_by_their_cause(health: DeviceHealth) -> None:
    """A load that failed since the device is lost is no fault of the model's files."""
    failed = ModelLoadFailed("m", "x")
    assert health.see(failed) is failed
    failed.__cause__ = RuntimeError("x")
    assert health.see(failed) is failed
    failed.__cause__ = RuntimeError(Fault.FATAL.value)
    assert isinstance(health.see(failed), DeviceLost)
    assert health.lost is not None


def test_callers_hear_what_they_can_do(health: DeviceHealth) -> None:
    assert isinstance(health.as_error("m", RuntimeError(Fault.PRESSURE.value)), OutOfMemory)
    assert isinstance(health.as_error("m", RuntimeError("x")), EngineFailed)


def test_memory_is_shed_by_all_who_keep_some(health: DeviceHealth) -> None:
    calls: list[str] = []
    with health.shedding(lambda: calls.append("first")):
        with health.shedding(lambda: calls.append("second")):
            health.shed()
        health.shed()
    health.shed()
    assert calls == ["first", "second", "first"]


def test_what_cannot_be_shed_keeps_nothing_else_from_it(health: DeviceHealth) -> None:
    """MLX raises a late error to whoever waits next; one that lasts is seen here too."""
    calls: list[str] = []

    def fail() -> None:
        raise RuntimeError(Fault.FATAL.value)

    with health.shedding(fail), health.shedding(lambda: calls.append("second")):
        health.shed()
    assert calls == ["second"]
    assert health.lost is not None


@pytest.mark.anyio
async def test_work_that_fails_is_told_and_begun_again() -> None:
    begun, told = 0, []
    is_well = asyncio.Event()

    async def work() -> None:
        nonlocal begun
        begun += 1
        if begun <= 2:
            raise ValueError(begun)
        is_well.set()
        await asyncio.Event().wait()

    worker = asyncio.create_task(run_forever("mine", work, lambda error: told.append(str(error))))
    await asyncio.wait_for(is_well.wait(), 60)
    worker.cancel()
    with pytest.raises(asyncio.CancelledError):
        await worker
    assert told == ["1", "2"]
    assert begun == 3
