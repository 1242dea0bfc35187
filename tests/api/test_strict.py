"""A strict answer is checked whatever its grammar held: one that breaks its schema is an error."""

from typing import Any

import httpx2
import orjson
import pytest

from gateway.jobs import CallDelta
from tests.api.harness import code_of
from tests.fakes import ScriptedChat, ScriptedEngines

pytestmark = pytest.mark.anyio

LIST = {"type": "array"}
PLACE = {"type": "object", "properties": {"at": {"type": "string"}}}
USER = [{"role": "user", "content": "[1]"}]
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": LIST, "strict": True}}
CHAT = {"model": "writer", "messages": USER, "response_format": FORM}
TEXT = {"format": {"type": "json_schema", "name": "a", "schema": LIST, "strict": True}}
RESPONSE = {"model": "writer", "input": "[1]", "text": TEXT}
OUTPUT = {"format": {"type": "json_schema", "schema": LIST}}
MESSAGE = {"model": "writer", "max_tokens": 9, "messages": USER, "output_config": OUTPUT}
WAYS = [
    pytest.param("/v1/chat/completions", CHAT, id="chat"),
    pytest.param("/v1/responses", RESPONSE, id="responses"),
    pytest.param("/v1/messages", MESSAGE, id="messages"),
]


def tools(*, strict: bool) -> list[tuple[str, dict[str, Any]]]:
    """Give a request of each wire that has one tool."""
    function = {"name": "go", "parameters": PLACE, "strict": strict}
    flat = {"type": "function", **function}
    used = {"name": "go", "input_schema": PLACE, "strict": strict}
    plain = {"model": "writer", "messages": USER}
    return [
        ("/v1/chat/completions", {**plain, "tools": [{"type": "function", "function": function}]}),
        ("/v1/responses", {"model": "writer", "input": "[1]", "tools": [flat]}),
        ("/v1/messages", {**plain, "max_tokens": 9, "tools": [used]}),
    ]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), WAYS)
async def test_an_answer_that_fits_is_as_any_other(
    client: httpx2.AsyncClient, engines: ScriptedEngines, path: str, body: Any
) -> None:
    """It was checked, and nothing is said of that: the status says it."""
    answer = await client.post(path, json=body)
    assert answer.status_code == 200
    assert [text for _, text in engines.chat.judged] == ["[1]"]
    assert "x-gateway-schema-valid" not in answer.headers
    assert "gateway" not in answer.json()


@pytest.mark.parametrize(("path", "body"), WAYS)
async def test_one_that_does_not_is_written_once_more(
    client: httpx2.AsyncClient, engines: ScriptedEngines, path: str, body: Any
) -> None:
    """A second answer that fits is the answer."""
    engines.chat.verdicts = [False, True]
    answer = await client.post(path, json=body)
    assert answer.status_code == 200
    usage = answer.json()["usage"]
    assert usage.get("prompt_tokens", usage.get("input_tokens")) == 6


@pytest.mark.parametrize(("path", "body"), WAYS)
async def test_a_second_that_does_not_is_an_error(
    client: httpx2.AsyncClient, engines: ScriptedEngines, path: str, body: Any
) -> None:
    """Which an SDK does not ask for again: two tries were made."""
    engines.chat.verdicts = [False, False]
    answer = await client.post(path, json=body)
    assert answer.status_code == 500
    assert code_of(answer) == "schema_violated"
    assert answer.headers["x-should-retry"] == "false"
    assert len(engines.chat.jobs) == 2


@pytest.mark.parametrize(("path", "body"), WAYS)
async def test_there_is_no_second_where_it_would_be_the_first(
    client: httpx2.AsyncClient, engines: ScriptedEngines, path: str, body: Any
) -> None:
    """Nor is one made of what was broken, if the engine breaks meanwhile."""
    engines.chat.verdicts = [False, False]
    answer = await client.post(path, json={**body, "temperature": 0})
    assert (answer.status_code, code_of(answer)) == (500, "schema_violated")
    assert len(engines.chat.jobs) == 1
    engines.chat.fail_at_step = len(engines.chat.steps) + 5  # the first try takes four
    answer = await client.post(path, json=body)
    assert (answer.status_code, code_of(answer)) == (500, "schema_violated")


