"""Nobody's key and nobody's prompt is told: not in logs, metrics, traces or errors."""

import io
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
import structlog
from httpx2 import AsyncClient
from starlette.types import Receive, Scope, Send

from gateway import logs
from gateway.registry import Catalog
from tests.api.harness import error_of, protected
from tests.fakes import ScriptedChat, ScriptedEngines
from tests.serving_app import served

pytestmark = pytest.mark.anyio
KEY = "sk-4f9d2c81e7"  # the gateway's own
OTHER = "sk-of-another-service-77"  # sent to us by mistake
PROMPT = "the-patient-is-called-Ada"
QUESTION = {"type": "predicate", "instructions": "Is it?"}
CHAT: dict[str, Any] = {"model": "writer", "messages": [{"role": "user", "content": PROMPT}]}
MISPLACED: list[dict[str, Any]] = [
    {"headers": {"authorization": "Basic {}"}},
    {"headers": {"authorization": "Token {}"}},
    {"headers": {"authorization": "{}"}},
    {"headers": {"authorization": "Bearer {}x"}},
    {"headers": {"authorization": "Bearer Bearer {}"}},
    {"headers": {"x-api-key": "Bearer {}"}},
    {"headers": {"x-api-key": "{}x"}},
    {"headers": {"api-key": "{}"}},
    {"headers": {"openai-organization": "{}"}},
    {"headers": {"cookie": "key={}"}},
    {"headers": {"proxy-authorization": "Bearer {}"}},
    {"params": {"api_key": "{}"}},
    {"params": {"key": "{}"}},
]


@pytest.fixture(params=["json", "console"])
def written(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[io.StringIO]:
    """Give all that is logged, down to the least serious event."""
    to = io.StringIO()
    monkeypatch.setattr(logs, "sys", SimpleNamespace(stderr=to))
    try:
        logs.configure("debug", request.param)
        yield to
    finally:
        structlog.reset_defaults()


def filled(template: Any, key: str) -> Any:
    if isinstance(template, dict):
        return {name: filled(value, key) for name, value in template.items()}
    return template.format(key)


@pytest.mark.parametrize("key", [KEY, OTHER])
async def test_a_key_in_the_wrong_place_is_told_nowhere(
    models: Catalog, engines: ScriptedEngines, written: io.StringIO, key: str
) -> None:
    told: list[str] = []
    holder = {"authorization": f"Bearer {KEY}"}
    async with served(models, engines, api_keys=KEY) as client:
        for path in ("/v1/chat/completions", "/v1/nowhere"):
            for place in MISPLACED:
                answer = await client.post(path, json=CHAT, **filled(place, key))
                assert answer.status_code == 401
                told += [answer.text, str(answer.headers)]
        for extra in ({"api_key": key}, {"temperature": key}, {"n": [key]}, {"seed": {"a": key}}):
            answer = await client.post(
                "/v1/chat/completions", json={**CHAT, **extra}, headers=holder
            )
            told += [answer.text, str(answer.headers)]
        raw = await client.post(
            "/v1/embeddings", content=f'{{"k": "{key}",'.encode(), headers=holder
        )
        assert raw.status_code == 400
        told += [raw.text, (await client.get("/metrics", headers=holder)).text]
    assert "key" in "".join(told)
    assert all(key not in each for each in told)
    assert "/v1/chat/completions" in written.getvalue()
    assert key not in written.getvalue()


async def test_a_traceback_shows_neither_key_nor_prompt(written: io.StringIO) -> None:
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        raise RuntimeError(f"{len(message['body'])} bytes were too much")

    transport = httpx2.ASGITransport(protected(broken, keys=[KEY]))
    async with AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.post("/", json=CHAT, headers={"authorization": f"Bearer {KEY}"})
    assert error_of(answer, 500)["type"] == "server_error"
    assert "were too much" in written.getvalue()
    assert "were too much" not in answer.text
    for secret in (KEY, PROMPT):
        assert secret not in written.getvalue() + answer.text


def requests() -> list[tuple[str, dict[str, Any]]]:
    return [
        ("chat/completions", CHAT),
        ("chat/completions", {**CHAT, "stream": True}),
        ("completions", {"model": "writer", "prompt": [PROMPT]}),
        ("responses", {"model": "writer", "input": PROMPT, "instructions": PROMPT}),
        ("embeddings", {"model": "embed", "input": [PROMPT]}),
        ("rerank", {"model": "judge", "query": PROMPT, "documents": [PROMPT]}),
        ("score", {"model": "judge", "text_1": PROMPT, "text_2": [PROMPT]}),
        ("decisions", {"model": "writer", "input": PROMPT, "questions": [QUESTION]}),
        ("tokenize", {"model": "writer", "prompt": PROMPT}),
    ]


async def test_prompts_are_not_logged(models: Catalog, written: io.StringIO) -> None:
    """They are left out at debug too, and when the answer is an error."""
    engines = ScriptedEngines(chat=ScriptedChat(max_context=1000))
    async with served(models, engines) as client:
        for path, body in requests():
            assert (await client.post(f"/v1/{path}", json=body)).status_code == 200
            unserved = await client.post(f"/v1/{path}", json={**body, "model": "nobody"})
            assert unserved.status_code == 404
            engines.chat.fail_at_step = len(engines.chat.steps) + 1
            await client.post(f"/v1/{path}", json=body)
            engines.chat.fail_at_step = None
    assert "/v1/" in written.getvalue()
    assert PROMPT not in written.getvalue()


async def test_prompts_are_logged_when_settings_say_so(
    models: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those for a model that may not be named too, but not those of a body that is refused."""
    engines = ScriptedEngines(chat=ScriptedChat(max_context=1000))
    written = io.StringIO()
    monkeypatch.setattr(logs, "sys", SimpleNamespace(stderr=written))
    try:
        logs.configure("info", "json")
        async with served(models, engines, log_prompts=True, any_model="org/*") as client:
            for path, body in requests():
                answer = await client.post(
                    f"/v1/{path}", json=body, headers={"x-request-id": f"req-{path}"}
                )
                assert answer.status_code == 200, answer.text
            unserved = {**CHAT, "model": "else/a"}
            answer = await client.post("/v1/chat/completions", json=unserved)
            assert answer.status_code == 404
            refused = {**CHAT, "temperature": "hot"}
            answer = await client.post("/v1/chat/completions", json=refused)
            assert answer.status_code == 400
    finally:
        structlog.reset_defaults()
    events = [json.loads(line) for line in written.getvalue().splitlines()]
    prompts = [event for event in events if event["event"] == "prompt"]
    served_ids = [f"req-{path}" for path, _ in requests()]
    assert [event["request_id"] for event in prompts[:-1]] == served_ids
    assert all(PROMPT in json.dumps(event) for event in prompts)
    assert sum(PROMPT in json.dumps(event) for event in events) == len(prompts)
