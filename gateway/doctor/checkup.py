"""Which models are checked, and the check of each in its own process, which may crash or hang."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Any, Final, TypeAlias

from gateway.app.hub import hub_of
from gateway.doctor.findings import Finding
from gateway.doctor.report import Checked, Report
from gateway.doctor.trials import STAGES
from gateway.engine.hub import on_disk
from gateway.errors import GatewayError, ModelUnavailable
from gateway.registry import ChatSpec, ModelSpec, PackageSource
from gateway.settings import Settings

OnStage: TypeAlias = Callable[[str, str], None]
SILENCE_S: Final = 300.0  # without a line: a large model on a CPU takes minutes for some stages
_TAIL_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class Ending:
    """How a process ended: its status, negative for a signal; None if it was silent too long."""

    status: int | None
    last_words: str = ""

    @property
    def problem(self) -> str:
        """What was wrong; empty if it ended well."""
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


def _ignore(*_: str) -> None:
    """Take a stage that is shown nowhere."""


@dataclass(slots=True)
class ChildOutput:
    """The lines of one model's process, which should go through `stages`.

    `on_stage` is called with each stage that begins.
    """

    stages: Sequence[str] = ()
    on_stage: Callable[[str], None] = _ignore
    facts: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)

    def add(self, line: bytes) -> None:
        """Add a line: facts, the name of a stage that begins, or a finding."""
        event = json.loads(line)
        self.facts |= event.get("facts", {})
        if (stage := event.get("stage")) is not None:
            self.begun.append(stage)
            self.on_stage(stage)
        if (found := event.get("finding")) is not None:
            self.findings.append(Finding(**found))

    def end(self, ending: Ending) -> list[Finding]:
        """Return the findings, with one for a crash and one for each stage that was not reached."""
        found = list(self.findings)
        if problem := ending.problem:
            under_way = self.begun[-1] if self.begun else "start"
            found.append(Finding(under_way, "fail", f"{problem}.", {"status": ending.status}))
        missed = [stage for stage in self.stages if stage not in self.begun]
        return found + [Finding(stage, "skip", "not reached.") for stage in missed]


def run_process(
    command: Sequence[str], on_line: Callable[[bytes], None], silence_s: float = SILENCE_S
) -> Ending:
    """Run a command and call `on_line` with each line; kill it after `silence_s` without one.

    Of its stderr the last line is returned.
    """
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors) as process,
    ):
        assert process.stdout is not None
        try:
            status = None
            if _read_lines(process.stdout.fileno(), on_line, silence_s):
                with suppress(subprocess.TimeoutExpired):
                    status = process.wait(silence_s)
        finally:
            process.kill()  # does nothing if it has ended
        return Ending(status, _last_line(errors))


def _read_lines(pipe: int, on_line: Callable[[bytes], None], silence_s: float) -> bool:
    """Read lines to the end; return False if none came for too long."""
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
            on_line(line)


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(max(0, errors.seek(0, os.SEEK_END) - _TAIL_BYTES))
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return lines[-1].strip().rstrip(".") if lines else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def choose(specs: Iterable[ModelSpec], is_here: Callable[[ModelSpec], bool]) -> list[ModelSpec]:
    """Choose a model of each kind: one on board, else one that is on disk, else the first. An
    adapter is none by itself.
    """
    first: dict[str, ModelSpec] = {}
    whole = [spec for spec in specs if not isinstance(spec, ChatSpec) or spec.base is None]
    for spec in sorted(whole, key=lambda spec: (not _is_on_board(spec), not is_here(spec))):
        first.setdefault(spec.kind, spec)
    return [first[kind] for kind in sorted(first, reverse=True)]


def _is_on_board(spec: ModelSpec) -> bool:
    return isinstance(spec.source, PackageSource)


def check_files(spec: ModelSpec, settings: Settings) -> Finding | None:
    """Return why a model cannot be checked, with what adds it; None if its files are on disk."""
    if isinstance(spec, ChatSpec) and spec.base is not None:
        reason = (
            f"an adapter is run by its base. Run: mlx-gateway doctor --engine --model {spec.base}"
        )
        return Finding("files", "skip", reason)
    try:
        if on_disk(spec, hub_of(settings, may_download=False)) is not None:
            return None
    except ModelUnavailable as error:
        return Finding("files", "skip", str(error))
    except GatewayError as error:
        return Finding("files", "fail", str(error))
    return Finding("files", "skip", f"not on disk. Run: mlx-gateway pull {spec.id}")


def check_models(
    specs: Sequence[ModelSpec], settings: Settings, on_stage: OnStage = _ignore
) -> Report:
    """Check models one after another; `on_stage` is called with model and stage as each begins."""
    checked: list[Checked] = []
    device: dict[str, Any] = {}
    for spec in specs:
        if (missing := check_files(spec, settings)) is not None:
            checked.append(Checked(spec, [missing]))
            continue
        output = ChildOutput(STAGES[spec.kind], partial(on_stage, spec.id))
        checked.append(Checked(spec, output.end(_run(settings, output, spec.id))))
        device |= output.facts
    if device:
        return Report(device, [], checked)
    output = ChildOutput()
    found = output.end(_run(settings, output))
    return Report(output.facts, found, checked)


def _run(settings: Settings, output: ChildOutput, *ids: str) -> Ending:
    command = [sys.executable, "-m", "gateway.doctor.child", str(settings.models), *ids]
    return run_process(command, output.add)
