"""Checks around every request: ids, keys, browsers, limits, and errors in one shape."""

import asyncio
import gzip
import random
import socket
from typing import Any

import orjson
import pytest
import structlog
from httpx2 import ASGITransport, AsyncClient
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.api.access import is_here, origin_pattern
from gateway.api.in_flight import context_of
from gateway.api.middleware import PIECE_BYTES, split_body
from gateway.app.gateway import Gateway
from gateway.jobs import RoutingKeys
from gateway.registry import Catalog
from tests.api.harness import chat, error_of, protected
from tests.fakes import ScriptedEngines
from tests.serving_app import served, served_app, settings
from tests.waiting import until

pytestmark = pytest.mark.anyio

CHAT = chat()


async def test_every_answer_has_a_request_id_and_one_sent_is_echoed(client: AsyncClient) -> None:
    assert (await client.get("/v1/models")).headers["x-request-id"].startswith("req-")
    sent = await client.get("/nowhere", headers={"x-request-id": "mine-7"})
    assert sent.headers["x-request-id"] == "mine-7"
    odd = await client.get("/health", headers={"x-request-id": "a b"})
    assert odd.headers["x-request-id"].startswith("req-")


async def test_the_context_has_the_names_that_a_router_leaves_in_the_scope() -> None:
    found: list[RoutingKeys] = []

    async def note(scope: Scope, receive: Receive, send: Send) -> None:
        found.append(context_of(scope).routing_keys)
        await Response()(scope, receive, send)

    named = RoutingKeys([b"name"], 0.5)

    async def routed(scope: Scope, receive: Receive, send: Send) -> None:
        await protected(note)({**scope, "routing_keys": named}, receive, send)

    for app in (protected(note), routed):
        async with AsyncClient(transport=ASGITransport(app), base_url="http://localhost") as client:
            assert (await client.get("/x")).status_code == 200
    assert found == [RoutingKeys(), named]


async def test_a_job_has_the_names_that_a_router_leaves_in_the_scope(models: Catalog) -> None:
    named, engines, given = RoutingKeys([b"name"], 0.5), ScriptedEngines(), settings()
    app = Gateway(given, models, engines).asgi

    async def routed(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "routing_keys": named}, receive, send)

    async with served_app(routed, given) as client:
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
    assert [job.caller.routing_keys for job in engines.chat.jobs] == [named]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nowhere", 404, "unknown_url"),
        ("POST", "/v1/audio/speech", 404, "unknown_url"),
        ("POST", "/", 405, "method_not_allowed"),
        ("GET", "/v1/embeddings", 405, "method_not_allowed"),
        ("DELETE", "/v1/chat/completions", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("DELETE", "/v1/models/writer", 405, "method_not_allowed"),
        ("GET", "/v1/models/nobody", 404, "model_not_found"),
    ],
)
async def test_wrong_paths_and_methods_are_told_in_the_envelope(
    client: AsyncClient, method: str, path: str, status: int, code: str
) -> None:
    """Anything else loses its code on the way through an SDK."""
    answer = await client.request(method, path)
    assert error_of(answer, status)["code"] == code
    assert status != 405 or answer.headers["allow"]


async def test_a_method_is_told_and_logged_no_longer_than_a_path(client: AsyncClient) -> None:
    with structlog.testing.capture_logs() as lines:
        answer = await client.request("M" * 20_000, "/v1/models")
        await until(lambda: any(line["event"] == "request" for line in lines))
    assert error_of(answer, 405)["message"].startswith("Not allowed to MMM")
    assert max(len(str(line)) for line in lines) < 1000
    assert len(answer.text) < 1000


LLAMA_CPPS = [
    *("/completion", "/infill", "/apply-template", "/embedding", "/props", "/slots", "/predict"),
    *("/slots/0?action=save", "/lora-adapters", "/tools", "/cors-proxy?url=http://127.0.0.1/"),
    *("/v1/stream?conv_id=%0D%0Aforged&from=0", "/v1/audio/transcriptions"),
]


