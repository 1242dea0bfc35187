"""Told to end, killed, or stuck: the process as clients and supervisors see it."""

import asyncio
import contextlib
import json
import signal
import socket
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.processes import Served, free_port, needs_openssl, started, write_certificate
from tests.provoked.engines import FAR_AWAY, HANG, HANGS
from tests.provoked.harness import chat, embed, inside, not_well, path_of
from tests.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

MODELS = """
version: 1
models:
  writer: {kind: chat, source: "path:.", preload: true}
  embedder: {kind: embedding, source: "path:.", preload: true}
  far-away: {kind: embedding, source: "path:."}
"""


def serving(
    folder: Path, open_files: int = 1024, /, **given: str
) -> AbstractContextManager[Served]:
    """Serve scripted engines, five milliseconds a step, with a limit of open files."""
    (folder / "models.yaml").write_text(MODELS)
    limited = ["sh", "-c", f'ulimit -n {open_files} && exec "$@"', "sh"]
    return started([*limited, sys.executable, "-m", "tests.provoked.process"], folder, **given)


async def outcome(client: httpx2.AsyncClient, body: dict[str, Any]) -> str:
    """Ask, and say how it ended: `done`, `told`, or the faulty text."""
    async with client.stream("POST", path_of(body), json=body) as answer:
        text = (await answer.aread()).decode()
    if answer.status_code == 503:
        return "told" if "service_unavailable" in text else text
    if answer.status_code != 200:
        return f"{answer.status_code} {text}"
    if "input" in body:
        return "done" if len(json.loads(text)["data"]) == len(body["input"]) else text
    asked = body["messages"][0]["content"]
    if not body.get("stream"):
        return "done" if json.loads(text)["choices"][0]["message"]["content"] == asked else text
    *events, last = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    if last == "[DONE]":
        deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
        said = "".join(delta.get("content") or "" for delta in deltas)
        return "done" if said == asked else text
    return "told" if json.loads(last)["error"]["code"] == "service_unavailable" else text


async def test_sigterm_under_load_ends_every_request_one_way_or_the_other(tmp_path: Path) -> None:
    short, long = "s" * 40, "l" * 900
    bodies = [
        *(chat(text, stream=stream) for text in (short, long) for stream in (False, True)),
        embed(*(["text"] * 100)),
    ] * 8
    with serving(tmp_path, GATEWAY_DRAIN_S="2.5") as served:
        limits = httpx2.Limits(max_connections=100)
        async with httpx2.AsyncClient(base_url=served.url, timeout=30, limits=limits) as client:
            asked = [asyncio.create_task(outcome(client, body)) for body in bodies]
            await inside(client, 16)  # the long ones
            served.process.send_signal(signal.SIGTERM)
            while (late := await client.get("/v1/models")).status_code == 200:
                await asyncio.sleep(0.02)
            ends = await asyncio.gather(*asked)
        assert late.status_code == 503
        assert late.headers["connection"] == "close"
        assert set(ends) == {"done", "told"}
        assert served.process.wait(60) == 0


async def test_a_drain_cut_short_tells_those_who_are_in_no_queue_too(tmp_path: Path) -> None:
    with serving(tmp_path, GATEWAY_DRAIN_S="0.3") as served:
        host, _, port = served.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nno end"
        )
        async with httpx2.AsyncClient(base_url=served.url, timeout=30) as client:
            body = {"model": FAR_AWAY, "input": "a"}
            asking = asyncio.create_task(client.post("/v1/embeddings", json=body))
            await inside(client, 1)
            served.process.send_signal(signal.SIGTERM)
            answer = await asking
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "service_unavailable"
        assert b" 503 " in await reader.readline()
        writer.close()
        assert served.process.wait(60) == 0


