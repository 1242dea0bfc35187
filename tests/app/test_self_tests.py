"""A chat model's self-test: at load, from disk, in idle time, and what becomes of its verdict."""

import asyncio
import json
import stat
import time
from collections.abc import Generator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway import metrics
from gateway.app import self_tests
from gateway.app.self_tests import SelfTest, VerdictStore
from gateway.engine.device import BLAS, Device
from gateway.engine.generation.self_test import self_test_digest
from gateway.engine.models.checkpoint import Checkpoint
from gateway.errors import Fault, PassFault
from gateway.jobs import KvCost, Verdict
from gateway.registry import ChatSpec, PathSource
from gateway.serving.budget import Budget
from gateway.serving.lane import Lane
from tests.checkpoints import write_chat
from tests.fakes import PASSED, ScriptedChat, ScriptedEngines
from tests.serving_app import catalog, served

pytestmark = pytest.mark.anyio
CHAT: dict[str, Any] = {"kind": "chat", "source": "path:.", "preload": True}
FAILED = replace(PASSED, rows=False, problem="rows: logits 1.4 apart")


@dataclass
class Scrutinised(ScriptedChat):
    """Counts its self-tests, each of whose steps takes a while."""

    step_s: float = 0.0
    tests: int = 0
    steps_taken: int = 0

    def self_test(self) -> Generator[Verdict]:
        self.tests += 1
        for finding in self.findings:
            time.sleep(self.step_s)
            self.steps_taken += 1
            yield finding


@dataclass
class Engines(ScriptedEngines):
    chat: Scrutinised = field(default_factory=Scrutinised)


async def shown(client: httpx2.AsyncClient) -> Any:
    return (await client.get("/v1/models/chat")).json()["batching"]


async def test_a_verdict_is_found_once_and_kept(tmp_path: Path) -> None:
    """The next start reads it; another model's is another."""
    given: dict[str, Any] = {"self_test": True, "self_test_folder": tmp_path / "kept"}
    for expected in (1, 0):
        engines = Engines()
        async with served(catalog(tmp_path, {"chat": CHAT}), engines, **given) as client:
            assert await shown(client) == {
                "rows": "together",
                "self_test": "passed",
                "problem": None,
            }
        assert engines.chat.tests == expected
        assert engines.chat.held == [PASSED]
    engines = Engines()
    async with served(catalog(tmp_path, {"chat": CHAT, "b": CHAT}), engines, **given):
        assert engines.chat.tests == 1


async def test_a_verdict_that_is_not_lasting_is_not_kept(tmp_path: Path) -> None:
    """It holds until the model is loaded again."""
    found = replace(FAILED, is_lasting=False)
    given: dict[str, Any] = {"self_test": True, "self_test_folder": tmp_path / "kept"}
    for _ in range(2):
        engines = Engines(chat=Scrutinised(findings=[found]))
        async with served(catalog(tmp_path, {"chat": CHAT}), engines, **given):
            assert engines.chat.held == [found]
        assert engines.chat.tests == 1


async def test_a_model_that_fails_runs_its_rows_one_at_a_time(tmp_path: Path) -> None:
    """Whoever else asks waits; /v1/models says why."""
    engines = Engines(chat=Scrutinised(findings=[Verdict(), FAILED]))
    body = {"model": "chat", "messages": [{"role": "user", "content": "Hello"}], "n": 4}
    async with served(
        catalog(tmp_path, {"chat": CHAT}), engines, self_test=True, self_test_folder=tmp_path / "t"
    ) as client:
        assert await shown(client) == {
            "rows": "one at a time",
            "self_test": "failed",
            "problem": FAILED.problem,
        }
        answer = await client.post("/v1/chat/completions", json=body)
        assert len(answer.json()["choices"]) == 4
    assert engines.chat.held == [FAILED]
    assert set(engines.chat.steps) == {1}


@pytest.mark.parametrize(
    ("batching", "rows", "outcome"),
    [
        ("force", "together", "off"),
        ({"mode": "force", "max_batch_size": 2}, "together", "off"),
        (False, "one at a time", "failed"),  # as YAML reads `off`
        ("off", "one at a time", "failed"),
        ({"mode": False}, "one at a time", "failed"),
        (True, "one at a time", "failed"),
    ],
)
async def test_models_yaml_has_the_last_word(
    tmp_path: Path, batching: Any, rows: str, outcome: str
) -> None:
    """`force` asks no test, and `off` needs none."""
    engines = Engines(chat=Scrutinised(findings=[FAILED]))
    models = {"chat": {**CHAT, "batching": batching}}
    async with served(
        catalog(tmp_path, models), engines, self_test=True, self_test_folder=tmp_path / "t"
    ) as client:
        batched = await shown(client)
    assert (batched["rows"], batched["self_test"]) == (rows, outcome)
    assert engines.chat.tests == (batching is True)


