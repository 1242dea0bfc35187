"""POST /v1/chat/completions over a socket, with a scripted engine."""

import asyncio
import threading
from collections.abc import AsyncGenerator
from typing import Any

import httpx2
import orjson
import pytest
from starlette.requests import Request
from starlette.types import Message

from gateway.api.bodies import Bodies, Body
from gateway.api.requests import MANY_LOGPROBS, serialise
from gateway.api.streams import COMMENT, EventStream, frame
from gateway.jobs import CallDelta, Likelihood, TokenLogprob
from tests.api.harness import stream
from tests.fakes import ScriptedEngines

pytestmark = pytest.mark.anyio


def ask(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "writer", "messages": [{"role": "user", "content": text}], **more}


async def post(client: httpx2.AsyncClient, text: str, **more: Any) -> httpx2.Response:
    return await client.post("/v1/chat/completions", json=ask(text, **more))


async def events(client: httpx2.AsyncClient, text: str, **more: Any) -> list[Any]:
    return (await stream(client, "/v1/chat/completions", ask(text, **more))).events


async def test_a_whole_answer_has_openais_shape(client: httpx2.AsyncClient) -> None:
    """Every field the specification requires."""
    answer = (await post(client, "hello")).json()
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "writer"
    assert answer["system_fingerprint"].endswith("-scripted")
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 6,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


async def test_a_stream_tells_role_text_and_reason_once_each(client: httpx2.AsyncClient) -> None:
    """SDKs concatenate what comes twice."""
    chunks = await events(client, "hey")
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"content": "h"},
        {"content": "e"},
        {"content": "y"},
        {},
    ]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * 4 + ["stop"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert all("usage" not in chunk for chunk in chunks)


async def test_usage_is_the_last_chunk_when_asked_for(client: httpx2.AsyncClient) -> None:
    """And has no choices."""
    chunks = await events(client, "hey", stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 4


async def test_choices_are_introduced_in_order_before_any_text(
    client: httpx2.AsyncClient,
) -> None:
    """The SDK's stream helper indexes them."""
    chunks = await events(client, "ab", n=3)
    assert [chunk["choices"][0]["index"] for chunk in chunks[:3]] == [0, 1, 2]
    for index in range(3):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(choice["delta"].get("content", "") for choice in mine) == "ab"
    whole = (await post(client, "ab", n=3)).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert whole["usage"]["completion_tokens"] == 9


async def test_max_tokens_in_either_spelling_ends_with_length(client: httpx2.AsyncClient) -> None:
    """And one beyond the context is clamped, as Graphiti sends 16384 to every model."""
    for spelling in ("max_tokens", "max_completion_tokens"):
        answer = (await post(client, "hello", **{spelling: 2})).json()
        assert answer["choices"][0]["message"]["content"] == "he"
        assert answer["choices"][0]["finish_reason"] == "length"
    assert (await post(client, "hello", max_tokens=16384)).status_code == 200


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
async def test_numbers_that_are_none_are_refused(client: httpx2.AsyncClient, number: str) -> None:
    """JSON has no NaN, and no temperature is infinite."""
    body = orjson.dumps(ask("hi", temperature=0)).replace(
        b'"temperature":0', b'"temperature":' + number.encode()
    )
    answer = await client.post("/v1/chat/completions", content=body)
    assert answer.status_code == 400


async def test_a_stream_that_pauses_in_its_middle_is_kept_alive_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By comments between whole events, a line feed each, and nothing else: no `id:`, no `event:`,
    no blank line, which some clients take for an empty event.
    """
    monkeypatch.setattr("gateway.api.streams.KEEP_ALIVE_S", 0.02)
    sent = bytearray()

    async def events() -> AsyncGenerator[bytes, None]:
        for word in (b"1", b"2", b"3"):
            yield frame(word)
            await asyncio.sleep(0.1)

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        sent.extend(message.get("body", b""))

    request = Request({"type": "http", "gateway.unread": Body(Bodies(10**9))}, receive)
    stream = EventStream(events(), {}, request, write_error=lambda error: b"", keep_alive=COMMENT)
    await stream.prime(1)
    await stream({}, receive, send)
    parts = bytes(sent).split(b"data: ")
    assert all(b": keep-alive\n" in part for part in parts[1:])
    assert bytes(sent).replace(b": keep-alive\n", b"") == b"data: 1\n\ndata: 2\n\ndata: 3\n\n"


LOGPROBS = TokenLogprob(
    Likelihood(" True", b" True", -0.1),
    [Likelihood(" True", b" True", -0.1), Likelihood(" False", b" False", -2.4)],
)


async def test_logprobs_are_told_as_openai_does(
    client: httpx2.AsyncClient, engines: ScriptedEngines
) -> None:
    """A reranker reads the first of the first token's likeliest."""
    engines.chat.script = [
        {"text": " True", "tokens": 1, "logprobs": [LOGPROBS], "finish_reason": "length"}
    ]
    asked = {"logprobs": True, "top_logprobs": 2, "max_tokens": 1, "temperature": 0}
    answer = (await post(client, "hi", **asked)).json()["choices"][0]
    expected = {
        "token": " True",
        "logprob": -0.1,
        "bytes": list(b" True"),
        "top_logprobs": [
            {"token": " True", "logprob": -0.1, "bytes": list(b" True")},
            {"token": " False", "logprob": -2.4, "bytes": list(b" False")},
        ],
    }
    assert answer["logprobs"] == {"content": [expected], "refusal": None}
    (job,) = engines.chat.jobs
    assert job.logprobs == 2
    assert job.template_args == {"enable_thinking": False}
    chunks = await events(client, "hi", **asked)
    assert chunks[1]["choices"][0]["logprobs"]["content"] == [expected]
    plain = (await post(client, "hi", logprobs=True)).json()["choices"][0]
    assert plain["logprobs"] is not None


async def test_reasoning_is_told_beside_the_content(
    client: httpx2.AsyncClient, engines: ScriptedEngines
) -> None:
    """Never in it, and counted."""
    engines.chat.script = [
        {"reasoning": "hm", "tokens": 1, "reasoning_tokens": 1},
        {"text": "{}", "tokens": 1, "finish_reason": "stop"},
    ]
    answer = (await post(client, "hi", reasoning_effort="high")).json()
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "{}")
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 1}
    assert engines.chat.jobs[0].template_args["enable_thinking"] is True
    deltas = [chunk["choices"][0]["delta"] for chunk in await events(client, "hi")]
    assert {"reasoning_content": "hm"} in deltas
    await post(client, "hi", reasoning_effort="none")
    assert engines.chat.jobs[-1].template_args == {"enable_thinking": False}
    kwargs = {"enable_thinking": True, "style": "x"}
    await post(client, "hi", reasoning_effort="none", chat_template_kwargs=kwargs)
    assert engines.chat.jobs[-1].template_args == kwargs


