"""/openapi.json tells the truth: of every route, every field, every answer."""

import asyncio
import re
import threading
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import orjson
import pytest
from httpx2 import AsyncClient
from openapi_spec_validator import validate
from starlette.routing import Route

from gateway import __version__
from gateway.api import ops
from gateway.api.endpoints import ENDPOINTS
from gateway.api.openapi import document
from gateway.api.requests import Exposure
from gateway.app.gateway import Gateway
from gateway.registry import Catalog
from gateway.wire.validation import Request
from tests.fakes import ScriptedEngines
from tests.serving_app import served, settings

pytestmark = pytest.mark.anyio
REQUESTS = dict.fromkeys(each.request for each in ENDPOINTS if each.request is not None)
USER = [{"role": "user", "content": "hi"}]
ASKED: dict[str, dict[str, Any]] = {
    "/embeddings": {"model": "embed", "input": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [104]},
    "/embed": {"inputs": ["hi", "there"]},
    "/v2/embed": {"texts": ["hi"], "embedding_types": ["float", "int8", "ubinary", "base64"]},
    "/chat/completions": {"model": "writer", "messages": USER, "logprobs": True},
    "/completions": {"model": "writer", "prompt": "hi"},
    "/responses": {"model": "writer", "input": "hi"},
    "/messages": {"model": "writer", "max_tokens": 9, "messages": USER},
    "/messages/count_tokens": {"model": "writer", "messages": USER},
    "/rerank": {"query": "hi", "documents": ["hi", {"text": "there"}], "return_documents": True},
    "/v2/rerank": {"query": "hi", "documents": "hi"},
    "/score": {"text_1": "hi", "text_2": ["there"]},
}


async def fetched(client: AsyncClient, **headers: str) -> dict[str, Any]:
    answer = await client.get("/openapi.json", headers=headers)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    found: dict[str, Any] = answer.json()
    return found


@pytest.fixture(scope="module")
async def found(shared_client: AsyncClient) -> dict[str, Any]:
    """Give the document of the gateway that most cases share."""
    return await fetched(shared_client)


def check(document: dict[str, Any], schema: dict[str, Any], value: Any) -> None:
    """Hold a value to a schema of the document."""
    whole = {**schema, "components": document["components"]}
    jsonschema.Draft202012Validator(whole).validate(value)


@pytest.mark.parametrize("given", [{}, {"strict_fields": True, "api_keys": "k", "admin_key": "a"}])
async def test_it_is_a_valid_document(
    models: Catalog, engines: ScriptedEngines, given: dict[str, Any]
) -> None:
    async with served(models, engines, **given) as client:
        found = await fetched(client, authorization="Bearer k")
    if given:  # it has all that the other has: a validation takes seconds
        validate(found)
    assert found["info"]["version"] == __version__
    assert ("/admin/reload" in found["paths"]) == ("admin_key" in given)
    assert found["security"][0] == ({"key": []} if "api_keys" in given else {})
    chat = found["components"]["schemas"]["ChatRequest"]
    unknown = {"type": "null"} if "strict_fields" in given else True
    assert chat["additionalProperties"] == unknown
    assert chat["properties"]["model"]["examples"] == ["writer", "gpt"]
    assert not [name for name in found["components"]["schemas"] if "__" in name], "two share a name"


