"""POST /v1/completions over a socket, with a scripted engine."""

import asyncio
import time
from collections import Counter
from typing import Any

import pytest
from httpx2 import AsyncClient, Response

from gateway import metrics
from gateway.clock import Stage
from gateway.jobs.chat import GenerateJob
from gateway.jobs.steps import SequenceParams
from gateway.registry import Catalog
from gateway.serving.generation import fan_out
from tests.api.harness import error_of, held, stream
from tests.fakes import ScriptedChat, ScriptedEngines
from tests.serving_app import served
from tests.waiting import until

pytestmark = pytest.mark.anyio
URL = "/v1/completions"


class SlowPlanner(ScriptedChat):
    """Long prompts take a while to be read."""

    def prepare(self, job: GenerateJob) -> list[SequenceParams]:
        time.sleep(len(job.prompt or "") / 1000)
        return super().prepare(job)


def ask(prompt: Any, **more: Any) -> dict[str, Any]:
    return {"model": "writer", "prompt": prompt, **more}


async def post(client: AsyncClient, prompt: Any, **more: Any) -> Response:
    return await client.post(URL, json=ask(prompt, **more))


async def events(client: AsyncClient, prompt: Any, **more: Any) -> list[Any]:
    return (await stream(client, URL, ask(prompt, **more))).events


