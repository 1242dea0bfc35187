"""POST /v1/responses over a socket, with a scripted engine."""

import asyncio
from dataclasses import replace
from typing import Any

import httpx2
import orjson
import pytest

from gateway.jobs import CallDelta, Delta
from gateway.registry import Catalog
from tests.fakes import ScriptedChat, ScriptedEngines
from tests.serving_app import served

pytestmark = pytest.mark.anyio

TOOL = {"type": "function", "name": "clock", "parameters": {"type": "object", "properties": {}}}


class ManyVoices(ScriptedChat):
    """Small letters are text, capitals are reasoning; `!` calls the clock."""

    def _next(self, row: int) -> list[Delta]:
        return [_voiced(delta) for delta in super()._next(row)]


def _voiced(delta: Delta) -> Delta:
    if delta.text == "!":
        return replace(delta, text="", call=CallDelta(0, "call_1", "clock", "{}"))
    if delta.text.isupper():
        return replace(delta, text="", reasoning=delta.text)
    return delta


def ask(given: Any, **more: Any) -> dict[str, Any]:
    return {"model": "writer", "input": given, **more}


async def post(client: httpx2.AsyncClient, given: Any, **more: Any) -> httpx2.Response:
    return await client.post("/v1/responses", json=ask(given, **more))


async def events(client: httpx2.AsyncClient, given: Any, **more: Any) -> list[Any]:
    """Read a stream whole: every frame is named by the type of its event."""
    body = ask(given, stream=True, **more)
    async with client.stream("POST", "/v1/responses", json=body) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in answer.aiter_lines() if line and not line.startswith(":")]
    told = [orjson.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert lines[::2] == [f"event: {event['type']}" for event in told]
    return told


async def test_a_whole_answer_has_openais_shape(client: httpx2.AsyncClient) -> None:
    """Every field the specification requires."""
    answer = (await post(client, "hello", instructions="Repeat.")).json()
    assert answer["id"].startswith("resp_")
    assert answer["object"] == "response"
    assert answer["status"] == "completed"
    assert answer["model"] == "writer"
    assert answer["error"] is None
    assert answer["incomplete_details"] is None
    assert answer["instructions"] == "Repeat."
    (message,) = answer["output"]
    assert message.pop("id").startswith("msg_")
    assert message == {
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "hello", "annotations": [], "logprobs": []}],
    }
    assert answer["usage"]["input_tokens"] == 5
    assert answer["usage"]["output_tokens"] == 6
    assert answer["usage"]["total_tokens"] == 11


