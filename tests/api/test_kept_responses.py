"""Responses that are kept: going on from them, by id or item by item, and forgetting them."""

from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest
from httpx2 import AsyncClient, Response

from gateway.registry import Catalog
from tests.api.harness import error_of
from tests.fakes import ScriptedEngines
from tests.serving_app import served

pytestmark = pytest.mark.anyio

TOOL = {"type": "function", "name": "clock", "parameters": {"type": "object", "properties": {}}}
URL = "/v1/responses"
MINE, YOURS = ({"authorization": f"Bearer {key}"} for key in ("mine", "yours"))


def ask(given: Any, **more: Any) -> dict[str, Any]:
    return {"model": "writer", "input": given, **more}


async def post(client: AsyncClient, given: Any, **more: Any) -> Response:
    return await client.post(URL, json=ask(given, **more))


async def answered(client: AsyncClient, given: Any, **more: Any) -> Any:
    answer = await post(client, given, **more)
    assert answer.status_code == 200, answer.text
    return answer.json()


def prompts(engines: ScriptedEngines) -> list[list[tuple[str, str]]]:
    """Give the messages that the model was shown, request by request."""
    return [[(turn["role"], turn["content"]) for turn in job.messages] for job in engines.chat.jobs]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_goes_on_from_the_response_it_names(
    client: AsyncClient, engines: ScriptedEngines, stream: bool
) -> None:
    if stream:
        first = await _streamed(client, "one", instructions="Shout.", tools=[TOOL])
    else:
        first = await answered(client, "one", instructions="Shout.", tools=[TOOL])
    second = await answered(client, "two", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    assert (second["instructions"], second["tools"]) == (None, [])
    await answered(client, "three", previous_response_id=second["id"])
    assert prompts(engines)[1:] == [
        [("user", "one"), ("assistant", "one"), ("user", "two")],
        [
            ("user", "one"), ("assistant", "one"), ("user", "two"), ("assistant", "two"),
            ("user", "three"),
        ],
    ]  # fmt: skip


async def _streamed(client: AsyncClient, given: Any, **more: Any) -> Any:
    answer = await post(client, given, stream=True, **more)
    last = answer.text.strip().rpartition("data: ")[2]
    return orjson.loads(last)["response"]


async def test_an_item_is_sent_by_its_id(client: AsyncClient, engines: ScriptedEngines) -> None:
    first = await answered(client, "one")
    (message,) = first["output"]
    for reference in ({"type": "item_reference", "id": message["id"]}, {"id": message["id"]}):
        await answered(client, [{"role": "user", "content": "one"}, reference, _user("two")])
    assert prompts(engines)[1] == [("user", "one"), ("assistant", "one"), ("user", "two")]
    assert prompts(engines)[2] == prompts(engines)[1]


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "input_text", "text": text}]}


