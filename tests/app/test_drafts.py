"""A chat model with a `draft:`, served over HTTP by real engines."""

import re
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.checkpoints import write_chat
from tests.cpu_engines import cpu_engines
from tests.serving_app import catalog, served

pytestmark = pytest.mark.anyio


COUNTED = r'gateway_tokens_read_ahead_total{kind="drafted",model="large"} (\S+)'


def entries(**large: Any) -> dict[str, Any]:
    chat = {"kind": "chat", "sampling": {"temperature": 0}}
    return {
        "large": {**chat, "source": "path:large", "draft": "small", **large},
        "small": {**chat, "source": "path:small"},
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_chat(tmp_path / "large")
    write_chat(tmp_path / "small", num_hidden_layers=1)
    return tmp_path


async def ask(client: httpx2.AsyncClient, model: str) -> httpx2.Response:
    messages = [{"role": "user", "content": "Hi"}]
    body = {"model": model, "messages": messages, "max_tokens": 40}
    return await client.post("/v1/chat/completions", json=body)


async def test_answers_are_those_without_it(folder: Path) -> None:
    said, drafted = [], [0.0]
    for large in ({}, {"draft": None}):
        engines = cpu_engines(speculate_rows=4)
        async with served(catalog(folder, entries(**large)), engines) as client:
            answer = await ask(client, "large")
            assert answer.status_code == 200, answer.text
            said.append(answer.json()["choices"][0]["message"]["content"])
            assert (await ask(client, "small")).status_code == 200
            counted = re.search(COUNTED, (await client.get("/metrics")).text)
            drafted.append(float(counted[1]) if counted is not None else 0.0)
    assert said[0] == said[1]
    assert drafted[1] > drafted[0]
    assert drafted[2] == drafted[1]


async def test_its_weights_and_kv_are_part_of_the_models_size(folder: Path) -> None:
    engines = cpu_engines(speculate_rows=4)
    specs = {each.id: each for each in catalog(folder, entries()).specs}
    alone = cpu_engines(speculate_rows=0)
    large = await engines.size(specs["large"], folder / "large")
    small = await engines.size(specs["small"], folder / "small")
    without = await alone.size(specs["large"], folder / "large")
    assert large.weights == without.weights + small.weights
    assert large.kv == without.kv + small.kv
    assert large.kv_token == without.kv_token + small.kv_token
