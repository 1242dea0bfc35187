"""Faults of the device: the errors that callers get, and the faults that end the process."""

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import mlx.core as mx
import pytest
from mlx.nn.layers.embedding import Embedding

from gateway.engine.embedding import engine as embedding
from gateway.engine.embedding import pooling
from tests.checkpoints import write_chat
from tests.compilers import NO_ROOM, compiling_in, needs_compiler, new_function, write_compiler
from tests.cpu_engines import cpu_engines
from tests.processes import DEMO, command, started
from tests.provoked import harness
from tests.provoked.harness import ask, not_well, said
from tests.serving_app import catalog, served
from tests.simulated_device import IGNORED, NO_MEMORY, TIMEOUT, SimulatedDevice

pytestmark = pytest.mark.anyio

GOLDEN = Path(__file__).parents[1] / "golden"
TEXTS = ["Hello there!", "What is it?", "One more, please.", "a b c", "Why?", "And then some."]
POISON = "Z"  # nothing else here has this token
GREEDY = {"temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat(tmp_path_factory.mktemp("models") / "tiny").parent


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    with SimulatedDevice().installed() as device:
        yield device


@pytest.fixture
async def client(folder: Path, device: SimulatedDevice) -> AsyncIterator[httpx2.AsyncClient]:
    models = catalog(
        folder,
        {
            "writer": {"kind": "chat", "source": "path:tiny", "preload": True},
            "embedder": {"kind": "embedding", "source": f"path:{GOLDEN}/bert", "preload": True},
        },
    )
    engines = cpu_engines()
    async with served(models, engines, exit_on_stall=False) as client:
        yield client


def token(folder: Path, text: str) -> int:
    vocabulary = json.loads((folder / "tiny" / "tokenizer.json").read_text())["model"]["vocab"]
    return int(vocabulary[text])


async def chat(client: httpx2.AsyncClient, text: str) -> httpx2.Response:
    return await ask(client, harness.chat(text, **GREEDY))


async def embed(client: httpx2.AsyncClient, *texts: str) -> httpx2.Response:
    return await ask(client, harness.embed(*texts))


async def metric(client: httpx2.AsyncClient, name: str) -> float:
    lines = (await client.get("/metrics")).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def is_refused(answer: httpx2.Response, code: str) -> None:
    assert answer.status_code == 503, answer.text
    assert answer.json()["error"]["code"] == code
    assert int(answer.headers["retry-after"]) > 0


async def test_a_prompt_that_fails_fifty_times_ends_nothing_and_harms_no_neighbour(
    client: httpx2.AsyncClient, device: SimulatedDevice, folder: Path
) -> None:
    """Its timeouts are of unknown cause, so the model's own prompt is read, and read well."""
    alone = [said(await chat(client, text)) for text in TEXTS]
    device.faults[token(folder, POISON)] = TIMEOUT
    ended = asyncio.Event()

    async def neighbour(text: str) -> list[Any]:
        answers = [said(await chat(client, text))]
        while not ended.is_set():
            answers.append(said(await chat(client, text)))
        return answers

    neighbours = [asyncio.create_task(neighbour(text)) for text in TEXTS[:3]]
    for _ in range(50):
        answer = await chat(client, POISON)
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "engine_failed"
    ended.set()
    for answers, expected in zip(await asyncio.gather(*neighbours), alone, strict=False):
        assert set(answers) == {expected}
    assert device.failures >= 50
    assert (await client.get("/ready")).status_code == 200
    device.faults.clear()
    assert [said(await chat(client, text)) for text in TEXTS] == alone


async def test_memory_that_ends_sheds_rows_and_all_are_answered(
    client: httpx2.AsyncClient, device: SimulatedDevice
) -> None:
    """Two have room at once; batching goes on, for none of the six was to blame."""
    alone = [said(await chat(client, text)) for text in TEXTS]
    device.limit_bytes = 300_000  # 131 kB a row: two layers' keys and values of 256 tokens
    before = await metric(client, "gateway_sheddings_total")
    answers = await asyncio.gather(*(chat(client, text) for text in TEXTS))
    assert [said(answer) for answer in answers] == alone
    assert await metric(client, "gateway_sheddings_total") > before
    device.limit_bytes = None
    models = (await client.get("/v1/models")).json()["data"]
    assert not [model for model in models if model.get("batching") == "off"]


async def test_a_row_that_memory_is_too_short_for_is_told_to_come_back(
    client: httpx2.AsyncClient, device: SimulatedDevice
) -> None:
    """It is so after a second try; the second try of a text has the memory that was shed."""
    device.limit_bytes = 1000
    is_refused(await chat(client, "Hello"), "out_of_memory")
    device.limit_bytes = None
    assert said(await chat(client, "Hello"))
    device.fail(NO_MEMORY.format(9))
    assert (await embed(client, "Hello")).status_code == 200
    device.fail(*[NO_MEMORY.format(9)] * 2)
    is_refused(await embed(client, "Hello, too"), "out_of_memory")
    assert (await client.get("/ready")).status_code == 200


@needs_compiler
async def test_a_full_disk_where_code_is_compiled_costs_no_request(
    client: httpx2.AsyncClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work that met it is computed once more, unfused, as is all that follows."""
    expected = [said(await chat(client, text)) for text in TEXTS]
    vectors = (await embed(client, "Hello")).json()["data"]
    write_compiler(tmp_path / "bin").is_now("full")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    embed_tokens: Any = Embedding.__call__
    pool = pooling.pool
    with compiling_in(tmp_path / "compiled"):
        for again in range(3):
            mx.enable_compile()
            function = new_function()
            monkeypatch.setattr(
                Embedding, "__call__", lambda *given, to=function: to(embed_tokens(*given))
            )
            monkeypatch.setattr(embedding, "pool", lambda *given, to=function: to(pool(*given)))
            assert (await embed(client, "Hello")).json()["data"] == vectors, again
            mx.enable_compile()
            answers = await asyncio.gather(*(chat(client, text) for text in TEXTS))
            assert [said(answer) for answer in answers] == expected, again
        assert (await client.get("/health")).status_code == 200


@needs_compiler
@pytest.mark.slow
def test_a_disk_that_fills_ends_no_gateway(tmp_path: Path) -> None:
    """A model that has no compiled code yet does not fail to load, either.

    Code that was compiled before lies in the user's cache, and nothing in the temporary folder.
    """
    compiler = write_compiler(tmp_path / "bin")
    folders = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "TMPDIR": str(tmp_path / "tmp")}
    given = {"PATH": compiler.path, "GATEWAY_DEMO_CHAT_PRELOAD": "false", **folders}
    for folder in folders.values():
        Path(folder).mkdir()
    with started(command("serve", "--models", str(DEMO)), tmp_path, **given) as gateway:
        assert list((tmp_path / "cache" / "mlx-gateway").glob("mlx-*/mlx/*/cpu/lib*.so"))
        compiler.is_now("full")
        for _ in range(2):
            body = {"model": "demo-chat", "messages": [{"role": "user", "content": "Hello!"}]}
            answer = httpx2.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
        assert httpx2.get(f"{gateway.url}/health").status_code == 200
        assert NO_ROOM in gateway.log.read_text()
    assert not (tmp_path / "tmp" / "mlx").exists()


@pytest.mark.parametrize("send", [chat, embed])
async def test_after_a_fatal_fault_all_are_told_and_it_is_not_well(
    client: httpx2.AsyncClient, device: SimulatedDevice, send: Any
) -> None:
    """Here nothing ends the process; requests that wait, come or are inside get the same error."""
    asked = [asyncio.create_task(send(client, text)) for text in TEXTS]
    device.is_dead = True
    for answer in await asyncio.gather(*asked):
        assert answer.status_code == 200 or answer.json()["error"]["code"] == "device_lost"
    for text in TEXTS:
        is_refused(await chat(client, text), "device_lost")
    is_refused(await embed(client, "Hello"), "device_lost")
    assert await not_well(client) == {"status": "dead"}
    device.is_dead = False


@pytest.mark.slow
async def test_six_requests_after_a_fatal_fault_are_told_and_then_the_process_ends(
    tmp_path: Path,
) -> None:
    write_chat(tmp_path / "tiny")
    models = {"writer": {"kind": "chat", "source": "path:tiny", "preload": True}}
    catalog(tmp_path, models)
    given = {"MORTAL_TOKEN": str(token(tmp_path, POISON)), "GATEWAY_SELF_TEST": "false"}
    with started([sys.executable, "-m", "tests.provoked.mortal"], tmp_path, **given) as process:
        async with httpx2.AsyncClient(base_url=process.url, timeout=30) as client:
            assert said(await chat(client, "Hello"))
            began = time.monotonic()
            answers = await asyncio.gather(
                *(chat(client, text) for text in (POISON, *TEXTS[:5])), return_exceptions=True
            )
        refused = [answer for answer in answers if isinstance(answer, httpx2.Response)]
        assert len(refused) == len(answers)  # nobody was cut off
        assert {answer.status_code for answer in refused} == {503}
        assert process.process.wait(60) == 70
        assert time.monotonic() - began < 10
        assert IGNORED in process.log.read_text()


async def test_a_device_that_dies_while_a_model_is_warmed_is_noted(
    folder: Path, device: SimulatedDevice
) -> None:
    """The engine tells of it in a delta; nobody else would ever hear."""
    models = catalog(folder, {"writer": {"kind": "chat", "source": "path:tiny"}})
    engines = cpu_engines()
    async with served(models, engines, exit_on_stall=False, warm_up=True) as client:
        device.is_dead = True
        assert (await chat(client, "Hello")).status_code in (500, 503)
        assert await not_well(client) == {"status": "dead"}
        device.is_dead = False
