"""A full disk at each place that the application writes to: a line of the log, or a named error."""

import errno
import os
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import structlog

from gateway.engine.compiled_code import FOLDER
from tests.compilers import is_fused
from tests.cpu_engines import cpu_engines
from tests.fakes import ScriptedEngines
from tests.serving_app import catalog, served

pytestmark = pytest.mark.anyio

BERT = {"kind": "embedding", "source": f"path:{Path(__file__).parents[1]}/golden/bert"}
CHAT = {"kind": "chat", "source": "path:."}
Usage = namedtuple("Usage", "total used free")


async def test_a_load_without_room_for_code_runs_unfused_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one finds room again, and has passes fused."""
    models = catalog(tmp_path, {"first": BERT, "second": BERT})
    body = {"model": "first", "input": "Hi"}
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 40, 0, 4096))
    async with served(models, cpu_engines()) as client:
        with structlog.testing.capture_logs() as logged:
            answer = await client.post("/v1/embeddings", json=body)
        [line] = [line for line in logged if line["event"] == "runs_unfused"]
        assert (line["model"], line["free_bytes"]) == ("first", 4096)
        assert line["folder"] == str(FOLDER)
        assert not is_fused()
        monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 40, 0, 1 << 30))
        with structlog.testing.capture_logs() as logged:
            again = await client.post("/v1/embeddings", json=body | {"model": "second"})
        assert not [line for line in logged if line["event"] == "runs_unfused"]
        assert is_fused()
    assert answer.status_code == again.status_code == 200
    [one], [other] = answer.json()["data"], again.json()["data"]
    assert one["embedding"] == pytest.approx(other["embedding"], abs=1e-5)


async def test_a_verdict_that_finds_no_room_is_a_line_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    engines = ScriptedEngines()
    monkeypatch.setattr(os, "replace", full)
    body = {"model": "chat", "messages": [{"role": "user", "content": "Hi"}]}
    folder = tmp_path / "verdicts"
    given: dict[str, Any] = {"self_test": True, "self_test_folder": folder}
    async with served(catalog(tmp_path, {"chat": CHAT}), engines, **given) as client:
        with structlog.testing.capture_logs() as logged:
            answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    assert [line["error"] for line in logged if line["event"] == "self_test_not_kept"] == [
        "[Errno 28] No space left on device"
    ]
    assert not list(folder.iterdir())
