"""An answer behaves the same in every protocol: chat, completions, responses, messages."""

import asyncio
from typing import Any

import pytest
from httpx2 import AsyncClient

from gateway.errors import EngineFailed
from gateway.registry import Catalog
from tests.api.harness import ASK, TOOLS, code_of, held, stream
from tests.fakes import ScriptedEngines
from tests.serving_app import level, served
from tests.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("path", ASK)]
# The name that a prompt has, by endpoint.
PARAM = {"/v1/completions": "prompt", "/v1/responses": "input"}
OVERLOADED = {"/v1/messages": 529}


async def test_a_stream_ends_as_its_protocol_has_it(client: AsyncClient, path: str) -> None:
    told = await stream(client, path, ASK[path]("hey"))
    assert told.is_done
    assert len(told.events) > 3
    assert told.error is None
    assert told.keep_alives == ("messages" in path)  # Anthropic's begin with a ping


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_a_client_that_leaves_frees_its_rows(
    client: AsyncClient, engines: ScriptedEngines, path: str, is_streamed: bool
) -> None:
    body = {**ASK[path]("x" * 90), "stream": is_streamed}
    if path == "/v1/completions":
        body["prompt"] = ["x" * 60, "y" * 60, "z" * 60]
    async with held(engines.chat.gate, client.post(path, json=body)) as asking:
        before = level("gateway_cancelled_total")
        asking.cancel()
        await asyncio.wait([asking])
        await until(lambda: level("gateway_cancelled_total") > before)
    await until(lambda: engines.chat.joined and set(engines.chat.joined) == set(engines.chat.left))
    assert len(engines.chat.steps) < 30


@pytest.mark.parametrize("fails", [False, True])
async def test_a_slow_first_token_opens_the_stream_and_keeps_it_alive(
    models: Catalog,
    engines: ScriptedEngines,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    fails: bool,
) -> None:
    gate = engines.chat.gate
    monkeypatch.setattr("gateway.api.streams.KEEP_ALIVE_S", 0.02)
    engines.chat.fail_at_step = 1 if fails else None
    async with served(models, engines, stream_open_after_s=0.02) as client:
        gate.close()
        told = await stream(client, path, ASK[path]("hi"), on_kept_twice=gate.open)
    assert told.is_kept_first
    assert told.is_done is not fails
    assert told.error == (EngineFailed.code if fails else None)
    if fails and path == "/v1/responses":  # clients must see a beginning before an end
        assert told.names[0] == "response.created"


async def test_a_failure_after_the_first_token_ends_the_stream_with_an_error(
    client: AsyncClient, engines: ScriptedEngines, path: str
) -> None:
    engines.chat.fail_at_step = 3
    told = await stream(client, path, ASK[path]("hello"))
    assert told.answer.status_code == 200
    assert told.error == EngineFailed.code
    assert not told.is_done
    if path == "/v1/responses":  # clients watch for one or the other
        assert told.names[-2:] == ["error", "response.failed"]
        failed, created = told.events[-1]["response"], told.events[0]["response"]
        assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
        assert failed["id"] == created["id"]
    if path == "/v1/messages":
        assert told.events[-1]["error"]["type"] == "api_error"
        assert told.events[-1]["request_id"].startswith("req-")


async def test_a_failure_of_an_unstreamed_answer_is_a_status(
    client: AsyncClient, engines: ScriptedEngines, path: str
) -> None:
    engines.chat.fail_at_step = 3
    answer = await client.post(path, json=ASK[path]("hello"))
    assert (answer.status_code, code_of(answer)) == (500, EngineFailed.code)


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_what_is_refused_before_the_first_token_is_a_status(
    client: AsyncClient, path: str, is_streamed: bool
) -> None:
    for text, more, status, code in (
        ("refuse me", {}, 400, None),
        ("x" * 101, {}, 400, "context_length_exceeded"),
        ("x", {"model": "org/embed"}, 400, "unsupported_model"),
        ("x", {"model": "nobody"}, 404, "model_not_found"),
    ):
        body = {**ASK[path](text), **more, "stream": is_streamed}
        answer = await client.post(path, json=body)
        assert answer.status_code == status
        assert code is None or code_of(answer) == code
        if "messages" not in path and not more:
            assert answer.json()["error"]["param"] == PARAM.get(path, "messages")


