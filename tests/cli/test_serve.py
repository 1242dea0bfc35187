"""serve: refuses what check refuses, says where it listens, and leaves when told."""

import asyncio
import json
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from tests.checkpoints import write_chat
from tests.processes import command, environment, started

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
    """And with its status, before anything is loaded."""
    file = tmp_path / "models.yaml"
    file.write_text("version: 1\nmodels:\n  a: {kind: chta, source: 'path:nowhere'}\n")
    told = [
        subprocess.run(
            command(name, "--models", str(file)),
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            timeout=60,
            check=False,
        )
        for name in ("check", "serve")
    ]
    assert [done.returncode for done in told] == [1, 1]
    check, serve = (done.stdout + done.stderr for done in told)
    assert b"models.yaml:3" in serve
    assert set(serve.splitlines()) <= set(check.splitlines())


def test_a_port_in_use_is_told_in_one_line(tmp_path: Path) -> None:
    """No traceback."""
    with serving(tmp_path) as (_, url):
        port = url.rpartition(":")[2]
        done = subprocess.run(
            command("serve", "--port", port),
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 2
    assert b"in use" in done.stderr
    assert b"Traceback" not in done.stderr


def test_sigterm_finishes_the_answer_under_way_and_refuses_the_next(tmp_path: Path) -> None:
    """Then the process ends with status 0."""
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


def test_what_the_drain_does_not_finish_is_told_so(tmp_path: Path) -> None:
    """An error event, and then the end; the process still ends with status 0."""
    with serving(tmp_path, GATEWAY_DRAIN_S="0.5") as (process, url):
        with (
            httpx2.Client(base_url=url, timeout=30) as client,
            client.stream("POST", "/v1/chat/completions", json={**LONG, "max_tokens": 3000}) as it,
        ):
            lines = it.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            told = [line for line in lines if line.startswith("data: ")]
        assert json.loads(told[-1].removeprefix("data: "))["error"]["code"] == "service_unavailable"
        assert process.wait(20) == 0


def test_a_second_signal_ends_it_now(tmp_path: Path) -> None:
    """However much is under way."""
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


@pytest.mark.anyio
async def test_a_unix_socket_is_served(tmp_path: Path) -> None:
    """GATEWAY_BIND hands Hypercorn's own binds through."""
    path = tmp_path / "gw.sock"
    with serving(tmp_path, GATEWAY_BIND=f"unix:{path}") as (_, bind):
        assert bind == f"unix:{path}"
        transport = httpx2.AsyncHTTPTransport(uds=str(path))
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            async with asyncio.timeout(10):
                assert (await client.get("/ready")).status_code == 200
