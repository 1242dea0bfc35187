"""serve: refuses what check refuses, says where it listens, and leaves when told."""

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from gateway.cli.serve import listen
from gateway.settings import SettingsInvalid
from tests.checkpoints import write_chat
from tests.cli.conftest import Inside
from tests.processes import Served, command, ran, started

MODELS = """
version: 1
models:
  tiny: {kind: chat, source: "path:tiny", preload: true}
"""
LONG = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hi"}],
    "stream": True,
    "n": 16,
    "logit_bias": {"2": -100},  # the end of the turn
}


@contextmanager
def serving(folder: Path, **given: str) -> Iterator[Served]:
    """Serve a tiny model from a folder."""
    write_chat(folder / "tiny")
    (folder / "models.yaml").write_text(MODELS)
    with started(command("serve"), folder, **given) as served:
        yield served


def test_a_broken_file_is_refused_in_checks_own_words(tmp_path: Path, inside: Inside) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("version: 1\nmodels:\n  a: {kind: chta, source: 'path:nowhere'}\n")
    told = [
        run(tmp_path, name, "--models", str(file))
        for run, name in ((inside, "check"), (ran, "serve"))
    ]
    assert [done.returncode for done in told] == [1, 1]
    check, serve = (done.stdout + done.stderr for done in told)
    assert "models.yaml:3" in serve
    assert set(serve.splitlines()) <= set(check.splitlines())


@pytest.mark.slow
def test_a_port_in_use_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "models.yaml").write_text(MODELS)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = ran(tmp_path, "serve", "--port", str(port))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        f"127.0.0.1:{port}: Address already in use. Change --port: 0 picks a free port."
    )
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_sigterm_finishes_the_answer_under_way_and_refuses_the_next(tmp_path: Path) -> None:
    with serving(tmp_path) as gateway:
        process, url = gateway.process, gateway.url
        with (
            httpx2.Client(base_url=url, timeout=30) as client,
            client.stream("POST", "/v1/chat/completions", json={**LONG, "max_tokens": 200}) as it,
        ):
            lines = it.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                answer = httpx2.get(f"{url}/ready")
                if answer.status_code == 503:
                    break
            assert answer.json()["status"] == "draining"
            refused = httpx2.get(f"{url}/v1/models")
            assert refused.status_code == 503
            rest = [line for line in lines if line.startswith("data: ")]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"]
        assert process.wait(60) == 0


@pytest.mark.slow
def test_a_second_signal_ends_it_now(tmp_path: Path) -> None:
    with serving(tmp_path) as gateway:
        with (
            httpx2.Client(base_url=gateway.url, timeout=30) as client,
            client.stream("POST", "/v1/chat/completions", json={**LONG, "max_tokens": 3000}) as it,
        ):
            lines = it.iter_lines()  # held: the stream closes with its iterator
            next(lines)
            gateway.process.send_signal(signal.SIGTERM)
            ends = time.monotonic() + 60
            while '"event":"draining"' not in gateway.log.read_text():
                assert gateway.process.poll() is None
                assert time.monotonic() < ends
                time.sleep(0.01)
            gateway.process.send_signal(signal.SIGTERM)
            assert gateway.process.wait(60) == 1


def asked(path: Path, headers: dict[str, str] | None = None) -> int:
    """Ask for the models over a unix socket."""
    with httpx2.Client(
        transport=httpx2.HTTPTransport(uds=str(path)), base_url="http://any.example", timeout=60
    ) as client:
        return client.get("/v1/models", headers=headers).status_code


def leave_socket(path: Path) -> None:
    """Leave a socket on which nobody listens, as a killed process does."""
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
        left.listen()


@pytest.mark.slow
def test_a_unix_socket_is_served_by_whatever_name_and_goes_at_exit(short_path: Path) -> None:
    """A browser can't be led to it, so a Host tells nothing; an Origin still does. One that a
    killed process left is replaced.
    """
    path = short_path / "gw.sock"
    leave_socket(path)
    with serving(short_path, GATEWAY_BIND=f"unix:{path}") as gateway:
        assert gateway.url == f"unix:{path}"
        assert asked(path) == 200
        assert asked(path, {"host": "gateway:8000"}) == 200
        assert asked(path, {"origin": "http://evil.example"}) == 403
        gateway.process.send_signal(signal.SIGTERM)
        assert gateway.process.wait(60) == 0
        assert not path.exists()


def is_answered(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


def test_a_socket_that_a_killed_process_left_is_replaced(short_path: Path) -> None:
    path = short_path / "gw.sock"
    leave_socket(path)
    assert not is_answered(path)
    with listen([f"unix:{path}"], scheme="http") as (bind,):
        assert is_answered(path)
        os.close(int(bind.removeprefix("fd://")))
    assert not path.exists()


def test_a_socket_that_is_listened_on_is_not_taken(short_path: Path) -> None:
    path, file = short_path / "gw.sock", short_path / "file"
    file.write_text("mine")
    with listen([f"unix:{path}"], scheme="http") as (bind,):
        for taken in (path, file):
            with (
                pytest.raises(SettingsInvalid, match=f"unix:{taken}: .* in use"),
                listen([f"unix:{taken}"], scheme="http"),
            ):
                pytest.fail("it is taken")
        assert is_answered(path)
        os.close(int(bind.removeprefix("fd://")))
    assert file.read_text() == "mine"


def test_a_socket_that_is_another_s_by_now_is_left(short_path: Path) -> None:
    path = short_path / "gw.sock"
    with listen([f"unix:{path}"], scheme="http") as (bind,):
        os.close(int(bind.removeprefix("fd://")))
        path.unlink()
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(path))
    assert path.is_socket()
