"""POST /v1/chat/completions over a socket, with a scripted engine."""

import asyncio
import threading
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from httpx2 import AsyncClient, Response
from starlette.requests import Request
from starlette.types import Message, Scope

from gateway.api.bodies import Bodies, Body
from gateway.api.in_flight import RequestContext
from gateway.api.requests import MANY_LOGPROBS, serialize
from gateway.api.streams import COMMENT, EventStream, frame
from gateway.jobs.chat import CallDelta, Likelihood, TokenLogprob
from tests.api.harness import TOOLS, chat, error_of, stream
from tests.fakes import ScriptedEngines
from tests.waiting import until

pytestmark = pytest.mark.anyio
URL = "/v1/chat/completions"


async def post(client: AsyncClient, text: str, **more: Any) -> Response:
    return await client.post(URL, json=chat(text, **more))


async def first(client: AsyncClient, **more: Any) -> Any:
    return (await post(client, "hi", **more)).json()["choices"][0]


async def events(client: AsyncClient, text: str, **more: Any) -> list[Any]:
    return (await stream(client, URL, chat(text, **more))).events


async def test_a_whole_answer_has_openais_shape(client: AsyncClient) -> None:
    answer = (await post(client, "hello")).json()
    assert answer["id"].startswith("chatcmpl-")
    assert (answer["object"], answer["model"]) == ("chat.completion", "writer")
    assert answer["system_fingerprint"].endswith("-scripted")
    message = {"role": "assistant", "content": "hello", "refusal": None}
    assert answer["choices"] == [
        {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    ]
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 6,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


async def test_a_stream_tells_role_text_and_reason_once_each(client: AsyncClient) -> None:
    """SDKs concatenate deltas that come twice."""
    chunks = await events(client, "hey", stream_options={"include_usage": True})
    usage = chunks.pop()
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 4)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    begin = {"role": "assistant", "content": ""}
    assert deltas == [begin, {"content": "h"}, {"content": "e"}, {"content": "y"}, {}]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * 4 + ["stop"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert not any("usage" in chunk for chunk in await events(client, "hey"))


async def silence() -> Message:
    """Receive nothing more of a client."""
    await asyncio.Event().wait()
    raise AssertionError


def event_stream(events: AsyncGenerator[bytes, None]) -> EventStream:
    """Return the stream of a request of which all has been received."""
    scope: Scope = {"type": "http"}
    counted = Body(Bodies(10**9))
    scope["gateway"] = RequestContext(
        scope=scope,
        headers={},
        request_id="req-1",
        is_anthropic=False,
        body=counted,
        unread=counted,
    )
    request = Request(scope, silence)
    return EventStream(events, {}, request, write_error=lambda error: b"", keep_alive=COMMENT)


async def test_a_stream_that_pauses_in_its_middle_is_kept_alive_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Keep-alives are comments between whole events, a line feed each, and nothing else: no `id:`,
    no `event:`, no blank line, which some clients take for an empty event.
    """
    monkeypatch.setattr("gateway.api.streams.KEEP_ALIVE_S", 0.02)
    sent = bytearray()

    async def kept_alive_after(word: bytes) -> None:
        await until(lambda: frame(word) + b": keep-alive\n" in sent)

    async def events() -> AsyncGenerator[bytes, None]:
        for word in (b"1", b"2", b"3"):
            yield frame(word)
            await kept_alive_after(word)

    async def send(message: Message) -> None:
        sent.extend(message.get("body", b""))

    stream = event_stream(events())
    await stream.prime(1)
    await stream({}, silence, send)
    parts = bytes(sent).split(b"data: ")
    assert all(b": keep-alive\n" in part for part in parts[1:])
    assert bytes(sent).replace(b": keep-alive\n", b"") == b"data: 1\n\ndata: 2\n\ndata: 3\n\n"


async def test_events_that_come_while_others_are_sent_are_sent_together() -> None:
    may_go_on, sent = asyncio.Event(), list[bytes]()

    async def events() -> AsyncGenerator[bytes, None]:
        yield frame(b"1")
        await may_go_on.wait()
        yield frame(b"2")
        yield frame(b"3")

    async def send(message: Message) -> None:
        if body := message.get("body"):
            sent.append(body)
            may_go_on.set()
        await asyncio.sleep(0.01)

    stream = event_stream(events())
    await stream.prime(1)
    await stream({}, silence, send)
    assert sent == [frame(b"1"), frame(b"2") + frame(b"3")]


async def test_logprobs_are_told_as_openai_does(
    client: AsyncClient, engines: ScriptedEngines
) -> None:
    """A reranker reads the first of the first token's likeliest."""
    likeliest = [Likelihood(" True", b" True", -0.1), Likelihood(" False", b" False", -2.4)]
    scored = TokenLogprob(likeliest[0], likeliest)
    engines.chat.script = [{"text": " True", "logprobs": [scored], "finish_reason": "length"}]
    asked = {"logprobs": True, "top_logprobs": 2, "max_tokens": 1, "temperature": 0}
    told = {"token": " True", "logprob": -0.1, "bytes": list(b" True")}
    other = {"token": " False", "logprob": -2.4, "bytes": list(b" False")}
    expected = {**told, "top_logprobs": [told, other]}
    assert (await first(client, **asked))["logprobs"] == {"content": [expected], "refusal": None}
    assert engines.chat.jobs[0].logprobs == 2
    assert engines.chat.jobs[0].template_args == {"enable_thinking": False}
    chunks = await events(client, "hi", **asked)
    assert chunks[1]["choices"][0]["logprobs"]["content"] == [expected]
    assert (await first(client, logprobs=True))["logprobs"] is not None


async def test_reasoning_is_told_beside_the_content(
    client: AsyncClient, engines: ScriptedEngines
) -> None:
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


CALLS: list[dict[str, Any]] = [
    {"text": "Let me see.", "tokens": 1},
    {"call": CallDelta(0, "call_1", "go", '{"a":1}'), "tokens": 1},
    {"call": CallDelta(1, "call_2", "go", ""), "tokens": 1},
    {"call": CallDelta(1, arguments='{"b"'), "tokens": 1},
    {"call": CallDelta(1, arguments=":2}"), "tokens": 1, "finish_reason": "tool_calls"},
]


async def test_calls_are_told_whole_and_streamed_with_id_and_name_once(
    client: AsyncClient, engines: ScriptedEngines
) -> None:
    """SDKs concatenate deltas that come twice, and index the calls as they come."""
    engines.chat.script = CALLS
    choice = await first(client, tools=TOOLS[URL])
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "Let me see.")
    assert choice["message"]["tool_calls"] == [
        {"id": "call_1", "type": "function", "function": {"name": "go", "arguments": '{"a":1}'}},
        {"id": "call_2", "type": "function", "function": {"name": "go", "arguments": '{"b":2}'}},
    ]
    chunks = [c["choices"][0] for c in await events(client, "hi", tools=TOOLS[URL])]
    pieces = [piece for c in chunks for piece in c["delta"].get("tool_calls", [])]
    told = [(p["index"], p.get("id"), p["function"].get("name")) for p in pieces]
    begun = {0: (0, "call_1", "go"), 1: (1, "call_2", "go")}
    assert told == [begun[0], (0, None, None), begun[1], (1, None, None), (1, None, None)]
    texts = ["".join(p["function"]["arguments"] for p in pieces if p["index"] == i) for i in (0, 1)]
    assert texts == ['{"a":1}', '{"b":2}']
    assert chunks[-1]["finish_reason"] == "tool_calls"
    engines.chat.script = CALLS[1:]
    assert (await first(client, tools=TOOLS[URL]))["message"]["content"] is None


