"""The checks of a machine, by their numbers: ok, warn or fail, and advice."""

import errno
import os
import re
import shutil
import threading
from collections import namedtuple
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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
    assert "Set --host to" in checks.check_port("192.0.2.1:0").message
    assert checks.check_port("nobody.invalid:0").state == "fail"


@pytest.mark.parametrize(
    ("variables", "key"),
    [
        ({}, "--port"),
        ({"GATEWAY_PORT": "80"}, "--port"),  # a flag was typed over it
        ({"GATEWAY_PORT": "9"}, "GATEWAY_PORT"),
        ({"GATEWAY_BIND": "[::1]:80,127.0.0.1:9"}, "GATEWAY_BIND"),
        ({"GATEWAY_BIND": "[::1]:80,127.0.0.1:99"}, "--port"),
    ],
)
def test_a_port_in_use_names_the_key_that_it_was_set_by(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], key: str
) -> None:
    for name in ("GATEWAY_PORT", "GATEWAY_BIND"):
        monkeypatch.setenv(name, variables.get(name, ""))
    taken, closed = (OSError(number, "x") for number in (errno.EADDRINUSE, errno.EACCES))
    message = checks.bind_problem("127.0.0.1:9", taken)  # nothing answers
    assert message == f"127.0.0.1:9: x. Change {key}: 0 picks a free port."
    assert f"Set {key} to one above 1023." in checks.bind_problem("127.0.0.1:9", closed)


@pytest.mark.parametrize(
    ("body", "is_gateway"), [(b'{"name": "mlx-gateway"}', True), (b"<p>mlx-gateway", False)]
)
def test_a_gateway_that_has_the_port_is_named_with_the_command_that_asks_it(
    monkeypatch: pytest.MonkeyPatch, body: bytes, is_gateway: bool
) -> None:
    """A proxy of the environment is not asked."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        finding = checks.check_port(f"127.0.0.1:{server.server_port}")
        server.shutdown()
    assert finding.state == ("warn" if is_gateway else "fail")
    assert ("A gateway answers there: ask it by `mlx-gateway run MODEL`." in finding.message) == (
        is_gateway
    )
    assert finding.message.endswith("Change --port: 0 picks a free port.")


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
