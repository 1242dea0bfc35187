"""/dashboard: its sources, its watchers, their number, and the samples they get."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from httpx2 import AsyncClient

from gateway import metrics
from gateway.api import dashboard
from gateway.api.dashboard import FILES
from gateway.api.in_flight import LAST_ERRORS, MOST_WATCHERS
from gateway.app.gateway import Gateway
from gateway.errors import ModelLoadFailed
from gateway.registry import Catalog
from tests.api.harness import chat, until_told
from tests.fakes import ScriptedEngines
from tests.provoked.engines import HeldEngines
from tests.serving_app import catalog, ready, served, served_app, settings
from tests.waiting import until

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
PROMPT = "the-patient-is-called-Ada"
HOSTILE = "<img/src=x/onerror=alert(1)>"
ADMIN = {"authorization": "Bearer sesame"}
Sample = dict[str, Any]


def getting(path: str) -> dict[str, Any]:
    """Return the scope of a GET."""
    scope = {"type": "http", "http_version": "1.1", "method": "GET", "scheme": "http"}
    return {**scope, "path": path, "query_string": b"", "headers": [(b"host", b"localhost")]}


@pytest.fixture
async def admin(models: Catalog, engines: ScriptedEngines) -> AsyncIterator[AsyncClient]:
    """Give a client of a gateway with an admin key, and no others."""
    async with served(models, engines, admin_key="sesame") as client:
        yield client


@asynccontextmanager
async def watching(
    client: AsyncClient, path: str = "/dashboard/samples", **headers: str
) -> AsyncIterator[AsyncIterator[Sample]]:
    """Watch while entered: iterate over the samples."""
    async with client.stream("GET", path, headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        lines = answer.aiter_lines()
        yield (json.loads(line) async for line in lines)


async def one(client: AsyncClient, path: str = "/dashboard/samples", **more: str) -> Sample:
    async with watching(client, path, **more) as samples:
        return await anext(samples)


async def told(admin: AsyncClient) -> Sample:
    return await one(admin, "/admin/samples", **ADMIN)


async def until_watched_by(client: AsyncClient, count: int) -> None:
    async def is_so() -> bool:
        async with client.stream("GET", "/dashboard/samples") as answer:
            if answer.status_code != 200:
                return False
            return bool(json.loads(await anext(answer.aiter_lines()))["watchers"] == count + 1)

    await until_told(is_so)


async def in_flight(client: AsyncClient, stage: str) -> Sample:
    """Watch until a request is at that stage, and return it."""
    async with asyncio.timeout(60), watching(client, "/admin/samples", **ADMIN) as samples:
        async for sample in samples:
            for each in sample["requests"]:
                if each["stage"] == stage:
                    found: Sample = each
                    return found
    raise AssertionError("the stream ended")


@pytest.mark.parametrize("name", FILES)
async def test_the_page_may_load_its_own_files_and_nothing_else(
    client: AsyncClient, name: str
) -> None:
    answer = await client.get(f"/dashboard/{name}")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith(FILES[name])
    assert answer.headers["x-content-type-options"] == "nosniff"
    directives = answer.headers["content-security-policy"].split(";")
    policy = dict(each.strip().split(" ", 1) for each in directives)
    for kind in ("default-src", "frame-ancestors", "base-uri", "form-action"):
        assert policy[kind] == "'none'", kind
    for kind in ("script-src", "style-src", "connect-src"):
        assert policy[kind] == "'self'", kind
    assert policy["img-src"] == "'self' blob:"
    assert policy["require-trusted-types-for"] == "'script'"


async def test_the_pages_have_nothing_inline_of_others_or_made_of_markup(
    client: AsyncClient,
) -> None:
    for path in ("/dashboard", "/docs"):
        page = (await client.get(path)).text
        loaded = re.findall(r'src="([^"]+)"|<link [^>]*href="([^"]+)"', page)
        assert len(loaded) == 3
        assert {"".join(each).removeprefix("dashboard/") for each in loaded} <= FILES.keys()
        for address in re.findall(r'<a href="([^"]+)"', page):
            assert (await client.get(f"/{address}")).status_code == 200
        assert not re.search(r"<style|<script>|\sstyle=|\son\w+=|javascript:|https?://", page)
    sinks = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|eval\(|Function\("
    for name in FILES:
        text = (await client.get(f"/dashboard/{name}")).text
        addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"')]*", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}, name
        assert set(re.findall(r'from "\./([^"]+)"', text)) <= FILES.keys()
        if name.endswith(".js"):
            assert not re.search(sinks, text)
            assert not re.search(r"localStorage|document\.cookie|setAttribute\(.style", text)


# What clients send when nothing else is asked of them.
BROWSERS = {
    "Chrome": "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,"
    "image/apng,*/*;q=0.8,application/signed-exchange;v=b3;q=0.7",
    "Firefox": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8",
    "Safari": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8",
    "a page alone": "text/html",
    "a page rather than JSON": "Application/JSON;q=0.5 , Text/HTML; level=1; q=0.9",
}
OTHERS = {
    "curl, requests, httpx, fetch": "*/*",
    "OpenAI's and Anthropic's SDKs": "application/json",
    "axios": "application/json, text/plain, */*",
    "urllib": "",
    "a name inside another": "application/x-text/html, text/htmlx",
    "no page": "text/html;q=0, */*",
    "JSON rather than a page": "application/json, text/html;q=0.1",
    "either": "text/html, application/json",
    "no number": "text/html;q=x",
}


@pytest.mark.parametrize("accept", BROWSERS.values(), ids=BROWSERS)
async def test_a_browser_at_the_root_is_sent_to_the_page(client: AsyncClient, accept: str) -> None:
    """The address is relative: a proxy may serve the gateway below a path."""
    for method in ("GET", "HEAD"):
        answer = await client.request(method, "/", headers={"accept": accept})
        assert (answer.status_code, answer.headers["location"]) == (307, "dashboard")
        assert answer.headers["vary"].startswith("Accept")
    page = await client.get("/", headers={"accept": accept}, follow_redirects=True)
    assert (page.status_code, page.url.path) == (200, "/dashboard")


@pytest.mark.parametrize("accept", OTHERS.values(), ids=OTHERS)
async def test_a_client_at_the_root_gets_json_that_names_the_pages(
    client: AsyncClient, accept: str
) -> None:
    answer = await client.get("/", headers={"accept": accept})
    assert answer.status_code == 200
    assert answer.headers["vary"].startswith("Accept")
    assert answer.json() == {
        "name": "mlx-gateway",
        "models": "/v1/models",
        "openapi": "/openapi.json",
        "dashboard": "/dashboard",
        "docs": "/docs",
    }


async def test_headers_of_one_name_count_together(client: AsyncClient) -> None:
    accepted = [("accept", "text/html;q=0.2"), ("accept", "application/json")]
    for headers in (accepted, accepted[::-1]):
        assert (await client.get("/", headers=headers)).status_code == 200


async def test_at_a_base_url_a_browser_gets_json_too(client: AsyncClient) -> None:
    answer = await client.get("/v1/", headers={"accept": BROWSERS["Chrome"]})
    assert (answer.status_code, answer.json()["dashboard"]) == (200, "/dashboard")


@pytest.mark.parametrize(
    ("given", "is_there"),
    [
        ({}, True),
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
    key = {"authorization": "Bearer k"}
    async with served(models, engines, **given) as client:
        index = (await client.get("/", headers={"accept": "text/html"})).json()
        assert ("dashboard" in index, "docs" in index) == (is_there, is_there)
        for path in ("/dashboard", "/dashboard/dashboard.js", "/docs"):
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
        assert (await told(client))["requests"] == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("host", "evil.example"),
        ("origin", "http://evil.example"),
        ("sec-fetch-site", "cross-site"),
        ("sec-fetch-site", "same-site"),
    ],
)
async def test_without_keys_no_other_page_can_watch(
    client: AsyncClient, name: str, value: str
) -> None:
    """Another page cannot take a place by an image that never ends to load, either."""
    assert (await client.get("/dashboard/samples", headers={name: value})).status_code == 403
    if name == "host":
        assert (await client.get("/dashboard", headers={name: value})).status_code == 403
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
            answer = await client.post(CHAT, json=chat(), headers={"host": host, "origin": origin})
            assert answer.status_code == status, (host, origin)


async def test_a_fifth_watcher_is_refused_and_one_that_leaves_makes_room(
    client: AsyncClient,
) -> None:
    for _ in range(MOST_WATCHERS + 1):  # a look at the head takes no place
        assert (await client.head("/dashboard/samples")).status_code == 200
    async with watching(client) as first, watching(client), watching(client):
        await anext(first)
        async with watching(client) as fourth:
            async for sample in fourth:
                if sample["watchers"] == MOST_WATCHERS:
                    break
            refused = await client.get("/dashboard/samples")
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "too_many_watchers"
            assert refused.headers["retry-after"] == "10"
        await until_watched_by(client, 3)
    await until_watched_by(client, 0)


async def test_the_last_place_is_an_admins(admin: AsyncClient) -> None:
    """Other watchers cannot keep admins from requests that they would cancel."""
    async with asyncio.timeout(60), watching(admin) as first, watching(admin), watching(admin):
        await anext(first)
        assert (await admin.get("/dashboard/samples")).status_code == 429
        assert (await told(admin))["watchers"] == MOST_WATCHERS


async def test_what_is_cancelled_while_it_is_sent_is_counted(
    models: Catalog, engines: ScriptedEngines
) -> None:
    """Its answer has begun: the connection ends, and only its record is left."""
    begun = asyncio.Event()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            begun.set()
            await asyncio.Event().wait()

    async def receive() -> Any:
        await asyncio.Event().wait()

    counted = metrics.of(metrics.REQUESTS, "/v1/models", "200")._value
    before = counted.get()
    app = Gateway(settings(), models, engines).asgi
    request = asyncio.ensure_future(app(getting("/v1/models"), receive, send))
    await begun.wait()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert counted.get() == before + 1


async def test_a_watch_is_no_slow_request(client: AsyncClient) -> None:
    """It lasts as long as somebody looks, which is no latency."""

    async def timed() -> list[str]:
        lines = (await client.get("/metrics")).text.splitlines()
        name = 'gateway_request_seconds_count{route="/dashboard/samples"}'
        return [line for line in lines if line.startswith(name)]

    counted = metrics.of(metrics.REQUESTS, "/dashboard/samples", "200")._value
    before, timed_before = counted.get(), await timed()
    await one(client)
    await until(lambda: counted.get() > before)
    assert await timed() == timed_before


async def test_a_watcher_holds_up_no_shutdown(models: Catalog, engines: ScriptedEngines) -> None:
    """Its stream ends within a second, after a sample that says so."""
    given = settings()
    gateway = Gateway(given, models, engines)
    async with served_app(gateway.asgi, given) as client:
        await ready(client)
        async with watching(client) as samples:
            await anext(samples)
            async with asyncio.timeout(60):
                await gateway.drain()
                assert [each["status"] async for each in samples][-1] == "draining"


async def test_for_a_watcher_that_does_not_read_nothing_piles_up(
    models: Catalog, engines: ScriptedEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next sample is made when the last one is taken. When it leaves, its place is free."""
    monkeypatch.setattr(dashboard, "PERIOD_S", 0.01)
    app = Gateway(settings(), models, engines).asgi
    taken, gone = asyncio.Semaphore(0), asyncio.Event()
    sent: list[Sample] = []

    async def send(message: Any) -> None:
        if message.get("body"):
            sent.append(json.loads(message["body"]))
            await taken.acquire()

    async def receive() -> Any:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def watch(count: int) -> None:
        watch = asyncio.ensure_future(app(getting("/dashboard/samples"), receive, send))
        await until(lambda: len(sent) >= count)
        await asyncio.sleep(0.1)  # more would come in this time
        gone.set()
        await asyncio.wait_for(watch, 60)
        gone.clear()

    await watch(1)
    assert len(sent) == 1
    for _ in range(20):
        taken.release()
    await watch(22)
    assert len(sent) == 22
    assert {each["watchers"] for each in sent} == {1}