async def test_a_call_asked_for_by_its_older_name_is_told_by_it(
    client: AsyncClient, engines: ScriptedEngines
) -> None:
    engines.chat.script = [{**CALLS[1], "finish_reason": "tool_calls"}]
    asked = {"functions": [TOOLS[URL][0]["function"]]}
    choice = await first(client, **asked)
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == {"name": "go", "arguments": '{"a":1}'}
    chunks = [c["choices"][0] for c in await events(client, "hi", **asked)]
    assert {"function_call": {"name": "go", "arguments": ""}} in [c["delta"] for c in chunks]
    assert chunks[-1]["finish_reason"] == "function_call"


USER = {"role": "user", "content": "hi"}
BEGUN = [USER, {"role": "assistant", "content": "Once"}]
CONTINUED = {"continue_final_message": True}


@pytest.mark.parametrize(
    ("messages", "more"),
    [
        (BEGUN, CONTINUED),
        (BEGUN, {**CONTINUED, "add_generation_prompt": False}),
        ([USER, {**BEGUN[1], "prefix": True}], {}),
    ],
)
async def test_a_last_message_of_the_assistants_may_be_continued(
    client: AsyncClient, engines: ScriptedEngines, messages: list[Any], more: dict[str, Any]
) -> None:
    """Requests ask for it in vLLM's way, or in Mistral's and DeepSeek's."""
    answer = await post(client, "", messages=messages, **more)
    assert answer.status_code == 200, answer.text
    assert engines.chat.jobs[-1].continues
    assert "prefix" not in engines.chat.jobs[-1].messages[-1]
    assert (await post(client, "", messages=BEGUN)).status_code == 200
    assert not engines.chat.jobs[-1].continues


JSON = {"response_format": {"type": "json_object"}}
FORCED = {"tools": TOOLS[URL], "tool_choice": "required"}


@pytest.mark.parametrize(
    ("messages", "more", "param"),
    [
        ([USER], CONTINUED, "messages[0]"),
        ([{**USER, "prefix": True}], {}, "messages[0]"),
        ([{"role": "assistant", "content": "a", "prefix": True}, USER], {}, "messages[0].prefix"),
        ([{"role": "assistant", "content": ""}], CONTINUED, "messages[0]"),
        (BEGUN, {**CONTINUED, "add_generation_prompt": True}, "add_generation_prompt"),
        (BEGUN, {"add_generation_prompt": False}, "add_generation_prompt"),
        (BEGUN, {**CONTINUED, **JSON}, "response_format"),
        (BEGUN, {**CONTINUED, "guided_choice": ["a"]}, "guided_choice"),
        (BEGUN, {**CONTINUED, **FORCED}, "tool_choice"),
    ],
)
async def test_what_cannot_be_continued_is_refused(
    client: AsyncClient, messages: list[Any], more: dict[str, Any], param: str
) -> None:
    assert error_of(await post(client, "", messages=messages, **more))["param"] == param


@pytest.mark.parametrize("logprobs", [0, MANY_LOGPROBS, MANY_LOGPROBS + 1])
async def test_very_many_logprobs_are_written_off_the_event_loop(logprobs: int) -> None:
    """128 choices of a thousand tokens, twenty likely ones at each place, take seconds."""
    threads: list[int] = []

    def write() -> bytes:
        threads.append(threading.get_ident())
        return b"{}"

    assert await serialize(write, logprobs) == b"{}"
    assert (threads == [threading.get_ident()]) is (logprobs <= MANY_LOGPROBS)