async def test_what_is_kept_is_shown_listed_and_forgotten(client: AsyncClient) -> None:
    first = await answered(client, "one")
    second = await answered(client, [_user("two")], previous_response_id=first["id"])
    assert (await client.get(f"{URL}/{second['id']}")).json() == second
    page = (await client.get(f"{URL}/{second['id']}/input_items?order=asc&limit=2")).json()
    assert [item["type"] for item in page["data"]] == ["message"] * 2
    assert [item["content"][0]["text"] for item in page["data"]] == ["one", "one"]
    assert page["data"][1]["id"] == first["output"][0]["id"]
    assert (page["object"], page["has_more"]) == ("list", True)
    after = f"{URL}/{second['id']}/input_items?order=asc&after={page['last_id']}"
    rest = (await client.get(after)).json()
    assert [item["content"][0]["text"] for item in rest["data"]] == ["two"]
    assert not rest["has_more"]
    newest = (await client.get(f"{URL}/{second['id']}/input_items?limit=1")).json()
    assert newest["data"] == rest["data"]
    gone = await client.delete(f"{URL}/{first['id']}")
    assert gone.json() == {"id": first["id"], "object": "response", "deleted": True}
    assert (await client.get(f"{URL}/{first['id']}")).status_code == 404
    assert (await client.delete(f"{URL}/{first['id']}")).status_code == 404
    third = await post(client, "x", previous_response_id=second["id"])
    assert third.status_code == 200  # its conversation is its own


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "order=up", "after=msg_1"])
async def test_a_page_that_cannot_be_is_refused(client: AsyncClient, query: str) -> None:
    first = await answered(client, "one")
    answer = await client.get(f"{URL}/{first['id']}/input_items?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == query.partition("=")[0]


async def test_pages_of_items_with_one_id_come_to_an_end(client: AsyncClient) -> None:
    first = await answered(client, [{"id": "msg_1", **_user(str(i))} for i in range(5)])
    items = [{"id": "msg_1", **_user("5")}]
    second = await answered(client, items, previous_response_id=first["id"])
    url = f"{URL}/{second['id']}/input_items?order=asc&limit=2"
    texts: list[str] = []
    ids: list[str] = []
    after = ""
    while len(ids) < 10:
        page = (await client.get(url + after)).json()
        texts += [item["content"][0]["text"] for item in page["data"]]
        ids += [item["id"] for item in page["data"]]
        after = f"&after={page['last_id']}"
        if not page["has_more"]:
            break
    assert texts == ["0", "1", "2", "3", "4", first["output"][0]["content"][0]["text"], "5"]
    assert ids[0] == "msg_1"
    assert len(set(ids)) == 7


async def test_a_response_with_store_false_is_not_kept(client: AsyncClient) -> None:
    first = await answered(client, "one", store=False)
    assert first["store"] is False
    for path in (first["id"], f"{first['id']}/input_items"):
        assert (await client.get(f"{URL}/{path}")).status_code == 404
    assert (await answered(client, "one"))["store"] is True


async def test_an_id_is_not_to_be_guessed(client: AsyncClient) -> None:
    """128 random bits at the least."""
    answer = await answered(client, "one")
    assert len(answer["id"].removeprefix("resp_")) >= 32
    page = (await client.get(f"{URL}/{answer['id']}/input_items")).json()
    for item in (*answer["output"], *page["data"]):
        assert len(item["id"].partition("_")[2]) >= 32


@pytest.mark.parametrize("stream", [False, True])
async def test_another_keys_response_is_as_good_as_none(
    models: Catalog, engines: ScriptedEngines, stream: bool
) -> None:
    """Found, followed, cited, listed, forgotten: the same 404 as for one that never was."""
    async with served(models, engines, api_keys="mine,yours") as client:
        made = await client.post(URL, json=ask("secret"), headers=MINE)
        mine = made.json()
        for response, item in ((mine["id"], mine["output"][0]["id"]), ("resp_0", "msg_0")):
            ask_yours = partial(client.request, headers=YOURS)
            for method, path in (
                ("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel"),
            ):  # fmt: skip
                answer = await ask_yours(method, f"{URL}/{response}{path}")
                assert _refusal(answer, response) == ("response_not_found", "response_id")
            body = ask("hi", stream=stream, previous_response_id=response)
            followed = await ask_yours("POST", URL, json=body)
            assert _refusal(followed, response)[1] == "previous_response_id"
            cited = await ask_yours("POST", URL, json=ask([{"id": item}], stream=stream))
            assert _refusal(cited, item) == ("item_not_found", "input[0].id")
        assert (await client.get(f"{URL}/{mine['id']}", headers=MINE)).json() == mine


def _refusal(answer: Response, name: str) -> tuple[str, str]:
    error = error_of(answer, 404)
    assert name in error["message"]
    return error["code"], error["param"]


async def test_one_key_cannot_push_out_anothers(models: Catalog, engines: ScriptedEngines) -> None:
    async with served(models, engines, api_keys="mine,yours", responses_kept=4) as client:

        async def kept(headers: dict[str, str]) -> str:
            made = await client.post(URL, json=ask("x"), headers=headers)
            return f"{URL}/{made.json()['id']}"

        mine = await kept(MINE)
        theirs = [await kept(YOURS) for _ in range(6)]
        found = [(await client.get(each, headers=YOURS)).status_code for each in theirs]
        assert found == [404] * 4 + [200] * 2
        assert (await client.get(mine, headers=MINE)).status_code == 200
        metrics = (await client.get("/metrics", headers=MINE)).text
        assert "gateway_responses_kept 3.0" in metrics


async def test_a_gateway_may_keep_none(models: Catalog, engines: ScriptedEngines) -> None:
    async with served(models, engines, responses_kept=0) as client:
        first = await answered(client, "one", store=True)
        assert first["store"] is False
        answer = await post(client, "two", previous_response_id=first["id"])
        assert answer.status_code == 404


async def test_an_answer_that_fails_is_not_kept(
    client: AsyncClient, engines: ScriptedEngines
) -> None:
    engines.chat.fail_at_step = 2
    last = await _streamed(client, "one")
    assert last["status"] == "failed"
    assert (await client.get(f"{URL}/{last['id']}")).status_code == 404


async def test_cancelling_replaying_and_conversations_are_refused(client: AsyncClient) -> None:
    first = await answered(client, "one")
    assert (await client.post(f"{URL}/{first['id']}/cancel")).status_code == 400
    answer = await client.get(f"{URL}/{first['id']}?stream=true")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream")
    answer = await post(client, "hi", conversation="conv_1")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "conversation")


async def test_a_prompts_tokens_are_counted_without_running_it(
    client: AsyncClient, engines: ScriptedEngines
) -> None:
    first = await answered(client, "hello")
    steps = len(engines.chat.steps)
    body = {"model": "writer", "input": "you", "previous_response_id": first["id"]}
    counted = await client.post(f"{URL}/input_tokens", json=body)
    assert counted.json()["object"] == "response.input_tokens"
    assert len(engines.chat.steps) == steps
    second = await client.post(URL, json=body)
    assert counted.json()["input_tokens"] == second.json()["usage"]["input_tokens"]
    long = await client.post(f"{URL}/input_tokens", json={"model": "writer", "input": "x" * 5000})
    assert long.json()["input_tokens"] >= 5000  # longer than the model can read


