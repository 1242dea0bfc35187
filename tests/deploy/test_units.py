"""The systemd unit and the launchd list: their supervisors' options, which keep the promises."""

import os
import plistlib
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from gateway.app.gateway import GRACE_S
from gateway.settings import Settings

DEPLOY = Path(__file__).parents[2] / "deploy"
UNIT = DEPLOY / "systemd" / "mlx-gateway.service"
PLIST = DEPLOY / "launchd" / "mlx-gateway.plist"
DRAIN_S = Settings.model_fields["drain_s"].default + GRACE_S

analyze = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)


def options() -> dict[str, list[str]]:
    """Read the unit's options; some are given more than once."""
    lines = [line for line in UNIT.read_text().splitlines() if "=" in line and line[0] != "#"]
    found: dict[str, list[str]] = {}
    for name, _, value in (line.partition("=") for line in lines):
        found.setdefault(name, []).append(value)
    return found


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """Give the unit with a program that is on this machine."""
    program = "/opt/mlx-gateway/.venv/bin/mlx-gateway serve"
    text = UNIT.read_text()
    assert f"ExecStart={program}\n" in text
    copy = tmp_path / UNIT.name
    copy.write_text(text.replace(program, "/bin/true"))
    return copy


@analyze
def test_systemd_understands_every_line(unit: Path) -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@analyze
def test_systemd_finds_little_exposed(unit: Path) -> None:
    """Its score is at most 2.0 of 10; an open service has 9.6."""
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=20", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_systemd_outwaits_the_drain_and_restarts_what_hung() -> None:
    """It does not start a gateway again whose settings were wrong."""
    unit = options()
    assert float(unit["TimeoutStopSec"][0]) > DRAIN_S
    assert unit["Restart"] == ["on-failure"]
    assert unit["RestartForceExitStatus"] == ["70"]
    assert unit["RestartPreventExitStatus"] == ["2"]
    assert unit["ExecReload"] == ["kill -HUP $MAINPID"]
    assert unit["EnvironmentFile"][0].endswith("/gateway.env")


def test_systemd_shuts_the_gateway_in() -> None:
    """Others must not put code where mlx keeps the code it compiles."""
    unit = options()
    for name in ("DynamicUser", "PrivateTmp", "NoNewPrivileges", "ProtectHome"):
        assert unit[name] == ["yes"], name
    assert unit["ProtectSystem"] == ["strict"]
    assert unit["CapabilityBoundingSet"] == [""]
    # All that it writes is OpenBLAS's copy, models, and what was found out about them.
    assert unit["Environment"] == [
        "XDG_CACHE_HOME=%C/mlx-gateway",
        "HF_HOME=%C/mlx-gateway",
        "GATEWAY_SELF_TEST_FOLDER=%C/mlx-gateway/self-tests",
    ]
    assert unit["CacheDirectory"] == ["mlx-gateway"]


def test_launchd_outwaits_the_drain_and_restarts_what_hung() -> None:
    """Its own patience is 20 seconds, and its own limit on open files 256."""
    with PLIST.open("rb") as file:
        job = plistlib.load(file)
    assert job["Label"] == PLIST.stem
    assert job["ProgramArguments"][-1] == f"{job['WorkingDirectory']}/.venv/bin/mlx-gateway"
    assert job["RunAtLoad"] is True
    assert job["KeepAlive"] == {"SuccessfulExit": False}
    assert job["ExitTimeOut"] > DRAIN_S
    assert job["SoftResourceLimits"]["NumberOfFiles"] >= 4096
    assert job["Umask"] == 0o077


def launched(gateway: str, folder: Path) -> subprocess.Popen[bytes]:
    """Start the command of launchd's list, with a script in the place of the gateway."""
    with PLIST.open("rb") as file:
        command = plistlib.load(file)["ProgramArguments"]
    program = folder / "mlx-gateway"
    program.write_text(f"#!/bin/sh\n{gateway}\n")
    program.chmod(0o755)
    # A shell traps no signal that it was started to ignore, as nohup has it ignore hangups.
    ignored = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        return subprocess.Popen([*command[:-1], str(program)], stdout=subprocess.PIPE)
    finally:
        signal.signal(signal.SIGHUP, ignored)


@pytest.mark.parametrize(("status", "told"), [(0, 0), (1, 1), (2, 0), (70, 70)])
def test_launchd_is_told_of_success_where_no_restart_helps(
    tmp_path: Path, status: int, told: int
) -> None:
    """It starts again whatever has failed, and a wrong setting stays wrong."""
    with launched(f'[ "$*" = serve ] && exit {status}; exit 99', tmp_path) as supervised:
        assert supervised.wait(60) == told


def test_what_docs_say_of_each_status_is_what_the_units_do(tmp_path: Path) -> None:
    """A process that a signal ended has, for the shell between, 128 and the signal's number."""
    page = (DEPLOY.parent / "docs" / "reliability.md").read_text(encoding="utf-8")
    table = page.partition("\n## What the supervisor does\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+|killed by .*?\)) \|.*\| (.*?) \|$", table, re.MULTILINE)
    told = {
        int(status): action.startswith("Restart")
        for cell, action in rows
        for status in re.findall(r"\d+", cell.partition("(")[2] or cell)
    }
    assert {status for status, restarts in told.items() if not restarts} == {0, 2}
    assert {1, 70, 137} <= told.keys()
    prevented = {0, *map(int, options()["RestartPreventExitStatus"])}
    for status, restarts in told.items():
        assert (status not in prevented) == restarts
        with launched(f"exit {status}", tmp_path) as supervised:
            assert (supervised.wait(60) != 0) == restarts


def test_launchds_signals_reach_the_gateway(tmp_path: Path) -> None:
    """A hangup ends nothing; a drain is waited for, and its status is the gateway's."""
    gateway = """
trap 'echo reloaded' HUP
trap 'echo drained; exit 7' TERM
echo up
while :; do sleep 0.01; done
"""
    with launched(gateway, tmp_path) as supervised:
        assert supervised.stdout is not None
        assert supervised.stdout.readline() == b"up\n"
        os.kill(supervised.pid, signal.SIGHUP)
        assert supervised.stdout.readline() == b"reloaded\n"
        os.kill(supervised.pid, signal.SIGTERM)
        assert supervised.stdout.readline() == b"drained\n"
        assert supervised.wait(60) == 7
