"""Replicas behind Ray Serve, on a cluster that is real: as one gateway to clients."""

import asyncio
import json
import os
import random
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from compat_tests.ray.cluster import PYTHON, SCRIPTED, Cluster, running, write_models
from tests.processes import DEMO
from tests.waiting import until

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.compat,
    pytest.mark.skipif(not PYTHON.exists(), reason="`make setup-ray` installs it"),
    pytest.mark.skipif(not Path("/proc").exists(), reason="a cluster's processes are found there"),
]
CHAT = {"kind": "chat", "source": "hub:x/y"}


def ask(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "demo-chat", "messages": [{"role": "user", "content": text}], **more}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two replicas of the real engines, with demo-chat and MiniLM."""
    with running(tmp_path_factory.mktemp("demo"), DEMO) as cluster:
        cluster.wait_for(2)
        yield cluster


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two replicas that echo, a character each 20 ms."""
    folder = tmp_path_factory.mktemp("scripted")
    models = write_models(folder, {"echo": {**CHAT, "preload": True}})
    with running(folder, models, "--engines", SCRIPTED, SCRIPTED_STEP_S="0.02") as cluster:
        cluster.wait_for(2)
        yield cluster


def test_the_sdk_gets_the_answers_of_one_gateway(demo: Cluster, url: str) -> None:
    with (
        OpenAI(base_url=f"{demo.url}/v1", api_key="unused") as client,
        OpenAI(base_url=f"{url}/v1", api_key="unused") as alone,
    ):
        for text in ("Hello!", "What is the capital of France?"):
            expected = alone.chat.completions.create(**ask(text))
            whole = client.chat.completions.create(**ask(text))
            assert whole.choices == expected.choices
            pieces = [
                chunk.choices[0].delta.content or ""
                for chunk in client.chat.completions.create(**ask(text, stream=True))
            ]
            assert "".join(pieces) == expected.choices[0].message.content
            assert len(pieces) > 3  # one by one
        one, other = (
            each.embeddings.create(model="text-embedding-3-small", input=["a", "b"]).data
            for each in (client, alone)
        )
        # A replica has fewer threads: sums of another order.
        np.testing.assert_allclose(
            [each.embedding for each in one], [each.embedding for each in other], atol=1e-5
        )


def test_responses_are_found_where_they_are_kept(demo: Cluster) -> None:
    """Any client finds them, as often as it asks: an id names its replica."""
    with OpenAI(base_url=f"{demo.url}/v1", api_key="unused") as client:
        kept = [
            client.responses.create(model="demo-chat", input=f"Hello! I am number {i}.")
            for i in range(8)
        ]
        for first in kept:
            assert client.responses.retrieve(first.id).output == first.output
            items: Any = [
                {"type": "item_reference", "id": first.output[0].id},
                {"role": "user", "content": "What is the capital of France?"},
            ]
            later = client.responses.create(
                model="demo-chat", input=items, previous_response_id=first.id
            )
            assert later.id[5:13] == first.id[5:13]  # the later one is kept on the same replica
            assert len(client.responses.input_items.list(later.id).data) == 4
            client.responses.delete(first.id)
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(first.id)


BAD = [
    ("POST", "/v1/chat/completions", {"model": "no-such", "messages": []}),
    ("POST", "/v1/chat/completions", ask("x", temperature=9)),
    ("POST", "/v1/embeddings", {"model": "demo-chat", "input": "x"}),
    ("POST", "/v1/embeddings", None),
    ("GET", "/v1/responses/resp_0", None),
    ("GET", "/v1/models/no-such", None),
    ("GET", "/no/such/path", None),
    ("DELETE", "/v1/models", None),
]


@pytest.mark.parametrize(("method", "path", "body"), BAD)
def test_errors_and_headers_are_those_of_one_gateway(
    demo: Cluster, url: str, method: str, path: str, body: Any
) -> None:
    """All but the values that differ each time: ids, and times."""
    here, there = (
        httpx2.request(method, f"{base}{path}", json=body, headers={"x-request-id": "mine"})
        for base in (demo.url, url)
    )
    assert (here.status_code, here.json()) == (there.status_code, there.json())
    assert sorted(here.headers) == sorted(there.headers)
    assert here.headers["x-request-id"] == "mine"