TOOLS = [{"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}]
CALLS: list[dict[str, Any]] = [
    {"text": "Let me see.", "tokens": 1},
    {"call": CallDelta(0, "call_1", "get", '{"a":1}'), "tokens": 1},
    {"call": CallDelta(1, "call_2", "get", ""), "tokens": 1},
    {"call": CallDelta(1, arguments='{"b"'), "tokens": 1},
    {"call": CallDelta(1, arguments=":2}"), "tokens": 1, "finish_reason": "tool_calls"},
]


async def test_calls_are_told_whole(client: httpx2.AsyncClient, engines: ScriptedEngines) -> None:
    """Arguments are JSON inside a string, ids are their own."""
    engines.chat.script = CALLS
    choice = (await post(client, "hi", tools=TOOLS)).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    assert choice["message"]["tool_calls"] == [
        {"id": "call_1", "type": "function", "function": {"name": "get", "arguments": '{"a":1}'}},
        {"id": "call_2", "type": "function", "function": {"name": "get", "arguments": '{"b":2}'}},
    ]
    engines.chat.script = CALLS[1:]
    only = (await post(client, "hi", tools=TOOLS)).json()["choices"][0]["message"]
    assert only["content"] is None


async def test_calls_are_streamed_with_id_and_name_once(
    client: httpx2.AsyncClient, engines: ScriptedEngines
) -> None:
    """SDKs concatenate what comes twice, and index what comes."""
    engines.chat.script = CALLS
    chunks = [c["choices"][0] for c in await events(client, "hi", tools=TOOLS)]
    pieces = [piece for c in chunks for piece in c["delta"].get("tool_calls", [])]
    assert [(p["index"], p.get("id"), p["function"].get("name")) for p in pieces] == [
        (0, "call_1", "get"),
        (0, None, None),
        (1, "call_2", "get"),
        (1, None, None),
        (1, None, None),
    ]
    texts = ["".join(p["function"]["arguments"] for p in pieces if p["index"] == i) for i in (0, 1)]
    assert texts == ['{"a":1}', '{"b":2}']
    assert chunks[-1]["finish_reason"] == "tool_calls"


async def test_a_call_asked_for_by_its_older_name_is_told_by_it(
    client: httpx2.AsyncClient, engines: ScriptedEngines
) -> None:
    """`functions` get a `function_call`."""
    engines.chat.script = [{**CALLS[1], "finish_reason": "tool_calls"}]
    asked = {"functions": [TOOLS[0]["function"]]}
    choice = (await post(client, "hi", **asked)).json()["choices"][0]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == {"name": "get", "arguments": '{"a":1}'}
    chunks = [c["choices"][0] for c in await events(client, "hi", **asked)]
    assert {"function_call": {"name": "get", "arguments": ""}} in [c["delta"] for c in chunks]
    assert chunks[-1]["finish_reason"] == "function_call"


async def test_tool_results_go_back_in(
    client: httpx2.AsyncClient, engines: ScriptedEngines
) -> None:
    """With arguments as values, since templates write JSON themselves."""
    call = {"id": "c", "type": "function", "function": {"name": "get", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "42"}]},
    ]
    answer = await post(client, "", messages=messages, tools=TOOLS)
    assert answer.status_code == 200
    assistant, tool = engines.chat.jobs[0].messages[1:]
    assert assistant["tool_calls"][0]["function"] == {"name": "get", "arguments": {"a": 1}}
    assert (tool["role"], tool["content"], tool["tool_call_id"]) == ("tool", "42", "c")


