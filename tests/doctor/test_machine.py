"""The checks of a machine, by their numbers: ok, warn or fail, and advice."""

import os
import re
import shutil
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest

from gateway.doctor import machine as checks
from gateway.doctor.report import Finding
from tests.processes import ROOT

GB = 10**9


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
    """It may still have to be made. A read-only folder may be so on purpose."""
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
    """Code that lies there is run."""
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
    """The line gives the number of kept tokens: the rest is read again in each turn."""
    found = checks.check_kept({"large": 6848, "small": 100_000}, 32_000)
    assert (found.state, "large 6,848" in found.message) == ("warn", True)
    assert "small" not in found.message.partition(".")[0]
    assert checks.check_kept({"small": 100_000}, 32_000).state == "ok"
