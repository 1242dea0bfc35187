"""A chat model with a `draft:`, served over HTTP by real engines."""

import re
from pathlib import Path
from typing import Any

import httpx2
import mlx.core as mx
import pytest

from gateway.registry import ChatSpec
from tests.checkpoints import GEMMA4, HEADED, add_head, write_assistant, write_chat
from tests.cpu_engines import cpu_engines
from tests.serving_app import catalog, served

pytestmark = pytest.mark.anyio


WEIGHTS = "model.safetensors"
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


def headed(**entry: Any) -> dict[str, Any]:
    chat = {"kind": "chat", "source": "path:headed", "sampling": {"temperature": 0}}
    return {"headed": {**chat, **entry}}


@pytest.mark.parametrize(
    ("entry", "drafters"),
    [
        ({}, ["prompt_lookup", "mtp_head"]),
        ({"mtp_head": False}, ["prompt_lookup"]),
        ({"batching": {"speculate_rows": 0}}, []),
    ],
)
async def test_a_models_own_head_is_counted_and_listed_unless_it_is_off(
    entry: dict[str, Any], drafters: list[str], tmp_path: Path
) -> None:
    folder = add_head(write_chat(tmp_path / "headed", **HEADED), is_right=True)
    listing, engines = catalog(tmp_path, headed(**entry)), cpu_engines(speculate_rows=4)
    arrays: Any = mx.load(str(folder / "model.safetensors"))
    nbytes = sum(each.nbytes for name, each in arrays.items() if is_used(name, drafters))
    assert (await engines.size(listing.specs[0], folder)).weights == nbytes
    async with served(listing, engines) as client:
        assert (await ask(client, "headed")).status_code == 200
        [model] = (await client.get("/v1/models")).json()["data"]
        assert model["drafters"] == drafters
        assert model["notes"] == []


async def test_a_packed_head_of_a_model_that_is_not_packed_is_left_out(tmp_path: Path) -> None:
    folder = write_chat(tmp_path / "headed", **HEADED)
    whole: Any = mx.load(str(add_head(write_chat(tmp_path / "other", **HEADED)) / WEIGHTS))
    codes: Any = mx.quantize(whole["language_model.mtp.fc.weight"], group_size=32, bits=8)
    parts = ("weight", "scales", "biases")
    packed = {f"mtp.fc.{part}": array for part, array in zip(parts, codes, strict=True)}
    mx.save_safetensors(str(folder / "mtp.safetensors"), packed)
    listing, engines = catalog(tmp_path, headed()), cpu_engines(speculate_rows=4)
    arrays: Any = mx.load(str(folder / WEIGHTS))
    nbytes = sum(each.nbytes for each in arrays.values())
    assert (await engines.size(listing.specs[0], folder)).weights == nbytes
    async with served(listing, engines) as client:
        assert (await ask(client, "headed")).status_code == 200
        [model] = (await client.get("/v1/models")).json()["data"]
        assert model["drafters"] == ["prompt_lookup"]
        [note] = model["notes"]
        assert note.startswith("its MTP head is not used")


def is_used(name: str, drafters: list[str]) -> bool:
    return ".mtp." not in name or "mtp_head" in drafters


async def test_what_is_kept_with_a_heads_kv_is_not_read_without_it(tmp_path: Path) -> None:
    """A prefix file's name has the digest."""
    folder = add_head(write_chat(tmp_path / "headed", **HEADED))
    plain = write_chat(tmp_path / "plain", **HEADED)
    engines = cpu_engines(speculate_rows=4)
    catalogs = [catalog(tmp_path, headed(**each)) for each in ({}, {"mtp_head": False})]
    specs = [each for found in catalogs for each in found.specs if isinstance(each, ChatSpec)]
    digests = [await engines.digest(spec, folder) for spec in specs]
    assert digests[0] != digests[1]
    assert await engines.digest(specs[0], plain) == await engines.digest(specs[1], plain)


async def test_gemma_4s_drafter_is_counted_and_guesses_but_is_served_to_nobody(
    tmp_path: Path,
) -> None:
    model = write_chat(tmp_path / "large", **GEMMA4)
    drafter = write_assistant(tmp_path / "small", model, is_right=True)
    listing, engines = catalog(tmp_path, entries()), cpu_engines(speculate_rows=4)
    specs = {each.id: each for each in listing.specs}
    [large, without] = [
        await each.size(specs["large"], model) for each in (engines, cpu_engines(speculate_rows=0))
    ]
    weights: Any = mx.load(str(drafter / "model.safetensors"))
    assert large.weights == without.weights + sum(each.nbytes for each in weights.values())
    assert (large.kv, large.kv_token) == (without.kv, without.kv_token)
    async with served(listing, engines) as client:
        assert (await ask(client, "large")).status_code == 200
        counted = re.search(COUNTED, (await client.get("/metrics")).text)
        assert counted is not None
        assert float(counted[1]) > 0
        refused = await ask(client, "small")
        assert refused.status_code == 500
        assert "`draft:`" in refused.json()["error"]["message"]


async def test_what_is_kept_with_the_states_for_a_drafter_is_not_read_without_them(
    tmp_path: Path,
) -> None:
    model = write_chat(tmp_path / "large", **GEMMA4)
    write_assistant(tmp_path / "small", model)
    engines = cpu_engines(speculate_rows=4)
    catalogs = [catalog(tmp_path, entries(**each)) for each in ({}, {"draft": None})]
    specs = [each for found in catalogs for each in found.specs if each.id == "large"]
    digests = [await engines.digest(spec, model) for spec in specs if isinstance(spec, ChatSpec)]
    assert digests[0] != digests[1]
