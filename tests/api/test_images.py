"""Conversations with images over a socket: left out, refused, or read by a model that sees."""

import asyncio
import base64
import binascii
import io
import json
import re
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from httpx2 import AsyncClient

from gateway import logs
from gateway.api.bodies import UNCOUNTED_BYTES
from gateway.jobs.steps import ImageCost
from gateway.registry import Catalog
from gateway.wire import images
from tests.api.harness import ASK, error_of, held
from tests.fakes import ScriptedChat, ScriptedEngines
from tests.serving_app import level, served

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


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_an_answer_does_not_go_on_from_the_text_in_an_images_place(
    client: AsyncClient, engines: ScriptedEngines, path: str
) -> None:
    body, more = session(path), {"continue_final_message": True}
    begun = [{"type": "text", "text": "It is"}, IMAGES[path]]
    body["messages"].append({"role": "assistant", "content": begun})
    body |= more if path == "/v1/chat/completions" else {}
    answer = await client.post(path, json=body, headers=ON)
    assert (answer.status_code, answer.headers[COUNT]) == (200, "2"), answer.text
    assert engines.chat.jobs[-1].continues
    assert engines.chat.jobs[-1].messages[-1]["content"] == "It is"
    body["messages"][-1] = {"role": "assistant", "content": begun[1:]}
    answer = await client.post(path, json=body, headers=ON)
    if path == "/v1/chat/completions":
        assert "an assistant's message that has text" in error_of(answer)["message"]
    else:
        assert (answer.status_code, engines.chat.jobs[-1].continues) == (200, False)


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
    """An image that cannot be read is refused for such a model too."""
    monkeypatch.setattr(ScriptedChat, "images", ImageCost())
    path = "/v1/chat/completions"
    answer = await client.post(path, json=session(path), headers=ON)
    assert (answer.status_code, COUNT in answer.headers) == (400, False)