def texts(answer: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


async def test_sixteen_tokens_are_written_unless_more_are_asked_for(client: AsyncClient) -> None:
    """OpenAI's documentation says so."""
    answer = (await post(client, "x" * 40)).json()
    assert texts(answer) == ["x" * 16]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert texts((await post(client, "x" * 40, max_tokens=30)).json()) == ["x" * 30]


@pytest.mark.parametrize("prompt", [["ab", "cde"], [[97, 98], [99, 100, 101]]])
async def test_choices_are_in_the_order_of_prompts(client: AsyncClient, prompt: Any) -> None:
    answer = (await post(client, prompt, n=2)).json()
    assert texts(answer) == ["ab", "ab", "cde", "cde"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    usage = {"prompt_tokens": 5, "completion_tokens": 3 + 3 + 4 + 4}
    assert usage.items() <= answer["usage"].items()


@pytest.mark.parametrize("prompt", ["abc", [97, 98, 99]])
@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_is_scored(
    client: AsyncClient, prompt: Any, max_tokens: int, stream: bool
) -> None:
    asked: dict[str, Any] = {"echo": True, "logprobs": 1, "max_tokens": max_tokens}
    if stream:
        chunks = await events(client, prompt, **asked)
        choices = [chunk["choices"][0] for chunk in chunks]
    else:
        answer = (await post(client, prompt, **asked)).json()
        choices = answer["choices"]
        assert answer["usage"]["prompt_tokens"] == 3
        assert answer["usage"]["completion_tokens"] == max_tokens
    assert "".join(choice["text"] for choice in choices) == "abc" + "a" * max_tokens
    assert choices[-1]["finish_reason"] == "length"
    scored = choices[0]["logprobs"]
    assert scored["tokens"][:3] == ["a", "b", "c"]
    assert scored["token_logprobs"][:3] == [None, -1.0, -1.0]
    assert scored["top_logprobs"][:3] == [None, {"b": -1.0}, {"c": -1.0}]
    assert scored["text_offset"][:3] == [0, 1, 2]


async def test_a_stream_tells_every_choice_whole(client: AsyncClient) -> None:
    chunks = await events(client, ["ab", "cde"], n=2, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 14
    told = [chunk["choices"][0] for chunk in chunks[:-1]]
    for index, text in enumerate(["ab", "ab", "cde", "cde"]):
        mine = [choice for choice in told if choice["index"] == index]
        assert "".join(choice["text"] for choice in mine) == text
        reasons = [choice["finish_reason"] for choice in mine]
        assert reasons == [None] * len(text) + ["stop"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all(chunk["object"] == "text_completion" for chunk in chunks)
    assert all("usage" not in chunk for chunk in chunks[:-1])


async def test_many_prompts_are_let_in_in_slices(
    client: AsyncClient, engines: ScriptedEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fan_out, "JOBS_AT_ONCE", 3)
    prompts = [chr(97 + i) * (1 + i % 5) for i in range(20)]
    answer = (await post(client, prompts)).json()
    assert texts(answer) == prompts
    assert max(engines.chat.steps) <= 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("bound", [{"queue_limit": 1}, {"queue_max_tokens": 12}])
async def test_a_request_does_not_fill_the_queue_against_itself(
    models: Catalog, engines: ScriptedEngines, stream: bool, bound: dict[str, Any]
) -> None:
    prompts = [chr(97 + i) * 3 for i in range(10)]
    async with served(models, engines, **bound) as client:
        if stream:
            assert len(await events(client, prompts)) == 10 * 4
        else:
            answer = await post(client, prompts)
            assert answer.status_code == 200
            assert texts(answer.json()) == prompts
    if "queue_max_tokens" in bound:
        assert max(engines.chat.steps) <= 4


async def test_a_request_that_is_alone_is_let_in_however_long_its_first_prompt_takes(
    models: Catalog,
) -> None:
    """The short ones beside it do not take its room while it is read."""
    writer = SlowPlanner(max_context=1000)
    async with served(models, ScriptedEngines(chat=writer), queue_max_tokens=200) as client:
        answer = await post(client, ["x" * 199, "a", "b", "c"])
    assert answer.status_code == 200
    assert texts(answer.json()) == ["x" * 16, "a", "b", "c"]


async def test_requests_that_share_a_small_queue_end(
    models: Catalog, engines: ScriptedEngines
) -> None:
    """A request whose first prompt was let in waits for room; none keeps it in return.

    Only clients that get a 429 count as rejected, however often others ask again.
    """
    rejected = metrics.of(metrics.REJECTED, "writer")._value
    before = rejected.get()
    async with served(models, engines, queue_max_tokens=9) as client, asyncio.timeout(60):
        asking = [post(client, prompt) for prompt in ["x", ["abc"] * 6] * 3]
        statuses = [answer.status_code for answer in await asyncio.gather(*asking)]
    assert set(statuses) <= {200, 429}
    assert 200 in statuses
    assert rejected.get() - before == statuses.count(429)


async def test_a_prompt_that_waits_for_room_is_read_once(
    models: Catalog, engines: ScriptedEngines
) -> None:
    """If each try read the prompt anew, a few such would keep all threads that read prompts."""

    def stages() -> list[Stage | None]:
        return [job.caller.timings.stage for job in engines.chat.jobs]

    async with served(models, engines, queue_limit=4) as client:
        async with held(engines.chat.gate, post(client, ["ab", "cd", "ef"], n=3)) as asking:
            await until(lambda: Counter(stages()) == {Stage.PREFILL: 1, Stage.QUEUE: 2})
    assert texts(asking.result().json()) == ["ab"] * 3 + ["cd"] * 3 + ["ef"] * 3
    assert len(engines.chat.jobs) == 3


async def test_requests_that_share_an_id_have_a_place_each(
    models: Catalog, engines: ScriptedEngines
) -> None:
    """They are not refused at half of the queue, as more prompts of one request are."""
    headers = {"x-request-id": "the-same"}
    async with served(models, engines, queue_limit=4) as client:
        engines.chat.gate.close()
        asked = [client.post(URL, json=ask("ab"), headers=headers) for _ in range(4)]
        asking = asyncio.gather(*asked)
        await until(lambda: len(engines.chat.jobs) == 4)
        engines.chat.gate.open()
        assert [answer.status_code for answer in await asking] == [200] * 4


@pytest.mark.parametrize("stream", [False, True])
async def test_one_prompt_too_long_refuses_them_all(client: AsyncClient, stream: bool) -> None:
    """The refusal is a status, before any text; the neighbours' rows are given back."""
    error = error_of(await post(client, ["fine", "x" * 101, "fine"], stream=stream))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert (await post(client, "hi")).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0, "logprobs": 1}, "max_tokens"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"n": 128, "prompt": ["a"] * 100}, "n"),
    ],
)
async def test_what_does_not_go_together_is_refused(
    client: AsyncClient, fields: dict[str, Any], param: str
) -> None:
    assert error_of(await client.post(URL, json=ask("hi") | fields))["param"] == param