@pytest.mark.parametrize("path", LLAMA_CPPS)
async def test_what_llama_cpp_serves_of_its_own_is_not_there(
    client: AsyncClient, path: str
) -> None:
    """No tools are run, no address is fetched, no state is written to a file."""
    for method in ("GET", "POST", "DELETE"):
        error = error_of(await client.request(method, path), 404)
        assert error["code"] == "unknown_url"
        assert "\n" not in error["message"]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"7", b'"x"', b"null", b"\xff\xfe", b'{"a":NaN}', b"{}{}"]
)
@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/chat/completions"])
async def test_a_body_that_is_no_json_object_is_a_400(
    client: AsyncClient, path: str, body: bytes
) -> None:
    error = error_of(await client.post(path, content=body))
    assert error["type"] == "invalid_request_error"


async def test_a_body_over_the_limit_is_a_413(models: Catalog, engines: ScriptedEngines) -> None:
    """A client that is still sending gets to read it."""
    async with served(models, engines, max_body_bytes=1024) as client:
        declared = await client.post("/v1/embeddings", content=b"x" * 1025)
        assert error_of(declared, 413)["code"] == "request_too_large"

        async def split_body() -> Any:
            for _ in range(20):
                yield b"x" * 100

        counted = await client.post("/v1/embeddings", content=split_body())
        assert counted.status_code == 413


async def test_a_body_that_does_not_come_is_a_408(
    models: Catalog, engines: ScriptedEngines
) -> None:
    async with served(models, engines, body_timeout_s=0.2) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
        head = b"POST /v1/embeddings HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n"
        writer.write(head + b"{")
        async with asyncio.timeout(60):
            status = await reader.readline()
        writer.close()
    assert b" 408 " in status


