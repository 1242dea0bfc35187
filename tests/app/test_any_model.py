"""Models by name: refused by name, downloaded one at a time; and the pulls of admins."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway import metrics
from gateway.api import models as pulls
from gateway.app.gateway import Gateway
from gateway.engine.hub import Hub, has_weights
from tests import fake_hub
from tests.checkpoints import write_chat
from tests.cpu_engines import cpu_engines, cpu_settings
from tests.fake_hub import FakeHub
from tests.serving_app import catalog, ready, served, served_app
from tests.waiting import until

pytestmark = pytest.mark.anyio
KEYS = [{"authorization": f"Bearer {key}"} for key in ("one", "two")]
ADMIN = {"authorization": "Bearer sesame"}
GIVEN: dict[str, Any] = {"any_model": "org/*", "api_keys": "one,two", "admin_key": "sesame"}
Pulled = AbstractAsyncContextManager[httpx2.Response]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat(tmp_path_factory.mktemp("checkpoint") / "files")


@pytest.fixture
def hub(tmp_path: Path, checkpoint: Path) -> Iterator[FakeHub]:
    coded = write_chat(tmp_path / "coded")
    config = json.loads((coded / "config.json").read_text())
    (coded / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "m.Model"}}))
    bare = write_chat(tmp_path / "bare")
    tokenizer = json.loads((bare / "tokenizer_config.json").read_text())
    tokenizer.pop("chat_template", None)
    (bare / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (bare / "chat_template.jinja").unlink(missing_ok=True)
    repos = dict.fromkeys(
        ("org/one", "org/two", "org/gated", "org/private", "org/One", "else/a"), checkpoint
    )
    with FakeHub({**repos, "org/coded": coded, "org/bare": bare}).serving() as hub:
        hub.says = {"org/gated": {"gated": "manual"}, "org/private": {"private": True}}
        # The hub answers so for names in any case, and for old names.
        hub.says["org/One"] = {"id": "org/one"}
        yield hub


def place(hub: FakeHub, folder: Path) -> Hub:
    return Hub(endpoint=hub.url, cache=folder / "cache", timeout_s=20)


@pytest.fixture
async def client(hub: FakeHub, tmp_path: Path) -> AsyncIterator[httpx2.AsyncClient]:
    """Serve a catalog without models, which callers with two keys may add to."""
    async with serving(hub, tmp_path) as client:
        yield client


def serving(
    hub: FakeHub, folder: Path, **more: Any
) -> AbstractAsyncContextManager[httpx2.AsyncClient]:
    return served(catalog(folder, {}), cpu_engines(place(hub, folder)), **{**GIVEN, **more})


async def ask(
    client: httpx2.AsyncClient, model: str, key: int = 0, allowed_s: str = "60"
) -> httpx2.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 2}
    headers = {**KEYS[key], "x-gateway-timeout-s": allowed_s}
    return await client.post("/v1/chat/completions", json=body, headers=headers)


def pulling(client: httpx2.AsyncClient, model: str) -> Pulled:
    return client.stream("POST", "/admin/models/pull", json={"model": model}, headers=ADMIN)


async def events(answer: httpx2.Response) -> list[dict[str, Any]]:
    """Read the events of a pull, which ends with [DONE] or an error."""
    lines = [line async for line in answer.aiter_lines()]
    texts = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(text) for text in texts if text != "[DONE]"]


async def listed(client: httpx2.AsyncClient) -> set[str]:
    answer = await client.get("/v1/models", headers=KEYS[0])
    return {model["id"] for model in answer.json()["data"]}


def cached(folder: Path, pattern: str) -> Iterator[Path]:
    return (folder / "cache").rglob(pattern)


def code_of(answer: httpx2.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


async def test_a_model_is_named_downloaded_and_served(
    client: httpx2.AsyncClient, tmp_path: Path
) -> None:
    counted = metrics.of(metrics.PULLED_BYTES, "key-2")
    before = counted._value.get()
    answers = await asyncio.gather(ask(client, "org/one", 1), ask(client, "hub:org/one", 1))
    assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
    assert await listed(client) == {"org/one", "hub:org/one"}
    stored = sum(file.stat().st_size for file in cached(tmp_path, "blobs/*"))
    assert counted._value.get() - before == stored


@pytest.mark.parametrize(
    ("model", "outcome", "said"),
    [
        ("else/a", (404, "model_not_found"), "may be named here: org/*"),
        ("org/../one", (404, "model_not_found"), "does not exist"),
        ("org/missing", (404, "model_not_found"), "no public repository org/missing"),
        ("org/gated", (400, "model_refused"), "org/gated is not public"),
        ("org/private", (400, "model_refused"), "org/private is not public"),
        ("org/coded", (400, "model_refused"), "Python code"),
        ("org/One", (400, "model_refused"), "its name on the hub is org/one."),
        ("org/bare", (400, "model_refused"), "no chat template"),
    ],
)
async def test_what_may_not_be_served_is_refused_by_name_on_both_surfaces(
    client: httpx2.AsyncClient, tmp_path: Path, model: str, outcome: tuple[int, str], said: str
) -> None:
    answer = await ask(client, model)
    assert code_of(answer) == outcome, answer.text
    assert said in answer.json()["error"]["message"]
    message = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    answer = await client.post("/v1/messages", json=message, headers=KEYS[0])
    assert said in answer.json()["error"]["message"]
    assert await listed(client) == set()
    assert not [*cached(tmp_path, "*/blobs/*")]


async def test_a_body_or_header_that_is_refused_asks_the_hub_nothing(
    client: httpx2.AsyncClient, hub: FakeHub
) -> None:
    unread = b'{"model": "org/one", "messages": ['
    incomplete = b'{"model": "org/one"}'
    for body in (unread, incomplete):
        answer = await client.post("/v1/chat/completions", content=body, headers=KEYS[0])
        assert answer.status_code == 400
    assert (await ask(client, "org/one", allowed_s="soon")).status_code == 400
    assert not hub.asked
    assert not await listed(client)


async def test_every_endpoint_of_a_model_says_which_models_may_be_named(
    client: httpx2.AsyncClient,
) -> None:
    question = {"type": "predicate", "instructions": "Is it?"}
    message = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    bodies: dict[str, dict[str, Any]] = {
        "/chat/completions": message,
        "/completions": {"prompt": "Hi"},
        "/messages": message,
        "/messages/count_tokens": {"messages": message["messages"]},
        "/responses": {"input": "Hi"},
        "/responses/input_tokens": {"input": "Hi"},
        "/decisions": {"input": "Hi", "questions": [question]},
        "/embeddings": {"input": "Hi"},
        "/rerank": {"query": "Hi", "documents": ["Hi"]},
        "/score": {"text_1": "Hi", "text_2": "Hi"},
        "/tokenize": {"prompt": "Hi"},
        "/detokenize": {"tokens": [1]},
    }
    for path, body in bodies.items():
        body = {**body, "model": "else/a"}
        answer = await client.post(f"/v1{path}", json=body, headers=KEYS[0])
        assert answer.status_code == 404, (path, answer.text)
        assert "may be named here: org/*" in answer.json()["error"]["message"], path


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"disk_reserve_bytes": 2**60}, "insufficient_disk"),
        ({"cache_max_bytes": 1000}, "insufficient_memory"),
    ],
)
async def test_what_is_too_large_is_refused_before_its_download(
    hub: FakeHub, tmp_path: Path, given: dict[str, Any], code: str
) -> None:
    async with serving(hub, tmp_path, **given) as client:
        assert code_of(await ask(client, "org/one")) == (507, code)
        async with pulling(client, "org/one") as answer:
            await answer.aread()
            assert code_of(answer) == (507, code)
    assert not hub.ranges


async def test_a_hub_that_is_slow_to_say_what_it_has_ends_no_later_than_the_caller_allows(
    client: httpx2.AsyncClient, hub: FakeHub
) -> None:
    hub.delay_s = 10
    async with asyncio.timeout(8):
        answer = await ask(client, "org/one", allowed_s="0.2")
    assert code_of(answer) == (504, "deadline_exceeded")


async def test_downloads_wait_for_one_another_and_a_key_has_one(
    hub: FakeHub, tmp_path: Path
) -> None:
    hub.gate.clear()
    async with serving(hub, tmp_path, load_wait_s=0.1) as client:
        answer = await ask(client, "org/one", 0)
        assert code_of(answer) == (503, "model_loading")
        assert "being downloaded (" in answer.json()["error"]["message"]
        assert code_of(await ask(client, "org/two", 0)) == (429, "rate_limit_exceeded")
        async with pulling(client, "org/two") as waiting:
            line = await anext(waiting.aiter_lines())
            assert json.loads(line.removeprefix("data: "))["status"] == "waiting"
            async with pulling(client, "org/one") as watching:  # the one that a request began
                hub.gate.set()
                last = (await events(watching))[-1]
            assert last["status"] == "success"
            assert has_weights(Path(last["path"]))
        await until(lambda: len(hub.ranges) == 2)  # it goes on though its client has left


async def test_a_pull_without_events_answers_at_its_end_and_counts_to_no_rate(
    hub: FakeHub, tmp_path: Path
) -> None:
    by_hand = cpu_engines(replace(place(hub, tmp_path), may_download=False))
    given = {**GIVEN, "requests_per_minute": 1}
    async with served(catalog(tmp_path, {}), by_hand, **given) as client:
        for _ in range(2):  # the second finds it on the disk
            body = {"model": "hub:else/a", "stream": False}  # no pattern allows it to callers
            answer = await client.post("/admin/models/pull", json=body, headers=ADMIN)
            assert answer.json()["status"] == "success"
        assert "else/a" in await listed(client)
        assert (await ask(client, "else/a")).status_code == 200


async def test_what_is_wrong_with_a_pull_is_an_answer_or_an_event(
    client: httpx2.AsyncClient, hub: FakeHub
) -> None:
    for model, status in (("nobody", 404), ("org/missing", 404), ("org/coded", 400)):
        async with pulling(client, model) as answer:
            assert answer.status_code == status
    assert (await client.post("/admin/models/pull", json={}, headers=ADMIN)).status_code == 400
    assert (await client.post("/admin/models/pull", json={}, headers=KEYS[0])).status_code == 401
    hub.status, hub.status_only = 500, "/resolve/"
    async with pulling(client, "org/one") as answer:
        assert answer.status_code == 503
    hub.status_only = "safetensors"
    async with pulling(client, "org/one") as answer:
        assert "could not be fetched" in (await events(answer))[-1]["error"]["message"]
    hub.status = None
    async with pulling(client, "org/one") as answer:
        assert (await events(answer))[-1]["status"] == "success"


async def test_a_file_longer_than_was_said_is_cut_off_and_removed(
    client: httpx2.AsyncClient, hub: FakeHub, tmp_path: Path
) -> None:
    siblings: Any = fake_hub._info("org/one", hub.repos["org/one"])["siblings"]
    weights = [{**each, "size": 1000} for each in siblings if "lfs" in each]
    others = [each for each in siblings if "lfs" not in each]
    hub.says["org/one"] = {"siblings": [*others, *weights]}
    answer = await ask(client, "org/one")
    assert code_of(answer) == (503, "model_unavailable")
    assert "is longer than the hub says" in answer.json()["error"]["message"]
    assert not [*cached(tmp_path, "*.part")]
    assert await listed(client) == set()


async def test_a_pull_that_a_stop_cuts_short_is_completed_after_it(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulls, "PULL_PERIOD_S", 0.05)
    hub.gate.clear()
    given = cpu_settings(place(hub, tmp_path), drain_s=30, **GIVEN)
    gateway = Gateway(given, catalog(tmp_path, {}), cpu_engines(place(hub, tmp_path)))
    async with served_app(gateway.asgi, given) as client:
        await ready(client)
        async with pulling(client, "org/one") as answer:
            await asyncio.to_thread(hub.half_sent.wait)
            body = {"model": "org/one", "stream": False}
            asking = client.post("/admin/models/pull", json=body, headers=ADMIN)
            whole = asyncio.ensure_future(asking)
            await until(lambda: len(gateway.in_flight.requests) == 2)
            async with asyncio.timeout(60):
                await gateway.drain()
                last = (await events(answer))[-1]
                assert code_of(await whole) == (503, "service_unavailable")
            assert last["error"]["code"] == "service_unavailable"
    assert [*cached(tmp_path, "*.part")]
    hub.gate.set()
    async with serving(hub, tmp_path) as client, pulling(client, "org/one") as answer:
        assert (await events(answer))[-1]["status"] == "success"
    assert not [*cached(tmp_path, "*.part")]


async def test_a_reload_keeps_what_was_named_unless_models_yaml_lists_it(
    hub: FakeHub, tmp_path: Path
) -> None:
    async with serving(hub, tmp_path, models=tmp_path / "models.yaml") as client:
        answer = await ask(client, "org/one")
        assert answer.status_code == 200, answer.text
        answer = await client.post("/admin/reload", headers=ADMIN)
        assert answer.json() == {"object": "reload", "added": [], "changed": [], "removed": []}
        catalog(tmp_path, {"org/one": {"kind": "embedding", "source": "hub:org/one"}})
        answer = await client.post("/admin/reload", headers=ADMIN)
        assert answer.json()["changed"] == ["org/one"]
        assert code_of(await ask(client, "org/one")) == (400, "unsupported_model")
