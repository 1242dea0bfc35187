"""/tokenize, /detokenize and /tokenizer_info over a socket, with a scripted engine."""

from typing import Any

import pytest
from httpx2 import AsyncClient

from gateway.registry import Catalog
from gateway.wire.tokenization import MAX_TOKENS
from tests.fakes import ScriptedEngines
from tests.serving_app import served

pytestmark = pytest.mark.anyio
HI = list(map(ord, "hi"))
USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": "hi"}, [1, *HI]),
        ({"prompt": "hi", "add_special_tokens": False}, HI),  # lm-eval's
        ({"prompt": "", "add_special_tokens": False}, []),
        ({"model": "writer", "messages": USER}, [*HI, 2]),
        ({"messages": USER, "add_generation_prompt": False}, HI),
    ],
)
async def test_a_prompt_and_a_conversation_become_tokens(
    client: AsyncClient, path: str, body: dict[str, Any], tokens: list[int]
) -> None:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json() == {
        "count": len(tokens),
        "max_model_len": 100,
        "tokens": tokens,
        "token_strs": None,
    }


async def test_a_prompt_longer_than_the_context_is_tokenized(client: AsyncClient) -> None:
    body = {"prompt": "a" * 200, "return_token_strs": True, "add_special_tokens": False}
    answer = (await client.post("/tokenize", json=body)).json()
    assert (answer["count"], answer["token_strs"]) == (200, ["a"] * 200)


async def test_tokens_become_text(client: AsyncClient) -> None:
    for text in ("hi", ""):
        answer = await client.post("/detokenize", json={"tokens": list(map(ord, text))})
        assert answer.json() == {"prompt": text}


async def test_the_tokenizer_is_described(client: AsyncClient) -> None:
    for path in ("/tokenizer_info", "/v1/tokenizer_info?model=gpt"):
        assert (await client.get(path)).json() == {
            "bos_token": "<s>",
            "eos_token": "</s>",
            "pad_token": None,
            "chat_template": "{{ messages }}",
        }
    assert (await client.get("/tokenizer_info?model=nobody")).status_code == 404


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": USER}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "model": "embed"}, "model"),
        ("/tokenize", {"prompt": "a" * 3_000_000}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [2**31]}, "tokens[0]"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [97, 999]}, "tokens"),
        ("/detokenize", {"tokens": [97] * (MAX_TOKENS + 1)}, "tokens"),
        ("/detokenize", {"tokens": ["a"] * (MAX_TOKENS + 1)}, "tokens"),
    ],
)
async def test_what_is_wrong_is_a_400_that_names_the_field(
    client: AsyncClient, path: str, body: dict[str, Any], param: str
) -> None:
    answer = await client.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


async def test_tokens_are_metered(models: Catalog, engines: ScriptedEngines) -> None:
    async with served(models, engines, requests_per_minute=2) as client:
        body: dict[str, Any]
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [97]})):
            answer = await client.post(path, json=body)
            assert answer.status_code == 200
        assert answer.headers["x-ratelimit-remaining-requests"] == "0"
        for path in ("/v1/tokenize", "/v1/detokenize"):
            assert (await client.post(path, json={"prompt": "a"})).status_code == 429
        assert (await client.get("/tokenizer_info")).status_code == 429