async def test_it_is_written_off_the_loop_and_once(
    models: Catalog, engines: ScriptedEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes a fifth of a second, for which nothing else would be answered."""
    threads = []

    def write(*given: Any, **named: Any) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return document(*given, **named)

    monkeypatch.setattr(ops, "document", write)
    async with served(models, engines) as client:
        await asyncio.gather(*(fetched(client) for _ in range(3)))
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()


async def test_a_key_is_sent_by_any_scheme_of_the_document(
    models: Catalog, engines: ScriptedEngines
) -> None:
    async with served(models, engines, api_keys="k") as client:
        found = await fetched(client, authorization="Bearer k")
        schemes = [found["components"]["securitySchemes"][name] for [name] in found["security"]]
        sent = {
            each.get("name", "authorization"): "k" if "name" in each else "Bearer k"
            for each in schemes
        }
        assert list(sent) == ["authorization", "x-api-key"]
        for name, value in sent.items():
            answer = await client.get("/v1/openapi.json", headers={name: value})
            assert answer.status_code == 200


async def test_with_keys_it_is_for_their_holders(models: Catalog, engines: ScriptedEngines) -> None:
    async with served(models, engines, api_keys="k") as client:
        assert (await client.get("/v1/openapi.json")).status_code == 401


def test_every_route_is_told_and_no_other(models: Catalog, engines: ScriptedEngines) -> None:
    gateway = Gateway(settings(admin_key="a"), models, engines)
    everything = Exposure(has_keys=False, has_admin=True, has_dashboard=True)
    found = {
        (method.lower(), re.sub(r":\w+}", "}", route.path))
        for route in routes(gateway.asgi)
        for method in route.methods or ()
        if method != "HEAD"
    }
    told = {
        (method, ("" if path.startswith(("/admin", "/dashboard", "/docs")) else prefix) + path)
        for path, methods in document(models, ENDPOINTS, everything, strict=False)["paths"].items()
        for method in methods.keys() - {"servers"}
        for prefix in (("",) if path in ("/healthz", "/v2/rerank") else ("", "/v1"))
    }
    assert found == told


def routes(app: Any) -> list[Route]:
    """Find Starlette's routes in the layers around it."""
    while not hasattr(app, "routes"):
        inner = getattr(app, "_app", None) or getattr(app, "app", None)
        app = inner or app.__closure__[-1].cell_contents
    return [route for route in app.routes if isinstance(route, Route)]


@pytest.mark.parametrize("request_type", REQUESTS, ids=lambda each: each.__name__)
async def test_every_field_of_the_fields_table_is_told(
    found: dict[str, Any], request_type: type[Request]
) -> None:
    schema = found["components"]["schemas"][request_type.__name__]
    properties = schema["properties"]
    known = {*request_type.served_fields(), *request_type.harmless, *request_type.refused}
    assert known == properties.keys()
    for name in request_type.refused:
        assert properties[name]["enum"] == [None, *request_type.neutral.get(name, ())]


@pytest.mark.parametrize("path", ASKED)
async def test_examples_are_served(client: AsyncClient, found: dict[str, Any], path: str) -> None:
    asked = found["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    check(found, asked["schema"], asked["example"])
    assert (await client.post(path, json=asked["example"])).status_code == 200


@pytest.mark.parametrize("path", ASKED)
async def test_answers_are_as_told(client: AsyncClient, found: dict[str, Any], path: str) -> None:
    operation = found["paths"][path]["post"]
    content = operation["responses"]["200"]["content"]
    answer = await client.post(path, json=ASKED[path])
    check(found, content["application/json"]["schema"], answer.json())
    refused = await client.post(path, json={**ASKED[path], "model": "nobody"})
    error = operation["responses"][str(refused.status_code)]["content"]["application/json"]
    check(found, error["schema"], refused.json())
    if "text/event-stream" not in content:
        return
    asked = {**ASKED[path], "stream": True, "stream_options": {"include_usage": True}}
    stream = await client.post(path, json=asked)
    lines = stream.text.splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    events = [orjson.loads(each) for each in data if each != "[DONE]"]
    assert events
    for event in events:
        check(found, content["text/event-stream"]["x-event-schema"], event)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"query": "hi", "texts": ["a", "b"], "return_text": True}, 200),
        ({"query": "hi", "texts": []}, 400),
        ({"query": "hi", "texts": 7}, 422),
        ({"query": "hi", "texts": ["a"], "model": "writer"}, 424),
    ],
)
async def test_the_other_form_of_reranking_is_described(
    client: AsyncClient, found: dict[str, Any], body: dict[str, Any], status: int
) -> None:
    operation = found["paths"]["/rerank"]["post"]
    answer = await client.post("/rerank", json=body)
    assert answer.status_code == status
    described = operation["responses"][str(status)]["content"]["application/json"]["schema"]
    check(found, described, answer.json())
    [content] = operation["requestBody"]["content"].values()
    schema = {**content["schema"], "components": found["components"]}
    allowed = jsonschema.Draft202012Validator(schema).is_valid(body)
    assert allowed == (status in (200, 424))


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"texts": ["a"]}, 200),
        ({"texts": ["a"], "embedding_types": ["int8", "base64"], "input_type": "clustering"}, 200),
        ({"texts": ["a"], "truncate": "START"}, 400),
        ({"texts": ["a"], "model": "nobody"}, 404),
    ],
)
async def test_coheres_form_of_embed_is_described(
    client: AsyncClient, found: dict[str, Any], body: dict[str, Any], status: int
) -> None:
    operation = found["paths"]["/embed"]["post"]
    answer = await client.post("/embed", json=body)
    assert answer.status_code == status
    described = operation["responses"][str(status)]["content"]["application/json"]["schema"]
    check(found, described, answer.json())
    assert "CohereErrorBody" in str(operation["responses"]["404"])


@pytest.mark.parametrize("path", ["/models", "/models/writer", "/health", "/ready"])
async def test_answers_to_get_are_as_documented(
    client: AsyncClient, found: dict[str, Any], path: str
) -> None:
    operation = found["paths"][path.replace("writer", "{name}")]["get"]
    answer = await client.get(path)
    schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
    check(found, schema, answer.json())


DATA = "data:image/png;base64,iVBORw0KGgo="
IMAGES: list[tuple[str, dict[str, Any]]] = [
    ("ContentPart", {"type": "image_url", "image_url": {"url": DATA, "detail": "low"}}),
    ("ContentPart", {"type": "image_url", "image_url": DATA}),
    ("ContentPart", {"type": "input_image", "image_url": DATA, "detail": "original"}),
    ("InputPart", {"type": "input_image", "image_url": DATA}),
    *(
        (part, {"type": "image", "source": {"type": "base64", "media_type": "a/b", "data": "AA"}})
        for part in ("InputBlock", "ResultPart")
    ),
]


@pytest.mark.parametrize(("part", "image"), IMAGES)
async def test_an_image_is_a_part_that_is_read(
    found: dict[str, Any], part: str, image: dict[str, Any]
) -> None:
    schemas = found["components"]["schemas"]
    check(found, schemas[part], image)
    other = {"InputBlock": "OtherBlock", "ResultPart": "OtherPart"}.get(part, f"Other{part}")
    with pytest.raises(jsonschema.ValidationError):
        check(found, schemas[other], image)