@pytest.fixture
def seeing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every chat model read images."""
    monkeypatch.setattr(ScriptedChat, "images", ImageCost())


def picture(nbytes: int = 30) -> tuple[bytes, str]:
    data = bytes(i * 7 % 251 for i in range(nbytes))
    return data, base64.b64encode(data).decode()


def part(path: str, digits: str) -> dict[str, Any]:
    """Give an image in the form of a protocol."""
    url = f"data:image/png;base64,{digits}"
    forms: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"type": "image_url", "image_url": {"url": url, "detail": "high"}},
        "/v1/responses": {"type": "input_image", "image_url": url, "detail": "high"},
        "/v1/messages": {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": digits},
        },
    }
    return forms[path]


def ask(path: str, digits: str, **more: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": [part(path, digits)]}]
    return {**ASK[path]("hi"), "input" if path == "/v1/responses" else "messages": turns, **more}


SEEING = pytest.mark.usefixtures("seeing")
COUNTED = {
    "/v1/messages/count_tokens": "/v1/messages",
    "/v1/responses/input_tokens": "/v1/responses",
}


@SEEING
@EACH
@pytest.mark.parametrize("stream", [False, True])
async def test_a_model_that_sees_gets_an_image_and_its_word(
    client: AsyncClient, engines: ScriptedEngines, path: str, stream: bool
) -> None:
    data, digits = picture()
    body = ask(path, digits, stream=stream)
    answer = await client.post(path, json=body, headers=ON)
    assert answer.status_code == 200, answer.text
    assert {COUNT, "x-gateway-ignored"}.isdisjoint(answer.headers)
    job = engines.chat.jobs[-1]
    (image,) = job.images
    assert (image.data, image.kind) == (data, part(path, digits)["type"])
    assert [turn["content"] for turn in job.messages] == [image.word]
    assert image.place == f"{'input' if path == '/v1/responses' else 'messages'}[0].content[0]"


@SEEING
@pytest.mark.parametrize(("path", "shape"), COUNTED.items())
async def test_tokens_of_a_prompt_with_an_image_are_counted_the_same_way(
    client: AsyncClient, path: str, shape: str
) -> None:
    _, digits = picture()
    body = ask(shape, digits)
    body.pop("max_tokens", None)
    assert (await client.post(path, json=body)).status_code == 200
    refused = await client.post(path, json=ask(shape, "%") | {"max_tokens": None})
    assert refused.status_code == 400
    assert "its data is not base64" in refused.text


@SEEING
async def test_an_image_is_not_tokenized(client: AsyncClient) -> None:
    error = error_of(await client.post("/tokenize", json=ask("/v1/chat/completions", picture()[1])))
    assert error["param"] == "messages[0].content[0]"


@SEEING
async def test_decisions_refuse_images_of_any_model(client: AsyncClient) -> None:
    turns = [{"role": "user", "content": [part("/v1/responses", picture()[1])]}]
    question = {"type": "predicate", "instructions": "Is it?"}
    body = {"model": "writer", "input": turns, "questions": [question]}
    error = error_of(await client.post("/v1/decisions", json=body))
    assert "Could not process image" in error["message"]


@pytest.mark.parametrize("path", [*IMAGES, *COUNTED])
async def test_a_model_of_text_refuses_before_anything_is_decoded(
    client: AsyncClient, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(images, "a2b_base64", None)
    body = ask(COUNTED.get(path, path), picture(100_000)[1])
    answer = await client.post(path, json=body)
    assert answer.status_code == 400
    assert "this model reads text" in answer.text


@SEEING
async def test_limits_have_their_numbers_in_the_error(models: Catalog) -> None:
    path = "/v1/chat/completions"
    small = part(path, picture()[1])
    given: dict[str, Any] = {"max_images": 2, "max_image_bytes": 40}
    async with served(models, ScriptedEngines(), **given) as client:
        three = {"model": "writer", "messages": [{"role": "user", "content": [small] * 3}]}
        error = error_of(await client.post(path, json=three))
        assert "at most 2 images" in error["message"]
        assert error["param"] == "messages[0].content[2]"
        error = error_of(await client.post(path, json=ask(path, picture(41)[1])))
        assert "41 bytes, and at most 40" in error["message"]
        assert (await client.post(path, json=ask(path, picture(40)[1]))).status_code == 200


@SEEING
@EACH
@pytest.mark.parametrize(("nbytes", "kind"), [(60_000, "bodies"), (900_000, "large-bodies")])
async def test_large_images_are_decoded_off_the_loop(
    client: AsyncClient, monkeypatch: pytest.MonkeyPatch, path: str, nbytes: int, kind: str
) -> None:
    threads: list[str] = []
    decode = binascii.a2b_base64

    def watched(*args: Any, **more: Any) -> bytes:
        threads.append(threading.current_thread().name)
        return decode(*args, **more)

    monkeypatch.setattr(images, "a2b_base64", watched)
    answer = await client.post(path, json=ask(path, picture(nbytes)[1]))
    assert answer.status_code == 200, answer.text
    assert {name.rpartition("_")[0] for name in threads} == {kind}


URL = "/v1/responses"


@SEEING
async def test_a_kept_image_goes_on_is_shown_and_takes_its_bytes_once(
    client: AsyncClient, engines: ScriptedEngines
) -> None:
    """It goes on by the response, by the item, and when the history is sent anew."""
    engines.chat.max_context = 1000
    before = level("gateway_responses_kept_bytes")
    data, digits = picture(200_000)
    first = (await client.post(URL, json=ask(URL, digits))).json()
    second = await client.post(
        URL, json={"model": "writer", "input": "go on", "previous_response_id": first["id"]}
    )
    turns = [*ask(URL, digits)["input"], {"role": "assistant", "content": "so"}]
    third = await client.post(
        URL, json={"model": "writer", "input": [*turns, {"role": "user", "content": "and"}]}
    )
    items = (await client.get(f"{URL}/{first['id']}/input_items")).json()["data"]
    assert items[0]["content"] == [part(URL, digits)]
    fourth = await client.post(URL, json={"model": "writer", "input": [{"id": items[0]["id"]}] * 3})
    for answer in (second, third, fourth):
        assert answer.status_code == 200, answer.text
    assert [[image.data for image in job.images] for job in engines.chat.jobs] == [
        [data], [data], [data], [data] * 3
    ]  # fmt: skip
    assert len({id(image.data) for image in engines.chat.jobs[-1].images}) == 1
    assert engines.chat.jobs[1].messages[0]["content"] == engines.chat.jobs[1].images[0].word
    added = level("gateway_responses_kept_bytes") - before
    assert len(digits) < added < len(digits) + 20_000
    for answer in (second, third, fourth):
        await client.delete(f"{URL}/{answer.json()['id']}")
    assert level("gateway_responses_kept_bytes") - before > len(digits)
    await client.delete(f"{URL}/{first['id']}")
    assert level("gateway_responses_kept_bytes") == before


@SEEING
async def test_images_of_kept_responses_count_with_the_bodies(
    client: AsyncClient, engines: ScriptedEngines
) -> None:
    """A body of some bytes may stand for many."""
    first = (await client.post(URL, json=ask(URL, picture(200_000)[1]))).json()
    body = {"model": "writer", "input": "hi", "previous_response_id": first["id"]}
    async with held(engines.chat.gate, client.post(URL, json=body)):
        assert level("gateway_body_bytes") == 200_000 - UNCOUNTED_BYTES
    async with asyncio.timeout(60):
        while level("gateway_body_bytes"):
            await asyncio.sleep(0.01)


async def test_a_page_of_items_ends_early_at_large_ones(
    client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Items that refer to one image show it each time."""
    monkeypatch.setattr("gateway.wire.responses_items.PAGE_BYTES", 300_000)
    _, digits = picture(100_000)
    body = ask(URL, digits)
    turns = [body["input"][0], {"role": "assistant", "content": "so"}] * 4
    first = await client.post(
        URL, json={**body, "input": [*turns, {"role": "user", "content": "hi"}]}, headers=ON
    )
    assert first.status_code == 200, first.text
    url = f"{URL}/{first.json()['id']}/input_items?order=asc"
    seen: list[str] = []
    sizes, page = [], (await client.get(url)).json()
    while True:
        sizes.append(len(page["data"]))
        seen += [item["role"] for item in page["data"]]
        if not page["has_more"]:
            break
        page = (await client.get(f"{url}&after={page['last_id']}")).json()
    assert seen == ["user", "assistant"] * 4 + ["user"]
    assert sizes == [4, 5]


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    to = io.StringIO()
    monkeypatch.setattr(logs, "sys", SimpleNamespace(stderr=to))
    try:
        logs.configure("debug", "json")
        yield to
    finally:
        structlog.reset_defaults()


