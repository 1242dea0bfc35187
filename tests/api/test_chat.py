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
from gateway.api.streams import EventStream, frame
from gateway.jobs import CallDelta, Likelihood, TokenLogprob
from gateway.registry import Catalog
from tests.fakes import ScriptedEngines
from tests.serving_app import served

pytestmark = pytest.mark.anyio


def ask(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "writer", "messages": [{"role": "user", "content": text}], **more}


async def post(client: httpx2.AsyncClient, text: str, **more: Any) -> httpx2.Response:
    return await client.post("/v1/chat/completions", json=ask(text, **more))


async def events(client: httpx2.AsyncClient, text: str, **more: Any) -> list[Any]:
    """Read a stream whole; [DONE] is None."""
    body = ask(text, stream=True, **more)
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in answer.aiter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    return [orjson.loads(line.removeprefix("data: ")) for line in lines[:-1]]


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


async def test_a_prompt_beyond_the_context_is_refused(client: httpx2.AsyncClient) -> None:
    """As a status, for a stream too."""
    for stream in (False, True):
        answer = await post(client, "x" * 101, stream=stream)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert answer.json()["error"]["param"] == "messages"


async def test_what_the_template_refuses_is_a_400_before_the_stream(
    client: httpx2.AsyncClient,
) -> None:
    """Never an error inside a 200."""
    answer = await post(client, "refuse me", stream=True)
    assert answer.status_code == 400


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", []), ("messages", "hi"), ("messages", None), ("temperature", -0.1),
        ("temperature", 2.1), ("temperature", "hot"), ("top_p", 1.1), ("min_p", -1),
        ("max_tokens", 0), ("max_tokens", -5), ("max_tokens", 1.5), ("n", 0), ("n", 129),
        ("stop", ["a"] * 65), ("stop", ["a" * 257]), ("stop", 3), ("seed", "x"),
        ("presence_penalty", 3), ("frequency_penalty", -3), ("logit_bias", {"a": 1}),
        ("logit_bias", {"5": 101}), ("logit_bias", []), ("stream", "yes"),
        ("chat_template_kwargs", []), ("logprobs", 1), ("top_logprobs", 21),
        ("top_logprobs", 5), ("tools", {}), ("tool_choice", "sometimes"),
        ("response_format", "json"), ("reasoning_effort", "very"), ("parallel_tool_calls", 1),
    ],
)  # fmt: skip
async def test_a_wrong_value_is_refused_by_its_name(
    client: httpx2.AsyncClient, field: str, value: Any
) -> None:
    """Never a 500, never a hang."""
    answer = await post(client, "hi", **{field: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].split("[")[0].split(".")[0] == field


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
async def test_numbers_that_are_none_are_refused(client: httpx2.AsyncClient, number: str) -> None:
    """JSON has no NaN, and no temperature is infinite."""
    body = orjson.dumps(ask("hi", temperature=0)).replace(
        b'"temperature":0', b'"temperature":' + number.encode()
    )
    answer = await client.post("/v1/chat/completions", content=body)
    assert answer.status_code == 400


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("modalities", ["audio"]),
        ("audio", {"voice": "x"}),
        ("web_search_options", {}),
    ],
)
async def test_what_would_change_the_answer_and_is_not_served_is_refused(
    client: httpx2.AsyncClient, field: str, value: Any
) -> None:
    """Never free text with a 200 where JSON was asked for."""
    answer = await post(client, "hi", **{field: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "unsupported_parameter"
    assert answer.json()["error"]["param"] == field


async def test_harmless_fields_and_nulls_are_accepted(client: httpx2.AsyncClient) -> None:
    """SDKs and agents send them unasked."""
    answer = await post(
        client, "hi", user="u", store=False, metadata={"a": "b"}, tools=[], n=1, seed=None,
        response_format={"type": "text"}, logprobs=False, stop=None, service_tier="auto",
        parallel_tool_calls=True, max_tokens=None, verbosity="low",
    )  # fmt: skip
    assert answer.status_code == 200
    assert "x-gateway-ignored" not in answer.headers


async def test_an_embedding_model_cannot_chat(client: httpx2.AsyncClient) -> None:
    """And is told so by name."""
    answer = await post(client, "hi", model="org/embed")
    assert answer.status_code == 400
    assert "`org/embed` is an embedding model" in answer.json()["error"]["message"]


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


async def test_a_failure_after_the_first_token_is_an_error_event(
    client: httpx2.AsyncClient, engines: ScriptedEngines
) -> None:
    """Then the stream ends, and there is no [DONE]."""
    engines.chat.fail_at_step = 3
    body = ask("hello", stream=True)
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        lines = [line async for line in answer.aiter_lines() if line]
    assert orjson.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "engine_failed"
    assert "data: [DONE]" not in lines


async def test_a_slow_first_token_opens_the_stream_and_keeps_it_alive(
    models: Catalog, engines: ScriptedEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With comments, which clients skip."""
    monkeypatch.setattr("gateway.api.streams.KEEP_ALIVE_S", 0.05)
    async with served(models, engines, stream_open_after_s=0.05) as client:
        engines.chat.gate.close()
        asyncio.get_running_loop().call_later(0.4, engines.chat.gate.open)
        body = ask("hi", stream=True)
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = [line async for line in answer.aiter_lines() if line]
    assert lines[0] == ": keep-alive"
    assert lines[-1] == "data: [DONE]"


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
    stream = await EventStream(events(), {}, request).prime(1)
    await stream({}, receive, send)
    parts = bytes(sent).split(b"data: ")
    assert all(b": keep-alive\n" in part for part in parts[1:])
    assert bytes(sent).replace(b": keep-alive\n", b"") == b"data: 1\n\ndata: 2\n\ndata: 3\n\n"


async def test_a_deadline_header_ends_the_wait(
    client: httpx2.AsyncClient, engines: ScriptedEngines
) -> None:
    """With 504, and no retry."""
    engines.chat.gate.close()
    answer = await client.post(
        "/v1/chat/completions", json=ask("hi"), headers={"x-gateway-timeout-s": "0.1"}
    )
    engines.chat.gate.open()
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("given", ["soon", "-1", "0", "nan"])
async def test_a_deadline_that_is_none_is_refused(client: httpx2.AsyncClient, given: str) -> None:
    """Rather than guessed."""
    answer = await client.post(
        "/v1/chat/completions", json=ask("hi"), headers={"x-gateway-timeout-s": given}
    )
    assert answer.status_code == 400


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


@pytest.mark.parametrize("stream", [False, True])
async def test_a_model_whose_form_of_calls_is_unknown_is_said_to_be(
    client: httpx2.AsyncClient, engines: ScriptedEngines, stream: bool
) -> None:
    """Its calls come as text: a header tells, where there are tools, whole or streamed."""
    engines.chat.calls_are_text = True
    answer = await post(client, "hi", tools=TOOLS, stream=stream)
    assert answer.headers["x-gateway-tool-format"] == "unknown"
    answer = await post(client, "hi", stream=stream)
    assert "x-gateway-tool-format" not in answer.headers


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
