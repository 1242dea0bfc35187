"""The times of a request's stages: in a header, in the log, in a chunk, in metrics."""

import re
from typing import Any

import orjson
import pytest
import structlog
from httpx2 import AsyncClient, Response

pytestmark = pytest.mark.anyio

EMBED = {"model": "embed", "input": ["a", "b"]}
RERANK = {"model": "judge", "query": "abc", "documents": ["a", "b"]}
CHAT = {"model": "writer", "messages": [{"role": "user", "content": "hello"}]}


def stages(answer: Response) -> dict[str, float]:
    """Read a Server-Timing header."""
    header = answer.headers["server-timing"]
    assert re.fullmatch(r"[a-z]+;dur=[\d.]+(, [a-z]+;dur=[\d.]+)*", header)
    return {name: float(ms) for name, ms in re.findall(r"(\w+);dur=([\d.]+)", header)}


@pytest.mark.parametrize(
    ("path", "body", "names"),
    [
        ("/v1/embeddings", EMBED, "tokenise queue lane inference"),
        ("/v2/rerank", RERANK, "tokenise queue lane inference"),
        ("/v1/chat/completions", CHAT, "tokenise queue lane prefill decode"),
        (
            "/v1/chat/completions",
            {**CHAT, "guided_regex": "a+"},
            "tokenise compile queue lane prefill decode",
        ),
    ],
)
@pytest.mark.usefixtures("engines")  # a gateway of its own
async def test_an_answer_tells_its_stages_in_a_header(
    client: AsyncClient, path: str, body: dict[str, Any], names: str
) -> None:
    told = stages(await client.post(path, json=body))
    assert list(told) == ["parse", "load", *names.split(), "serialise", "total"]
    assert sum(told.values()) - told["total"] <= told["total"] + 0.1


@pytest.mark.usefixtures("engines")  # a gateway of its own
async def test_a_stream_tells_up_to_its_first_token_and_the_rest_with_its_usage(
    client: AsyncClient,
) -> None:
    """A header cannot come after the text; the chunk that `include_usage` asks for can."""
    asked = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    answer = await client.post("/v1/chat/completions", json=asked)
    assert list(stages(answer))[:6] == ["parse", "load", "tokenise", "queue", "lane", "prefill"]
    *_, last, done = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    assert done == "data: [DONE]"
    told = orjson.loads(last.removeprefix("data: "))["timings"]
    assert told["decode_ms"] >= 0
    assert told["total_ms"] > 0


async def test_the_access_log_has_the_stages_and_tokens(client: AsyncClient) -> None:
    with structlog.testing.capture_logs() as lines:
        await client.post("/v1/chat/completions", json=CHAT)
        await client.get("/v1/models")
    # A line of the request before, of another test, may come late.
    chat, models = [line for line in lines if line["event"] == "request"][-2:]
    assert chat["model"] == "writer"
    assert (chat["tokens_in"], chat["tokens_out"]) == (5, 6)
    assert {"parse_ms", "tokenise_ms", "queue_ms", "lane_ms", "prefill_ms", "decode_ms"} <= set(
        chat
    )
    assert "model" not in models


async def test_stages_are_histograms_by_model_and_route(client: AsyncClient) -> None:
    await client.post("/v1/embeddings", json={"model": "embed", "input": ["a", "bbb"]})
    await client.post("/v1/chat/completions", json=CHAT)
    text = (await client.get("/metrics")).text
    for series in (
        'gateway_stage_seconds_count{model="org/embed",route="/v1/embeddings",stage="inference"}',
        'gateway_stage_seconds_count{model="writer",route="/v1/chat/completions",stage="prefill"}',
        'gateway_time_to_first_token_seconds_count{model="writer"}',
        'gateway_time_per_output_token_seconds_count{model="writer"}',
        'gateway_batch_padding_ratio_count{model="org/embed"}',
        'gateway_fast_path_total{model="org/embed"}',
        'gateway_lane_seconds_total{kind="decode"}',
        'gateway_lane_wait_seconds_count{kind="embedding"}',
    ):
        found = re.search(re.escape(series) + r" ([\d.e+-]+)", text)
        assert found, series
        assert float(found[1]) > 0, series