async def test_with_keys_only_their_holders_come_in(
    models: Catalog, engines: ScriptedEngines
) -> None:
    """Supervisors need none; metrics are for holders too."""
    async with served(models, engines, api_keys="first,second") as client:
        for path in ("/v1/models", "/metrics", "/nowhere"):
            assert (await client.get(path)).status_code == 401
        for path in ("/health", "/ready", "/v1/health"):
            assert (await client.get(path)).status_code == 200
        for given in ("Bearer third", "Bearer", "first", "Basic first", "Bearer firs"):
            answer = await client.get("/v1/models", headers={"authorization": given})
            assert error_of(answer, 401)["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
            assert "third" not in answer.text
        for key in ("first", "second"):
            answer = await client.get("/v1/models", headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == 200


async def test_of_a_header_sent_twice_the_first_counts(
    models: Catalog, engines: ScriptedEngines
) -> None:
    """Whichever a proxy in front looked at, it is the one that came first."""
    right, wrong = ("authorization", "Bearer first"), ("authorization", "Bearer other")
    async with served(models, engines, api_keys="first") as client:
        assert (await client.get("/v1/models", headers=[right, wrong])).status_code == 200
        assert (await client.get("/v1/models", headers=[wrong, right])).status_code == 401


async def test_a_refusal_reaches_an_allowed_page_too(
    models: Catalog, engines: ScriptedEngines
) -> None:
    """Without CORS headers a browser shows its page nothing, not even a 401."""
    async with served(
        models, engines, api_keys="first", cors_origins="https://app.example"
    ) as client:
        for status, given in ((401, {}), (431, {"x-large": "x" * 40_000})):
            headers = {"origin": "https://app.example", **given}
            answer = await client.get("/v1/models", headers=headers)
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == "https://app.example"
            assert "x-request-id" in answer.headers["access-control-expose-headers"]


async def test_a_rebound_host_or_a_foreign_origin_is_refused(client: AsyncClient) -> None:
    """A web page must not use a gateway that asks for no key."""
    rebound = await client.get("/v1/models", headers={"host": "evil.example"})
    assert "GATEWAY_ALLOWED_HOSTS" in error_of(rebound, 403)["message"]
    error_of(await client.get("/v1/models", headers={"origin": "https://evil.example"}), 403)
    for host in ("localhost:8000", "127.0.0.1", "[::1]:8000"):
        assert (await client.get("/v1/models", headers={"host": host})).status_code == 200


async def test_hosts_and_origins_can_be_allowed(models: Catalog, engines: ScriptedEngines) -> None:
    async with served(
        models, engines, allowed_hosts="gw.local", cors_origins="https://app.example"
    ) as client:
        assert (await client.get("/v1/models", headers={"host": "gw.local:80"})).status_code == 200
        headers = {"origin": "https://app.example"}
        answer = await client.get("/v1/models", headers=headers)
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        other = await client.get("/v1/models", headers={"origin": "https://other.example"})
        assert other.status_code == 403


async def test_an_allowed_page_may_send_its_key(models: Catalog, engines: ScriptedEngines) -> None:
    """A browser asks first, without it; another's page is told nothing that lets it go on."""
    async with served(
        models, engines, api_keys="first", cors_origins="https://app.example"
    ) as client:
        asked = {
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization, content-type, x-api-key",
        }
        for path in ("/v1/chat/completions", "/v1/messages"):
            ours = await client.options(path, headers={"origin": "https://app.example", **asked})
            assert ours.status_code == 200
            assert ours.headers["access-control-allow-origin"] == "https://app.example"
            assert "POST" in ours.headers["access-control-allow-methods"]
            allowed = ours.headers["access-control-allow-headers"].split(", ")
            assert {"authorization", "content-type", "x-api-key"} <= set(allowed)
            other = await client.options(path, headers={"origin": "https://evil.example", **asked})
            assert other.status_code >= 400
            assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize(
    "origin",
    [
        "tauri://localhost",  # Jan
        "http://tauri.localhost",  # Jan on Windows
        "app://obsidian.md",
        "vscode-webview://0q3u1vh7",
        "vscode-file://vscode-app",
    ],
)
async def test_a_desktop_app_may_call(client: AsyncClient, origin: str) -> None:
    """No web page can have its origin; its preflight is answered, its answer shown to it."""
    headers = {"origin": origin}
    asked = {"method": "POST", "headers": "authorization", "private-network": "true"}
    asked = {f"access-control-request-{name}": value for name, value in asked.items()}
    preflight = await client.options("/v1/chat/completions", headers={**headers, **asked})
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == origin
    assert preflight.headers["access-control-allow-private-network"] == "true"
    answer = await client.get("/v1/models", headers=headers)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == origin
    exposed = answer.headers["access-control-expose-headers"].split(", ")
    assert {"x-should-retry", "x-gateway-images-left-out"} <= set(exposed)


@pytest.mark.parametrize(
    "origin",
    [
        "null",  # any page's sandboxed frame
        *("https://tauri.localhost.evil.example", "http://tauri.localhost:1"),
        *("https://evil.example", "http://localhost:3000", "xapp://a", "app://a/tauri://b"),
        "chrome-extension://abc",
    ],
)
async def test_an_origin_that_a_web_page_can_have_is_no_desktop_app(
    client: AsyncClient, origin: str
) -> None:
    answer = await client.get("/v1/models", headers={"origin": origin})
    assert answer.status_code == 403
    asked = {"access-control-request-method": "POST", "origin": origin}
    preflight = await client.options("/v1/models", headers=asked)
    assert preflight.status_code >= 400
    assert "access-control-allow-origin" not in preflight.headers


@pytest.mark.parametrize(
    ("allowed", "taken", "refused"),
    [
        ("http://localhost:*", "http://localhost http://localhost:3000 http://localhost:65535",
         "https://localhost:1 http://localhost:x http://localhost.evil.example"),
        ("null", "null", "https://evil.example"),
        ("chrome-extension://*", "chrome-extension://abc", "https://abc"),
        ("https://*.ours.example", "https://a.ours.example https://a.b.ours.example",
         "https://ours.example https://evil.example:1.ours.example https://aours.example"),
        ("*", "https://evil.example null", ""),
    ],
)  # fmt: skip
def test_an_origin_may_be_a_pattern(allowed: str, taken: str, refused: str) -> None:
    pattern = origin_pattern([allowed])
    assert all(map(pattern.fullmatch, taken.split()))
    assert not any(map(pattern.fullmatch, refused.split()))


@pytest.mark.parametrize(
    "host",
    [
        "host.docker.internal:8000",
        "HOST.docker.internal",
        "gateway.localhost",
        socket.gethostname().partition(".")[0],
        f"{socket.gethostname().partition('.')[0]}.local:8000",
    ],
)
async def test_a_container_and_this_machines_names_are_taken(
    client: AsyncClient, host: str
) -> None:
    """No web page can have them, so none was led here by them."""
    answer = await client.post("/v1/chat/completions", json=CHAT, headers={"host": host})
    assert answer.status_code == 200
    own_page = {"host": host, "origin": f"http://{host.lower()}"}
    assert (await client.get("/v1/models", headers=own_page)).status_code == 200


def test_this_machine_is_told_from_names_that_look_like_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """127.0.0.1.evil.example is somebody else's, and so is all but the first word of a name."""
    monkeypatch.setattr(socket, "gethostname", lambda: "Mac.evil.example")
    is_here.cache_clear()
    ours = ["localhost", "LOCALHOST:1", "127.9.9.9:80", "[::1]", "[::1]:80", "mac", "mac.local"]
    assert all(map(is_here, ours))
    theirs = [
        *("", "127.0.0.1.evil.example", "localhost.evil.example", "192.168.0.2", "internal.evil"),
        *("host.docker.internal.evil.example", "evilinternal", "mac.evil.example", "mac2.local"),
    ]
    assert not any(map(is_here, theirs))
    monkeypatch.setattr(socket, "gethostname", lambda: "")
    is_here.cache_clear()
    assert not any(map(is_here, ["", ".local"]))
    is_here.cache_clear()


async def test_strict_fields_refuse_what_nobody_knows(
    models: Catalog, engines: ScriptedEngines
) -> None:
    async with served(models, engines, strict_fields=True) as client:
        answer = await client.post("/v1/chat/completions", json={**CHAT, "temprature": 1})
        assert error_of(answer)["param"] == "temprature"


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES])
def test_a_large_body_is_sent_in_pieces(size: int, more: bool) -> None:
    body = random.Random(size).randbytes(size)
    message = {"type": "http.response.body", "body": body, "more_body": more}
    sent = list(split_body(message))
    assert b"".join(each["body"] for each in sent) == body
    assert all(len(each["body"]) <= PIECE_BYTES for each in sent)
    assert [each["more_body"] for each in sent] == [True] * (len(sent) - 1) + [more]