async def test_a_test_that_takes_too_long_is_ended_in_idle_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then rows of an architecture that is known to be equal run together."""
    monkeypatch.setattr(self_tests, "LANE_S", 0.3)
    slow = Scrutinised(findings=[Verdict()] * 4 + [FAILED], step_s=0.15)
    engines = Engines(chat=slow)
    async with served(
        catalog(tmp_path, {"chat": CHAT}), engines, self_test=True, self_test_folder=tmp_path / "t"
    ) as client:
        assert slow.steps_taken < 5
        assert await shown(client) == {
            "rows": "together",
            "self_test": "unfinished",
            "problem": None,
        }
        async with asyncio.timeout(20):
            while (await shown(client))["self_test"] != "failed":
                await asyncio.sleep(0.1)
        assert (await shown(client))["rows"] == "one at a time"
        async with asyncio.timeout(5):
            while not list((tmp_path / "t").glob("*.json")):
                await asyncio.sleep(0.05)
    assert slow.tests == 1


async def test_until_its_test_is_whole_another_architecture_runs_its_rows_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then they run together, if the test finds nothing wrong."""
    monkeypatch.setattr(self_tests, "LANE_S", 0.3)
    slow = Scrutinised(findings=[Verdict()] * 4 + [PASSED], step_s=0.15, is_listed=False)
    body = {"model": "chat", "messages": [{"role": "user", "content": "Hello"}], "n": 4}
    async with served(
        catalog(tmp_path, {"chat": CHAT}),
        Engines(chat=slow),
        self_test=True,
        self_test_folder=tmp_path / "t",
    ) as client:
        assert await shown(client) == {
            "rows": "one at a time",
            "self_test": "unfinished",
            "problem": None,
        }
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        assert set(slow.steps) == {1}
        async with asyncio.timeout(20):
            while (await shown(client))["rows"] != "together":
                await asyncio.sleep(0.1)
        assert (await shown(client))["self_test"] == "passed"
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        assert max(slow.steps) == 4


async def test_the_window_is_tested_while_nobody_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One who comes goes first, and loses nothing of what was known."""
    known = replace(PASSED, window=None)
    waiting = Scrutinised(findings=[known, known, known, replace(known, window=False)])
    engines = Engines(chat=waiting)
    async with served(
        catalog(tmp_path, {"chat": CHAT}), engines, self_test=True, self_test_folder=tmp_path / "t"
    ) as client:
        assert (await shown(client))["rows"] == "together"
        body = {"model": "chat", "messages": [{"role": "user", "content": "Hello"}]}
        waiting.gate.close()
        first_poll_s = self_tests.IDLE_POLL_S
        monkeypatch.setattr(self_tests, "IDLE_POLL_S", 0.02)
        asked = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        await asyncio.to_thread(waiting.gate.reached.wait, 20)
        await asyncio.sleep(first_poll_s + 0.1)  # several polls
        assert waiting.steps_taken == 1
        waiting.gate.open()
        assert (await asked).status_code == 200
        async with asyncio.timeout(20):
            while (await shown(client))["rows"] != "one at a time":
                await asyncio.sleep(0.1)


async def test_a_test_gives_its_memory_to_rows_that_need_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is begun again when nobody uses the model: rows would wait for it, and it for them."""
    known = replace(PASSED, window=None)
    waiting = Scrutinised(
        findings=[known] * 3 + [PASSED],
        kv_cost=KvCost(1),
        self_test_tokens=200,
        max_context=3000,
    )
    engines = Engines(chat=waiting)
    async with served(
        catalog(tmp_path, {"chat": CHAT}),
        engines,
        self_test=True,
        self_test_folder=tmp_path / "t",
        cache_max_bytes=2500,
        load_wait_s=3,
    ) as client:
        async with asyncio.timeout(10):
            while waiting.steps_taken < 2:
                await asyncio.sleep(0.02)
        body = {
            "model": "chat",
            "messages": [{"role": "user", "content": "x" * 1000}],
            "max_tokens": 1,
        }
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        monkeypatch.setattr(self_tests, "IDLE_POLL_S", 0.02)
        async with asyncio.timeout(20):
            while waiting.steps_taken < 2 + len(waiting.findings):
                await asyncio.sleep(0.05)
    assert waiting.tests == 2


async def test_faults_of_batches_are_counted(tmp_path: Path) -> None:
    """The engine hands them up, for it counts nothing."""
    engines = Engines()
    before = metrics.of(metrics.BATCH_FAULTS, "chat")._value.get()
    engines.chat.faults = [PassFault(Fault.ROW, "2 rows: ValueError: no such shapes")]
    body = {"model": "chat", "messages": [{"role": "user", "content": "Hello"}]}
    async with served(catalog(tmp_path, {"chat": CHAT}), engines) as client:
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    assert metrics.of(metrics.BATCH_FAULTS, "chat")._value.get() == before + 1


