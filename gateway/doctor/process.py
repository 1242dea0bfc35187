"""A process that may crash or hang: what it says, line by line, and how it ends."""

import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any, Final

from gateway.doctor.findings import Finding

SILENCE_S: Final = 300.0  # of a stage: a large model on a CPU takes minutes for some
_TAIL_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class Ending:
    """How a process ended: its status, negative for a signal; None where it was too long silent."""

    status: int | None
    last_words: str = ""

    @property
    def problem(self) -> str:
        """Say what was wrong; nothing if it ended well."""
        last_words = f": {self.last_words}" if self.last_words else ""
        match self.status:
            case 0:
                return ""
            case None:
                return f"it said nothing for too long, and was ended by SIGKILL{last_words}"
            case status if status > 0:
                return f"it ended with status {status}{last_words}"
            case status:
                name = _signal_name(-status)
                is_short = name == "SIGKILL" and not last_words
                hint = ", as the system does where memory ends" if is_short else last_words
                return f"it was ended by {name}{hint}"


def _nobody(stage: str) -> None:
    """Hear of no stage."""


@dataclass(slots=True)
class Heard:
    """What the process of one model has said, of the `stages` that it should go through.

    `told` hears of each that begins.
    """

    stages: Sequence[str] = ()
    told: Callable[[str], None] = _nobody
    facts: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)

    def add(self, line: bytes) -> None:
        """Take a line: facts, the name of a stage that begins, or a finding of it."""
        said = json.loads(line)
        self.facts |= said.get("facts", {})
        if (stage := said.get("stage")) is not None:
            self.begun.append(stage)
            self.told(stage)
        if (found := said.get("finding")) is not None:
            self.findings.append(Finding(**found))

    def end(self, ending: Ending) -> list[Finding]:
        """Return the findings: also of an end too soon, and of each stage that was not reached."""
        found = list(self.findings)
        if problem := ending.problem:
            under_way = self.begun[-1] if self.begun else "start"
            found.append(Finding(under_way, "fail", f"{problem}.", {"status": ending.status}))
        missed = [stage for stage in self.stages if stage not in self.begun]
        return found + [Finding(stage, "skip", "not reached.") for stage in missed]


def listen(
    command: Sequence[str], told: Callable[[bytes], None], silence_s: float = SILENCE_S
) -> Ending:
    """Run a command, and hand on each line as it comes; end it after so many seconds without one.

    What it writes to stderr is kept, and only its last line is returned.
    """
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors) as process,
    ):
        assert process.stdout is not None
        try:
            status = None
            if _hand_on(process.stdout.fileno(), told, silence_s):
                with suppress(subprocess.TimeoutExpired):
                    status = process.wait(silence_s)
        finally:
            process.kill()  # does nothing where it has ended
        return Ending(status, _last_line(errors))


def _hand_on(pipe: int, told: Callable[[bytes], None], silence_s: float) -> bool:
    """Hand lines on until there are no more; return False if none came for too long."""
    rest, until = b"", time.monotonic() + silence_s
    while True:
        ready, _, _ = select.select([pipe], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            return False
        if not (received := os.read(pipe, 65536)):
            return True
        *lines, rest = (rest + received).split(b"\n")
        for line in lines:
            until = time.monotonic() + silence_s
            told(line)


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(max(0, errors.seek(0, os.SEEK_END) - _TAIL_BYTES))
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return lines[-1].strip().rstrip(".") if lines else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
