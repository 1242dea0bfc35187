"""doctor: a line for each check, with ok, warn or fail and advice; its status."""

import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.cli import doctor as command
from tests.checkpoints import write_chat
from tests.cli.conftest import Inside
from tests.processes import ROOT

GOOD = "version: 1\nmodels:\n  mine: {kind: chat, source: 'path:tiny'}\n"
GB = 10**9


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """Give a folder with one model and a place for temporary files that is ours alone."""
    write_chat(tmp_path / "tiny")
    (tmp_path / "models.yaml").write_text(GOOD)
    (tmp_path / "tmp").mkdir(mode=0o700)
    return tmp_path


def doctor(inside: Inside, here: Path, **given: str) -> tuple[int, dict[str, str]]:
    """Run it; give its status, and the state and words of each check."""
    own = {"TMPDIR": str(here / "tmp"), "GATEWAY_PORT": "0"}
    done = inside(here, "doctor", **own, **given)
    assert done.stderr == ""
    found: dict[str, str] = {}
    for check, state, said in (line.split("\t") for line in done.stdout.splitlines()):
        found[check] = "\n".join([*filter(None, [found.get(check)]), f"{state} {said}"])
    return done.returncode, found


@pytest.fixture
def checked(here: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[str, str]]:
    """Give a function that checks this machine in-process, with each check's state and words."""
    monkeypatch.chdir(here)
    monkeypatch.setenv("GATEWAY_PORT", "0")

    def check() -> dict[str, str]:
        return {each.check: f"{each.state} {each.message}" for each in command._check_machine(None)}

    return check


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Find a device that works and a model, without a process."""
    sizes, kept = {"mine": 1000}, {"mine": 40_000}
    probe = command.Probe("cpu", GB, sizes, kept, kept, "openblas", None, 100.0, {})
    monkeypatch.setattr(command, "run_probe", lambda _: probe)


def test_a_machine_that_can_serve_ends_with_0(here: Path, inside: Inside) -> None:
    status, found = doctor(inside, here)
    assert status == 0
    first = ["packages", "files", "settings", "port", "device", "blas", "compiler", "disk"]
    assert list(found) == [*first, "memory", "contexts", "prefixes", "models", "hub"]
    assert not [said for said in found.values() if said.startswith("fail")]
    assert found["device"].startswith("ok mlx computes on ")
    assert found["models"] == "ok 1 of 1 are on disk."
    contents = ["models", "self-tests", "OpenBLAS's copy", "compiled code", "temporary files"]
    said = re.findall(r"^ok .* free for (.*) in (/.*)\.$", found["disk"], re.MULTILINE)
    assert [content for content, _ in said if content != "OpenBLAS's copy"] == [
        each for each in contents if each != "OpenBLAS's copy"
    ]
    assert dict(said)["temporary files"] == str(here / "tmp")


@pytest.mark.usefixtures("probed")
def test_a_port_in_use_fails(
    checked: Callable[[], dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        monkeypatch.setenv("GATEWAY_PORT", str(number))
        found = checked()
    assert found["port"].startswith(f"fail 127.0.0.1:{number}: Address already in use.")
    assert "GATEWAY_PORT" in found["port"]


@pytest.mark.usefixtures("probed")
def test_a_broken_models_file_fails_in_checks_own_words(
    here: Path, checked: Callable[[], dict[str, str]]
) -> None:
    (here / "models.yaml").write_text(GOOD.replace("chat", "chta"))
    found = checked()
    assert found["models"].startswith("fail models.yaml:3: mine: `kind` should be")
    assert found["device"].startswith("ok")


def test_wrong_settings_fail_each(
    checked: Callable[[], dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GATEWAY_PORT", "99999")
    found = checked()
    assert found["settings"].startswith("fail GATEWAY_PORT=99999: should be less than")
    assert "device" not in found
    with pytest.raises(SystemExit, match="1"):
        command.doctor(None, engine=False, model=[], as_json=False, report=False)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise ImportError('libmlx.so: not for this machine')", "ImportError: libmlx.so"),
        ("import os; os.kill(os.getpid(), 4)", "it was ended by SIGILL"),
    ],
)
def test_an_mlx_that_does_not_work_fails(
    here: Path,
    checked: Callable[[], dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    said: str,
) -> None:
    (here / "other" / "mlx").mkdir(parents=True)
    (here / "other" / "mlx" / "__init__.py").touch()
    (here / "other" / "mlx" / "core.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", f"{here / 'other'}:{ROOT}")
    found = checked()
    assert found["device"].startswith(f"fail mlx does not work: {said}")
    assert "blas" not in found


@pytest.mark.slow
def test_a_model_that_cannot_be_had_or_is_too_large_is_a_warning(
    here: Path, inside: Inside
) -> None:
    """The others are served: one has no weights, another's hub is not there.

    A loaded model's bytes are not its bytes on disk.
    """
    entries = (
        "  half: {kind: chat, source: 'path:tmp'}\n  far: {kind: chat, source: 'hub:org/far'}\n"
    )
    (here / "models.yaml").write_text(GOOD + entries)
    given = {"GATEWAY_HUB_ENDPOINT": "http://127.0.0.1:9", "GATEWAY_HUB_CACHE": str(here / "c")}
    status, found = doctor(inside, here, **given, GATEWAY_PROT="1", GATEWAY_CACHE_MAX_BYTES="1000")
    assert status == 0
    assert found["settings"].startswith("warn GATEWAY_PROT is set, and nothing reads it; did you")
    half, whole = found["models"].splitlines()
    assert half.startswith("warn The model `half` failed to load: ")
    assert whole == "ok 1 of 3 are on disk."
    assert found["hub"].startswith("warn The model `far` cannot be loaded: org/far could not be")
    assert found["hub"].endswith("Once that is fixed, run `mlx-gateway pull far`.")
    assert found["memory"].startswith("warn mine would hold ")
    assert found["memory"].endswith(", and models may hold 1000 B. Use a smaller one.")
