"""Keywords that no grammar holds are named, checked and told, over a socket."""

import asyncio
import threading
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest
from httpx2 import AsyncClient, Response
from prometheus_client import REGISTRY

from gateway import clock
from gateway.jobs import Caller
from gateway.serving.admission import until_deadline
from gateway.serving.generation import answer_checks
from tests.api.harness import chat, stream
from tests.fakes import ScriptedChat, ScriptedEngines
from tests.serving_app import catalog, served
from tests.waiting import until

pytestmark = pytest.mark.anyio

UNIQUE = {"type": "array", "uniqueItems": True}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": UNIQUE}}
NAMED = "%23%2FuniqueItems,%23%2Fa~1%C3%BC"
POINTERS = ["#/uniqueItems", "#/a~1ü"]


HURRIED_S = 50


@dataclass
class SlowJudge(ScriptedChat):
    """Judges nothing before `is_over` is set."""

    is_over: threading.Event = field(default_factory=threading.Event)

    def matches_schema(self, schema: str, answer: str) -> bool | None:
        self.is_over.wait(60)
        return super().matches_schema(schema, answer)


def ask(**more: Any) -> dict[str, Any]:
    return chat("[1]", **{"response_format": FORM, **more})


async def post(client: AsyncClient, **more: Any) -> Response:
    return await client.post("/v1/chat/completions", json=ask(**more))


def counted(outcome: str) -> float:
    labels = {"model": "writer", "outcome": outcome}
    return REGISTRY.get_sample_value("gateway_checked_answers_total", labels) or 0.0


async def test_unenforced_keywords_are_named_and_the_answer_checked(
    client: AsyncClient, engines: ScriptedEngines
) -> None:
    before = counted("valid")
    answer = await post(client)
    assert answer.headers["x-gateway-unenforced"] == NAMED
    assert answer.headers["x-gateway-schema-valid"] == "true"
    [(schema, text)] = engines.chat.judged
    assert (orjson.loads(schema), text) == (UNIQUE, "[1]")
    assert counted("valid") == before + 1
    held = await post(client, response_format={"type": "json_object"})
    assert not {"x-gateway-unenforced", "x-gateway-schema-valid"} & held.headers.keys()


async def test_an_answer_to_a_schema_held_whole_is_checked_too(
    client: AsyncClient, engines: ScriptedEngines
) -> None:
    """A compiler may err: the answer is written once more, and only a second fault is told."""
    whole = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "array"}}}
    for verdicts, told in (([False], None), ([False, False], "false")):
        engines.chat.verdicts = list(verdicts)
        answer = await post(client, response_format=whole)
        assert "x-gateway-unenforced" not in answer.headers
        assert answer.headers.get("x-gateway-schema-valid") == told
    assert len(engines.chat.judged) == 4


async def test_an_answer_that_violates_is_written_once_more(
    client: AsyncClient, engines: ScriptedEngines
) -> None:
    """Usage counts both; the second stands, whatever it is."""
    before = counted("invalid")
    for verdicts, told in (([False], "true"), ([False, False], "false")):
        engines.chat.verdicts = list(verdicts)
        answer = await post(client)
        assert answer.headers["x-gateway-schema-valid"] == told
        usage = {"prompt_tokens": 6, "completion_tokens": 8}
        assert usage.items() <= answer.json()["usage"].items()
        assert answer.json()["choices"][0]["message"]["content"] == "[1]"
    assert len(engines.chat.judged) == 4
    assert counted("invalid") == before + 3


@pytest.mark.parametrize(
    ("more", "told"),
    [({"seed": 7}, "false"), ({"temperature": 0}, "false"), ({"max_tokens": 2}, "unknown")],
)
async def test_an_answer_that_would_repeat_or_was_cut_is_not_written_again(
    client: AsyncClient, engines: ScriptedEngines, more: dict[str, Any], told: str
) -> None:
    """An answer breaks no schema by being too short: it is not judged at all."""
    engines.chat.verdicts = [False]
    answer = await post(client, **more)
    assert answer.headers["x-gateway-schema-valid"] == told
    assert len(engines.chat.judged) == (told == "false")
    assert len(engines.chat.jobs) == 1


async def test_a_second_try_that_fails_leaves_the_first(
    client: AsyncClient, engines: ScriptedEngines
) -> None:
    engines.chat.verdicts = [False]
    engines.chat.fail_at_step = 5  # the first answer takes four
    answer = await post(client)
    assert answer.status_code == 200
    assert answer.headers["x-gateway-schema-valid"] == "false"
    assert answer.json()["choices"][0]["message"]["content"] == "[1]"