@pytest.mark.parametrize("reads", [False, True])
async def test_no_image_is_shown_anywhere(
    models: Catalog, monkeypatch: pytest.MonkeyPatch, written: io.StringIO, reads: bool
) -> None:
    """A log of prompts has its size and a tag in its place; errors, metrics and lists have none."""
    if reads:
        monkeypatch.setattr(ScriptedChat, "images", ImageCost())
    data, digits = picture(1_234)
    key = {"authorization": "Bearer admin"}
    told = []
    async with served(
        models, ScriptedEngines(), log_prompts=True, admin_key="admin", strict_fields=True
    ) as client:
        for path in IMAGES:
            for sent in (digits, digits + "%", digits[:-1] + "\u00e9"):
                answer = await client.post(path, json=ask(path, sent))
                told += [answer.text, str(answer.headers)]
        told.append((await client.get("/metrics")).text)
        async with client.stream("GET", "/admin/samples", headers=key) as sample:
            told.append(await anext(sample.aiter_lines()))
    assert '"errors"' in told[-1]
    assert data not in written.getvalue().encode()
    for text in (written.getvalue(), *told):
        assert digits[:40] not in text
    prompts = [
        line
        for line in map(json.loads, written.getvalue().splitlines())
        if line["event"] == "prompt"
    ]
    assert len(prompts) == 9
    tags = {
        re.findall(r"<image [\d,]+ bytes, tag ([0-9a-f]{8})>", json.dumps(each))[0]
        for each in prompts
    }
    assert len(tags) == 3
    assert "<image 1,234 bytes, tag " in json.dumps(prompts[0])


async def test_files_are_looked_at_for_images_of_an_unknown_model_alone(
    models: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look reads the small files of every model, and a slow disk makes it wait."""
    looks = 0
    inputs = ScriptedEngines.inputs

    async def counting(engines: ScriptedEngines, specs: Any) -> Any:
        nonlocal looks
        looks += 1
        return await inputs(engines, specs)

    monkeypatch.setattr(ScriptedEngines, "inputs", counting)
    path = "/v1/chat/completions"
    async with served(models, ScriptedEngines()) as client:
        before = looks
        for _ in range(3):
            assert (await client.post(path, json=ASK[path]("What is an image?"))).status_code == 200
        assert looks - before <= 1
