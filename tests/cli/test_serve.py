"""serve: refuses what check refuses, says where it listens, and leaves when told."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from gateway.cli.serve import listen
from tests.checkpoints import write_chat
from tests.processes import command, ran, started

pytestmark = pytest.mark.slow

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
def serving(folder: Path, **given: str) -> Iterator[tuple["subprocess.Popen[bytes]", str]]:
    """Serve a tiny model from a folder; give the process and where it listens."""
    write_chat(folder / "tiny")
    (folder / "models.yaml").write_text(MODELS)
    with started(command("serve"), folder, **given) as served:
        yield served.process, served.url


def test_a_broken_file_is_refused_in_checks_own_words(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("version: 1\nmodels:\n  a: {kind: chta, source: 'path:nowhere'}\n")
    told = [ran(tmp_path, name, "--models", str(file)) for name in ("check", "serve")]
    assert [done.returncode for done in told] == [1, 1]
    check, serve = (done.stdout + done.stderr for done in told)
    assert "models.yaml:3" in serve
    assert set(serve.splitlines()) <= set(check.splitlines())


def test_a_port_in_use_is_told_in_one_line(tmp_path: Path) -> None:
    with serving(tmp_path) as (_, url):
        port = url.rpartition(":")[2]
        done = ran(tmp_path, "serve", "--port", port)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        f"127.0.0.1:{port}: Address already in use. Is a gateway running already? If not, choose "
        "another port: GATEWAY_PORT."
    )
    assert "Traceback" not in done.stderr


def test_sigterm_finishes_the_answer_under_way_and_refuses_the_next(tmp_path: Path) -> None:
    with serving(tmp_path) as (process, url):
        with (
            httpx2.Client(base_url=url, timeout=30) as client,
            client.stream("POST", "/v1/chat/completions", json={**LONG, "max_tokens": 200}) as it,
        ):
            lines = it.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + 5
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
        assert process.wait(20) == 0


def test_a_second_signal_ends_it_now(tmp_path: Path) -> None:
    with serving(tmp_path) as (process, url):
        with (
            httpx2.Client(base_url=url, timeout=30) as client,
            client.stream("POST", "/v1/chat/completions", json={**LONG, "max_tokens": 3000}) as it,
        ):
            lines = it.iter_lines()  # held: the stream closes with its iterator
            next(lines)
            process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            process.send_signal(signal.SIGTERM)
            assert process.wait(5) == 1


async def asked(path: Path, headers: dict[str, str] | None = None) -> int:
    """Ask for the models over a unix socket."""
    transport = httpx2.AsyncHTTPTransport(uds=str(path))
    async with httpx2.AsyncClient(transport=transport, base_url="http://any.example") as client:
        async with asyncio.timeout(10):
            return (await client.get("/v1/models", headers=headers)).status_code


@pytest.mark.anyio
async def test_a_unix_socket_is_served_by_whatever_name_and_goes_at_exit(short_path: Path) -> None:
    """A browser can't be led to it, so a Host tells nothing; an Origin still does."""
    path = short_path / "gw.sock"
    with serving(short_path, GATEWAY_BIND=f"unix:{path}") as (process, bind):
        assert bind == f"unix:{path}"
        assert await asked(path) == 200
        assert await asked(path, {"host": "gateway:8000"}) == 200
        assert await asked(path, {"origin": "http://evil.example"}) == 403
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert not path.exists()


@pytest.mark.anyio
async def test_a_socket_that_a_killed_process_left_is_replaced(short_path: Path) -> None:
    path = short_path / "gw.sock"
    with serving(short_path, GATEWAY_BIND=f"unix:{path}") as (process, _):
        process.kill()
        process.wait(10)
    assert path.is_socket()
    with serving(short_path, GATEWAY_BIND=f"unix:{path}"):
        assert await asked(path) == 200


@pytest.mark.anyio
async def test_a_socket_that_is_listened_on_is_not_taken(short_path: Path) -> None:
    path, file = short_path / "gw.sock", short_path / "file"
    file.write_text("mine")
    with serving(short_path, GATEWAY_BIND=f"unix:{path}"):
        for bind in (path, file):
            done = ran(short_path, "serve", GATEWAY_BIND=f"unix:{bind}")
            assert done.returncode == 2
            assert "in use" in done.stderr
            assert "Traceback" not in done.stderr
        assert await asked(path) == 200
    assert file.read_text() == "mine"


def test_a_socket_that_is_another_s_by_now_is_left(short_path: Path) -> None:
    path = short_path / "gw.sock"
    with listen([f"unix:{path}"], scheme="http") as (bind,):
        os.close(int(bind.removeprefix("fd://")))
        path.unlink()
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(path))
    assert path.is_socket()