@pytest.mark.parametrize("path", ["/chat/completions", "/messages", "/embed", "/rerank"])
async def test_a_compressed_body_is_a_415_that_names_its_encoding(
    client: AsyncClient, path: str
) -> None:
    body = orjson.dumps({**CHAT, "max_tokens": 9, "inputs": "a", "query": "a", "documents": ["a"]})
    sent = {"content-encoding": "gzip"}
    answer = await client.post(path, content=gzip.compress(body), headers=sent)
    assert answer.status_code == 415
    assert "`gzip`" in answer.text
    if path == "/chat/completions":
        assert answer.headers["accept-encoding"] == "identity"
        assert error_of(answer, 415)["code"] == "unsupported_content_encoding"
        plain = await client.post(path, content=body, headers={"content-encoding": "identity"})
        assert plain.status_code == 200


async def test_a_byte_order_mark_is_no_part_of_a_body(client: AsyncClient) -> None:
    """PowerShell writes one."""
    body = b"\xef\xbb\xbf" + orjson.dumps(CHAT)
    assert (await client.post("/v1/chat/completions", content=body)).status_code == 200
    twice = await client.post("/v1/chat/completions", content=b"\xef\xbb\xbf" + body)
    assert twice.status_code == 400


async def test_a_multipart_body_is_told_what_it_is(client: AsyncClient) -> None:
    answer = await client.post("/v1/chat/completions", files={"file": b"x"})
    told = "The request body is multipart/form-data. It must be a JSON object."
    assert error_of(answer)["message"] == told


@pytest.mark.parametrize(
    "path", ["/v1/messages/batches", "/v1/messages/batches/b1/results", "/v1/batches", "/batches"]
)
async def test_batches_are_said_not_to_be_served(client: AsyncClient, path: str) -> None:
    answer = await client.post(path, json={"requests": []})
    assert answer.status_code == 404
    assert "Batches are not served" in answer.json()["error"]["message"]
