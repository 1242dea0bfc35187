"""A strict answer is checked whatever its grammar held: one that breaks its schema is an error."""

from typing import Any

import pytest
from httpx2 import AsyncClient

from gateway.jobs.chat import CallDelta
from tests.api.harness import ASK, TOOLS, chat, code_of
from tests.fakes import ScriptedChat, ScriptedEngines

pytestmark = pytest.mark.anyio

LIST = {"type": "array"}
PLACE = {"type": "object", "properties": {"at": {"type": "string"}}}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": LIST, "strict": True}}
TEXT = {"format": {"type": "json_schema", "name": "a", "schema": LIST, "strict": True}}
OUTPUT = {"format": {"type": "json_schema", "schema": LIST}}
CHAT = chat("[1]", response_format=FORM)
RESPONSE = {"model": "writer", "input": "[1]", "text": TEXT}
MESSAGE = {**ASK["/v1/messages"]("[1]"), "output_config": OUTPUT}
WAYS = [
    pytest.param("/v1/chat/completions", CHAT, id="chat"),
    pytest.param("/v1/responses", RESPONSE, id="responses"),
    pytest.param("/v1/messages", MESSAGE, id="messages"),
]


def tools(*, strict: bool) -> dict[str, dict[str, Any]]:
    """Give a request of each wire that has one tool."""
    function = {"name": "go", "parameters": PLACE, "strict": strict}
    used = {"name": "go", "input_schema": PLACE, "strict": strict}
    given: dict[str, Any] = {
        "/v1/chat/completions": {"type": "function", "function": function},
        "/v1/responses": {"type": "function", **function},
        "/v1/messages": used,
    }
    return {path: {**ASK[path]("[1]"), "tools": [tool]} for path, tool in given.items()}


@pytest.mark.parametrize(
    ("verdicts", "status", "tries", "told"),
    [
        ([], 200, 1, None),
        ([False, True], 200, 2, None),
        ([False, False], 500, 2, None),
        ([None], 200, 1, "unknown"),
    ],
)
@pytest.mark.parametrize(("path", "body"), WAYS)
async def test_an_answer_that_does_not_fit_is_written_once_more_and_then_an_error(
    client: AsyncClient, engines: ScriptedEngines, path: str, body: Any,
    verdicts: list[bool | None], status: int, tries: int, told: str | None,
) -> None:  # fmt: skip
    """An SDK does not repeat such a request.

    An answer that cannot be judged in time is reported.
    """
    engines.chat.verdicts = list(verdicts)
    answer = await client.post(path, json=body)
    assert answer.status_code == status
    assert answer.headers.get("x-gateway-schema-valid") == told
    assert len(engines.chat.jobs) == tries
    if status == 200:
        usage = answer.json()["usage"]
        assert usage.get("prompt_tokens", usage.get("input_tokens")) == 3 * tries
    else:
        assert code_of(answer) == "schema_violated"
        assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(("path", "body"), WAYS)
async def test_no_second_try_is_made_where_it_would_repeat_the_first(
    client: AsyncClient, engines: ScriptedEngines, path: str, body: Any
) -> None:
    """A broken answer gets no second try, either, if the engine fails meanwhile."""
    engines.chat.verdicts = [False, False]
    answer = await client.post(path, json={**body, "temperature": 0})
    assert (answer.status_code, code_of(answer)) == (500, "schema_violated")
    assert len(engines.chat.jobs) == 1
    engines.chat.fail_at_step = len(engines.chat.steps) + 5  # the first try takes four
    answer = await client.post(path, json=body)
    assert (answer.status_code, code_of(answer)) == (500, "schema_violated")


@pytest.mark.parametrize(("path", "body"), WAYS)
async def test_a_stream_ends_with_the_error(
    client: AsyncClient, engines: ScriptedEngines, path: str, body: Any
) -> None:
    engines.chat.verdicts = [False]
    answer = await client.post(path, json={**body, "stream": True})
    assert answer.status_code == 200
    assert "schema_violated" in answer.text
    assert '"finish_reason":"stop"' not in answer.text
    for end in ("[DONE]", "message_stop", "response.completed"):
        assert end not in answer.text


async def test_other_choices_stand_by_themselves(
    client: AsyncClient, engines: ScriptedEngines
) -> None:
    engines.chat.verdicts = [True, False, True]
    answer = await client.post("/v1/chat/completions", json={**CHAT, "n": 3})
    assert answer.status_code == 200
    assert [job.n for job in engines.chat.jobs] == [3, 1]
    engines.chat.verdicts = [True, False, True, False]
    answer = await client.post("/v1/chat/completions", json={**CHAT, "n": 3})
    assert code_of(answer) == "schema_violated"


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("path", TOOLS)
async def test_arguments_of_strict_tools_are_checked_too(
    client: AsyncClient, engines: ScriptedEngines, path: str, strict: bool
) -> None:
    """Those of other tools are not: their schema is advice."""
    call = {"call": CallDelta(0, "call_1", "go", '{"at":1}')}
    engines.chat = ScriptedChat(script=[call, {"finish_reason": "tool_calls"}])
    engines.chat.verdicts = [False, False]
    answer = await client.post(path, json=tools(strict=strict)[path])
    assert answer.status_code == (500 if strict else 200), answer.text
    assert [text for _, text in engines.chat.judged] == ['{"at":1}'] * (2 if strict else 0)


@pytest.mark.parametrize("cut", ["length", "]"])
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("path", "body"), WAYS)
async def test_an_answer_cut_by_its_length_or_a_stop_string_is_not_checked(
    client: AsyncClient, engines: ScriptedEngines, path: str, body: Any, is_streamed: bool, cut: str
) -> None:
    """It is not whole: clients know by its reason."""
    reason = (
        {"finish_reason": "length"} if cut == "length" else {"finish_reason": "stop", "stop": cut}
    )
    engines.chat.script = [{"text": "[1", "tokens": 2}, {"tokens": 1, **reason}]
    engines.chat.verdicts = [False, False]
    answer = await client.post(path, json={**body, "stream": is_streamed})
    assert answer.status_code == 200
    assert "schema_violated" not in answer.text
    assert engines.chat.judged == []
