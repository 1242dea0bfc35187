"""A model whose tokenizer panics fails its own requests, by name; its neighbours do not notice."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.checkpoints import write_chat
from tests.cpu_engines import cpu_engines
from tests.engine.embedding.harness import tiny
from tests.serving_app import catalog, served
from tests.spoilt_tokenizers import strip

pytestmark = pytest.mark.anyio
HI = {"messages": [{"role": "user", "content": "Hi"}]}


def change_tokenizer(folder: Path, **parts: Any) -> Path:
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **parts}))
    return folder


async def chat(client: httpx2.AsyncClient, model: str, **more: Any) -> httpx2.Response:
    return await client.post("/v1/chat/completions", json={"model": model, **HI, **more})


async def test_a_token_that_panics_ends_its_row_alone(tmp_path: Path) -> None:
    """Rows of the same batch, and a stream of another model, go on to their ends."""
    write_chat(tmp_path / "good", num_hidden_layers=1)
    bad = change_tokenizer(write_chat(tmp_path / "bad", num_hidden_layers=1), decoder=strip("q"))
    q = json.loads((bad / "tokenizer.json").read_text())["model"]["vocab"]["q"]
    models = {name: {"kind": "chat", "source": f"path:{name}"} for name in ("good", "bad")}
    async with served(catalog(tmp_path, models), cpu_engines()) as client:
        never, always = {"logit_bias": {str(q): -100}}, {"logit_bias": {str(q): 100}}
        answers = await asyncio.gather(
            chat(client, "good", max_tokens=40, stream=True),
            *(chat(client, "bad", max_tokens=20, **never) for _ in range(3)),
            chat(client, "bad", max_tokens=20, **always),
        )
        assert [answer.status_code for answer in answers] == [200, 200, 200, 200, 500]
        error = answers[-1].json()["error"]
        assert error["code"] == "engine_failed"
        assert "`bad`" in error["message"]
        assert "slice index" in error["message"]
        assert "[DONE]" in answers[0].text
        assert (await chat(client, "bad", max_tokens=5, **never)).status_code == 200
        assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize("chars", [3, 3000], ids=["on the loop", "in a pool"])
async def test_a_text_that_panics_is_an_error_in_the_envelope(tmp_path: Path, chars: int) -> None:
    """A pattern gives up at a long word: a retry limit of its own, which panics."""
    split = {"type": "Split", "pattern": {"Regex": "(?:(?:x+x+)+)+y"}, "behavior": "Isolated"}
    tiny(tmp_path, "bert").rename(tmp_path / "bad")
    change_tokenizer(tmp_path / "bad", normalizer=None, pre_tokenizer={**split, "invert": False})
    models = {"bad": {"kind": "embedding", "source": "path:bad"}}
    async with served(catalog(tmp_path, models), cpu_engines()) as client:
        text = ("x" * 28 + " ") * (chars // 3)
        answer = await client.post("/v1/embeddings", json={"model": "bad", "input": text})
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "engine_failed"
        assert "`bad`" in answer.json()["error"]["message"]
        well = await client.post("/v1/embeddings", json={"model": "bad", "input": "a"})
        assert well.status_code == 200
