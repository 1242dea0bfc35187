"""doctor: a line for each check: ok, warn or fail, and what to do; its status."""

import os
import re
import shutil
import socket
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from gateway.cli import doctor as checks
from gateway.doctor.report import Finding
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
    """Give what checks the machine in this process, with the state and words of each check."""
    monkeypatch.chdir(here)
    monkeypatch.setenv("GATEWAY_PORT", "0")

    def check() -> dict[str, str]:
        return {each.check: f"{each.state} {each.message}" for each in checks._check_machine(None)}

    return check


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Find a device that works and a model, without a process."""
    sizes, kept = {"mine": 1000}, {"mine": 40_000}
    probe = checks.Probe("cpu", GB, sizes, kept, kept, "openblas", None, 100.0, {})
    monkeypatch.setattr(checks, "run_probe", lambda _: probe)


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
        checks.doctor(None, engine=False, model=[], as_json=False, report=False)


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
    """The others are served: one has no weights, another's hub is not there. What a model holds
    once it is loaded is not what it has on disk.
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
    assert found["hub"].endswith("When that is mended: `mlx-gateway pull far`.")
    assert found["memory"].startswith("warn mine would hold ")
    assert found["memory"].endswith(", and models may hold 1000 B. Use a smaller one.")


def test_a_slow_cpu_is_told_what_to_install() -> None:
    slow = checks.check_blas("cpu", "reference BLAS", 2.5, "Install it.")
    assert slow == Finding("blas", "warn", "Install it.")
    assert checks.check_blas("metal", "mlx's own", 2e3, "Install it.").state == "ok"
    assert "apt-get install g++" in checks.check_compiler("cpu", None).message
    assert checks.check_compiler("cpu", "/usr/bin/g++").state == "ok"
    assert checks.check_compiler("cuda", None).state == "ok"


def test_two_builds_of_mlx_are_one_too_many() -> None:
    found = checks.check_packages(["mlx", "mlx-cpu", "mlx-cuda-12", "mlx-lm", "numpy"])
    assert found.state == "warn"
    assert found.message.startswith("mlx-cpu and mlx-cuda-12 are both installed.")
    found = checks.check_packages(["mlx", "mlx-cuda-12", "mlx-cuda-13"])
    assert found.state == "warn"
    assert "`pip uninstall mlx-cuda-12 mlx-cuda-13`" in found.message
    assert checks.check_packages(["mlx", "mlx-cuda-13", "mlx-lm"]).state == "ok"
    assert checks.check_packages(["mlx", "mlx-cuda-12", "mlx-lm"]).state == "ok"
    assert checks.check_packages(["mlx", "mlx-metal"]).state == "ok"


@pytest.mark.parametrize(
    ("file", "build"), [("cuda.txt", "mlx-cuda-12"), ("cuda13.txt", "mlx-cuda-13")]
)
def test_pins_for_cuda_hold_one_build_of_the_version_of_mlx_itself(file: str, build: str) -> None:
    text = (ROOT / "requirements" / file).read_text(encoding="utf-8")
    pins = dict(re.findall(r"^(mlx[a-z0-9-]*)==(\S+)", text, re.MULTILINE))
    assert [name for name in pins if name.startswith(("mlx-cpu", "mlx-cuda"))] == [build]
    assert pins[build] == pins["mlx"]
    assert "://" not in text


def test_binds_of_every_kind_are_tried(tmp_path: Path) -> None:
    assert checks.check_port(f"unix:{tmp_path}/gw.sock").state == "ok"
    assert checks.check_port(f"unix:{tmp_path}/none/gw.sock").state == "fail"
    assert checks.check_port("fd://3").state == "ok"
    assert "GATEWAY_HOST" in checks.check_port("192.0.2.1:0").message
    assert checks.check_port("nobody.invalid:0").state == "fail"


def test_a_folder_without_room_fails_and_says_how_much_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may still have to be made. What is read-only may be so on purpose."""
    folder = tmp_path / "a" / "b"
    Usage = namedtuple("Usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(GB, 0, checks.LEAST_FREE_BYTES - 1))
    said = f"16 MiB free for models in {folder}. Make room there."
    assert checks.check_folder("models", folder) == Finding("disk", "fail", said)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(GB, 0, 5 << 30))
    said = f"5.0 GiB free for models in {folder}."
    assert checks.check_folder("models", folder) == Finding("disk", "ok", said)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert checks.check_folder("models", folder).state == "warn"


def test_a_shared_folder_for_compiled_code_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies there is run."""
    tmp_path.chmod(0o1777)
    found = checks.check_folder(checks.COMPILED, tmp_path)
    assert (found.state, "Others may write" in found.message) == ("warn", True)
    assert checks.check_folder("temporary files", tmp_path).state == "ok"
    tmp_path.chmod(0o700)
    assert checks.check_folder(checks.COMPILED, tmp_path).state == "ok"
    monkeypatch.setattr(os, "ST_NOEXEC", 8, raising=False)
    found_by_os = SimpleNamespace(f_flag=8, f_bavail=GB, f_blocks=GB, f_bfree=GB, f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda _: found_by_os)
    found = checks.check_folder(checks.COMPILED, tmp_path)
    assert (found.state, "Nothing may run" in found.message) == ("warn", True)


def test_few_open_files_are_few_clients() -> None:
    assert checks.check_files(256).state == "warn"
    assert checks.check_files(65_536).state == "ok"


def test_models_that_are_not_here_are_told_how_to_come() -> None:
    assert checks.check_hub([], may_download=False, refusal=None).state == "ok"
    found = checks.check_hub(["a", "b"], may_download=True, refusal=None)
    said = "a and 1 more: fetched at the first request, or by `mlx-gateway pull a`."
    assert found == Finding("hub", "ok", said)
    found = checks.check_hub(["a"], may_download=False, refusal=None)
    assert found.state == "warn"
    assert "GATEWAY_AUTO_PULL is off" in found.message


def test_the_context_of_each_model_is_listed_or_said_to_be_unknown() -> None:
    found = checks.check_contexts({"large": 40_960, "small": 256})
    assert found == Finding("contexts", "ok", "in tokens: large 40,960, small 256.")
    found = checks.check_contexts({"large": 40_960, "mute": None})
    assert (found.state, found.message.partition(":")[0]) == ("warn", "mute")
    assert "max_context:" in found.message
    assert checks.check_contexts({}).state == "ok"


def test_a_model_that_keeps_less_than_an_agents_prompt_is_named() -> None:
    """With how much it keeps: the rest is read again in each turn."""
    found = checks.check_kept({"large": 6848, "small": 100_000})
    assert (found.state, "large 6,848" in found.message) == ("warn", True)
    assert "small" not in found.message.partition(".")[0]
    assert checks.check_kept({"small": 100_000}).state == "ok"
