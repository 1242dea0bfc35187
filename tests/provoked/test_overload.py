"""More clients than the queue holds: each is answered or told to come back; then all is well."""

import asyncio
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.clock import Stage
from gateway.registry import Catalog
from tests.processes import Served, started
from tests.provoked.engines import HeldEngines
from tests.provoked.harness import ask, chat, inside, reached
from tests.serving_app import served

pytestmark = pytest.mark.anyio

MODELS = """
version: 1
models:
  writer: {kind: chat, source: "path:.", preload: true}
  embedder: {kind: embedding, source: "path:.", preload: true}
"""
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MOST_GROWTH_BYTES = 200_000_000


def body(number: int) -> dict[str, Any]:
    """Ask for something that only this client asked for."""
    if number % 2:
        return chat(f"client {number} " + "x" * 30, stream=number % 4 == 1)
    return {"model": "embedder", "input": ["y" * (number % 90 + 1)]}


def is_right(number: int, text: str) -> bool:
    """Tell whether it is that client's answer."""
    if number % 4 == 1:
        return text.endswith("data: [DONE]\n\n")
    return f"client {number} " in text if number % 2 else f"[{number % 90 + 1}.0," in text


async def test_who_waits_for_a_model_to_load_waits_in_its_queue(
    models: Catalog, engines: HeldEngines
) -> None:
    """A stream, too, is refused with a status: long before its 200 would have to be sent."""
    engines.load_gate.close()
    async with served(models, engines, queue_limit=2, stream_open_after_s=0.2) as client:
        waiting = [
            asyncio.create_task(client.post(CHAT, json=chat(text, stream=True))) for text in "ab"
        ]
        await reached(engines.load_gate)
        refused = await client.post(CHAT, json=chat("c", stream=True))
        assert (refused.status_code, int(refused.headers["retry-after"]) > 0) == (429, True)
        engines.load_gate.open()
        for answer in await asyncio.gather(*waiting):
            assert answer.status_code == 200
            assert answer.text.endswith("data: [DONE]\n\n")
        assert (await client.post(CHAT, json=chat("d"))).status_code == 200


async def test_who_waited_for_a_load_keeps_its_place(models: Catalog, engines: HeldEngines) -> None:
    """Clients who come as the load ends are behind; a list of prompts has one place."""
    engines.load_gate.close()
    body = {"model": "writer", "prompt": ["abc", "def", "ghi"], "stream": True}
    async with served(models, engines, queue_limit=3, stream_open_after_s=0.05) as client:
        waiting = [asyncio.create_task(client.post(COMPLETIONS, json=body)) for _ in range(3)]
        await reached(engines.load_gate)
        refused = await client.post(COMPLETIONS, json=body)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
        engines.load_gate.open()
        late = await asyncio.gather(*(client.post(COMPLETIONS, json=body) for _ in range(20)))
        assert {answer.status_code for answer in late} <= {200, 429}
        for answer in await asyncio.gather(*waiting):
            assert answer.text.endswith("data: [DONE]\n\n")


async def test_a_stream_that_finds_no_room_for_its_tokens_after_a_load_is_refused_with_a_status(
    models: Catalog, engines: HeldEngines
) -> None:
    """Its 200 waits until it is accepted, however long that takes."""
    engines.load_gate.close()
    given: dict[str, Any] = {"queue_max_tokens": 50, "stream_open_after_s": 0.05}
    async with served(models, engines, **given) as client:
        bodies = [chat(letter * 40, stream=True) for letter in "ab"]
        asking = [asyncio.create_task(client.post(CHAT, json=body)) for body in bodies]
        await reached(engines.load_gate)
        await inside(client, 2)
        early, _ = await asyncio.wait(asking, timeout=0.2)
        assert not early
        gate = engines.chat.gates[Stage.PREFILL]
        gate.close()
        engines.load_gate.open()
        done, _ = await asyncio.wait(asking, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        assert [each.result().status_code for each in done] == [429]
        gate.open()
        assert sorted([(await each).status_code for each in asking]) == [200, 429]


async def storm(process: Served, clients: int) -> None:
    """Let all come at once; see that every answer is one of two, and that it leaves no trace."""
    limits = httpx2.Limits(max_connections=clients)
    async with httpx2.AsyncClient(base_url=process.url, timeout=60, limits=limits) as client:
        await asyncio.gather(*(ask(client, body(number)) for number in range(20)))
        before = process.rss_bytes()
        answers = await asyncio.gather(*(ask(client, body(number)) for number in range(clients)))
        statuses = Counter(answer.status_code for answer in answers)
        assert statuses.keys() == {200, 429}, statuses
        for number, answer in enumerate(answers):
            if answer.status_code == 200:
                assert is_right(number, answer.text), answer.text
            else:
                assert answer.json()["error"]["code"] == "rate_limit_exceeded"
                assert 1 <= int(answer.headers["retry-after"]) <= 60
        after = [await ask(client, body(number)) for number in range(4)]  # now, one by one
        assert [answer.status_code for answer in after] == [200] * 4
        assert process.rss_bytes() - before < MOST_GROWTH_BYTES
        metrics = (await client.get("/metrics")).text
        for line in ("gateway_queue_depth", "gateway_queue_tokens"):
            assert f'{line}{{model="writer"}} 0.0' in metrics
            assert f'{line}{{model="embedder"}} 0.0' in metrics


async def stormed(folder: Path, *, clients: int, queue: int) -> None:
    (folder / "models.yaml").write_text(MODELS)
    command = [sys.executable, "-m", "tests.provoked.process"]
    with started(command, folder, GATEWAY_QUEUE_LIMIT=str(queue)) as process:
        await storm(process, clients)


@pytest.mark.slow
async def test_two_hundred_clients_on_a_queue_of_twenty(tmp_path: Path) -> None:
    await stormed(tmp_path, clients=200, queue=20)


@pytest.mark.soak
async def test_a_thousand_clients_on_a_queue_of_a_hundred(tmp_path: Path) -> None:
    await stormed(tmp_path, clients=1000, queue=100)