@pytest.mark.parametrize(
    "headers", [{"host": "rebound.example"}, {"origin": "https://elsewhere.example"}]
)
def test_hosts_and_origins_are_checked_before_ray_sees_anything(
    demo: Cluster, headers: dict[str, str]
) -> None:
    before = sum(demo.metrics("gateway_requests_total"))
    answer = httpx2.post(f"{demo.url}/v1/chat/completions", json=ask("x"), headers=headers)
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "forbidden"
    assert sum(demo.metrics(r"gateway_requests_total\{.*chat")) <= before


def test_models_and_readiness_are_one_answer(demo: Cluster) -> None:
    models = httpx2.get(f"{demo.url}/v1/models").json()["data"]
    assert len({model["id"] for model in models}) == len(models)
    assert {model["state"] for model in models} == {"loaded"}
    ready = httpx2.get(f"{demo.url}/ready").json()
    assert ready == {
        "status": "ready",
        "models": {"all-minilm-l6-v2": "loaded", "demo-chat": "loaded"},
    }


def test_every_socket_is_of_this_machine_alone(demo: Cluster) -> None:
    """The listening sockets are the ingress's, and Ray's ports, which run code they are sent."""
    listening = list(_listening(demo.pids))
    assert len(listening) > 5
    assert {address for address in listening if not address.startswith("127.")} == set()


def test_a_client_that_leaves_frees_its_row(scripted: Cluster) -> None:
    """The answer would take half an hour."""
    body = {**ask("x" * 90_000, stream=True), "model": "echo"}
    with httpx2.stream("POST", f"{scripted.url}/v1/chat/completions", json=body) as answer:
        lines = answer.iter_lines()  # kept: without it the answer is closed
        while '"content":"x"' not in next(lines):
            pass
        assert sum(scripted.metrics(r"gateway_rows\{")) == 1
    for _ in range(100):
        if not sum(scripted.metrics(r"gateway_rows\{")):
            break
    assert sum(scripted.metrics(r"gateway_rows\{")) == 0
    assert sum(scripted.metrics(r'gateway_cancelled_total\{.*stage="decode"')) == 1


def test_one_who_does_not_read_holds_up_nobody(scripted: Cluster) -> None:
    """Its answer waits at its replica, and others are answered."""
    host, port = scripted.url.removeprefix("http://").split(":")
    payload = json.dumps({**ask("y" * 3000, stream=True), "model": "echo"}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}:{port}\r\n"
    with socket.create_connection((host, int(port))) as silent:
        silent.sendall(f"{head}content-length: {len(payload)}\r\n\r\n".encode() + payload)
        body = {**ask("quick"), "model": "echo"}
        for _ in range(4):
            answer = httpx2.post(f"{scripted.url}/v1/chat/completions", json=body, timeout=30)
            assert answer.json()["choices"][0]["message"]["content"] == "quick"


async def test_two_models_stay_where_they_are_loaded(tmp_path: Path) -> None:
    """Each replica has room for one: at least 95 of 100 requests find theirs loaded."""
    models = write_models(tmp_path, {"one": CHAT, "two": CHAT})
    options = ("--engines", SCRIPTED)
    with running(
        tmp_path, models, *options, SCRIPTED_STEP_S="0.005", GATEWAY_CACHE_MAX_MODELS="1"
    ) as cluster:
        cluster.wait_for(2)
        draw = random.Random(0)
        async with AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="unused") as client:
            places = asyncio.Semaphore(8)

            async def one(i: int) -> None:
                text = f"{i} " * draw.randrange(1, 12)
                async with places:
                    answer = await client.chat.completions.create(
                        model=draw.choice(["one", "two"]),
                        messages=[{"role": "user", "content": text}],
                    )
                assert answer.choices[0].message.content == text

            await asyncio.gather(*(one(i) for i in range(400)))
        chosen = sum(cluster.metrics("gateway_ray_choices_total"))
        loading = sum(cluster.metrics(r'gateway_ray_choices_total\{reason="(load|spread)"'))
        loads = sum(cluster.metrics(r"gateway_model_loads_total\{"))
        print(f"{chosen:g} choices, {loading:g} to load, {loads:g} loads")
        assert chosen >= 400
        assert loading <= 0.05 * chosen
        assert loads <= 0.05 * chosen