BUDGET: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/chat/completions": ({"thinking_token_budget": 99}, "thinking_token_budget"),
    "/v1/responses": ({"thinking_token_budget": 99}, "thinking_token_budget"),
    "/v1/messages": (
        {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000},
        "thinking.budget_tokens",
    ),
}


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_a_budget_for_thinking_without_effect_is_told(
    client: AsyncClient, engines: ScriptedEngines, path: str, is_streamed: bool
) -> None:
    """A model that does not think ignores it; one that does may have no token left to answer."""
    if path not in BUDGET:
        return
    asked, name = BUDGET[path]
    engines.chat.thinks = False
    body = {**ASK[path]("hi"), **asked, "stream": is_streamed}
    named = (await client.post(path, json={**body, "colour": "red"})).headers
    assert named["x-gateway-ignored"] == f"colour,{name}"
    assert "x-gateway-thinking-budget" not in named
    assert "x-gateway-ignored" not in (await client.post(path, json=ASK[path]("hi"))).headers
    engines.chat.thinks = True
    headers = (await client.post(path, json=body)).headers
    assert "x-gateway-ignored" not in headers
    assert headers["x-gateway-thinking-budget"] == "takes-max-tokens"
    if "messages" not in path:
        short = (await client.post(path, json={**body, "thinking_token_budget": 9})).headers
        assert "x-gateway-thinking-budget" not in short
        for wrong in (-1, 1.5, "9"):
            refused = await client.post(path, json={**body, "thinking_token_budget": wrong})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "thinking_token_budget"


async def test_a_deadline_header_ends_the_wait(
    client: AsyncClient, engines: ScriptedEngines, path: str
) -> None:
    engines.chat.gate.close()
    headers = {"x-gateway-timeout-s": "0.1"}
    answer = await client.post(path, json=ASK[path]("hi"), headers=headers)
    engines.chat.gate.open()
    assert (answer.status_code, code_of(answer)) == (504, "deadline_exceeded")
    assert answer.headers["x-should-retry"] == "false"
    for value in ("soon", "-1", "0", "nan"):
        headers = {"x-gateway-timeout-s": value}
        assert (await client.post(path, json=ASK[path]("hi"), headers=headers)).status_code == 400


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_a_full_queue_refuses_with_a_time_to_come_again(
    models: Catalog, engines: ScriptedEngines, path: str, is_streamed: bool
) -> None:
    body = ASK[path]("hold")
    async with served(models, engines, queue_limit=1) as client:
        async with held(engines.chat.gate, client.post(path, json=body)) as holding:
            refused = await client.post(path, json={**body, "stream": is_streamed})
        assert refused.status_code == OVERLOADED.get(path, 429)
        assert code_of(refused) == "rate_limit_exceeded"
        assert int(refused.headers["retry-after"]) > 0
        assert holding.result().status_code == 200


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_a_model_whose_form_of_calls_is_unknown_is_said_to_be(
    client: AsyncClient, engines: ScriptedEngines, path: str, is_streamed: bool
) -> None:
    engines.chat.calls_are_text = True
    body: dict[str, Any] = {**ASK[path]("hi"), "stream": is_streamed}
    assert "x-gateway-tool-format" not in (await client.post(path, json=body)).headers
    if path in TOOLS:
        answer = await client.post(path, json={**body, "tools": TOOLS[path]})
        assert answer.headers["x-gateway-tool-format"] == "unknown"


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_a_model_whose_form_of_thoughts_is_unknown_is_said_to_be(
    client: AsyncClient, engines: ScriptedEngines, path: str, is_streamed: bool
) -> None:
    """Bare prompts are the exception: their answers have no thoughts."""
    engines.chat.thoughts_are_text = True
    answer = await client.post(path, json={**ASK[path]("hi"), "stream": is_streamed})
    has_thoughts = path != "/v1/completions"
    assert answer.headers.get("x-gateway-reasoning-format") == ("unknown" if has_thoughts else None)