async def test_a_batching_that_ends_while_rows_wait_lets_them_join_one_at_a_time(
    tmp_path: Path,
) -> None:
    """The engine has given it up after some faults."""
    engines = Engines()
    body = {"model": "chat", "messages": [{"role": "user", "content": "Hello"}], "n": 3}
    async with served(catalog(tmp_path, {"chat": CHAT}), engines) as client:
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        assert max(engines.chat.steps) == 3
        engines.chat.is_batched = False
        warned = await client.post("/v1/chat/completions", json={**body, "n": 1})
        assert warned.status_code == 200
        engines.chat.steps.clear()
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        assert set(engines.chat.steps) == {1}
        assert (await shown(client))["rows"] == "one at a time"


class TestVerdicts:
    """Small files that anything may have happened to."""

    def test_they_are_this_users_alone(self, tmp_path: Path) -> None:
        """Nobody else's verdict is believed, so nobody else writes there."""
        verdicts = VerdictStore(tmp_path / "a" / "b")
        verdicts.write("d", FAILED)
        verdicts.write("e", replace(FAILED, single=None))  # not whole
        verdicts.write("e", replace(FAILED, is_lasting=False))
        assert verdicts.read("d") == FAILED
        assert verdicts.read("e") == Verdict()
        (file,) = verdicts.folder.iterdir()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(verdicts.folder.stat().st_mode) == 0o700

    @pytest.mark.parametrize(
        "content",
        [
            "",
            "{",
            "[]",
            "null",
            '"x"',
            "[" * 3000,
            json.dumps(asdict(PASSED) | {"rows": "no"}),
            json.dumps(asdict(PASSED) | {"problem": 1}),
        ],
    )
    def test_what_is_not_sound_is_not_known(self, tmp_path: Path, content: str) -> None:
        """Then the test is made again."""
        (tmp_path / "d.json").write_text(content)
        verdicts = VerdictStore(tmp_path)
        assert verdicts.read("d") == Verdict()
        verdicts.write("d", PASSED)
        assert verdicts.read("d") == PASSED

    def test_bytes_that_are_no_text_are_not_known(self, tmp_path: Path) -> None:
        """Nor is a folder of that name."""
        (tmp_path / "d.json").write_bytes(b"\xff\x00")
        (tmp_path / "e.json").mkdir()
        assert VerdictStore(tmp_path).read("d") == VerdictStore(tmp_path).read("e") == Verdict()


async def test_doctor_runs_all_of_a_test_whatever_is_kept(tmp_path: Path) -> None:
    """Its verdict holds at once, and replaces the other on disk."""

    async def digest() -> str:
        return "d"

    engine, verdicts = Scrutinised(findings=[Verdict(), FAILED]), VerdictStore(tmp_path)
    verdicts.write("d", PASSED)
    spec = ChatSpec(id="chat", kind="chat", source=PathSource(tmp_path))
    async with Lane() as lane:
        test = SelfTest(
            spec, engine, lane, Budget(1000), verdicts, digest, kv=KvCost(0), is_on=True
        )
        assert await test.run_to_end() == FAILED
    assert engine.held == [FAILED]
    assert verdicts.read("d") == FAILED


async def test_a_verdict_that_cannot_be_kept_holds_nevertheless(tmp_path: Path) -> None:
    """A disk may be full, or read only."""
    (tmp_path / "file").write_text("in the way")
    engines = Engines(chat=Scrutinised(findings=[FAILED]))
    async with served(
        catalog(tmp_path, {"chat": CHAT}),
        engines,
        self_test=True,
        self_test_folder=tmp_path / "file" / "x",
    ) as client:
        assert (await shown(client))["rows"] == "one at a time"


def test_a_digest_names_what_a_verdict_depends_on(tmp_path: Path) -> None:
    """The architecture, its number formats and the device; not when its files were written."""

    def digest(folder: Path, device: Device = Device.CPU, dtype: str | None = None) -> str:
        return self_test_digest(Checkpoint("m", folder), device, dtype)

    one = write_chat(tmp_path / "one")
    assert digest(one) == digest(write_chat(tmp_path / "again", seed=1))
    others = {
        digest(one),
        digest(one, dtype="float16"),
        digest(one, Device.METAL),
        digest(write_chat(tmp_path / "wide", intermediate_size=128)),
        digest(write_chat(tmp_path / "far", rope_theta=1e6)),
    }
    assert len(others) == 5


def test_a_verdict_holds_for_the_blas_that_it_was_found_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU its kernels decide how far a batch's sums are from those of one row."""
    checkpoint = Checkpoint("m", write_chat(tmp_path / "one"))
    digests = set()
    for config in ("OpenBLAS 0.3.26 Haswell", "OpenBLAS 0.3.29 SkylakeX"):
        monkeypatch.setattr(f"{self_test_digest.__module__}.BLAS", replace(BLAS, config=config))
        digests.add(self_test_digest(checkpoint, Device.CPU, None))
    assert len(digests) == 2
