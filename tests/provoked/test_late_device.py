"""A device whose failed work looks as if it had succeeded: nothing of it gets out."""

import asyncio
import json
import math
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx2
import mlx.core as mx
import pytest

from gateway.engine.embedding import engine as embedding
from gateway.engine.embedding import pooling
from tests.app.test_labels_rerank import LABELS
from tests.checkpoints import SLIDING, write_chat
from tests.cpu_engines import cpu_engines
from tests.serving_app import catalog, served
from tests.simulated_device import NO_MEMORY, TIMEOUT, LateDevice

pytestmark = pytest.mark.anyio

GOLDEN = Path(__file__).parents[1] / "golden"
SEA = "tell me of the sea and of the old man and his boat " * 3  # more than two blocks of tokens
GREEDY = {"temperature": 0, "max_tokens": 5}
TURN = [{"role": "user", "content": SEA}]
DOCUMENTS = ["Paris.", "Bananas are yellow.", "Rome"]
QUESTION = {"type": "predicate", "instructions": "Is it wet?"}
RERANK = {"query": "Which city?", "documents": DOCUMENTS, "raw_scores": True}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("chat/completions", {"model": "writer", "messages": TURN, "logprobs": True, **GREEDY}),
    "windows": ("chat/completions", {"model": "sliding", "messages": TURN, **GREEDY}),
    "completions": ("completions", {"model": "writer", "prompt": SEA, **GREEDY}),
    "scored": (
        "completions",
        {"model": "writer", "prompt": SEA, "echo": True, "logprobs": 1, "max_tokens": 0},
    ),
    "messages": ("messages", {"model": "writer", "messages": TURN, **GREEDY}),
    "decisions": ("decisions", {"model": "writer", "input": SEA, "questions": [QUESTION]}),
    "embeddings": ("embeddings", {"model": "embedder", "input": DOCUMENTS}),
    "of a decoder": ("embeddings", {"model": "decoder", "input": DOCUMENTS}),
    "rerank": ("rerank", {"model": "reranker", **RERANK}),
    "labels": ("rerank", {"model": "judge", **RERANK}),
}
GIVEN_ANEW = {"id", "created", "created_at", "completed_at", "usage", "system_fingerprint"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_chat(folder / "tiny")
    write_chat(folder / "sliding", **SLIDING)
    return folder


@pytest.fixture
def device() -> Iterator[LateDevice]:
    with LateDevice().installed() as device:
        yield device


@pytest.fixture
async def client(folder: Path, device: LateDevice) -> AsyncIterator[httpx2.AsyncClient]:
    async with gateway(folder) as client:
        yield client


def gateway(folder: Path, **given: Any) -> AbstractAsyncContextManager[httpx2.AsyncClient]:
    models: dict[str, dict[str, Any]] = {
        "writer": {"kind": "chat", "source": "path:tiny"},
        "sliding": {"kind": "chat", "source": "path:sliding"},
        "embedder": {"kind": "embedding", "source": f"path:{GOLDEN}/bert"},
        "decoder": {"kind": "embedding", "source": f"path:{GOLDEN}/qwen3"},
        "reranker": {"kind": "rerank", "source": f"path:{GOLDEN}/bert-reranker"},
        "judge": {**LABELS, "source": "path:tiny"},
    }
    engines = cpu_engines(prefix_cache_bytes=1 << 24, speculate_rows=given.pop("ahead", 0))
    given = {"exit_on_stall": False, "cache_max_models": len(models), **given}
    return served(catalog(folder, models), engines, **given)


def told(answer: httpx2.Response) -> Any:
    """Return the content that a client reads in an answer; None of an error."""
    if answer.status_code >= 500:
        assert "error" in answer.json()
        return None
    assert answer.status_code == 200, answer.text
    return _without(answer.json())


def are_alike(one: Any, other: Any) -> bool:
    """Return True if two answers are equal, but for the rounding of numbers."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-3, abs_tol=1e-4)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(are_alike(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(are_alike, one, other))
    return bool(one == other)


def _without(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without(each) for key, each in value.items() if key not in GIVEN_ANEW}
    return [_without(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("name", "text"), [*((name, TIMEOUT) for name in REQUESTS), ("chat", NO_MEMORY.format(9))]
)
async def test_each_answer_is_right_or_an_error_when_work_fails_late(
    client: httpx2.AsyncClient, device: LateDevice, name: str, text: str
) -> None:
    """Each piece of a request's work fails in turn, with nothing kept and with all of it kept."""
    path, body = REQUESTS[name]
    salts = {"cache_salt": "0"} if "messages" in body or "prompt" in body else {}

    async def ask(salt: str) -> Any:
        return told(await client.post(f"/v1/{path}", json={**body, **dict.fromkeys(salts, salt)}))

    expected = await ask("")
    assert expected is not None
    for work in (*range(8), *range(8, 100, 4)):
        for salt in (f"new-{work}", ""):
            device.fail_at(work, text)
            failures = device.failures
            answer = await ask(salt)
            assert answer is None or are_alike(answer, expected), (work, salt)
            assert not device.is_due or device.failures == failures
            was_reached = device.failures > failures
            device.relent()
            assert are_alike(await ask(salt), expected), (work, salt)
        if not was_reached:
            break
    assert work > 0
    assert device.failures > 1


@pytest.mark.parametrize("ahead", [0, 8])
async def test_no_neighbour_gets_work_that_failed_late(
    folder: Path, device: LateDevice, ahead: int
) -> None:
    """Many requests at once, to several models: each gets its right answer or an error."""
    shape = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    form = {"type": "json_schema", "json_schema": {"name": "on", "schema": shape}}
    requests = [
        *REQUESTS.values(),
        ("chat/completions", {"model": "writer", "messages": TURN, **GREEDY, "n": 3}),
        ("chat/completions", {"model": "sliding", "messages": TURN, **GREEDY, "max_tokens": 20}),
        (
            "chat/completions",
            {"model": "writer", "messages": TURN, **GREEDY, "response_format": form},
        ),
    ]
    chance = random.Random(0)
    async with gateway(folder, ahead=ahead) as client:

        async def ask(path: str, body: dict[str, Any]) -> Any:
            return told(await client.post(f"/v1/{path}", json=body))

        expected = [await ask(*request) for request in requests]
        for _ in range(5):
            device.fail_at(chance.randrange(60), TIMEOUT)
            answers = await asyncio.gather(*(ask(*request) for request in requests))
            for (path, body), answer, right in zip(requests, answers, expected, strict=True):
                assert answer is None or are_alike(answer, right), (path, body)
        assert device.failures > 1
        device.relent()
        answers = await asyncio.gather(*(ask(*request) for request in requests))
        assert all(map(are_alike, answers, expected))


async def test_a_stream_is_right_up_to_the_error(
    client: httpx2.AsyncClient, device: LateDevice
) -> None:
    """A step that fails is read again; one that fails again ends the stream, with an error."""
    path, body = REQUESTS["chat"]

    async def tokens(salt: str) -> tuple[list[str], bool]:
        answer = await client.post(f"/v1/{path}", json={**body, "stream": True, "cache_salt": salt})
        if answer.status_code >= 500:
            return [], False
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        chunks = [json.loads(line) for line in lines if line != "[DONE]"]
        scores = [chunk["choices"][0]["logprobs"] for chunk in chunks if "choices" in chunk]
        read = [each["token"] for score in scores if score for each in score["content"]]
        return read, not any("error" in chunk for chunk in chunks)

    whole, _ = await tokens("")
    ends = set()
    for work in range(16):
        device.fail_at(work, NO_MEMORY.format(9), is_lasting=work % 2 == 0)
        read, is_whole = await tokens(str(work // 2))
        ends.add(is_whole)
        assert whole[: len(read)] == read
        assert (read == whole) == is_whole
        device.relent()
    assert ends == {True, False}
    assert (await tokens(""))[1]


async def test_no_file_has_work_that_failed_late(folder: Path, device: LateDevice) -> None:
    """No wrong piece is written, and none that was read wrong is kept."""
    path, body = REQUESTS["completions"]

    async def ask(client: httpx2.AsyncClient) -> Any:
        return told(await client.post(f"/v1/{path}", json=body))

    async def save(client: httpx2.AsyncClient) -> int:
        told = await client.post("/admin/prefixes/save", headers={"authorization": "Bearer sesame"})
        return told.status_code

    statuses = []
    for work in range(4):
        given = {"prefix_folder": folder / f"kept-{work}", "admin_key": "sesame"}
        async with gateway(folder, **given) as client:
            expected = await ask(client)
            device.fail_at(work // 2, TIMEOUT)
            statuses.append(await save(client))
            device.relent()
            if work % 2:
                assert await save(client) == 200
        async with gateway(folder, **given) as client:
            device.fail_at(work // 2, TIMEOUT)
            answers = [await ask(client)]
            device.relent()
            answers += [await ask(client), await ask(client)]
        assert all(answer is None or are_alike(answer, expected) for answer in answers), work
    assert statuses[0] == 503


async def test_a_vector_of_zeros_is_refused(
    client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No error may come of a device at all; its neighbours in the batch have their vectors."""
    pool = pooling.pool

    def empty(hidden: mx.array, lengths: mx.array, *given: Any) -> mx.array:
        vectors = pool(hidden, lengths, *given)
        return mx.where(lengths[:, None] > 8, 0, vectors)

    monkeypatch.setattr(embedding, "pool", empty)
    bodies = [{"model": "embedder", "input": text} for text in ("a", "a b c d e f g h i j")]
    good, bad = await asyncio.gather(*(client.post("/v1/embeddings", json=body) for body in bodies))
    assert good.status_code == 200
    assert bad.status_code == 500
    assert "the vector of row 0 is zero" in bad.json()["error"]["message"]


@pytest.mark.parametrize("name", ["chat", "embeddings", "of a decoder", "rerank", "labels"])
async def test_a_model_whose_weights_failed_late_answers_nothing_wrong(
    folder: Path, device: LateDevice, name: str
) -> None:
    """Its load fails, or the first request does."""
    path, body = REQUESTS[name]
    async with gateway(folder) as client:
        expected = told(await client.post(f"/v1/{path}", json=body))
    for work in range(0, 8, 3):
        async with gateway(folder) as client:
            device.fail_at(work, TIMEOUT)
            answers = [told(await client.post(f"/v1/{path}", json=body)) for _ in range(3)]
            device.relent()
        assert all(answer is None or are_alike(answer, expected) for answer in answers), work
