"""Rate limits: OpenAI's headers, a 429 in its envelope, and a wait that is true."""

import asyncio
from typing import Any

import pytest
from httpx2 import AsyncClient, Response

from gateway.api.access import format_duration
from gateway.registry import Catalog
from tests.fakes import ScriptedEngines
from tests.serving_app import level, served
from tests.waiting import until

pytestmark = pytest.mark.anyio
USER = [{"role": "user", "content": "hi"}]
CHAT: dict[str, Any] = {"model": "writer", "messages": USER}
EMBED = {"model": "embed", "input": "abc"}


def ratelimits(answer: Response) -> dict[str, str]:
    prefix = "x-ratelimit-"
    return {
        name.removeprefix(prefix): value
        for name, value in answer.headers.items()
        if name.startswith(prefix)
    }


@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        (0, "0ms"),
        (0.0004, "1ms"),
        (0.12, "120ms"),
        (1, "1s"),
        (8.64, "9s"),
        (59.2, "1m0s"),
        (360, "6m0s"),
        (3661, "1h1m1s"),
    ],
)
def test_times_are_written_as_openai_writes_them(seconds: float, written: str) -> None:
    """Rounded up, so that who waits so long has waited long enough."""
    assert format_duration(seconds) == written


async def test_without_a_limit_nothing_is_said_of_one(client: AsyncClient) -> None:
    assert ratelimits(await client.post("/v1/embeddings", json=EMBED)) == {}


async def test_requests_beyond_the_limit_are_told_when_to_come(
    models: Catalog, engines: ScriptedEngines
) -> None:
    async with served(models, engines, requests_per_minute=2) as client:
        first = await client.post("/v1/embeddings", json=EMBED)
        assert ratelimits(first) == {
            "limit-requests": "2",
            "remaining-requests": "1",
            "reset-requests": "30s",
        }
        second = await client.post("/chat/completions", json={**CHAT, "stream": True})
        assert second.status_code == 200
        assert ratelimits(second)["remaining-requests"] == "0"
        third = await client.post("/v1/chat/completions", json=CHAT)
        assert third.status_code == 429
        error = third.json()["error"]
        assert error["code"] == "rate_limit_exceeded"
        assert "requests per minute" in error["message"]
        assert 25 <= int(third.headers["retry-after"]) <= 30
        assert ratelimits(third)["remaining-requests"] == "0"
        assert (await client.get("/v1/models")).status_code == 200


@pytest.mark.parametrize("path", ["/v1/responses/input_tokens", "/v1/messages/count_tokens"])
async def test_a_request_that_only_counts_tokens_is_a_request(
    models: Catalog, engines: ScriptedEngines, path: str
) -> None:
    body = {"model": "writer", "input": "hi"} if "responses" in path else CHAT
    async with served(models, engines, requests_per_minute=1) as client:
        assert (await client.post(path, json=body)).status_code == 200
        assert (await client.post(path, json=body)).status_code == 429
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 429


async def test_tokens_are_charged_when_known_and_the_next_request_waits(
    models: Catalog, engines: ScriptedEngines
) -> None:
    async with served(models, engines, tokens_per_minute=6) as client:
        embedded = await client.post("/v1/embeddings", json=EMBED)
        assert ratelimits(embedded)["remaining-tokens"] == "3"
        spent = embedded.json()["usage"]["total_tokens"]
        chat = await client.post("/v1/chat/completions", json=CHAT)
        spent += chat.json()["usage"]["total_tokens"]
        assert spent >= 6
        refused = await client.post("/v1/chat/completions", json=CHAT)
        assert refused.status_code == 429
        assert "tokens per minute" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) <= 10 * (spent - 6 + 1)


async def test_a_streams_tokens_are_charged_at_its_end(
    models: Catalog, engines: ScriptedEngines
) -> None:
    """Its headers are sent before they are known."""
    async with served(models, engines, tokens_per_minute=10) as client:
        long = [{"role": "user", "content": "x" * 40}]
        body = {**CHAT, "messages": long, "stream": True}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        refused = await client.post("/v1/chat/completions", json=CHAT)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) > 60 * 70 / 10 - 60


async def test_every_prompt_of_a_completion_is_charged(
    models: Catalog, engines: ScriptedEngines
) -> None:
    """The first one, which is timed, is not the only one charged."""
    async with served(models, engines, tokens_per_minute=1000) as client:
        body = {"model": "writer", "prompt": ["abcde", "abcde", "abcde"]}
        answer = await client.post("/v1/completions", json=body)
        spent = answer.json()["usage"]["total_tokens"]
        assert spent > 15
        left = int(ratelimits(answer)["remaining-tokens"])
    assert 1000 - spent - 1 <= left <= 1000 - spent + 1


async def test_a_client_that_leaves_is_charged_what_was_made(
    models: Catalog, engines: ScriptedEngines
) -> None:
    engines.chat.gate.close()
    async with served(models, engines, tokens_per_minute=10) as client:
        long = [{"role": "user", "content": "x" * 40}]
        asked = asyncio.create_task(
            client.post("/v1/chat/completions", json={**CHAT, "messages": long})
        )
        await asyncio.to_thread(engines.chat.gate.reached.wait, 60)
        before = level("gateway_cancelled_total")
        asked.cancel()
        await until(lambda: level("gateway_cancelled_total") > before)
        engines.chat.gate.open()
        async with asyncio.timeout(60):
            while (await client.post("/v1/embeddings", json=EMBED)).status_code != 429:
                await asyncio.sleep(0.01)


async def test_one_keys_limit_is_not_anothers(models: Catalog, engines: ScriptedEngines) -> None:
    async with served(models, engines, api_keys="one,two", requests_per_minute=1) as client:
        statuses = []
        for key in ("one", "one", "two", "three"):
            headers = {"authorization": f"Bearer {key}"}
            answer = await client.post("/v1/embeddings", json=EMBED, headers=headers)
            statuses.append(answer.status_code)
    assert statuses == [200, 429, 200, 401]


async def test_no_more_requests_at_once_come_in_than_the_limit(
    models: Catalog, engines: ScriptedEngines
) -> None:
    async with served(models, engines, requests_per_minute=5) as client:
        answers = await asyncio.gather(
            *(client.post("/v1/embeddings", json=EMBED) for _ in range(20))
        )
    assert sorted(answer.status_code for answer in answers) == [200] * 5 + [429] * 15
