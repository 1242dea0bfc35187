"""The stages of one model: load it, try it, and see that all it held is given back."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from gateway.doctor import findings
from gateway.doctor.findings import Finding
from gateway.errors import GatewayError

LOAD: Final = "load"
MEMORY: Final = "memory"


@dataclass(frozen=True, slots=True)
class Stage:
    """Something to try, under a name, which tells what was under way if the process ends."""

    name: str
    run: Callable[[], Sequence[Finding]]


class Trial(Protocol):
    """A loaded model, what it computes in, and what is tried on it."""

    dtype: str

    def stages(self) -> Sequence[Stage]:
        """List what is tried, in order."""

    def rest(self) -> None:
        """Let go of all but the weights."""

    def close(self) -> None:
        """Let go of the weights too."""


Event: TypeAlias = str | Finding


def examine(open_: Callable[[], Trial], held_bytes: Callable[[], int]) -> Iterator[Event]:
    """Give the name of each stage as it begins, and then what it has found.

    A stage that raises has failed, and the next ones are tried all the same.
    """
    yield LOAD
    before, started = held_bytes(), time.perf_counter()
    try:
        trial = open_()
    except Exception as error:
        yield Finding(LOAD, "fail", _told(error))
        return
    loaded, seconds = held_bytes(), time.perf_counter() - started
    said = f"{findings.megabytes(loaded - before)}, {trial.dtype}, in {seconds:.1f} seconds."
    measured = {"seconds": seconds, "bytes": loaded - before, "dtype": trial.dtype}
    yield Finding(LOAD, "ok", said, measured)
    for stage in trial.stages():
        yield stage.name
        yield from _tried(stage)
    yield MEMORY
    yield from _tried(Stage(MEMORY, lambda: [_memory(trial, held_bytes, before, loaded)]))


def _tried(stage: Stage) -> Sequence[Finding]:
    try:
        return stage.run()
    except Exception as error:
        return [Finding(stage.name, "fail", _told(error))]


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, GatewayError) else f"{type(error).__name__}: {error}"


def _memory(trial: Trial, held_bytes: Callable[[], int], before: int, loaded: int) -> Finding:
    trial.rest()
    idle = held_bytes()
    trial.close()
    return findings.memory(before, loaded, idle, held_bytes())
