"""Ctrl-C while the gateway starts and loads: it ends by a status of its own, and never aborts."""

import json
import random
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.processes import DEMO, ROOT, environment

pytestmark = pytest.mark.slow

DRAINED, AT_ONCE, EARLY = 0, 1, 130
TRIALS = 200
SEED = 51


@dataclass(frozen=True)
class Ended:
    """How a process ended, and the lines that it wrote but for those about imports."""

    status: int
    said: tuple[str, ...]


def interrupted(folder: Path, mark: str | int, pause_s: float | None = None) -> Ended:
    """Serve until stderr has a text or a number of lines; then interrupt once, or twice.

    Python reports each import, so the lines tell how far a start is on any machine. `pause_s` are
    the seconds from the first interrupt to the second.
    """
    log = folder / "log"
    serve = [sys.executable, "-X", "importtime", "-m", "gateway", "serve", "--models", str(DEMO)]
    given = environment(GATEWAY_PORT="0", GATEWAY_LOG_FORMAT="json")
    with log.open("wb") as output:
        process = subprocess.Popen(serve, cwd=folder, env=given, stderr=output)
    try:
        while process.poll() is None and not _is_at(log.read_text(), mark):
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        if pause_s is not None:
            time.sleep(pause_s)
            process.send_signal(signal.SIGINT)  # it may have ended
        status = process.wait(60)
    finally:
        process.kill()
        process.wait(60)
    lines = [line for line in log.read_text().splitlines() if not line.startswith("import time:")]
    return Ended(status, tuple(lines))


def _is_at(text: str, mark: str | int) -> bool:
    return mark in text if isinstance(mark, str) else text.count("\n") >= mark


def is_clean(ended: Ended) -> bool:
    """Tell whether only log lines were written, and no traceback or stack."""
    try:
        return all("event" in json.loads(line) for line in ended.said)
    except ValueError:
        return False


@pytest.mark.parametrize("mark", ["typer", "gateway.errors\n", "mlx.core\n"])
def test_an_early_interrupt_prints_no_traceback(tmp_path: Path, mark: str) -> None:
    """At the first import of a library, at the commands' own, and at those of mlx."""
    ended = interrupted(tmp_path, mark)
    assert ended.status == EARLY
    assert is_clean(ended)


def test_the_script_begins_as_the_module_does() -> None:
    """It is the function that handles an interrupt before it imports the commands."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"mlx-gateway": "gateway.__main__:main"}


@pytest.mark.parametrize("mark", ["mlx_lm.utils\n", "mlx_lm\n"])
def test_an_interrupt_during_a_loads_imports_is_a_drain(tmp_path: Path, mark: str) -> None:
    """A thread of the load is in native code then, which Python's end would abort."""
    ended = interrupted(tmp_path, mark)
    assert (ended.status, is_clean(ended)) == (DRAINED, True)
    events = [json.loads(line) for line in ended.said]
    [waiting] = [event for event in events if event["event"] == "waiting_for"]
    assert waiting["requests"] == 0
    assert len(waiting["loading"]) == 1
    assert not [event for event in events if event["level"] not in ("info", "warning")]


def test_a_second_interrupt_ends_a_load_at_once(tmp_path: Path) -> None:
    ended = interrupted(tmp_path, '"event":"model_loading"', 0.0)
    assert ended.status in (DRAINED, AT_ONCE)  # the first may have been enough
    assert is_clean(ended)


@pytest.mark.soak
def test_interrupts_at_any_time_never_abort(tmp_path: Path) -> None:
    """A third of two hundred once, the others again within half a second."""
    whole = interrupted(tmp_path, '"event":"ready"')
    assert whole.status == DRAINED
    log = (tmp_path / "log").read_text()
    # Nobody can handle an interrupt while Python itself starts.
    first, last = log.partition("typer")[0].count("\n") + 1, log.count("\n")
    chance = random.Random(SEED)
    ends, wrong = Counter[int](), list[Ended]()
    for number in range(TRIALS):
        mark = chance.randrange(first, last)
        pause_s = chance.uniform(0, 0.5) if number % 3 else None
        ended = interrupted(tmp_path, mark, pause_s)
        ends[ended.status] += 1
        if not is_clean(ended):
            wrong.append(ended)
        print(f"{number}: at line {mark}, again after {pause_s}: {ended.status}", flush=True)
    print(f"statuses: {dict(ends)}")
    assert not wrong
    assert set(ends) <= {DRAINED, AT_ONCE, EARLY}
