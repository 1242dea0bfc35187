"""Conversations with images over a socket: the setting, the header, and the note to the model."""

from typing import Any

import pytest
from httpx2 import AsyncClient

from gateway.registry import Catalog, ChatSpec
from tests.api.harness import ASK, error_of
from tests.fakes import ScriptedEngines
from tests.serving_app import served

pytestmark = pytest.mark.anyio

ON, OFF = ({"x-gateway-leave-out-images": text} for text in ("true", "false"))
COUNT = "x-gateway-images-left-out"
IMAGES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"type": "image_url", "image_url": {"url": "data:,", "detail": "low"}},
    "/v1/responses": {"type": "input_image", "image_url": "data:,", "detail": "low"},
    "/v1/messages": {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}},
}
EACH = pytest.mark.parametrize("path", IMAGES)


def session(path: str) -> dict[str, Any]:
    """Give a request with an image in an earlier turn."""
    turns = [
        {"role": "user", "content": [IMAGES[path]]},
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": "hi"},
    ]
    return {**ASK[path]("hi"), "input" if path == "/v1/responses" else "messages": turns}


@EACH
async def test_a_session_with_an_image_goes_on_by_the_header(
    client: AsyncClient, engines: ScriptedEngines, path: str
) -> None:
    answer = await client.post(path, json=session(path), headers=ON)
    assert (answer.status_code, answer.headers[COUNT]) == (200, "1"), answer.text
    assert "x-gateway-ignored" not in answer.headers
    first = engines.chat.jobs[-1].messages[0]
    assert first["content"] == "[image left out: this model reads text]"


@EACH
async def test_a_stream_says_how_many_were_left_out(client: AsyncClient, path: str) -> None:
    body = {**session(path), "stream": True}
    async with client.stream("POST", path, json=body, headers=ON) as answer:
        assert (answer.status_code, answer.headers[COUNT]) == (200, "1")
        await answer.aread()


@EACH
async def test_images_are_refused_by_default_and_the_header_goes_before_the_setting(
    client: AsyncClient, models: Catalog, path: str
) -> None:
    error = (await client.post(path, json=session(path))).json()["error"]
    assert "GATEWAY_LEAVE_OUT_IMAGES=true" in error["message"]
    async with served(models, ScriptedEngines(), leave_out_images=True) as willing:
        assert (await willing.post(path, json=session(path))).headers[COUNT] == "1"
        assert (await willing.post(path, json=session(path), headers=OFF)).status_code == 400
        plain = await willing.post(path, json=ASK[path]("hi"))
        assert (plain.status_code, COUNT in plain.headers) == (200, False)


@EACH
async def test_an_images_own_fields_are_known(models: Catalog, path: str) -> None:
    async with served(models, ScriptedEngines(), strict_fields=True) as client:
        answer = await client.post(path, json=session(path), headers=ON)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("given", ["", "yes", "1", "true, false"])
async def test_another_header_is_a_400(client: AsyncClient, given: str) -> None:
    answer = await client.post(
        "/v1/chat/completions",
        json=ASK["/v1/chat/completions"]("hi"),
        headers={"x-gateway-leave-out-images": given},
    )
    assert error_of(answer)["param"] == "x-gateway-leave-out-images"


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("/v1/messages/count_tokens", "/v1/messages"),
        ("/v1/responses/input_tokens", "/v1/responses"),
    ],
)
async def test_a_prompt_whose_tokens_are_counted_has_no_images_either(
    client: AsyncClient, path: str, shape: str
) -> None:
    body = session(shape)
    body.pop("max_tokens", None)
    answer = await client.post(path, json=body, headers=ON)
    assert (answer.status_code, answer.headers[COUNT]) == (200, "1"), answer.text


async def test_a_kept_response_goes_on_and_shows_what_was_sent(
    client: AsyncClient, engines: ScriptedEngines
) -> None:
    path, image = "/v1/responses", IMAGES["/v1/responses"]
    first = (await client.post(path, json=session(path), headers=ON)).json()
    more = {"model": "writer", "input": "go on", "previous_response_id": first["id"]}
    answer = await client.post(path, json=more, headers=ON)
    assert (answer.status_code, answer.headers[COUNT]) == (200, "1"), answer.text
    before, after = (job.messages for job in engines.chat.jobs)
    assert after[: len(before)] == before
    items = (await client.get(f"{path}/{first['id']}/input_items?order=asc")).json()
    assert items["data"][0]["content"] == [image]


async def test_nothing_is_left_out_for_a_model_that_reads_images(
    client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No model reads images yet: an image for one is still refused."""
    monkeypatch.setattr(ChatSpec, "input_modalities", ("text", "image"))
    path = "/v1/chat/completions"
    answer = await client.post(path, json=session(path), headers=ON)
    assert (answer.status_code, COUNT in answer.headers) == (400, False)