@pytest.mark.parametrize("with_usage", [False, True])
async def test_a_stream_tells_the_verdict_with_its_end(
    client: AsyncClient, engines: ScriptedEngines, with_usage: bool
) -> None:
    engines.chat.verdicts = [False]
    body = ask(stream_options={"include_usage": with_usage})
    told = await stream(client, "/v1/chat/completions", body)
    assert told.answer.headers["x-gateway-unenforced"] == NAMED
    [chunk] = [chunk for chunk in told.events if "gateway" in chunk]
    assert chunk["choices"][0]["finish_reason"] == "stop"
    assert chunk["gateway"] == {"unenforced": POINTERS, "schema_valid": False}
    assert len(engines.chat.jobs) == 1


async def test_responses_tell_it_too(client: AsyncClient, engines: ScriptedEngines) -> None:
    engines.chat.verdicts = [False, True, False]
    form = {"format": {"type": "json_schema", "name": "a", "schema": UNIQUE}}
    body: dict[str, Any] = {"model": "writer", "input": "[1]", "text": form}
    answer = await client.post("/v1/responses", json=body)
    assert answer.headers["x-gateway-unenforced"] == NAMED
    assert answer.headers["x-gateway-schema-valid"] == "true"
    assert answer.json()["gateway"] == {"unenforced": POINTERS, "schema_valid": True}
    assert answer.json()["usage"]["input_tokens"] == 6
    told = await stream(client, "/v1/responses", body)
    assert told.is_done
    assert told.events[-1]["response"]["gateway"]["schema_valid"] is False


async def test_pointers_without_room_in_the_header_are_counted(
    client: AsyncClient, engines: ScriptedEngines
) -> None:
    """No pointer is cut: there is room for sixteen, or for 1,024 characters."""
    wide = {"name": "a", "schema": {"enum": ["many unenforced"], **UNIQUE}}
    answer = await post(client, response_format={"type": "json_schema", "json_schema": wide})
    *names, rest = answer.headers["x-gateway-unenforced"].split(",")
    assert names == [f"%23%2F{i}%2F{'x' * 99}" for i in range(9)]
    assert rest == "%E2%80%A6+11"


async def test_a_bare_prompts_schema_is_always_strict(
    client: AsyncClient, engines: ScriptedEngines
) -> None:
    """An answer that does not fit is an error, whole or in a stream: there is no other verdict."""
    body = {"model": "writer", "prompt": "[1]", "guided_json": UNIQUE}
    assert (await client.post("/v1/completions", json=body)).status_code == 200
    [job] = engines.chat.jobs
    assert job.grammar is not None
    assert job.grammar.strict
    engines.chat.verdicts = [False, False]
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "schema_violated"
    streamed = await client.post("/v1/completions", json={**body, "stream": True})
    assert "schema_violated" in streamed.text


async def test_answers_that_are_slow_to_judge_keep_no_other_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not waited for beyond the deadline, either: then nobody can tell."""

    def soon_after_judging_begins(caller: Caller) -> AbstractAsyncContextManager[None]:
        is_hurried = caller.allowed_s == HURRIED_S
        deadline = clock.now() + 0.2 if is_hurried else caller.deadline
        return until_deadline(replace(caller, deadline=deadline))

    monkeypatch.setattr(answer_checks, "until_deadline", soon_after_judging_begins)
    judge = SlowJudge()
    models = catalog(tmp_path, {"writer": {"kind": "chat", "source": "path:."}})
    async with served(models, ScriptedEngines(chat=judge)) as client:
        hurried = {"x-gateway-timeout-s": str(HURRIED_S)}
        ask_one = partial(client.post, "/v1/chat/completions", json=ask())
        asking = [asyncio.create_task(ask_one(headers=hurried if i else {})) for i in range(40)]
        try:
            async with asyncio.timeout(60):
                await until(lambda: len(judge.jobs) == 40)
                large = ask(response_format=None, user="x", metadata={"a": "x" * 300_000})
                assert (await client.post("/v1/chat/completions", json=large)).status_code < 500
                late = await asyncio.gather(*asking[1:])
        finally:
            judge.is_over.set()
        first = await asking[0]
    assert {answer.status_code for answer in late} == {200}
    assert {answer.headers["x-gateway-schema-valid"] for answer in late} == {"unknown"}
    assert first.headers["x-gateway-schema-valid"] == "true"
