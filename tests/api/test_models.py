"""GET /v1/models: every name a client may send."""

import httpx2
import pytest
from openai import AsyncOpenAI

pytestmark = pytest.mark.anyio


async def test_ids_and_aliases_are_listed(client: httpx2.AsyncClient) -> None:
    """`root` names the id behind an alias."""
    listing = (await client.get("/v1/models")).json()
    assert listing["object"] == "list"
    roots = {entry["id"]: entry["root"] for entry in listing["data"]}
    assert roots["org/embed"] == roots["embed"] == roots["embed-query"] == "org/embed"
    assert roots["gpt"] == "writer"
    assert all(isinstance(entry["created"], int) for entry in listing["data"])
    assert all(entry["object"] == "model" for entry in listing["data"])


@pytest.mark.parametrize("path", ["/v1/models/org%2Fembed", "/v1/models/org/embed", "/models/gpt"])
async def test_one_model_is_found_by_any_name(client: httpx2.AsyncClient, path: str) -> None:
    """Ids have slashes, which SDKs send as %2F."""
    assert (await client.get(path)).json()["root"] in ("org/embed", "writer")


async def test_the_sdk_retrieves_an_id_with_a_slash(client: httpx2.AsyncClient) -> None:
    """As it does for every mlx-community model."""
    async with AsyncOpenAI(base_url=f"{client.base_url}/v1", api_key="x") as sdk:
        assert (await sdk.models.retrieve("org/embed")).id == "org/embed"


async def test_a_model_tells_whether_it_is_loaded(client: httpx2.AsyncClient) -> None:
    """It is after its first use."""
    assert (await client.get("/v1/models/writer")).json()["state"] == "unloaded"
    body = {"model": "writer", "messages": [{"role": "user", "content": "hi"}]}
    await client.post("/v1/chat/completions", json=body)
    assert (await client.get("/v1/models/gpt")).json()["state"] == "loaded"
