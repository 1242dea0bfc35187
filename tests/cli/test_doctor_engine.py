"""doctor --engine: real engines; its table, JSON and status."""

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.checkpoints import write_chat
from tests.processes import ROOT, command, ran, started

pytestmark = pytest.mark.slow

GOLDEN = ROOT / "tests" / "golden"


def doctor(here: Path, *arguments: str, **given: str) -> tuple[int, str, str]:
    own = {"GATEWAY_SELF_TEST_FOLDER": str(here / "self-tests"), **given}
    done = ran(here, "doctor", *arguments, **own)
    return done.returncode, done.stdout, done.stderr


def write_models(here: Path, **sources: tuple[str, str]) -> None:
    entries = "".join(
        f"  {name}: {{kind: {kind}, source: '{source}'}}\n"
        for name, (kind, source) in sources.items()
    )
    (here / "models.yaml").write_text(f"version: 1\nmodels:\n{entries}")


def test_tiny_models_pass_on_this_machine(tmp_path: Path) -> None:
    """Each with its checks, in JSON that names no folder. The gateway finds the self-test's
    verdict, and writes no other.
    """
    write_chat(tmp_path / "tiny")
    write_models(
        tmp_path, chat=("chat", "path:tiny"), vectors=("embedding", f"path:{GOLDEN / 'bert'}")
    )
    status, out, err = doctor(tmp_path, "--engine", "--json")
    assert (status, err) == (0, "")
    assert str(tmp_path) not in out
    assert str(ROOT) not in out
    told = json.loads(out)
    assert told["passed"] is True
    assert told["device"]["memory_bytes"] > 0
    vectors, chat = told["models"]
    assert (vectors["model"], chat["model"]) == ("vectors", "chat")
    assert _states(vectors) == _states(chat) == {"load": "ok", "batch": "ok", "speed": "ok"}
    [speed] = [each for each in chat["findings"] if each["check"] == "speed"]
    assert speed["measured"]["tokens_per_s"].keys() == {"1", "8"}
    kept = list((tmp_path / "self-tests").iterdir())
    with started(
        command("serve"), tmp_path, GATEWAY_SELF_TEST_FOLDER=str(tmp_path / "self-tests")
    ) as gateway:
        body = {"model": "chat", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
        httpx2.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=60).raise_for_status()
        shown = httpx2.get(f"{gateway.url}/v1/models/chat").json()
    assert shown["batching"]["self_test"] == "passed"
    assert list((tmp_path / "self-tests").iterdir()) == kept
    assert len(kept) == 1


def _states(model: dict[str, Any]) -> dict[str, str]:
    return {each["check"]: each["state"] for each in model["findings"]}


def test_models_that_are_absent_are_skipped(tmp_path: Path) -> None:
    write_models(tmp_path, far=("chat", "hub:org/far"))
    status, out, err = doctor(tmp_path, "--engine", GATEWAY_HUB_CACHE=str(tmp_path / "hub"))
    assert (status, err) == (0, "")
    rows = [line.split("\t") for line in out.splitlines()]
    assert [row[:3] for row in rows] == [
        ["machine", "versions", "ok"],
        ["machine", "device", "ok"],
        ["far", "files", "skip"],
    ]
    assert rows[2][3] == "not on disk. Run: mlx-gateway pull far"


def test_a_model_whose_weights_are_broken_fails(tmp_path: Path) -> None:
    (write_chat(tmp_path / "tiny") / "model.safetensors").write_bytes(b"\0" * 100)
    write_models(tmp_path, mine=("chat", "path:tiny"))
    status, out, _ = doctor(tmp_path, "--engine", "--model", "mine")
    assert status == 1
    rows = [line.split("\t") for line in out.splitlines()]
    assert rows[2][:3] == ["mine", "load", "fail"]
    assert rows[2][3].startswith("The model `mine` failed to load: ")
    assert len(rows) == 3


@pytest.mark.parametrize(
    "arguments", [["--json"], ["--model", "mine"], ["--engine", "--model", "none"]]
)
def test_wrong_usage_ends_with_2(tmp_path: Path, arguments: list[str]) -> None:
    write_models(tmp_path, mine=("chat", "hub:org/mine"))
    status, out, _ = doctor(tmp_path, *arguments)
    assert (status, out) == (2, "")


def test_a_model_beyond_the_memory_that_is_set_is_not_loaded(tmp_path: Path) -> None:
    """Where memory ends, Metal would end the process."""
    write_chat(tmp_path / "tiny")
    write_models(tmp_path, mine=("chat", "path:tiny"))
    status, out, _ = doctor(tmp_path, "--engine", GATEWAY_CACHE_MAX_BYTES="1000")
    assert status == 1
    rows = [line.split("\t") for line in out.splitlines()]
    assert rows[2][:3] == ["mine", "load", "fail"]
    assert rows[2][3].startswith("The model `mine` does not fit in memory: it takes ")
