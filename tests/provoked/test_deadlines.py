"""A deadline holds wherever a request stands: the caller is told, and its memory is free again."""

import asyncio
import json
from typing import Any

import httpx2
import pytest

from gateway.clock import Stage
from tests.fakes import Gate
from tests.provoked.engines import HeldEngines
from tests.provoked.harness import SCHEMA, ask, chat, embed, reached, said
from tests.waiting import until

pytestmark = pytest.mark.anyio

SOON = {"x-gateway-timeout-s": "0.3"}


def is_told(answer: httpx2.Response) -> None:
    assert answer.status_code == 504, answer.text
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "stage", [Stage.LOAD, Stage.TOKENIZE, Stage.COMPILE, Stage.QUEUE, Stage.PREFILL, Stage.DECODE]
)
async def test_a_chat_that_takes_too_long(
    client: httpx2.AsyncClient, engines: HeldEngines, stage: Stage, stream: bool
) -> None:
    writer = engines.chat
    if stage is not Stage.LOAD:
        await ask(client, chat("loads it"))
    gate = engines.load_gate if stage is Stage.LOAD else writer.gates[stage]
    ahead: asyncio.Task[Any] | None = None
    if stage is Stage.QUEUE:
        gate = writer.gates[Stage.DECODE]
        gate.close()
        ahead = asyncio.create_task(ask(client, chat("ahead")))
        await reached(gate)
    gate.close()
    more = {"response_format": SCHEMA} if stage is Stage.COMPILE else {}
    is_told(await ask(client, chat("a" * 90, stream=stream, **more), SOON))
    gate.open()
    await until(lambda: writer.rows == 0)
    if ahead is not None:
        assert (await ahead).status_code == 200
    assert said(await ask(client, chat("next"))) == "next"


@pytest.mark.parametrize("stage", [Stage.LOAD, Stage.TOKENIZE, Stage.INFERENCE])
async def test_an_embedding_that_takes_too_long(
    client: httpx2.AsyncClient, engines: HeldEngines, stage: Stage
) -> None:
    if stage is not Stage.LOAD:
        await ask(client, embed("loads it"))
    gate: Gate = engines.load_gate if stage is Stage.LOAD else engines.embedder.gates[stage]
    gate.close()
    is_told(await ask(client, embed("a", "b"), SOON))
    gate.open()
    assert (await ask(client, embed("next"))).status_code == 200


async def test_a_stream_that_takes_too_long_after_its_first_token(
    client: httpx2.AsyncClient, engines: HeldEngines
) -> None:
    engines.chat.hold_at_step = 5
    body, later = chat("a" * 90, stream=True), {"x-gateway-timeout-s": "1"}
    async with client.stream("POST", "/v1/chat/completions", json=body, headers=later) as answer:
        assert answer.status_code == 200
        told = [line async for line in answer.aiter_lines() if line]
    engines.open()
    assert "data: [DONE]" not in told
    assert json.loads(told[-1].removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    await until(lambda: engines.chat.rows == 0)
