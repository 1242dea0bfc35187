"""The Dockerfile: its base images, the rights it runs with, and a probe that is true."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import anyio.to_thread
import pytest

from tests.fakes import ScriptedEngines
from tests.serving_app import catalog, served

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "container"
JOINED = (FOLDER / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
STEPS = [line.split(None, 1) for line in JOINED.splitlines() if line and line[0] != "#"]
PINS = ("runtime", "cuda", "cuda13")  # what the argument may be
IGNORED = (FOLDER / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()


def said(instruction: str) -> list[str]:
    return [rest for name, rest in STEPS if name == instruction]


def probe() -> list[str]:
    command: list[str] = json.loads(said("HEALTHCHECK")[0].partition(" CMD ")[2])
    return command


def test_it_does_not_run_as_root() -> None:
    """The last USER decides, by number, so that an orchestrator can see it."""
    [user] = said("USER")
    assert int(user) > 0
    assert f"--uid {user}" in " ".join(said("RUN"))
    after = [name for name, _ in STEPS[STEPS.index(["USER", user]) :]]
    assert not {"RUN", "COPY", "ADD"} & set(after)


def test_commands_have_no_shell_between() -> None:
    """A shell would keep SIGTERM to itself, and nothing would drain."""
    assert said("STOPSIGNAL") == ["SIGTERM"]
    assert json.loads(said("ENTRYPOINT")[0]) == ["mlx-gateway"]
    assert json.loads(said("CMD")[0]) == ["serve"]
    assert probe()[0] == "python"


def test_what_is_copied_exists_and_is_not_ignored() -> None:
    """The context holds nothing else: no .env, no .git."""
    assert said("ARG") == [f"PINS={PINS[0]}"]
    named = [each for rest in said("COPY") if "--from" not in rest for each in rest.split()[:-1]]
    copied = {each.replace("${PINS}", pins) for each in named for pins in PINS}
    assert len(copied) == len(named) + len(PINS) - 1
    for each in copied:
        assert (ROOT / each).exists(), each
    allowed = {line.removeprefix("!") for line in IGNORED if line.startswith("!")}
    assert "*" in IGNORED
    assert copied == allowed


def test_what_is_copied_is_all_that_the_package_is_built_of(tmp_path: Path) -> None:
    """pip builds a wheel of the copied files, as in the image."""
    for rest in said("COPY"):
        *names, folder = rest.replace("${PINS}", PINS[0]).split()
        if "--from" in rest:
            continue
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for name in names:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, tmp_path / folder, dirs_exist_ok=True)
            else:
                shutil.copy(ROOT / name, tmp_path / folder)
    command = [sys.executable, "-c", "from hatchling.build import *; build_wheel('.')"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        assert {"gateway/models.yaml", "gateway/catalogue.yaml"} <= {*wheel.namelist()}


def test_all_that_is_written_is_in_the_volume_or_the_temporary_folder() -> None:
    """The rest may then be read-only. Without OpenBLAS's copy a CPU is fifty times slower."""
    [volume] = said("VOLUME")
    variables = dict(each.split("=", 1) for rest in said("ENV") for each in rest.split())
    for name in ("HF_HOME", "XDG_CACHE_HOME", "GATEWAY_SELF_TEST_FOLDER"):
        assert Path(variables[name]).is_relative_to(volume), name
    made = next(run for run in said("RUN") if "install -d" in run)
    assert made.endswith(f"-o gateway -g gateway -m 700 {volume} {variables['TMPDIR']}")
    assert (
        f"--read-only --tmpfs {variables['TMPDIR']}:exec,uid={said('USER')[0]},mode=700" in JOINED
    )


def test_pins_are_installed_with_their_hashes() -> None:
    installs = [run for run in said("RUN") if "pip install" in run]
    assert "--require-hashes" in installs[0]
    assert all("--no-deps" in run for run in installs)


@pytest.mark.anyio
async def test_the_probe_tells_a_living_gateway_from_none(tmp_path: Path) -> None:
    """It asks /health with the image's only tool, Python, and past a proxy."""
    models = {"writer": {"kind": "chat", "source": "path:."}}
    async with served(catalog(tmp_path, models), ScriptedEngines()) as client:
        port = client.base_url.port
        assert await anyio.to_thread.run_sync(ended, port) == 0
    assert await anyio.to_thread.run_sync(ended, port) != 0


def ended(port: int | None) -> int:
    """Run the probe, as the image would, and give its status."""
    command = [sys.executable, *probe()[1:]]
    environment = {**os.environ, "GATEWAY_PORT": str(port), "http_proxy": "http://127.0.0.1:1"}
    return subprocess.run(
        command, env=environment, stderr=subprocess.DEVNULL, check=False
    ).returncode
