"""GET /v1/models: every name a client may send."""

import time
from datetime import datetime
from typing import Any

import pytest
from httpx2 import AsyncClient

from gateway.registry import Catalog, Inputs
from tests.api.harness import chat, held
from tests.fakes import ScriptedEmbedder, ScriptedEngines
from tests.serving_app import served

pytestmark = pytest.mark.anyio
ASKED = [{"role": "user", "content": "a"}]


async def test_ids_and_aliases_are_listed(client: AsyncClient) -> None:
    listing = (await client.get("/v1/models")).json()
    assert listing["object"] == "list"
    roots = {entry["id"]: entry["root"] for entry in listing["data"]}
    assert roots["org/embed"] == roots["embed"] == roots["embed-query"] == "org/embed"
    assert roots["gpt"] == "writer"
    assert all(isinstance(entry["created"], int) for entry in listing["data"])
    assert all(entry["object"] == "model" for entry in listing["data"])
    kinds = {entry["id"]: entry["kind"] for entry in listing["data"]}
    told = [kinds[name] for name in ("writer", "gpt", "embed", "judge")]
    assert told == ["chat", "chat", "embedding", "rerank"]


@pytest.mark.parametrize("path", ["/v1/models/org%2Fembed", "/v1/models/org/embed", "/models/gpt"])
async def test_one_model_is_found_by_any_name(client: AsyncClient, path: str) -> None:
    """Ids have slashes, which SDKs send as %2F."""
    assert (await client.get(path)).json()["root"] in ("org/embed", "writer")


@pytest.mark.usefixtures("engines")  # a gateway of its own
async def test_a_loaded_model_tells_its_bytes_and_last_use(client: AsyncClient) -> None:
    before = (await client.get("/v1/models/writer")).json()
    assert (before["bytes"], before["last_used"], before["error"]) == (None, None, None)
    await client.post("/v1/chat/completions", json=chat())
    after = (await client.get("/v1/models/writer")).json()
    assert after["bytes"] == 1
    assert abs(after["last_used"] - time.time()) < 60


async def test_inputs_are_described_before_a_load_and_by_the_engine_after(models: Catalog) -> None:
    reads = {"writer": Inputs(70), "org/embed": Inputs(None), "org/judge": None}
    async with served(models, ScriptedEngines(reads=reads)) as client:

        async def told(name: str) -> list[object]:
            shown = (await client.get(f"/v1/models/{name}")).json()
            keys = ("max_model_len", "context_length", "max_context", "input_modalities")
            return [shown[key] for key in keys]

        assert await told("gpt") == [70, 70, 70, ["text"]]
        assert await told("embed") == [None, None, None, ["text"]], "its files do not say it"
        assert await told("judge") == [None] * 4, "its files are on no disk"
        of_anthropic = (await client.get("/v1/models/gpt", headers=ANTHROPIC)).json()
        assert (of_anthropic["max_input_tokens"], of_anthropic["max_tokens"]) == (70, 70)
        await client.post("/v1/chat/completions", json=chat())
        await client.post("/v1/embeddings", json={"model": "embed", "input": "hi"})
        assert await told("gpt") == [100, 100, 100, ["text"]]
        limit = ScriptedEmbedder().max_tokens
        assert await told("embed") == [limit, limit, None, ["text"]]


async def test_a_model_beyond_the_budget_is_507(models: Catalog) -> None:
    engines = ScriptedEngines(sizes={"writer": 2000})
    async with served(models, engines, cache_max_bytes=1000) as client:
        answer = await client.post("/v1/chat/completions", json=chat())
        assert answer.status_code == 507
        assert answer.headers["x-should-retry"] == "false"
        error = answer.json()["error"]
        assert error["code"] == "insufficient_memory"
        assert "`writer`" in error["message"]
        assert "2 KiB, and 1000 B are allowed" in error["message"]
        body = {"model": "embed", "input": "hi"}
        assert (await client.post("/v1/embeddings", json=body)).status_code == 200


async def test_a_model_that_waits_for_one_in_use_is_503_in_time(models: Catalog) -> None:
    engines = ScriptedEngines(sizes={"writer": 600, "org/embed": 600})
    async with served(models, engines, cache_max_bytes=1000, load_wait_s=0.2) as client:
        await client.post("/v1/chat/completions", json=chat())
        asking = client.post("/v1/chat/completions", json=chat())
        async with held(engines.chat.gate, asking) as answering:
            answer = await client.post("/v1/embeddings", json={"model": "embed", "input": "hi"})
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) >= 1
        assert answering.result().status_code == 200


