"""A process that crashes or hangs is a finding of the stage it was in."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gateway.doctor.checkup import ChildOutput, Ending, run_process
from gateway.doctor.findings import Finding

STAGES = ("load", "batch", "memory")
BEGUN = r"""
import json, os, signal, sys, time
def tell(**said): print(json.dumps(said), flush=True)
tell(facts={"device": "cpu"})
tell(stage="load")
tell(finding={"check": "load", "state": "ok", "said": "1 MB.", "measured": {"bytes": 1}})
tell(stage="batch")
"""


def heard_of(code: str, silence_s: float = 60) -> tuple[ChildOutput, list[Finding]]:
    """Run a process that has begun well and goes on so; return what was found."""
    heard = ChildOutput(STAGES)
    ending = run_process([sys.executable, "-c", BEGUN + code], heard.add, silence_s)
    return heard, heard.end(ending)


def test_a_process_that_ends_well_adds_nothing() -> None:
    """What was not reached is named."""
    heard, found = heard_of('print("not ours", file=sys.stderr)')
    assert heard.facts == {"device": "cpu"}
    assert found == [
        Finding("load", "ok", "1 MB.", {"bytes": 1}),
        Finding("memory", "skip", "not reached."),
    ]


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT", "SIGILL"])
def test_a_crash_is_told_by_its_signal_and_last_words(name: str) -> None:
    """As a finding of the stage that was under way; what was found before it stays."""
    code = "print('a', 'terminating: [metal] no', sep='\\n', file=sys.stderr, flush=True)\n"
    _, found = heard_of(code + f"signal.raise_signal(signal.{name})")
    said = f"it was ended by {name}: terminating: [metal] no."
    status = {"status": -signal.Signals[name]}
    assert found[1:] == [
        Finding("batch", "fail", said, status),
        Finding("memory", "skip", "not reached."),
    ]


def test_a_hang_is_ended_and_told() -> None:
    """What waits for ever is killed."""
    started = time.monotonic()
    _, found = heard_of("time.sleep(600)", silence_s=0.5)
    assert found[1].said == "it said nothing for too long, and was ended by SIGKILL."
    assert found[1].check == "batch"
    assert time.monotonic() - started < 60


def test_a_process_that_closes_its_output_and_hangs_is_ended_too() -> None:
    """At its exit, for one."""
    _, found = heard_of("os.close(1); time.sleep(600)", silence_s=0.5)
    assert found[1].state == "fail"


def test_who_speaks_now_and_then_is_not_silent() -> None:
    """The limit is of each line, not of them all."""
    code = "for _ in range(8):\n    time.sleep(0.25); tell(stage='memory')"
    _, found = heard_of(code, silence_s=1.5)
    assert [each.check for each in found] == ["load"]


def test_a_traceback_is_its_last_line() -> None:
    """The rest would be paths."""
    _, found = heard_of("raise OSError('no such thing')")
    assert found[1].said == "it ended with status 1: OSError: no such thing."


def test_a_crash_before_anything_was_said_is_one_of_the_start() -> None:
    """Every stage is missing."""
    heard = ChildOutput(STAGES)
    heard.end(run_process([sys.executable, "-c", "import os; os.abort()"], heard.add))
    found = heard.end(Ending(-signal.SIGABRT))
    assert [(each.check, each.state) for each in found] == [
        ("start", "fail"),
        *((stage, "skip") for stage in STAGES),
    ]


def test_a_kill_without_a_word_hints_at_memory() -> None:
    """The system's own way to say so."""
    assert "where memory ends" in Ending(-signal.SIGKILL).problem
    assert Ending(-64).problem.startswith("it was ended by ")
    assert Ending(0, "a warning").problem == ""


def test_whoever_gives_up_leaves_no_process(tmp_path: Path) -> None:
    """As with Ctrl-C."""

    def interrupt(line: bytes) -> None:
        raise KeyboardInterrupt

    mark = f"doctor-{tmp_path.name}"
    code = f"print(1, flush=True); import time; time.sleep(600)  # {mark}"
    with pytest.raises(KeyboardInterrupt):
        run_process([sys.executable, "-c", code], interrupt)
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert mark not in running.stdout
