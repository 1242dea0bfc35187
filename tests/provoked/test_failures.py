"""A failure in an engine fails the request it concerns, and no other."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx2
import mlx.core as mx
import pytest

from gateway.clock import Stage
from tests.checkpoints import write_chat
from tests.cpu_engines import cpu_engines
from tests.provoked.engines import EXIT, HeldEngines
from tests.provoked.harness import ask, chat, embed, reached, said
from tests.serving_app import catalog, level, served
from tests.waiting import until

pytestmark = pytest.mark.anyio


def is_told(answer: httpx2.Response) -> None:
    """It is a 500 that names the request."""
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "engine_failed"
    assert answer.headers["x-request-id"]


async def test_a_row_of_no_numbers_on_real_mlx_leaves_its_neighbours_answers_as_they_were(
    tmp_path: Path,
) -> None:
    weights = write_chat(tmp_path / "tiny") / "model.safetensors"
    arrays = mx.load(str(weights))
    assert isinstance(arrays, dict)
    tokens = json.loads((tmp_path / "tiny" / "tokenizer.json").read_text())["model"]["vocab"]
    arrays["model.embed_tokens.weight"][tokens["Z"]] = float("nan")
    mx.save_safetensors(str(weights), arrays)
    models = catalog(tmp_path, {"writer": {"kind": "chat", "source": "path:tiny"}})
    greedy = {"temperature": 0, "max_tokens": 24}
    texts = ["Hello there!", "What is it?", "One more, please."]
    engines = cpu_engines()
    async with served(models, engines) as client:
        alone = [said(await ask(client, chat(text, **greedy))) for text in texts]
        mixed = [chat(text, **greedy) for text in (texts[0], "Z", *texts[1:], "ZZ")]
        answers = await asyncio.gather(*(ask(client, body) for body in mixed))
    is_told(answers[1])
    is_told(answers[4])
    assert "`writer`" in answers[1].json()["error"]["message"]
    assert [said(answers[i]) for i in (0, 2, 3)] == alone


@pytest.mark.parametrize("body", [embed(EXIT), chat(EXIT)], ids=["embedding", "chat"])
async def test_a_lane_that_dies_is_told_to_everybody_at_once(
    client: httpx2.AsyncClient, engines: HeldEngines, body: dict[str, Any]
) -> None:
    assert said(await ask(client, chat("loads it"))) == "loads it"
    gate = engines.embedder.gates[Stage.INFERENCE]
    gate.close()
    held = [asyncio.create_task(ask(client, embed("x")))]
    await reached(gate)
    for each in (chat("ab"), body, chat("c" * 90)):
        held.append(asyncio.create_task(ask(client, each)))
        await until(lambda: level("gateway_tickets") == len(held) - 1)
    gate.open()
    async with asyncio.timeout(60):
        answers = await asyncio.gather(*held)
        assert {answer.status_code for answer in answers} <= {200, 503}
        assert answers[2].status_code == 503
        assert answers[3].status_code == 503
        for path, status in (("/health", "dead"), ("/ready", "dead")):
            answer = await client.get(path)
            assert (answer.status_code, answer.json()["status"]) == (503, status)
        for late in (chat("d"), embed("e", "f")):
            assert (await ask(client, late)).status_code == 503