@pytest.mark.parametrize(("path", "body"), WAYS)
async def test_a_stream_ends_with_the_error(
    client: httpx2.AsyncClient, engines: ScriptedEngines, path: str, body: Any
) -> None:
    """Its text is out; no event says that it has ended well."""
    engines.chat.verdicts = [False]
    answer = await client.post(path, json={**body, "stream": True})
    assert answer.status_code == 200
    assert "schema_violated" in answer.text
    assert '"finish_reason":"stop"' not in answer.text
    for end in ("[DONE]", "message_stop", "response.completed"):
        assert end not in answer.text


async def test_other_choices_stand_by_themselves(
    client: httpx2.AsyncClient, engines: ScriptedEngines
) -> None:
    """One of three is written again; one that is broken twice is an error for all."""
    engines.chat.verdicts = [True, False, True]
    answer = await client.post("/v1/chat/completions", json={**CHAT, "n": 3})
    assert answer.status_code == 200
    assert [job.n for job in engines.chat.jobs] == [3, 1]
    engines.chat.verdicts = [True, False, True, False]
    answer = await client.post("/v1/chat/completions", json={**CHAT, "n": 3})
    assert code_of(answer) == "schema_violated"


@pytest.mark.parametrize(("path", "body"), WAYS)
async def test_what_nobody_can_tell_is_told(
    client: httpx2.AsyncClient, engines: ScriptedEngines, path: str, body: Any
) -> None:
    """A check that takes too long takes no answer back."""
    engines.chat.verdicts = [None]
    answer = await client.post(path, json=body)
    assert answer.status_code == 200
    assert answer.headers["x-gateway-schema-valid"] == "unknown"


@pytest.mark.parametrize(("path", "body"), WAYS)
async def test_an_answer_that_was_cut_at_its_length_says_so_itself(
    client: httpx2.AsyncClient, engines: ScriptedEngines, path: str, body: Any
) -> None:
    """It is not checked: clients know by its reason that it is no whole one."""
    most = {"max_output_tokens": 2} if path == "/v1/responses" else {"max_tokens": 2}
    answer = await client.post(path, json={**body, **most})
    assert answer.status_code == 200
    assert not engines.chat.judged


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("way", [0, 1, 2], ids=["chat", "responses", "messages"])
async def test_so_are_the_arguments_of_strict_tools(
    client: httpx2.AsyncClient, engines: ScriptedEngines, way: int, strict: bool
) -> None:
    """Those of others are not: their schema is advice."""
    call = {"call": CallDelta(0, "call_1", "go", '{"at":1}')}
    engines.chat = ScriptedChat(script=[call, {"finish_reason": "tool_calls"}])
    engines.chat.verdicts = [False, False]
    path, body = tools(strict=strict)[way]
    answer = await client.post(path, json=body)
    assert answer.status_code == (500 if strict else 200), answer.text
    assert [text for _, text in engines.chat.judged] == ['{"at":1}'] * (2 if strict else 0)


async def test_text_beside_strict_tools_is_free(
    client: httpx2.AsyncClient, engines: ScriptedEngines
) -> None:
    """There is nothing to check in it."""
    path, body = tools(strict=True)[0]
    answer = await client.post(path, json=body)
    assert answer.status_code == 200
    assert not engines.chat.judged
    assert orjson.loads(answer.content)["choices"][0]["message"]["content"] == "[1]"


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("path", "body"), WAYS)
async def test_one_that_a_stop_string_cut_is_as_it_was_asked_for(
    client: httpx2.AsyncClient,
    engines: ScriptedEngines,
    path: str,
    body: Any,
    *,
    is_streamed: bool,
) -> None:
    """It is not whole, so it is not checked."""
    last = {"tokens": 1, "finish_reason": "stop", "stop": "]"}
    engines.chat.script = [{"text": "[1", "tokens": 2}, last]
    engines.chat.verdicts = [False, False]
    answer = await client.post(path, json={**body, "stream": is_streamed})
    assert answer.status_code == 200
    assert "schema_violated" not in answer.text
    assert engines.chat.judged == []