async def test_requests_in_flight_are_told_without_what_they_say(
    admin: AsyncClient, engines: ScriptedEngines
) -> None:
    await admin.post(CHAT, json=chat())
    engines.chat.gate.close()
    asking = admin.post(CHAT, json=chat(PROMPT, user=PROMPT), headers={"x-request-id": HOSTILE})
    asked = asyncio.ensure_future(asking)
    found = await in_flight(admin, "prefill")
    assert found["request_id"] == HOSTILE
    assert (found["method"], found["route"]) == ("POST", CHAT)
    assert (found["model"], found["tokens_in"]) == ("writer", len(PROMPT))
    assert 0 < found["age_s"] < 30
    engines.chat.gate.open()
    assert (await asked).status_code == 200
    sample = await told(admin)
    assert sample["requests"] == []
    assert PROMPT not in json.dumps(sample)


@pytest.mark.parametrize("digits", [18, 19, 5000])
async def test_a_number_of_any_length_is_no_request_s(admin: AsyncClient, digits: int) -> None:
    answer = await admin.post(f"/admin/requests/{'9' * digits}/cancel", headers=ADMIN)
    assert answer.status_code == 404


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_request_that_is_cancelled_ends_with_an_error_that_says_so(
    admin: AsyncClient, engines: ScriptedEngines, stream: bool
) -> None:
    """Its row leaves, and the next one is answered."""
    await admin.post(CHAT, json=chat())
    engines.chat.gate.close()
    asked = asyncio.ensure_future(admin.post(CHAT, json=chat("a" * 50, stream=stream)))
    found = await in_flight(admin, "prefill")
    path = f"/admin/requests/{found['number']}/cancel"
    assert (await admin.post(path)).status_code == 401
    assert (await admin.post(path, headers=ADMIN)).json()["number"] == found["number"]
    answer = await asked
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "request_cancelled")
    assert answer.headers["x-should-retry"] == "false"
    engines.chat.gate.open()
    await until(lambda: not engines.chat.rows)
    assert (await admin.post(path, headers=ADMIN)).json()["error"]["code"] == "request_not_found"
    assert (await admin.post(CHAT, json=chat())).status_code == 200
    assert (await told(admin))["errors"][-1]["code"] == "request_cancelled"