async def test_killed_in_mid_stream_is_a_broken_stream_and_a_clean_start(tmp_path: Path) -> None:
    port = str(free_port())
    with serving(tmp_path, GATEWAY_PORT=port) as served:
        lines: list[str] = []

        async def read() -> None:
            body = chat("l" * 900, stream=True)
            async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    lines.append(line)
                    if len(lines) == 20:
                        served.process.kill()

        async with httpx2.AsyncClient(base_url=served.url, timeout=30) as client:
            with pytest.raises(httpx2.RemoteProtocolError):
                await read()
        assert len(lines) >= 20
        assert not any("[DONE]" in line for line in lines)
        assert served.process.wait(60) == -signal.SIGKILL
    with serving(tmp_path, GATEWAY_PORT=port) as served:
        async with httpx2.AsyncClient(base_url=served.url, timeout=30) as client:
            assert await outcome(client, chat("again")) == "done"


@needs_openssl
async def test_clients_that_begin_no_tls_keep_nobody_out_and_no_shutdown_waiting(
    tmp_path: Path,
) -> None:
    """They are counted before the handshake, and closed for a client that comes later."""
    certificate = write_certificate(tmp_path)
    with serving(tmp_path, 512, **certificate) as served:
        host, _, port = served.url.removeprefix("https://").partition(":")
        with contextlib.ExitStack() as stack:
            for _ in range(400):
                stack.enter_context(socket.create_connection((host, int(port))))
            async with httpx2.AsyncClient(base_url=served.url, timeout=30, verify=False) as client:
                assert (await client.get("/health")).status_code == 200
            served.process.send_signal(signal.SIGTERM)
            assert served.process.wait(60) == 0
        assert "idle_connections_closed" in served.log.read_text()


async def test_a_stuck_lane_turns_health_to_503(tmp_path: Path) -> None:
    given = {"GATEWAY_STALL_LIMIT_S": "0.5", "GATEWAY_LOAD_STALL_LIMIT_S": "0.5"}
    given |= {"GATEWAY_EXIT_ON_STALL": "false", "GATEWAY_DRAIN_S": "0.2", "SHUTDOWN_S": "1"}
    with serving(tmp_path, **given) as served:
        async with httpx2.AsyncClient(base_url=served.url, timeout=30) as client:
            assert (await client.get("/health")).json() == {"status": "ok"}
            stuck = asyncio.create_task(outcome(client, embed(HANG)))
            assert await not_well(client) == {"status": "stalled"}
            ready = await client.get("/ready")
            assert (ready.status_code, ready.json()["status"]) == (503, "stalled")
            assert served.process.poll() is None
            served.process.send_signal(signal.SIGTERM)
            assert await stuck == "told"
        assert served.process.wait(30) == 70
        log = served.log.read_text()
        assert '"event":"lane_stalled"' in log
        assert "engines.py" in log  # the file where it hangs


async def test_a_stuck_lane_ends_the_process_with_status_70(tmp_path: Path) -> None:
    given = {"GATEWAY_STALL_LIMIT_S": "0.5", "GATEWAY_LOAD_STALL_LIMIT_S": "0.5"}
    with serving(tmp_path, **given) as served:
        async with httpx2.AsyncClient(base_url=served.url, timeout=30) as client:
            bodies = [embed(HANG), embed("a", "b"), chat("one"), chat("two", stream=True)]
            ends = await asyncio.gather(*(outcome(client, body) for body in bodies))
        assert ends[0] == "told"
        assert set(ends[1:]) <= {"told", "done"}
        assert served.process.wait(60) == 70
        assert '"event":"lane_stalled"' in served.log.read_text()


async def test_a_stuck_lane_does_not_keep_the_process_from_ending(tmp_path: Path) -> None:
    """The process tells clients inside that it stops, and leaves without the stuck call."""
    with serving(tmp_path, GATEWAY_STALL_LIMIT_S="2", GATEWAY_DRAIN_S="0.2") as served:
        async with httpx2.AsyncClient(base_url=served.url, timeout=30) as client:
            await outcome(client, embed("the first of its shape"))
            stuck = asyncio.create_task(outcome(client, embed(HANG + "e first of its shape ")))
            await until(lambda: HANGS in served.log.read_text())
            served.process.send_signal(signal.SIGTERM)
            assert await stuck == "told"
        assert served.process.wait(60) == 70
