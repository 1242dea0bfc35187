"""Reranking by labels through HTTP: a tiny causal model, as models.yaml describes it."""

import asyncio
import math
from pathlib import Path
from typing import Any

import httpx2
import mlx.core as mx
import pytest
from mlx_lm import load
from tokenizers import Tokenizer

from gateway.errors import RegistryInvalid
from tests.checkpoints import write_chat
from tests.cpu_engines import cpu_engines
from tests.serving_app import catalog, served

pytestmark = pytest.mark.anyio
TEMPLATE = "{instruction}\nQ: {query}\nD: {document}\nRelevant:"
LABELS = {"kind": "rerank", "scoring": "labels", "labels": ["y", "n"], "template": TEMPLATE}
QUERY = "What is the capital of France, and since when? " * 4
DOCUMENTS = ["Paris.", "Bananas are yellow. " * 9, "Rome", "Nothing of this."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat(tmp_path_factory.mktemp("tiny"))


def log_odds(folder: Path, instruction: str, query: str, document: str) -> float:
    """Compute the expected value with mlx-lm, alone and with the whole vocabulary."""
    loaded: Any = load(str(folder))
    model = loaded[0]
    model.set_dtype(mx.float32)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = TEMPLATE.format(instruction=instruction, query=query, document=document)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    logits: Any = model(mx.array([ids]))[0, -1].tolist()
    yes, no = (tokenizer.encode(each, add_special_tokens=False).ids[0] for each in "yn")
    return float(logits[yes] - logits[no])


async def test_scores_are_the_models_own(folder: Path, tmp_path: Path) -> None:
    models = catalog(tmp_path, {"judge": {**LABELS, "source": f"path:{folder}"}})
    expected = [log_odds(folder, "Be kind.", QUERY, each) for each in DOCUMENTS]
    body = {"model": "judge", "query": QUERY, "instruction": "Be kind.", "raw_scores": True}
    async with served(models, cpu_engines()) as client:

        async def scores(documents: list[str], **more: Any) -> list[float]:
            answer = await client.post("/v1/rerank", json={**body, "documents": documents, **more})
            assert answer.status_code == 200, answer.text
            assert "x-gateway-ignored" not in answer.headers
            results = sorted(answer.json()["results"], key=lambda each: int(each["index"]))
            return [each["relevance_score"] for each in results]

        assert await scores(DOCUMENTS) == pytest.approx(expected, abs=1e-4)
        alone = await asyncio.gather(*(scores([each]) for each in DOCUMENTS))
        assert [one for [one] in alone] == pytest.approx(expected, abs=1e-4)
        shares = [1 / (1 + math.exp(-each)) for each in expected]
        assert await scores(DOCUMENTS, raw_scores=False) == pytest.approx(shares, abs=1e-4)
        long = await _post(client, {**body, "documents": ["word " * 9999]})
        assert long.headers["x-gateway-truncated"] == "1"
        too_long = await _post(client, {**body, "query": "word " * 9999, "documents": ["x"]})
        assert (too_long.status_code, too_long.json()["error"]["param"]) == (400, "query")


async def _post(client: httpx2.AsyncClient, body: dict[str, Any]) -> httpx2.Response:
    return await client.post("/v1/rerank", json=body)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"template": "{query} and no more"}, "once each"),
    ({"template": "{document} {query}"}, "come last"),
    ({"labels": []}, "labels"),
    ({"labels": ["a", "b", "c"]}, "labels"),
    ({"scoring": "head"}, "scoring: labels"),
    ({"scoring": "luck"}, "scoring"),
]


@pytest.mark.parametrize(("keys", "problem"), BAD)
def test_what_models_yaml_has_wrong_is_named(
    tmp_path: Path, keys: dict[str, Any], problem: str
) -> None:
    with pytest.raises(RegistryInvalid) as caught:
        catalog(tmp_path, {"judge": {**LABELS, "source": "path:.", **keys}})
    assert problem in " ".join(caught.value.problems)