CODEX = Path(__file__).with_name("codex_first_request.json")


async def test_codexs_first_request_is_served(
    client: AsyncClient, engines: ScriptedEngines
) -> None:
    """The request is that of version 0.169.0 of the CLI, its texts left out: namespaces are
    unpacked, web search is skipped and named.
    """
    body = orjson.loads(CODEX.read_bytes()) | {"model": "writer", "stream": False}
    answer = await client.post(URL, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-gateway-ignored"] == "tools.web_search"
    job = engines.chat.jobs[-1]
    shown = {tool["function"]["name"] for tool in job.tools}
    assert {"exec_command", "close_agent"} <= shown
    assert {tool["type"] for tool in answer.json()["tools"]} == {"function", "namespace"}


RESUMED: list[dict[str, Any]] = [
    {
        "type": "reasoning", "id": "rs_1", "encrypted_content": "x",
        "summary": [{"type": "summary_text", "text": "Patch it."}],
    },
    {
        "type": "custom_tool_call", "id": "ctc_1", "status": "completed", "call_id": "c1",
        "name": "apply_patch", "input": "*** Begin Patch",
    },
    {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
    {
        "type": "web_search_call", "id": "ws_1", "status": "completed",
        "action": {"type": "search", "query": "x"},
    },
    {
        "type": "local_shell_call", "call_id": "c2", "status": "completed",
        "action": {"type": "exec", "command": ["ls"]},
    },
    {"type": "function_call_output", "call_id": "c2", "output": "README.md"},
    {"type": "ghost_snapshot", "ghost_commit": {"id": "x"}},
    {"type": "compaction", "encrypted_content": "x"},
    {"type": "function_call", "call_id": "c3", "name": "exec_command", "arguments": '{"cmd": "l'},
    {"type": "function_call_output", "call_id": "c3", "output": "cut"},
    {"role": "user", "content": "Go on"},
]  # fmt: skip


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_codexs_resumed_session_is_served_and_kept(
    client: AsyncClient, engines: ScriptedEngines, is_streamed: bool
) -> None:
    """It has all that OpenAI's own API leaves in a history; kept, it is listed as it was sent."""
    body = orjson.loads(CODEX.read_bytes()) | {"model": "writer", "stream": is_streamed}
    body["store"] = True
    count = len(body["input"])
    body["input"] += RESUMED
    answer = await client.post(URL, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-gateway-ignored"].split(",") == [
        "tools.web_search", f"input[{count + 3}].web_search_call",
        f"input[{count + 6}].ghost_snapshot", f"input[{count + 7}].compaction",
        f"input[{count + 8}].arguments",
    ]  # fmt: skip
    told = [turn for turn in engines.chat.jobs[-1].messages if turn["role"] != "system"][1:]
    assert [(turn["role"], turn["content"]) for turn in told] == [
        ("assistant", ""), ("tool", "done"), ("assistant", ""), ("tool", "README.md"),
        ("assistant", ""), ("tool", "cut"), ("user", "Go on"),
    ]  # fmt: skip
    assert told[0]["reasoning_content"] == "Patch it."
    calls = [turn["tool_calls"][0]["function"] for turn in told if "tool_calls" in turn]
    assert calls == [
        {"name": "apply_patch", "arguments": {"input": "*** Begin Patch"}},
        {"name": "local_shell", "arguments": {"command": ["ls"], "type": "exec"}},
        {"name": "exec_command", "arguments": {"cmd": "l"}},
    ]
    last = answer.text.strip().rpartition("data: ")[2] if is_streamed else answer.text
    whole = orjson.loads(last)
    name = (whole["response"] if is_streamed else whole)["id"]
    listed = (await client.get(f"{URL}/{name}/input_items?order=asc&limit=100")).json()["data"]
    assert [item["type"] for item in listed[count:-1]] == [item["type"] for item in RESUMED[:-1]]
    assert RESUMED[3].items() <= listed[count + 3].items()
    again = await post(client, "And?", previous_response_id=name)
    assert again.status_code == 200, again.text
    assert "x-gateway-ignored" not in again.headers
    shown = engines.chat.jobs[-1].messages
    assert [turn for turn in shown if turn["role"] != "system"][1:8] == told


async def test_thoughts_of_a_kept_response_go_back(
    client: AsyncClient, engines: ScriptedEngines
) -> None:
    engines.chat.script = [
        {"reasoning": "So.", "tokens": 1},
        {"text": "Yes.", "tokens": 1, "finish_reason": "stop"},
    ]
    first = await answered(client, "one")
    kinds = [item["type"] for item in first["output"]]
    assert kinds == ["reasoning", "message"]
    said = {"role": "assistant", "content": "Yes.", "reasoning_content": "So."}
    await answered(client, "two", previous_response_id=first["id"])
    await answered(client, [_user("one"), *({"id": each["id"]} for each in first["output"])])
    await answered(client, [_user("one"), *first["output"]])
    assert all(job.messages[1] == said for job in engines.chat.jobs[1:])
