"""A client that leaves frees its resources within a step, wherever it stood, and is counted."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from gateway import metrics
from gateway.clock import Stage
from gateway.jobs import TokenIds, Vectors
from gateway.registry import Catalog
from tests.provoked.engines import HeldEmbedder, HeldEngines
from tests.provoked.harness import (
    SCHEMA,
    ask,
    chat,
    counted,
    embed,
    inside,
    leave,
    path_of,
    reached,
    said,
    unread,
)
from tests.serving_app import catalog, level, served
from tests.waiting import until

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "stage", [Stage.TOKENIZE, Stage.COMPILE, Stage.QUEUE, Stage.PREFILL, Stage.DECODE]
)
async def test_a_chat_whose_client_leaves(
    client: httpx2.AsyncClient, engines: HeldEngines, stage: Stage, stream: bool
) -> None:
    writer, before = engines.chat, counted("writer", stage)
    assert (await ask(client, chat("loads it"))).status_code == 200
    ahead: asyncio.Task[Any] | None = None
    if stage is Stage.QUEUE:
        writer.gates[Stage.DECODE].close()
        ahead = asyncio.create_task(ask(client, chat("ahead")))
        await reached(writer.gates[Stage.DECODE])
    elif stage is Stage.DECODE:  # a few tokens are out, and the next is being made
        writer.hold_at_step = len(writer.steps) + 5
        writer.gates[stage].reached.clear()
    else:
        writer.gates[stage].close()
    more = {"response_format": SCHEMA} if stage is Stage.COMPILE else {}
    leaving = asyncio.create_task(ask(client, chat("a" * 90, stream=stream, **more)))
    if stage is Stage.QUEUE:
        await inside(client, 2)
    else:
        await until(lambda: stage is not Stage.DECODE or len(writer.steps) == writer.hold_at_step)
        await reached(writer.gates[stage])
    joined, steps = len(writer.joined), len(writer.steps)
    await leave(leaving)
    await until(lambda: counted("writer", stage) == before + 1)
    engines.open()
    await until(lambda: writer.rows == 0)
    if ahead is not None:
        assert said(await ahead) == "ahead"
    else:
        assert len(writer.steps) <= steps + 1
    assert len(writer.joined) == joined
    assert said(await ask(client, chat("next"))) == "next"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_one_who_leaves_many_prompts_is_counted_once(
    client: httpx2.AsyncClient, engines: HeldEngines, stream: bool
) -> None:
    writer = engines.chat
    before = {stage: counted("writer", stage) for stage in Stage}
    writer.gates[Stage.DECODE].close()
    body = {"model": "writer", "prompt": ["a" * 9, "b" * 9, "c" * 9], "stream": stream}
    leaving = asyncio.create_task(client.post("/v1/completions", json=body))
    await reached(writer.gates[Stage.DECODE])
    await until(lambda: len(writer.jobs) == 3)
    await leave(leaving)
    before[Stage.PREFILL] += 1
    await until(lambda: counted("writer", Stage.PREFILL) == before[Stage.PREFILL])
    engines.open()
    await until(lambda: writer.rows == 0)
    assert before == {stage: counted("writer", stage) for stage in Stage}


async def test_who_is_refused_has_not_left(client: httpx2.AsyncClient) -> None:
    before = {stage: counted("writer", stage) for stage in Stage}
    body = {"model": "writer", "prompt": ["fits", "x" * 20_000, "fits, too"], "max_tokens": 5}
    assert (await client.post("/v1/completions", json=body)).status_code == 400
    assert before == {stage: counted("writer", stage) for stage in Stage}


@pytest.mark.parametrize("body", [chat("a"), chat("b", stream=True), embed("c")])
async def test_a_client_who_leaves_while_its_model_loads(
    client: httpx2.AsyncClient, engines: HeldEngines, body: dict[str, Any]
) -> None:
    before = counted(body["model"], Stage.LOAD)
    engines.load_gate.close()
    leaving = asyncio.create_task(ask(client, body))
    await reached(engines.load_gate)
    await leave(leaving)
    await until(lambda: counted(body["model"], Stage.LOAD) == before + 1)
    engines.open()
    assert (await ask(client, body)).status_code == 200
    assert engines.loads == [body["model"]]


class WideEmbedder(HeldEmbedder):
    """Its vectors are long: a few thousand fill every buffer on the way."""

    def embed(self, rows: Sequence[TokenIds]) -> Vectors:
        return np.full((len(rows), 4096), 1 / 3, dtype=np.float32)


LONG_NAME = "w" * 256  # each chunk of a stream has it
LARGE = [
    embed(*["x"] * 400),  # 5 MB
    {**chat("a" * 2500, stream=True, n=8, max_tokens=2500), "model": LONG_NAME},
]


@pytest.fixture
def wide(tmp_path: Path) -> Catalog:
    """Give models whose answers are large."""
    kinds = {"embedder": "embedding", LONG_NAME: "chat"}
    return catalog(tmp_path, {name: {"kind": kinds[name], "source": "path:."} for name in kinds})


@pytest.mark.parametrize("body", LARGE, ids=["whole", "streamed"])
async def test_a_client_who_stops_reading_has_left(wide: Catalog, body: dict[str, Any]) -> None:
    """Its answer is kept for GATEWAY_SEND_TIMEOUT_S, and not for as long as it likes."""
    left = metrics.of(metrics.REQUESTS, path_of(body), "499")
    before = left._value.get()
    async with served(wide, HeldEngines(WideEmbedder()), send_timeout_s=0.3) as client:
        with unread(str(client.base_url), body):
            async with asyncio.timeout(30):
                while left._value.get() == before:
                    await asyncio.sleep(0.05)
        assert (await ask(client, embed("next"))).status_code == 200


@pytest.mark.parametrize("body", LARGE, ids=["whole", "streamed"])
async def test_answers_that_nobody_reads_leave_no_room_for_others(
    wide: Catalog, body: dict[str, Any]
) -> None:
    """They count with the bodies: the next large one is a 503, until the first is read or gone."""
    engines = HeldEngines(WideEmbedder())
    async with served(wide, engines, max_bodies_bytes=5_500_000) as client:
        assert (await client.post("/v1/embeddings", json=LARGE[0])).status_code == 200
        with unread(str(client.base_url), body):
            await until(lambda: level("gateway_body_bytes") >= 1_000_000)
            refused = await client.post("/v1/embeddings", json=LARGE[0])
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert (await ask(client, embed("a small one"))).status_code == 200
        await until(lambda: level("gateway_body_bytes") == 0)
        assert (await client.post("/v1/embeddings", json=LARGE[0])).status_code == 200


async def test_a_large_answer_that_is_read_slowly_arrives_whole(models: Catalog) -> None:
    """It may take longer than GATEWAY_SEND_TIMEOUT_S, as long as some of it is read within."""
    async with served(models, HeldEngines(WideEmbedder()), send_timeout_s=0.3) as client:
        async with client.stream("POST", "/v1/embeddings", json=LARGE[0]) as answer:
            text = b""
            async for piece in answer.aiter_bytes(1_000_000):
                text += piece
                await asyncio.sleep(0.03)
        assert len(json.loads(text)["data"]) == 400