ANTHROPIC = {"anthropic-version": "2023-06-01"}


@pytest.mark.usefixtures("engines")  # a gateway of its own
async def test_anthropics_clients_get_its_form(client: AsyncClient) -> None:
    answer = await client.get("/v1/models", headers=ANTHROPIC)
    listing = answer.json()
    assert set(listing) == {"data", "has_more", "first_id", "last_id"}
    assert [each["id"] for each in listing["data"]] == ["writer", "gpt"]
    assert (listing["first_id"], listing["last_id"]) == ("writer", "gpt")
    assert listing["has_more"] is False
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    one = (await client.get("/v1/models/gpt", headers=ANTHROPIC)).json()
    assert one == listing["data"][1]
    nothing = ("max_input_tokens", "max_tokens", "capabilities", "line", "deprecated_at")
    named = {
        "type": "model",
        "id": "gpt",
        "display_name": "gpt",
        "lifecycle": "active",
        "retires_at": None,
    }
    assert one == {**named, **dict.fromkeys(nothing), "created_at": one["created_at"]}
    created = datetime.fromisoformat(one["created_at"]).timestamp()
    assert created == (await client.get("/v1/models/gpt")).json()["created"]


async def test_its_list_is_read_page_by_page(client: AsyncClient) -> None:
    async def page(query: str) -> tuple[list[str], bool]:
        found = (await client.get(f"/v1/models?{query}", headers=ANTHROPIC)).json()
        return [each["id"] for each in found["data"]], found["has_more"]

    assert await page("limit=1") == (["writer"], True)
    assert await page("limit=1&after_id=writer") == (["gpt"], False)
    assert await page("after_id=gpt") == ([], False)
    assert await page("limit=1&before_id=gpt") == (["writer"], False)
    assert await page("before_id=writer") == ([], False)


@pytest.mark.parametrize(
    "path",
    [
        *("?limit=0", "?limit=1001", "?limit=x", "?limit=99999999", "?after_id=nobody"),
        *("?before_id=embed", "?after_id=writer&before_id=gpt", "/nobody"),
    ],
)
async def test_its_errors_are_anthropics(client: AsyncClient, path: str) -> None:
    answer = await client.get(f"/v1/models{path}", headers=ANTHROPIC)
    body = answer.json()
    kind = "not_found_error" if path == "/nobody" else "invalid_request_error"
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert "error_type" not in (await client.get(f"/v1/models{path}")).text


CHAT, EMBED, RERANK = (
    "`writer`",
    "`any-size`, `org/embed`, `shortenable`",
    "`org/judge`, `short-judge`",
)


@pytest.mark.parametrize(
    ("path", "body", "served"),
    [
        ("/v1/chat/completions", {"messages": ASKED}, CHAT),
        ("/v1/completions", {"prompt": "a"}, CHAT),
        ("/v1/responses", {"input": "a"}, CHAT),
        ("/v1/messages", {"messages": ASKED, "max_tokens": 9}, CHAT),
        ("/v1/tokenize", {"prompt": "a"}, CHAT),
        ("/v1/embeddings", {"input": "a"}, EMBED),
        ("/v1/embed", {"inputs": "a"}, EMBED),
        ("/v2/rerank", {"query": "a", "documents": ["a"]}, RERANK),
        ("/v1/rerank", {"query": "a", "texts": ["a"]}, RERANK),
    ],
)
async def test_an_unknown_model_is_answered_with_served_ones_that_would_do(
    client: AsyncClient, path: str, body: dict[str, Any], served: str
) -> None:
    """Each API in its own envelope; any embedding model ranks too."""
    answer = await client.post(path, json={"model": "xyz", **body})
    assert answer.status_code in (404, 422)
    assert f"have access to it. Served here: {served}" in answer.text
    near = await client.post(path, json={"model": "shortenabel", **body})
    assert ("Did you mean `shortenable`?" in near.text) == (served != CHAT)


async def test_no_model_is_named_to_who_may_list_none(models: Catalog) -> None:
    async with served(models, ScriptedEngines(), api_keys="secret") as client:
        answer = await client.post("/v1/chat/completions", json={**chat(), "model": "xyz"})
        assert answer.status_code == 401
        assert "writer" not in answer.text


async def test_anthropics_clients_are_told_the_models_of_their_list(client: AsyncClient) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    answer = await client.get("/v1/models/shortenabel", headers=headers)
    assert answer.json()["error"]["message"].endswith("Served here: `writer`.")
