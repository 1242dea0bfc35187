"""The recipe of docs/graphiti.md, as written."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.processes import ROOT

PAGE = (ROOT / "docs" / "graphiti.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.M | re.S)


@pytest.mark.compat
def test_the_recipe_works_as_pasted(shipped_url: str, tmp_path: Path) -> None:
    """Only the port is the test's own. The gateway is as shipped."""
    (recipe,) = (code for code in BLOCKS if "import Graphiti" in code)
    code = recipe.replace("http://127.0.0.1:8000", shipped_url)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, timeout=600, check=False
    )
    printed = done.stdout.decode()
    assert done.returncode == 0, done.stderr.decode()
    assert " entities and " in printed
    assert "1 episode found: Alice works at Acme in Paris." in printed


async def test_the_reranker_as_pasted_ranks_in_one_call(url: str) -> None:
    """The shipped embedding model ranks; an empty list makes no call."""
    (code,) = (code for code in BLOCKS if "class GatewayReranker" in code)
    names: dict[str, Any] = {}
    exec(code, names)
    reranker = names["GatewayReranker"](url, "all-minilm-l6-v2")
    passages = ["The sea is salty.", "A dog barks at strangers.", "Paris lies on the Seine."]
    ranked = await reranker.rank("Which animal barks?", passages)
    assert ranked[0][0] == passages[1]
    assert sorted(passage for passage, _ in ranked) == sorted(passages)
    scores = [score for _, score in ranked]
    assert scores == sorted(scores, reverse=True)
    assert await reranker.rank("anything", []) == []
    await reranker._client.aclose()
