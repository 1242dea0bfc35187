"""Answers in no format that is known here, read by the `response_template` of their checkpoint."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import structlog

from tests.checkpoints import write_reciting
from tests.cpu_engines import CpuEngines, cpu_settings
from tests.serving_app import catalog, served

pytestmark = pytest.mark.anyio

TEMPLATE: dict[str, Any] = {
    "start_anchor": "<|assistant|>",
    "defaults": {"role": "assistant"},
    "fields": {
        "thinking": {"open": "<|thought|>", "close": "<|thought over|>"},
        "tool_calls": {
            "open_pattern": r"<\|do\|>(?P<name>\w+)",
            "close": "<|done|>",
            "repeats": True,
            "content": "json",
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        },
        "content": {},
    },
}
THOUGHT = ("<|thought|>", "It may rain.", "<|thought over|>")
CALL = ("<|do|>", "look", '{"at": "Oslo"}', "<|done|>")
ANSWER = (*THOUGHT, "I shall ", "look.", *CALL)
AS_IT_STANDS = 'I shall look.look{"at": "Oslo"}'
LOOK = {"name": "look", "parameters": {"type": "object", "properties": {"at": {}}}}
TOOLS = [{"type": "function", "function": LOOK}]
ASKED: dict[str, Any] = {
    "model": "mine",
    "messages": [{"role": "user", "content": "Hi"}],
    "temperature": 0,
}
HEADER = "x-gateway-answer-format"


@asynccontextmanager
async def reciting(
    folder: Path,
    pieces: Sequence[str] = ANSWER,
    template: Any = TEMPLATE,
    *,
    opening: str = "",
    **spec: Any,
) -> AsyncIterator[httpx2.AsyncClient]:
    """Serve a model that answers with these pieces."""
    files = write_reciting(folder / "files", pieces, opening=opening, response_template=template)
    models = catalog(folder, {"mine": {"source": f"path:{files}", "kind": "chat", **spec}})
    async with served(models, CpuEngines(cpu_settings())) as client:
        yield client


async def choice(client: httpx2.AsyncClient, **body: Any) -> dict[str, Any]:
    answer = (await client.post("/v1/chat/completions", json={**ASKED, **body})).json()
    [only] = answer["choices"]
    return dict(only)


async def events(client: httpx2.AsyncClient, path: str, **body: Any) -> list[dict[str, Any]]:
    text = (await client.post(path, json={**ASKED, **body, "stream": True})).text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


async def test_thoughts_text_and_calls_are_told_apart(tmp_path: Path) -> None:
    async with reciting(tmp_path) as client:
        answer = await client.post("/v1/chat/completions", json={**ASKED, "tools": TOOLS})
    assert answer.headers[HEADER] == "response_template"
    assert "x-gateway-tool-format" not in answer.headers
    [only] = answer.json()["choices"]
    message = only["message"]
    assert (message["reasoning_content"], message["content"]) == ("It may rain.", "I shall look.")
    [call] = message["tool_calls"]
    assert call["id"].startswith("call_")
    assert call["function"] == {"name": "look", "arguments": '{"at":"Oslo"}'}
    assert only["finish_reason"] == "tool_calls"
    assert answer.json()["usage"]["completion_tokens"] == len(ANSWER) + 1


async def test_a_stream_has_no_text_before_the_end_and_then_all(tmp_path: Path) -> None:
    async with reciting(tmp_path) as client:
        chunks = await events(client, "/v1/chat/completions", tools=TOOLS, n=2)
    for index in range(2):
        choices = [each for chunk in chunks for each in chunk["choices"] if each["index"] == index]
        deltas = [each["delta"] for each in choices]
        assert [each["content"] for each in deltas if each.get("content")] == ["I shall look."]
        thoughts = [each["reasoning_content"] for each in deltas if each.get("reasoning_content")]
        assert thoughts == ["It may rain."]
        calls = [call["function"] for each in deltas for call in each.get("tool_calls") or ()]
        assert [call["name"] for call in calls if call.get("name")] == ["look"]
        assert "".join(call.get("arguments") or "" for call in calls) == '{"at":"Oslo"}'
        assert choices[-1]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_anthropics_messages_have_blocks_of_each(tmp_path: Path, is_streamed: bool) -> None:
    tools = [{"name": "look", "input_schema": LOOK["parameters"]}]
    body: dict[str, Any] = {"tools": tools, "max_tokens": 2000}
    body["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    async with reciting(tmp_path) as client:
        if is_streamed:
            whole = await events(client, "/v1/messages", **body)
            kinds = [
                e["content_block"]["type"] for e in whole if e["type"] == "content_block_start"
            ]
            [reason] = [e["delta"]["stop_reason"] for e in whole if e["type"] == "message_delta"]
        else:
            answer = (await client.post("/v1/messages", json={**ASKED, **body})).json()
            kinds, reason = [block["type"] for block in answer["content"]], answer["stop_reason"]
            assert answer["content"][-1]["input"] == {"at": "Oslo"}
    assert (kinds, reason) == (["thinking", "text", "tool_use"], "tool_use")


async def test_a_thought_that_the_template_opens_is_one(tmp_path: Path) -> None:
    pieces = ("Hm.", "<|thought over|>", "Yes.")
    async with reciting(tmp_path, pieces, opening="<|thought|>") as client:
        message = (await choice(client))["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")


async def test_only_what_may_be_called_and_is_whole_is_a_call(tmp_path: Path) -> None:
    other = [{"type": "function", "function": {**LOOK, "name": "listen"}}]
    async with reciting(tmp_path) as client:
        for body, reason in (
            ({}, "stop"),
            ({"tools": other}, "stop"),
            ({"tools": TOOLS, "tool_choice": "none"}, "stop"),
            ({"tools": TOOLS, "max_tokens": len(ANSWER)}, "length"),
        ):
            answer = await choice(client, **body)
            assert answer["message"]["reasoning_content"] == "It may rain."
            assert answer["message"]["content"] == AS_IT_STANDS
            assert not answer["message"].get("tool_calls")
            assert answer["finish_reason"] == reason
        cut = await choice(client, tools=TOOLS, max_tokens=4)
        assert cut["message"]["reasoning_content"] == "It may rain."
        assert (cut["message"]["content"], cut["finish_reason"]) == ("I shall", "length")
        stopped = await choice(client, tools=TOOLS, stop=["look"])
        assert (stopped["message"]["content"], stopped["finish_reason"]) == ("I shall", "stop")
        scored = await choice(client, tools=TOOLS, logprobs=True)
        # Logprobs of thoughts and of a call are not the content's.
        assert not (scored["logprobs"] or {}).get("content")


async def test_an_answer_that_a_stop_string_ended_makes_no_call(tmp_path: Path) -> None:
    """A stop string may have cut the call short, as max_tokens may."""
    async with reciting(tmp_path, [*ANSWER, "Bye."]) as client:
        answer = await choice(client, tools=TOOLS, stop=["Bye."])
    assert answer["message"]["content"] == AS_IT_STANDS
    assert (answer["message"].get("tool_calls"), answer["finish_reason"]) == (None, "stop")


@pytest.mark.parametrize("setting", ["tool_parser", "reasoning_parser"])
async def test_models_yaml_comes_before_the_checkpoints_own(tmp_path: Path, setting: str) -> None:
    async with reciting(tmp_path, **{setting: "none"}) as client:
        answer = await client.post("/v1/chat/completions", json={**ASKED, "tools": TOOLS})
    assert HEADER not in answer.headers


async def test_a_forced_call_is_held_to_its_grammar_and_read_as_ever(tmp_path: Path) -> None:
    async with reciting(tmp_path) as client:
        body = {**ASKED, "tools": TOOLS, "tool_choice": "required", "max_tokens": 40}
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    assert HEADER not in answer.headers


@pytest.mark.parametrize(
    "template",
    [
        ["no", "template"],
        "no template",
        {"fields": {}},
        {**TEMPLATE, "fields": {"content": {"open_pattern": "("}}},
        {**TEMPLATE, "version": 2},
    ],
)
async def test_what_is_no_template_is_logged_and_left_alone(tmp_path: Path, template: Any) -> None:
    with structlog.testing.capture_logs() as logged:
        async with reciting(tmp_path, template=template) as client:
            answer = await client.post("/v1/chat/completions", json={**ASKED, "tools": TOOLS})
    assert HEADER not in answer.headers
    assert answer.headers["x-gateway-tool-format"] == "unknown"
    assert answer.headers["x-gateway-reasoning-format"] == "unknown"
    assert answer.json()["choices"][0]["message"]["content"] == f"It may rain.{AS_IT_STANDS}"
    assert "response_template_unused" in [each["event"] for each in logged]


async def test_a_format_that_models_yaml_names_goes_before_the_template(tmp_path: Path) -> None:
    async with reciting(tmp_path, tool_parser="none") as client:
        answer = await client.post("/v1/chat/completions", json=ASKED)
    assert HEADER not in answer.headers
    assert answer.json()["choices"][0]["message"]["content"] == f"It may rain.{AS_IT_STANDS}"


async def test_a_family_that_is_known_has_its_own_reader_and_streams(tmp_path: Path) -> None:
    pieces = ("<think>", "Hm.", "</think>", "Yes, ", "it does.")
    async with reciting(tmp_path, pieces) as client:
        answer = await client.post("/v1/chat/completions", json=ASKED)
        chunks = await events(client, "/v1/chat/completions")
    assert HEADER not in answer.headers
    message = answer.json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes, it does.")
    deltas = [each["delta"] for chunk in chunks for each in chunk["choices"]]
    assert [each["content"] for each in deltas if each.get("content")] == ["Yes, ", "it does."]