async def test_a_stream_under_way_ends_with_an_event_that_says_so(models: Catalog) -> None:
    """It follows the text written so far, without a [DONE]; a second press does no harm."""
    engines = HeldEngines()
    async with served(models, engines, admin_key="sesame") as admin:
        await admin.post(CHAT, json=chat())
        engines.chat.hold_at_step = len(engines.chat.steps) + 3
        body = chat("b" * 60, stream=True)
        async with admin.stream("POST", CHAT, json=body) as answer:
            assert answer.status_code == 200
            found = await in_flight(admin, "decode")
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
    admin: AsyncClient, engines: ScriptedEngines
) -> None:
    """Messages may repeat a request's text. Callers turned away at the door are not in the list."""
    identity = {"x-request-id": "mine-7"}
    await admin.get(f"/v1/{PROMPT}")
    await admin.post(CHAT, json=chat(PROMPT, temperature=PROMPT))
    await admin.post(CHAT, json=chat(model=PROMPT), headers=identity)
    engines.failing["writer"] = ModelLoadFailed("writer", HOSTILE)
    await admin.post(CHAT, json=chat(PROMPT))
    sample = await told(admin)
    failed, unknown, wrong = sample["errors"]
    assert (failed["status"], failed["code"]) == (500, "model_load_failed")
    assert (unknown["status"], unknown["code"]) == (404, "model_not_found")
    assert (wrong["status"], wrong["code"]) == (400, "invalid_type")
    assert (failed["model"], failed["route"], unknown["request_id"]) == ("writer", CHAT, "mine-7")
    assert PROMPT not in json.dumps(sample)
    told_of = next(each for each in sample["models"] if each["id"] == "writer")
    assert HOSTILE in told_of["error"]
    for _ in range(LAST_ERRORS):
        await admin.get("/v1/models/nobody")
    codes = [each["code"] for each in (await told(admin))["errors"]]
    assert codes == ["model_not_found"] * LAST_ERRORS


