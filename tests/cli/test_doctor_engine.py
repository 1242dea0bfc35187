"""doctor --engine: real engines; its table, JSON and status."""

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest
from anyio.from_thread import BlockingPortal

from gateway.app.engines import MlxEngines
from gateway.doctor import trial
from gateway.registry import load_catalog
from tests.checkpoints import write_chat
from tests.cli.conftest import Inside
from tests.engine.vision.harness import write_seeing
from tests.processes import ROOT, ran
from tests.serving_app import served, settings

GOLDEN = ROOT / "tests" / "golden"


def write_models(here: Path, **sources: tuple[str, str]) -> None:
    entries = "".join(
        f"  {name}: {{kind: {kind}, source: '{source}'}}\n"
        for name, (kind, source) in sources.items()
    )
    (here / "models.yaml").write_text(f"version: 1\nmodels:\n{entries}")


@pytest.mark.slow
def test_tiny_models_pass_on_this_machine(
    tmp_path: Path, inside: Inside, portal: BlockingPortal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with its checks, in JSON that names no folder. The gateway finds the self-test's
    verdict, and writes no other.
    """
    monkeypatch.setattr(trial, "MEASURED_S", 0.1)
    write_chat(tmp_path / "tiny")
    write_models(
        tmp_path, chat=("chat", "path:tiny"), vectors=("embedding", f"path:{GOLDEN / 'bert'}")
    )
    verdicts = tmp_path / "self-tests"
    done = inside(tmp_path, "doctor", "--engine", "--json", GATEWAY_SELF_TEST_FOLDER=str(verdicts))
    assert (done.returncode, done.stderr) == (0, "")
    assert str(tmp_path) not in done.stdout
    assert str(ROOT) not in done.stdout
    told = json.loads(done.stdout)
    assert told["passed"] is True
    assert told["device"]["memory_bytes"] > 0
    vectors, chat = told["models"]
    assert (vectors["model"], chat["model"]) == ("vectors", "chat")
    assert _states(vectors) == {"load": "ok", "batch": "ok", "speed": "ok"}
    others = {"files": "ok", "formats": "ok", "images": "skip", "widths": "ok"}
    assert _states(chat) == {**_states(vectors), **others}
    [speed] = [each for each in chat["findings"] if each["check"] == "speed"]
    assert speed["measured"]["tokens_per_s"].keys() == {"1", "8"}
    assert all(rate > 1 for rate in speed["measured"]["tokens_per_s"].values())
    kept = list(verdicts.iterdir())
    given = settings(self_test=True, self_test_folder=verdicts)
    models = load_catalog(tmp_path / "models.yaml", {})
    gateway = served(models, MlxEngines(given), **given.model_dump(exclude_unset=True))
    with portal.wrap_async_context_manager(gateway) as client:
        body = {"model": "chat", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
        url = str(client.base_url).rstrip("/")
        httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=60).raise_for_status()
        shown = httpx2.get(f"{url}/v1/models/chat").json()
    assert shown["batching"]["self_test"] == "passed"
    assert list(verdicts.iterdir()) == kept
    assert len(kept) == 1


def _states(model: dict[str, Any]) -> dict[str, str]:
    return {each["check"]: each["state"] for each in model["findings"]}


@pytest.mark.slow
def test_a_model_with_a_vision_tower_reads_an_image(
    tmp_path: Path, inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "MEASURED_S", 0.01)
    write_seeing("qwen3_vl", tmp_path / "tiny")
    source = "kind: chat, source: 'path:tiny', images: "
    file = f"version: 1\nmodels:\n  sees: {{{source}true}}\n  blind: {{{source}false}}\n"
    (tmp_path / "models.yaml").write_text(file)
    named = ("--model", "blind", "--model", "sees")
    done = inside(tmp_path, "doctor", "--engine", "--json", *named)
    assert done.returncode == 0, done.stdout
    blind, sees = json.loads(done.stdout)["models"]
    assert (blind["model"], _states(blind)["images"]) == ("blind", "skip")
    [found] = [each for each in sees["findings"] if each["check"] == "images"]
    assert (found["state"], found["measured"]["tokens"]) == ("ok", 64), found


@pytest.mark.slow
def test_what_cannot_be_loaded_is_a_line_each(tmp_path: Path) -> None:
    """One that is absent is skipped; one whose weights are broken fails, and one beyond the memory
    that is set is not loaded: where memory ends, Metal would end the process.
    """
    write_chat(tmp_path / "tiny")
    (write_chat(tmp_path / "broken") / "model.safetensors").write_bytes(b"\0" * 100)
    write_models(
        tmp_path,
        far=("chat", "hub:org/far"),
        broken=("chat", "path:broken"),
        large=("chat", "path:tiny"),
    )
    named = [text for name in ("broken", "large", "far") for text in ("--model", name)]
    given = {"GATEWAY_HUB_CACHE": str(tmp_path / "hub"), "GATEWAY_CACHE_MAX_BYTES": "1000"}
    done = ran(tmp_path, "doctor", "--engine", *named, **given)
    assert done.returncode == 1
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert [row[:3] for row in rows] == [
        ["machine", "versions", "ok"],
        ["machine", "device", "ok"],
        ["broken", "load", "fail"],
        ["large", "load", "fail"],
        ["far", "files", "skip"],
    ]
    broken, large, far = (row[3] for row in rows[2:])
    assert broken.startswith("The model `broken` failed to load: ")
    assert large.startswith("The model `large` does not fit in memory: it takes ")
    assert far == "not on disk. Run: mlx-gateway pull far"


def test_models_that_are_absent_fail_nothing(tmp_path: Path, inside: Inside) -> None:
    write_models(tmp_path, far=("chat", "hub:org/far"))
    done = inside(tmp_path, "doctor", "--engine", GATEWAY_HUB_CACHE=str(tmp_path / "hub"))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[2].split("\t")[:3] == ["far", "files", "skip"]


@pytest.mark.parametrize(
    "arguments", [["--json"], ["--model", "mine"], ["--engine", "--model", "none"]]
)
def test_wrong_usage_ends_with_2(tmp_path: Path, inside: Inside, arguments: list[str]) -> None:
    write_models(tmp_path, mine=("chat", "hub:org/mine"))
    done = inside(tmp_path, "doctor", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