async def test_a_replica_that_is_killed_hangs_nobody_and_falsifies_nothing(
    scripted: Cluster,
) -> None:
    """Requests that had not begun are answered by the other; begun ones end with an error event."""
    begun = asyncio.Event()
    outcomes: dict[str, int] = {"whole": 0, "complete": 0, "broken off": 0, "refused": 0}
    async with httpx2.AsyncClient(base_url=scripted.url, timeout=60) as client:

        async def whole(i: int) -> None:
            text = f"{i:03} is whole " * 8
            body = {**ask(text), "model": "echo"}
            answer = await client.post("/v1/chat/completions", json=body)
            if answer.status_code == 503:
                assert answer.json()["error"]["code"] == "service_unavailable"
                outcomes["refused"] += 1
                return
            assert answer.json()["choices"][0]["message"]["content"] == text
            outcomes["whole"] += 1

        async def streamed(i: int) -> None:
            text, said, error = f"{i:03} is streamed " * 8, "", None
            body = {**ask(text, stream=True), "model": "echo"}
            async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                lines = [line async for line in answer.aiter_lines() if _note(begun)]
            for line in lines:
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    error = event.get("error", error)
                    for choice in event.get("choices", ()):
                        said += choice["delta"].get("content") or ""
            if error is None:
                assert (said, lines[-2]) == (text, "data: [DONE]")
                outcomes["complete"] += 1
            else:
                assert text.startswith(said)
                assert "data: [DONE]" not in lines
                assert error["code"] == "service_unavailable"
                outcomes["broken off"] += 1

        tasks = [asyncio.create_task(each(i)) for i in range(20) for each in (whole, streamed)]
        await asyncio.wait_for(begun.wait(), 30)
        await asyncio.sleep(0.3)  # every row is under way, at both
        os.kill(scripted.replicas[0], signal.SIGKILL)
        await asyncio.wait_for(asyncio.gather(*tasks), 60)
    print(outcomes)
    assert outcomes["whole"] == 20
    assert 0 < outcomes["broken off"] < 20
    await asyncio.to_thread(scripted.wait_for, 2)  # Ray has started another


async def test_a_replica_has_a_folder_of_its_own_and_finds_it_when_it_is_started_again(
    tmp_path: Path,
) -> None:
    models = write_models(tmp_path, {"echo": {**CHAT, "preload": True}})
    kept = tmp_path / "kept"
    with running(
        tmp_path, models, "--engines", SCRIPTED, GATEWAY_PREFIX_FOLDER=str(kept)
    ) as cluster:
        await asyncio.to_thread(cluster.wait_for, 2)
        folders = [kept / "replica-0", kept / "replica-1"]
        secrets = {(folder / "secret").read_bytes() for folder in folders}
        assert len(secrets) == 2
        gone = cluster.replicas[0]
        os.kill(gone, signal.SIGKILL)
        await until(lambda: len({*cluster.replicas} - {gone}) == 2, seconds=120)
        await asyncio.to_thread(cluster.wait_for, 2)
        assert sorted(folder for folder in kept.iterdir() if folder.is_dir()) == folders
        assert {(folder / "secret").read_bytes() for folder in folders} == secrets
        assert "prefix_folder_taken" not in cluster.log.read_text()


async def test_replicas_follow_the_tokens_that_wait(tmp_path: Path) -> None:
    models = write_models(tmp_path, {"echo": {**CHAT, "preload": True}})
    options = ("--engines", SCRIPTED, "--replicas", "1", "--most", "2")
    with running(tmp_path, models, *options, SCRIPTED_STEP_S="0.1") as cluster:
        await asyncio.to_thread(cluster.wait_for, 1)
        async with httpx2.AsyncClient(base_url=cluster.url, timeout=120) as client:
            body = {**ask("z" * 900), "model": "echo"}
            tasks = [
                asyncio.create_task(client.post("/v1/chat/completions", json=body))
                for _ in range(16)
            ]
            await asyncio.to_thread(cluster.wait_for, 2)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


def _note(event: asyncio.Event) -> bool:
    event.set()
    return True


def _listening(pids: list[int]) -> Iterator[str]:
    """Yield the addresses that processes listen on, over TCP of both families."""
    inodes = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.add(os.readlink(descriptor))
            except OSError:
                continue
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                raw = bytes.fromhex(fields[1].partition(":")[0])
                words = [raw[at : at + 4][::-1] for at in range(0, len(raw), 4)]
                yield socket.inet_ntop(family, b"".join(words)).removeprefix("::ffff:")