async def test_a_client_that_leaves_is_no_error(
    admin: AsyncClient, engines: ScriptedEngines
) -> None:
    await admin.post(CHAT, json=chat())
    engines.chat.gate.close()
    asked = asyncio.ensure_future(admin.post(CHAT, json=chat("a" * 30)))
    await in_flight(admin, "prefill")
    asked.cancel()
    await asyncio.wait([asked])
    async with asyncio.timeout(60):
        while (sample := await told(admin))["requests"]:
            await asyncio.sleep(0.05)
    engines.chat.gate.open()
    assert sample["errors"] == []


async def test_a_model_pinned_by_hand_stays_until_it_is_unpinned_or_the_file_is_read(
    tmp_path: Path, engines: ScriptedEngines
) -> None:
    """The cache has room for one model, so another is refused while the first is pinned."""
    specs = {name: {"kind": "embedding", "source": "path:."} for name in ("first", HOSTILE)}
    given: dict[str, Any] = {"models": tmp_path / "models.yaml", "admin_key": "sesame"}
    given |= {"cache_max_models": 1, "load_wait_s": 0.2}
    async with served(catalog(tmp_path, specs), engines, **given) as client:

        async def embed(model: str) -> int:
            body = {"model": model, "input": "a"}
            return (await client.post("/v1/embeddings", json=body)).status_code

        async def post(path: str) -> Any:
            return (await client.post(f"/admin/{path}", headers=ADMIN)).json()

        async def pins() -> dict[str, bool]:
            return {each["id"]: each["pinned"] for each in (await told(client))["models"]}

        assert await embed("first") == 200
        assert (await post("models/first/pin"))["pinned"] is True
        assert await pins() == {"first": True, HOSTILE: False}
        assert await embed(HOSTILE) == 507
        assert (await post("models/first/unpin"))["pinned"] is False
        assert await embed(HOSTILE) == 200
        assert await embed("first") == 200
        await post("models/first/pin")
        await post("reload")
        assert await pins() == {"first": False, HOSTILE: False}
        assert await embed(HOSTILE) == 200
        assert (await post("models/nobody/pin"))["error"]["code"] == "model_not_found"
