"""/dashboard: what it may load, who may watch, how many, and what they are told."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway import metrics
from gateway.api import dashboard
from gateway.api.dashboard import FILES
from gateway.api.in_flight import LAST_ERRORS, MOST_WATCHERS
from gateway.app.gateway import Gateway
from gateway.errors import ModelLoadFailed
from gateway.registry import Catalog
from tests.fakes import ScriptedEngines
from tests.provoked.engines import HeldEngines
from tests.serving_app import catalog, ready, served, served_app, settings

pytestmark = pytest.mark.anyio
PROMPT = "the-patient-is-called-Ada"
HOSTILE = "<img/src=x/onerror=alert(1)>"
ADMIN = {"authorization": "Bearer sesame"}
Sample = dict[str, Any]


def chat(text: str = "hi", **more: Any) -> dict[str, Any]:
    return {"model": "writer", "messages": [{"role": "user", "content": text}], **more}


def getting(path: str) -> dict[str, Any]:
    """Return the scope of a GET."""
    return {
        "type": "http",
        "http_version": "1.1",
        "method": "GET",
        "path": path,
        "query_string": b"",
        "headers": [(b"host", b"localhost")],
        "scheme": "http",
    }


@pytest.fixture
async def admin(models: Catalog, engines: ScriptedEngines) -> AsyncIterator[httpx2.AsyncClient]:
    """Give a client of a gateway with an admin key, and no others."""
    async with served(models, engines, admin_key="sesame") as client:
        yield client


@asynccontextmanager
async def watching(
    client: httpx2.AsyncClient, path: str = "/dashboard/samples", **headers: str
) -> AsyncIterator[AsyncIterator[Sample]]:
    """Watch while entered: iterate over the samples."""
    async with client.stream("GET", path, headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()

        async def samples() -> AsyncIterator[Sample]:
            async for line in answer.aiter_lines():
                yield json.loads(line)

        yield samples()


async def first_until(samples: AsyncIterator[Sample], watchers: int) -> AsyncIterator[Sample]:
    """Yield samples up to the first with so many watchers."""
    async for sample in samples:
        yield sample
        if sample["watchers"] == watchers:
            return


async def one(client: httpx2.AsyncClient, path: str = "/dashboard/samples", **more: str) -> Sample:
    async with watching(client, path, **more) as samples:
        return await anext(samples)


async def until_watched_by(client: httpx2.AsyncClient, count: int) -> None:
    """Wait until so many watch."""
    async with asyncio.timeout(10):
        while True:
            async with client.stream("GET", "/dashboard/samples") as answer:
                if answer.status_code == 200:
                    sample = json.loads(await anext(answer.aiter_lines()))
                    if sample["watchers"] == count + 1:
                        return
            await asyncio.sleep(0.02)


async def in_flight(client: httpx2.AsyncClient, **expected: object) -> Sample:
    """Watch until a request is as expected, and return it."""
    async with asyncio.timeout(10), watching(client, "/admin/samples", **ADMIN) as samples:
        async for sample in samples:
            for each in sample["requests"]:
                if expected.items() <= each.items():
                    found: Sample = each
                    return found
    raise AssertionError("the stream ended")


@pytest.mark.parametrize("name", FILES)
async def test_the_page_may_load_its_own_files_and_nothing_else(
    client: httpx2.AsyncClient, name: str
) -> None:
    answer = await client.get(f"/dashboard/{name}")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith(FILES[name])
    assert answer.headers["x-content-type-options"] == "nosniff"
    policy = dict(
        each.strip().split(" ", 1) for each in answer.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    for kind in ("script-src", "style-src", "img-src", "connect-src"):
        assert policy[kind] == "'self'", kind
    assert policy["require-trusted-types-for"] == "'script'"


async def test_what_the_page_refers_to_is_among_its_files(client: httpx2.AsyncClient) -> None:
    """Nothing is inline, and no address is another's."""
    page = (await client.get("/dashboard")).text
    assert re.findall(r'(?:src|href)="([^"]+)"', page)
    for reference in re.findall(r'(?:src|href)="([^"#]+)"', page):
        assert reference.removeprefix("dashboard/") in FILES, reference
    assert not re.search(r"<style|<script>|\sstyle=|\son\w+=|javascript:|https?://", page)
    for name in FILES:
        text = (await client.get(f"/dashboard/{name}")).text
        addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"')]*", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}, name
        for module in re.findall(r'from "\./([^"]+)"', text):
            assert module in FILES


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".js")])
async def test_nothing_is_made_of_markup(client: httpx2.AsyncClient, name: str) -> None:
    """Texts of models, requests and errors are set as text."""
    script = (await client.get(f"/dashboard/{name}")).text
    sinks = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|eval\(|Function\("
    assert not re.search(sinks, script)
    assert not re.search(r"localStorage|document\.cookie|setAttribute\(.style", script)


@pytest.mark.parametrize(
    ("given", "is_there"),
    [
        ({}, True),
        ({"dashboard": False}, False),
        ({"dashboard": False, "api_keys": "k"}, False),
        ({"host": "0.0.0.0", "allow_unauthenticated": True}, False),
        ({"bind": "127.0.0.1,192.168.0.2", "allow_unauthenticated": True}, False),
        ({"host": "0.0.0.0", "allow_unauthenticated": True, "admin_key": "sesame"}, False),
        ({"host": "0.0.0.0", "api_keys": "k"}, True),
        ({"bind": "unix:/tmp/gateway.sock"}, True),
    ],
)
async def test_beyond_loopback_it_is_there_only_with_keys(
    models: Catalog, engines: ScriptedEngines, given: dict[str, Any], is_there: bool
) -> None:
    """With its samples, an admin's too; the openapi document agrees."""
    key = {"authorization": "Bearer k"}
    async with served(models, engines, **given) as client:
        for path in ("/dashboard", "/dashboard/dashboard.js"):
            assert (await client.get(path, headers=key)).status_code == (200 if is_there else 404)
        document = (await client.get("/openapi.json", headers=key)).json()
        assert ("/dashboard/samples" in document["paths"]) is is_there
        if not is_there:
            assert (await client.get("/dashboard/samples", headers=key)).status_code == 404
            headers = ADMIN if "admin_key" in given else key
            assert (await client.get("/admin/samples", headers=headers)).status_code == 404


async def test_with_keys_the_page_is_open_and_its_samples_are_not(
    models: Catalog, engines: ScriptedEngines
) -> None:
    """A browser can send no key when it opens a page."""
    async with served(models, engines, api_keys="k", admin_key="sesame") as client:
        assert (await client.get("/dashboard")).status_code == 200
        for headers in ({}, {"authorization": "Bearer wrong"}, ADMIN):
            assert (await client.get("/dashboard/samples", headers=headers)).status_code == 401
        assert (await client.get("/dashboard/samples?key=k")).status_code == 401
        user = {"authorization": "Bearer k"}
        assert (await client.get("/admin/samples", headers=user)).status_code == 401
        assert "requests" not in await one(client, **user)
        assert (await one(client, "/admin/samples", **ADMIN))["requests"] == []


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"origin": "http://evil.example"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
async def test_without_keys_no_other_page_can_watch(
    client: httpx2.AsyncClient, headers: dict[str, str]
) -> None:
    """Nor take a place by an image that never ends to load."""
    assert (await client.get("/dashboard/samples", headers=headers)).status_code == 403
    if "host" in headers:
        assert (await client.get("/dashboard", headers=headers)).status_code == 403
    assert (await one(client, **{"sec-fetch-site": "same-origin"}))["watchers"] == 1


async def test_the_gateways_own_page_may_call_it_without_keys(
    models: Catalog, engines: ScriptedEngines
) -> None:
    """A browser sends its origin with each POST; another port or scheme is another origin."""
    async with served(models, engines, allowed_hosts="ours.example:1,*") as client:
        here = f"127.0.0.1:{client.base_url.port}"
        for host, origin, status in [
            (here, f"http://{here}", 200),
            ("ours.example:1", "http://ours.example:1", 200),
            (here, f"https://{here}", 403),
            (here, "http://127.0.0.1:1", 403),
            (here, "null", 403),
            ("rebound.example", "http://rebound.example", 403),
        ]:
            headers = {"host": host, "origin": origin}
            answer = await client.post("/v1/chat/completions", json=chat(), headers=headers)
            assert answer.status_code == status, (host, origin)


async def test_a_sample_says_what_metrics_say(client: httpx2.AsyncClient) -> None:
    """Every series of the gateway, by the same names."""
    for _ in range(3):
        await client.post("/v1/chat/completions", json=chat("hello"))
    await client.post("/v1/embeddings", json={"model": "embed", "input": ["a", "bbb"]})
    sample = await one(client)
    text = (await client.get("/metrics")).text
    told = {}
    for line in text.splitlines():
        if line.startswith("gateway_") and "_created" not in line:
            series, _, value = line.rpartition(" ")
            told[series] = float(value)
    shown = {}
    for name, values in sample["values"].items():
        for labels, value in values:
            shown[_series(name, labels)] = value
    for name, histogram in sample["histograms"].items():
        for labels, counts, total in histogram["series"]:
            assert len(counts) == len(histogram["edges"]) + 1
            shown[_series(f"{name}_count", labels)] = counts[-1]
            shown[_series(f"{name}_sum", labels)] = total
            for edge, count in zip([*histogram["edges"], "+Inf"], counts, strict=True):
                bucket = {**labels, "le": edge if edge == "+Inf" else str(float(edge))}
                shown[_series(f"{name}_bucket", bucket)] = count
    assert 'gateway_stage_seconds_bucket{le="0.5",model="writer"' in "".join(shown)
    moving = ("gateway_tasks", "samples", "/metrics", "gateway_request_seconds", "/ready")
    for series in told.keys() | shown.keys():
        if not any(each in series for each in moving):
            assert shown[series] == told[series], series


def _series(name: str, labels: dict[str, str]) -> str:
    pairs = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
    return f"{name}{{{pairs}}}" if pairs else name


async def test_a_fifth_watcher_is_refused_and_one_that_leaves_makes_room(
    client: httpx2.AsyncClient,
) -> None:
    async with watching(client) as first, watching(client), watching(client):
        await anext(first)
        async with watching(client) as fourth:
            counts = [each["watchers"] async for each in first_until(fourth, MOST_WATCHERS)]
            assert counts[-1] == MOST_WATCHERS
            refused = await client.get("/dashboard/samples")
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "too_many_watchers"
            assert refused.headers["retry-after"] == "10"
        await until_watched_by(client, 3)
    await until_watched_by(client, 0)


async def test_the_last_place_is_an_admins(admin: httpx2.AsyncClient) -> None:
    """Who else watches cannot keep them from what they would cancel."""
    async with watching(admin) as first, watching(admin), watching(admin):
        await anext(first)
        assert (await admin.get("/dashboard/samples")).status_code == 429
        assert (await one(admin, "/admin/samples", **ADMIN))["watchers"] == MOST_WATCHERS


async def test_a_look_at_the_head_takes_no_place(client: httpx2.AsyncClient) -> None:
    for _ in range(MOST_WATCHERS + 1):
        answer = await client.head("/dashboard/samples")
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/x-ndjson"
    assert (await one(client))["watchers"] == 1


async def test_what_is_cancelled_while_it_is_sent_is_counted(
    models: Catalog, engines: ScriptedEngines
) -> None:
    """Its answer has begun: the connection ends, and its record is what is left of it."""
    app = Gateway(settings(), models, engines).asgi
    scope = getting("/v1/models")
    begun = asyncio.Event()

    async def send(message: Any) -> None:
        begun.set()
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def receive() -> Any:
        await asyncio.Event().wait()

    counted = metrics.of(metrics.REQUESTS, "/v1/models", "200")._value
    before = counted.get()
    request = asyncio.ensure_future(app(scope, receive, send))
    await begun.wait()
    await asyncio.sleep(0.01)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert counted.get() == before + 1


async def test_a_sample_comes_each_second_and_is_made_once_for_all(
    client: httpx2.AsyncClient,
) -> None:
    async with watching(client) as one, watching(client) as other:
        ones = [await anext(one) for _ in range(3)]
        others = [await anext(other) for _ in range(3)]
    assert {each["at"] for each in ones[1:]} & {each["at"] for each in others}
    assert all(0.5 < later["at"] - earlier["at"] < 5 for earlier, later in pairwise(ones[1:]))


async def test_a_watch_is_no_slow_request(client: httpx2.AsyncClient) -> None:
    """It lasts as long as somebody looks, which is no latency."""

    async def counted(series: str) -> float:
        found = re.search(re.escape(series) + r" (\S+)", (await client.get("/metrics")).text)
        return float(found[1]) if found else 0.0

    answered = 'gateway_requests_total{route="/dashboard/samples",status="200"}'
    timed = 'gateway_request_seconds_count{route="/dashboard/samples"}'
    before = await counted(answered), await counted(timed)
    async with watching(client) as samples:
        await anext(samples)
    async with asyncio.timeout(5):
        while await counted(answered) == before[0]:
            await asyncio.sleep(0.02)
    assert await counted(timed) == before[1]


async def test_a_watcher_holds_up_no_shutdown(models: Catalog, engines: ScriptedEngines) -> None:
    """Its stream ends within a second, after a sample that says so."""
    given = settings()
    gateway = Gateway(given, models, engines)
    async with served_app(gateway.asgi, given) as client:
        await ready(client)
        async with watching(client) as samples:
            await anext(samples)
            async with asyncio.timeout(10):
                await gateway.drain()
                assert [each["status"] async for each in samples][-1] == "draining"


async def test_for_a_watcher_that_does_not_read_nothing_piles_up(
    models: Catalog, engines: ScriptedEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next sample is made when the last one is taken. When it leaves, its place is free."""
    monkeypatch.setattr(dashboard, "PERIOD_S", 0.01)
    app = Gateway(settings(), models, engines).asgi
    scope = getting("/dashboard/samples")
    taken, gone = asyncio.Semaphore(0), asyncio.Event()
    sent: list[Sample] = []

    async def send(message: Any) -> None:
        if message.get("body"):
            sent.append(json.loads(message["body"]))
            await taken.acquire()

    async def receive() -> Any:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def watch(until: int) -> None:
        watch = asyncio.ensure_future(app(dict(scope), receive, send))
        async with asyncio.timeout(10):
            while len(sent) < until:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # in which more would come
        gone.set()
        async with asyncio.timeout(5):
            await watch
        gone.clear()

    await watch(1)
    assert len(sent) == 1
    for _ in range(20):
        taken.release()
    await watch(22)
    assert len(sent) == 22
    assert {each["watchers"] for each in sent} == {1}


async def test_requests_in_flight_are_told_without_what_they_say(
    admin: httpx2.AsyncClient, engines: ScriptedEngines
) -> None:
    """By their route, model, stage and tokens."""
    await admin.post("/v1/chat/completions", json=chat())
    engines.chat.gate.close()
    asked = asyncio.create_task(
        admin.post(
            "/v1/chat/completions",
            json=chat(PROMPT, user=PROMPT),
            headers={"x-request-id": HOSTILE},
        )
    )
    found = await in_flight(admin, stage="prefill")
    assert found["request_id"] == HOSTILE
    assert (found["method"], found["route"]) == ("POST", "/v1/chat/completions")
    assert (found["model"], found["tokens_in"]) == ("writer", len(PROMPT))
    assert 0 < found["age_s"] < 30
    engines.chat.gate.open()
    assert (await asked).status_code == 200
    sample = await one(admin, "/admin/samples", **ADMIN)
    assert sample["requests"] == []
    assert PROMPT not in json.dumps(sample)


@pytest.mark.parametrize("digits", [18, 19, 5000])
async def test_a_number_of_any_length_is_no_request_s(
    admin: httpx2.AsyncClient, digits: int
) -> None:
    answer = await admin.post(f"/admin/requests/{'9' * digits}/cancel", headers=ADMIN)
    assert answer.status_code == 404


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_request_that_is_cancelled_ends_with_an_error_that_says_so(
    admin: httpx2.AsyncClient, engines: ScriptedEngines, stream: bool
) -> None:
    """Its row leaves, and the next one is answered."""
    await admin.post("/v1/chat/completions", json=chat())
    engines.chat.gate.close()
    body = chat("a" * 50, stream=stream)
    asked = asyncio.create_task(admin.post("/v1/chat/completions", json=body))
    found = await in_flight(admin, stage="prefill")
    path = f"/admin/requests/{found['number']}/cancel"
    assert (await admin.post(path)).status_code == 401
    assert (await admin.post(path, headers=ADMIN)).json()["number"] == found["number"]
    answer = await asked
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "request_cancelled"
    assert answer.headers["x-should-retry"] == "false"
    engines.chat.gate.open()
    async with asyncio.timeout(5):
        while engines.chat.rows:
            await asyncio.sleep(0.01)
    assert (await admin.post(path, headers=ADMIN)).json()["error"]["code"] == "request_not_found"
    assert (await admin.post("/v1/chat/completions", json=chat())).status_code == 200
    [error] = (await one(admin, "/admin/samples", **ADMIN))["errors"][-1:]
    assert error["code"] == "request_cancelled"


async def test_a_stream_under_way_ends_with_an_event_that_says_so(models: Catalog) -> None:
    """After what was written so far, and without a [DONE]; a second press does no harm."""
    engines = HeldEngines()
    async with served(models, engines, admin_key="sesame") as admin:
        await admin.post("/v1/chat/completions", json=chat())
        engines.chat.hold_at_step = len(engines.chat.steps) + 3
        body = chat("b" * 60, stream=True)
        async with admin.stream("POST", "/v1/chat/completions", json=body) as answer:
            assert answer.status_code == 200
            found = await in_flight(admin, stage="decode")
            path = f"/admin/requests/{found['number']}/cancel"
            presses = await asyncio.gather(*(admin.post(path, headers=ADMIN) for _ in range(2)))
            assert 200 in {each.status_code for each in presses}
            engines.open()
            lines = [line async for line in answer.aiter_lines() if line]
        text = (await admin.get("/metrics")).text
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "request_cancelled"
    assert "[DONE]" not in "".join(lines)
    assert found["tokens_out"] > 0
    assert re.search(r'gateway_cancelled_total\{model="writer",stage="decode"\} [1-9]', text)


async def test_the_last_errors_have_an_id_and_a_code_and_no_words_of_the_request(
    admin: httpx2.AsyncClient, engines: ScriptedEngines
) -> None:
    """Messages may repeat what was sent. Callers turned away at the door are not among them."""
    identity = {"x-request-id": "mine-7"}
    await admin.get(f"/v1/{PROMPT}")
    await admin.post("/v1/chat/completions", json=chat(PROMPT, temperature=PROMPT))
    await admin.post("/v1/chat/completions", json={**chat(), "model": PROMPT}, headers=identity)
    engines.failing["writer"] = ModelLoadFailed("writer", HOSTILE)
    await admin.post("/v1/chat/completions", json=chat(PROMPT))
    sample = await one(admin, "/admin/samples", **ADMIN)
    assert [each["code"] for each in sample["errors"]] == [
        "model_load_failed",
        "model_not_found",
        "invalid_type",
    ]
    assert [each["status"] for each in sample["errors"]] == [500, 404, 400]
    assert sample["errors"][0]["model"] == "writer"
    assert sample["errors"][1]["request_id"] == "mine-7"
    assert {each["route"] for each in sample["errors"]} == {"/v1/chat/completions"}
    assert PROMPT not in json.dumps(sample)
    failed = next(each for each in sample["models"] if each["id"] == "writer")
    assert HOSTILE in failed["error"]
    for _ in range(LAST_ERRORS):
        await admin.get("/v1/models/nobody")
    errors = (await one(admin, "/admin/samples", **ADMIN))["errors"]
    assert [each["code"] for each in errors] == ["model_not_found"] * LAST_ERRORS


async def test_a_client_that_leaves_is_no_error(
    admin: httpx2.AsyncClient, engines: ScriptedEngines
) -> None:
    await admin.post("/v1/chat/completions", json=chat())
    engines.chat.gate.close()
    asked = asyncio.create_task(admin.post("/v1/chat/completions", json=chat("a" * 30)))
    await in_flight(admin, stage="prefill")
    asked.cancel()
    await asyncio.wait([asked])
    engines.chat.gate.open()
    async with asyncio.timeout(5):
        while (await one(admin, "/admin/samples", **ADMIN))["requests"]:
            await asyncio.sleep(0.05)
    assert (await one(admin, "/admin/samples", **ADMIN))["errors"] == []


async def test_a_model_pinned_by_hand_stays_until_it_is_unpinned_or_the_file_is_read(
    tmp_path: Path, engines: ScriptedEngines
) -> None:
    """With room for one, another finds none; a hostile name is a name."""
    specs = {
        name: {"kind": "embedding", "source": "path:."} for name in ("first", "second", HOSTILE)
    }
    given: dict[str, Any] = {
        "admin_key": "sesame",
        "models": tmp_path / "models.yaml",
        "cache_max_models": 1,
        "load_wait_s": 0.2,
    }

    async with served(catalog(tmp_path, specs), engines, **given) as client:

        async def embed(model: str) -> int:
            body = {"model": model, "input": "a"}
            return (await client.post("/v1/embeddings", json=body)).status_code

        async def post(path: str) -> Any:
            return (await client.post(f"/admin/{path}", headers=ADMIN)).json()

        async def pins() -> dict[str, bool]:
            models = (await one(client, "/admin/samples", **ADMIN))["models"]
            return {each["id"]: each["pinned"] for each in models}

        assert await embed("first") == 200
        assert (await post("models/first/pin"))["pinned"] is True
        assert await pins() == {"first": True, "second": False, HOSTILE: False}
        assert await embed("second") == 507
        assert (await post("models/first/unpin"))["pinned"] is False
        assert await embed("second") == 200
        await post("models/second/pin")
        assert await embed(HOSTILE) == 507
        await post("reload")
        assert await pins() == {"first": False, "second": False, HOSTILE: False}
        assert await embed(HOSTILE) == 200
        assert (await post("models/nobody/pin"))["error"]["code"] == "model_not_found"
