"""POST /v1/responses over a socket, with a scripted engine."""

from typing import Any

import httpx2
import pytest

from tests.api.harness import ManyVoices, stream
from tests.fakes import ScriptedEngines

pytestmark = pytest.mark.anyio

TOOL = {"type": "function", "name": "clock", "parameters": {"type": "object", "properties": {}}}


def ask(given: Any, **more: Any) -> dict[str, Any]:
    return {"model": "writer", "input": given, **more}


async def post(client: httpx2.AsyncClient, given: Any, **more: Any) -> httpx2.Response:
    return await client.post("/v1/responses", json=ask(given, **more))


async def events(client: httpx2.AsyncClient, given: Any, **more: Any) -> list[Any]:
    return (await stream(client, "/v1/responses", ask(given, **more))).events


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