BEGUN = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Once"}]


@pytest.mark.parametrize(
    ("messages", "more"),
    [
        (BEGUN, {"continue_final_message": True}),
        (BEGUN, {"continue_final_message": True, "add_generation_prompt": False}),
        ([BEGUN[0], {**BEGUN[1], "prefix": True}], {}),
    ],
)
async def test_a_last_message_of_the_assistants_may_be_continued(
    client: httpx2.AsyncClient, engines: ScriptedEngines, messages: list[Any], more: dict[str, Any]
) -> None:
    """In vLLM's way, or in Mistral's and DeepSeek's."""
    answer = await post(client, "", messages=messages, **more)
    assert answer.status_code == 200, answer.text
    assert engines.chat.jobs[-1].continues
    assert "prefix" not in engines.chat.jobs[-1].messages[-1]
    assert (await post(client, "", messages=BEGUN)).status_code == 200
    assert not engines.chat.jobs[-1].continues


@pytest.mark.parametrize(
    ("messages", "more", "param"),
    [
        (BEGUN[:1], {"continue_final_message": True}, "messages[0]"),
        ([{**BEGUN[0], "prefix": True}], {}, "messages[0]"),
        ([{"role": "assistant", "content": "a", "prefix": True}, BEGUN[0]], {},
         "messages[0].prefix"),
        ([{"role": "assistant", "content": ""}], {"continue_final_message": True}, "messages[0]"),
        (BEGUN, {"continue_final_message": True, "add_generation_prompt": True},
         "add_generation_prompt"),
        (BEGUN, {"add_generation_prompt": False}, "add_generation_prompt"),
        (BEGUN, {"continue_final_message": True, "response_format": {"type": "json_object"}},
         "response_format"),
        (BEGUN, {"continue_final_message": True, "guided_choice": ["a"]}, "guided_choice"),
        (BEGUN, {"continue_final_message": True, "tools": TOOLS, "tool_choice": "required"},
         "tool_choice"),
    ],
)  # fmt: skip
async def test_what_cannot_be_continued_is_refused(
    client: httpx2.AsyncClient, messages: list[Any], more: dict[str, Any], param: str
) -> None:
    """With the field that is in the way."""
    answer = await post(client, "", messages=messages, **more)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("logprobs", "is_here"), [(0, True), (MANY_LOGPROBS, True), (MANY_LOGPROBS + 1, False)]
)
async def test_very_many_logprobs_are_written_off_the_event_loop(
    logprobs: int, is_here: bool
) -> None:
    """128 choices of a thousand tokens, twenty likely ones at each place, take seconds."""
    threads: list[int] = []

    def write() -> bytes:
        threads.append(threading.get_ident())
        return b"{}"

    assert await serialise(write, logprobs) == b"{}"
    assert (threads == [threading.get_ident()]) is is_here