async def test_a_stream_tells_the_same_answer_event_by_event(client: httpx2.AsyncClient) -> None:
    """Created first, completed last, with one id for each thing throughout."""
    told = await events(client, "hey")
    assert [event["type"].removeprefix("response.") for event in told] == [
        "created", "in_progress", "output_item.added", "content_part.added",
        *["output_text.delta"] * 3, "output_text.done", "content_part.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    whole = told[-1]["response"]
    assert told[0]["response"]["id"] == whole["id"]
    assert {e["item_id"] for e in told if "item_id" in e} == {whole["output"][0]["id"]}
    unstreamed = (await post(client, "hey")).json()
    for answer in (whole, unstreamed):
        for name in ("id", "created_at", "completed_at"):
            del answer[name]
        del answer["output"][0]["id"]
    assert whole == unstreamed


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_text_and_calls_are_items_in_that_order(
    client: httpx2.AsyncClient, engines: ScriptedEngines, stream: bool
) -> None:
    """Each as the model made it."""
    engines.chat = ManyVoices()
    if stream:
        answer = (await events(client, "HMok!", tools=[TOOL]))[-1]["response"]
    else:
        answer = (await post(client, "HMok!", tools=[TOOL])).json()
    reasoning, message, call = answer["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "HM"}]
    assert message["content"][0]["text"] == "ok"
    assert (call["type"], call["call_id"], call["name"]) == ("function_call", "call_1", "clock")
    assert call["arguments"] == "{}"


async def test_an_answer_cut_by_its_limit_is_incomplete(client: httpx2.AsyncClient) -> None:
    """With a status of 200, and its reason."""
    answer = (await post(client, "hello", max_output_tokens=2)).json()
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["output"][0]["content"][0]["text"] == "he"
    told = await events(client, "hello", max_output_tokens=2)
    assert told[-1]["type"] == "response.incomplete"
    assert (await post(client, "hello", max_output_tokens=16384)).json()["status"] == "completed"


async def test_a_conversation_is_sent_as_items(client: httpx2.AsyncClient) -> None:
    """With earlier answers put back in as they came."""
    first = (await post(client, "hello")).json()
    items = [
        {"role": "user", "content": "hello"},
        *first["output"],
        {"role": "user", "content": [{"type": "input_text", "text": "bye"}]},
    ]
    second = (await post(client, items)).json()
    assert second["output"][0]["content"][0]["text"] == "bye"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("given", ["x" * 101, "refuse me"])
async def test_what_is_refused_before_the_first_token_is_a_status(
    client: httpx2.AsyncClient, given: str, stream: bool
) -> None:
    """Under the name the conversation has here."""
    answer = await post(client, given, stream=stream)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "input"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("input", None), ("input", []), ("input", 3), ("model", ""), ("temperature", 3),
        ("max_output_tokens", 0), ("tools", {}), ("tools", [{"type": "mcp"}]), ("tool_choice", 3),
        ("parallel_tool_calls", "no"), ("text", "json"), ("text", {"format": {"type": "xml"}}),
        ("reasoning", "high"), ("include", "all"), ("metadata", []), ("top_logprobs", 21),
        ("stream", 1), ("previous_response_id", ""), ("store", "no"), ("conversation", {"id": "c"}),
        ("background", True), ("prompt", {"id": "p"}), ("response_format", {"type": "json_object"}),
        ("messages", [{"role": "user", "content": "hi"}]),
    ],
)  # fmt: skip
async def test_a_wrong_or_unserved_value_is_refused_by_its_name(
    client: httpx2.AsyncClient, field: str, value: Any
) -> None:
    """Never a 500, never left out in silence."""
    answer = await client.post("/v1/responses", json=ask("hi") | {field: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].split("[")[0].split(".")[0] == field


async def test_harmless_fields_and_nulls_are_accepted(client: httpx2.AsyncClient) -> None:
    """And unknown ones are named."""
    answer = await post(
        client, "hi", store=True, user="u", metadata=None, previous_response_id=None, tools=[],
        include=[], service_tier="auto", safety_identifier="s", prompt_cache_key="k",
        text={"verbosity": "low"}, prompt_cache_options={"mode": "explicit"}, truncation="auto",
    )  # fmt: skip
    assert answer.status_code == 200
    assert "x-gateway-ignored" not in answer.headers
    assert (await post(client, "hi", mood=1)).headers["x-gateway-ignored"] == "mood"


async def test_a_failure_after_the_first_token_is_told_twice(
    client: httpx2.AsyncClient, engines: ScriptedEngines
) -> None:
    """As an error, and as a failed response: clients watch for one or the other."""
    engines.chat.fail_at_step = 3
    told = await events(client, "hello")
    assert [event["type"] for event in told[-2:]] == ["error", "response.failed"]
    assert told[-2]["code"] == "engine_failed"
    assert told[-1]["response"]["status"] == "failed"
    assert told[-1]["response"]["error"]["code"] == "server_error"
    assert told[-1]["response"]["id"] == told[0]["response"]["id"]


async def test_a_failure_of_an_unstreamed_answer_is_a_status(
    client: httpx2.AsyncClient, engines: ScriptedEngines
) -> None:
    """Nothing of it has been sent."""
    engines.chat.fail_at_step = 3
    answer = await post(client, "hello")
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "engine_failed"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_its_row(
    client: httpx2.AsyncClient, engines: ScriptedEngines, stream: bool
) -> None:
    """Streaming or not."""
    engines.chat.gate.close()
    asking = asyncio.create_task(post(client, "x" * 90, stream=stream))
    await asyncio.to_thread(engines.chat.gate.reached.wait, 5)
    asking.cancel()
    await asyncio.sleep(0.2)
    engines.chat.gate.open()
    async with asyncio.timeout(5):
        while not engines.chat.left:
            await asyncio.sleep(0.01)
    assert len(engines.chat.steps) < 30


async def test_a_slow_first_token_opens_the_stream_and_keeps_it_alive(
    models: Catalog, engines: ScriptedEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With comments before the first event."""
    monkeypatch.setattr("gateway.api.streams.KEEP_ALIVE_S", 0.05)
    async with served(models, engines, stream_open_after_s=0.05) as client:
        engines.chat.gate.close()
        asyncio.get_running_loop().call_later(0.4, engines.chat.gate.open)
        async with client.stream("POST", "/v1/responses", json=ask("hi", stream=True)) as answer:
            lines = [line async for line in answer.aiter_lines() if line]
    assert lines[0] == ": keep-alive"
    told = [line for line in lines if not line.startswith(":")]
    assert told[0] == "event: response.created"
    assert told[-2] == "event: response.completed"


async def test_an_embedding_model_cannot_respond(client: httpx2.AsyncClient) -> None:
    """And is told so by name."""
    answer = await post(client, "hi", model="org/embed")
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "unsupported_model"


async def test_a_failure_after_the_opening_and_before_any_event_is_still_a_response(
    models: Catalog, engines: ScriptedEngines
) -> None:
    """Created, the error, failed: clients must see a beginning before an end."""
    async with served(models, engines, stream_open_after_s=0.05) as client:
        engines.chat.fail_at_step = 1
        engines.chat.gate.close()
        asyncio.get_running_loop().call_later(0.4, engines.chat.gate.open)
        body = ask("hi", stream=True)
        async with client.stream("POST", "/v1/responses", json=body) as answer:
            assert answer.status_code == 200
            lines = [line async for line in answer.aiter_lines() if line.startswith("event: ")]
    assert lines[0] == "event: response.created"
    assert lines[-2:] == ["event: error", "event: response.failed"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_model_whose_form_of_calls_is_unknown_is_said_to_be(
    models: Catalog, stream: bool
) -> None:
    """As on the chat endpoint."""
    engines = ScriptedEngines(chat=ScriptedChat(calls_are_text=True))
    async with served(models, engines) as client:
        answer = await post(client, "hi", tools=[TOOL], stream=stream)
        assert answer.headers["x-gateway-tool-format"] == "unknown"
