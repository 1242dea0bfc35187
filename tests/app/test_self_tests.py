"""A chat model's self-test: at load, from disk, in idle time, and the effects of its verdict."""

import asyncio
import json
import stat
import time
from collections.abc import AsyncIterator, Generator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
import structlog

from gateway import metrics
from gateway.app import self_tests
from gateway.app.self_tests import SelfTest, VerdictStore
from gateway.engine.device import BLAS, Device
from gateway.engine.generation.self_test import self_test_digest
from gateway.engine.models.checkpoint import Checkpoint
from gateway.engine.models.decoders import Numbers
from gateway.errors import Fault, PassFault
from gateway.jobs.steps import KvCost, Verdict
from gateway.registry import ChatSpec, PathSource
from gateway.serving.budget import Budget
from gateway.serving.generation.policy import GenerationLimits
from gateway.serving.lane import Lane
from tests.checkpoints import write_chat
from tests.fakes import PASSED, Gate, ScriptedChat, ScriptedEngines
from tests.serving_app import catalog, served
from tests.waiting import until

pytestmark = pytest.mark.anyio
CHAT: dict[str, Any] = {"kind": "chat", "source": "path:.", "preload": True}
LIMITS = GenerationLimits(max_batch_size=32, prefill_chunk_tokens=512)
FAILED = replace(PASSED, rows=False, problem="rows: logits 1.4 apart")


@dataclass
class Scrutinised(ScriptedChat):
    """Counts its self-tests, each of whose steps takes a while."""

    step_s: float = 0.0
    tests: int = 0
    steps_taken: int = 0
    timed: list[int] = field(default_factory=list)  # the rows of steps
    freed: list[int] = field(default_factory=list)  # those whose memory was freed
    fails_at: int = 0  # rows
    width_gate: Gate = field(default_factory=Gate)  # between two steps of four rows

    def time_step(self, rows: int) -> Generator[float | None]:
        self.timed.append(rows)
        try:
            yield None
            if rows == self.fails_at:
                raise RuntimeError("no such shapes")
            if rows == 4:
                self.width_gate.pass_through()
                yield None
            yield self.timed_s(rows)
        finally:
            self.freed.append(rows)

    def self_test(self) -> Generator[Verdict]:
        self.tests += 1
        for finding in self.findings:
            time.sleep(self.step_s)
            self.steps_taken += 1
            yield finding


async def shown(client: httpx2.AsyncClient) -> Any:
    return (await client.get("/v1/models/chat")).json()["batching"]


BODY = {"model": "chat", "messages": [{"role": "user", "content": "Hello"}]}


@asynccontextmanager
async def serving(
    folder: Path, chat: ScriptedChat, models: Mapping[str, Any] | None = None, **given: Any
) -> AsyncIterator[httpx2.AsyncClient]:
    """Serve chat models, whose verdicts are kept in a folder."""
    options = {"self_test": True, "self_test_folder": folder / "kept", **given}
    specs = catalog(folder, models or {"chat": CHAT})
    async with served(specs, ScriptedEngines(chat=chat), **options) as client:
        yield client


async def answered(client: httpx2.AsyncClient, n: int = 1) -> None:
    answer = await client.post("/v1/chat/completions", json={**BODY, "n": n})
    assert answer.status_code == 200
    assert len(answer.json()["choices"]) == n


async def until_shown(client: httpx2.AsyncClient, key: str, value: str) -> None:
    async with asyncio.timeout(60):
        while (await shown(client))[key] != value:
            await asyncio.sleep(0.1)


def batching(rows: str, outcome: str, problem: str | None = None) -> dict[str, str | None]:
    return {"rows": rows, "self_test": outcome, "problem": problem}


async def test_a_verdict_is_found_once_and_kept(tmp_path: Path) -> None:
    for expected in (1, 0):
        chat = Scrutinised()
        async with serving(tmp_path, chat) as client:
            assert await shown(client) == batching("together", "passed")
        assert chat.tests == expected
        assert chat.held == [PASSED]
    chat = Scrutinised()
    async with serving(tmp_path, chat, {"chat": CHAT, "b": CHAT}):
        assert chat.tests == 1


async def test_a_model_that_fails_runs_its_rows_one_at_a_time(tmp_path: Path) -> None:
    """Other clients wait; /v1/models says why. It holds though the disk does not take it."""
    (tmp_path / "file").write_text("in the way")
    chat = Scrutinised(findings=[Verdict(), FAILED])
    async with serving(tmp_path, chat, self_test_folder=tmp_path / "file" / "x") as client:
        assert await shown(client) == batching("one at a time", "failed", FAILED.problem)
        await answered(client, 4)
    assert chat.held == [FAILED]
    assert set(chat.steps) == {1}


@pytest.mark.parametrize(
    ("written", "rows", "outcome"),
    [
        ("force", "together", "off"),
        ({"mode": "force", "max_batch_size": 2}, "together", "off"),
        (False, "one at a time", "failed"),  # YAML reads `off` so
        ("off", "one at a time", "failed"),
        ({"mode": False}, "one at a time", "failed"),
        (True, "one at a time", "failed"),
    ],
)
async def test_models_yaml_has_the_last_word(
    tmp_path: Path, written: Any, rows: str, outcome: str
) -> None:
    """`force` asks no test, and `off` needs none."""
    chat = Scrutinised(findings=[FAILED])
    async with serving(tmp_path, chat, {"chat": {**CHAT, "batching": written}}) as client:
        batched = await shown(client)
    assert (batched["rows"], batched["self_test"]) == (rows, outcome)
    assert chat.tests == (written is True)


async def test_a_test_that_takes_too_long_is_ended_in_idle_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the test ends, rows of an architecture that is known to be equal run together."""
    monkeypatch.setattr(self_tests, "LANE_S", 0.3)
    monkeypatch.setattr(self_tests, "IDLE_POLL_S", 5.0)
    slow = Scrutinised(findings=[Verdict()] * 4 + [FAILED], step_s=0.15)
    async with serving(tmp_path, slow) as client:
        assert slow.steps_taken < 5
        assert await shown(client) == batching("together", "unfinished")
        soon(monkeypatch)
        await until_shown(client, "self_test", "failed")
        await until_shown(client, "rows", "one at a time")
        await until(lambda: list((tmp_path / "kept").glob("*.json")))
    assert slow.tests == 1


async def test_the_window_is_tested_while_nobody_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = replace(PASSED, window=None)
    waiting = Scrutinised(findings=[known, known, known, replace(known, window=False)])
    async with serving(tmp_path, waiting) as client:
        assert (await shown(client))["rows"] == "together"
        waiting.gate.close()
        first_poll_s = self_tests.IDLE_POLL_S
        monkeypatch.setattr(self_tests, "IDLE_POLL_S", 0.02)
        asked = asyncio.create_task(answered(client))
        await asyncio.to_thread(waiting.gate.reached.wait, 60)
        await asyncio.sleep(first_poll_s + 0.1)  # several polls
        assert waiting.steps_taken == 1
        waiting.gate.open()
        await asked
        await until_shown(client, "rows", "one at a time")


async def test_a_test_gives_its_memory_to_rows_that_need_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is begun again when nobody uses the model: rows would wait for it, and it for them."""
    known = replace(PASSED, window=None)
    findings = [known] * 3 + [PASSED]
    memory: dict[str, Any] = {"kv_cost": KvCost(1), "self_test_tokens": 200, "max_context": 3000}
    waiting = Scrutinised(findings=findings, **memory)
    async with serving(tmp_path, waiting, cache_max_bytes=2500, load_wait_s=3) as client:
        await until(lambda: waiting.steps_taken >= 2)
        long = {"messages": [{"role": "user", "content": "x" * 1000}], "max_tokens": 1}
        answer = await client.post("/v1/chat/completions", json={**BODY, **long})
        assert answer.status_code == 200
        monkeypatch.setattr(self_tests, "IDLE_POLL_S", 0.02)
        await until(lambda: waiting.steps_taken >= 2 + len(findings))
    assert waiting.tests == 2


async def test_a_batching_that_ends_while_rows_wait_lets_them_join_one_at_a_time(
    tmp_path: Path,
) -> None:
    """The engine has given it up after some faults, which are counted."""
    chat = Scrutinised()
    counted = metrics.of(metrics.BATCH_FAULTS, "chat")._value
    before = counted.get()
    async with serving(tmp_path, chat) as client:
        chat.faults = [PassFault(Fault.ROW, "2 rows: ValueError: no such shapes")]
        await answered(client, 3)
        assert counted.get() == before + 1
        assert max(chat.steps) == 3
        chat.is_batched = False
        await answered(client)
        chat.steps.clear()
        await answered(client, 3)
        assert set(chat.steps) == {1}
        assert (await shown(client))["rows"] == "one at a time"


def kept(folder: Path) -> Verdict:
    """Return the verdict on disk."""
    return VerdictStore(folder / "kept").read("digest-of-chat")


def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the rest of a test done as soon as the model is idle."""
    monkeypatch.setattr(self_tests, "IDLE_POLL_S", 0.01)


TIMES = tuple(0.01 + 0.001 * rows for rows in (1, 2, 4, 8, 16))


class TestWidths:
    """Decode steps that are timed once the verdict is known."""

    async def test_widths_are_timed_once_in_idle_time_and_kept(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        soon(monkeypatch)
        chat = Scrutinised()
        async with serving(tmp_path, chat):
            await until(lambda: kept(tmp_path).step_s == TIMES)
        assert chat.timed == [1, 2, 4, 8, 16]
        again = Scrutinised()
        async with serving(tmp_path, again) as client:
            await answered(client)
            await asyncio.sleep(0.1)
        assert (again.tests, again.timed) == (0, [])

    @pytest.mark.parametrize(
        "found", [{}, {"step_s": [-1.0]}, {"step_s": [0.1, 1e999]}, {"step_s": [5e-324] * 3}]
    )
    async def test_a_verdict_without_sound_times_holds_and_they_are_taken(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: dict[str, Any]
    ) -> None:
        """Verdicts that were kept before steps were timed are such ones."""
        soon(monkeypatch)
        (tmp_path / "kept").mkdir()
        written = {name: value for name, value in asdict(PASSED).items() if name != "step_s"}
        (tmp_path / "kept" / "digest-of-chat.json").write_text(json.dumps(written | found))
        chat = Scrutinised()
        async with serving(tmp_path, chat):
            await until(lambda: kept(tmp_path).step_s == TIMES)
        assert chat.tests == 0
        assert chat.held == [PASSED]

    @pytest.mark.parametrize(
        ("timed_s", "places", "rows"),
        [(lambda rows: 0.07 * rows, 32, [1, 2, 4]), (lambda rows: 0.01, 5, [1, 2, 4])],
    )
    async def test_no_width_is_timed_beyond_the_limit_of_a_pass_or_the_places(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timed_s: Any, places: int, rows: Any
    ) -> None:
        soon(monkeypatch)
        chat = Scrutinised(timed_s=timed_s)
        async with serving(tmp_path, chat, generation_max_batch_size=places):
            await until(lambda: len(kept(tmp_path).step_s) == len(rows))
            await asyncio.sleep(0.1)
        assert chat.timed == rows

    @pytest.mark.parametrize(
        ("written", "is_on", "finding"),
        [
            ("force", True, PASSED),
            ("off", True, PASSED),
            (True, False, PASSED),
            (True, True, FAILED),
        ],
    )
    async def test_no_width_is_timed_where_it_decides_nothing(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        written: Any,
        is_on: bool,
        finding: Verdict,
    ) -> None:
        """`force` batches always; and who runs one at a time has no widths."""
        soon(monkeypatch)
        chat = Scrutinised(findings=[finding])
        models = {"chat": {**CHAT, "batching": written}}
        async with serving(tmp_path, chat, models, self_test=is_on) as client:
            await answered(client)
            await asyncio.sleep(0.1)
        assert chat.timed == []

    async def test_a_width_that_others_broke_in_on_is_timed_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """They wait for a step, and not for all of them."""
        soon(monkeypatch)
        chat = Scrutinised()
        chat.width_gate.close()
        async with serving(tmp_path, chat) as client:
            await asyncio.to_thread(chat.width_gate.reached.wait, 60)
            asked = asyncio.create_task(answered(client))
            await until(lambda: chat.jobs)
            await asyncio.sleep(0.1)
            chat.width_gate.open()
            await asked
            await until(lambda: kept(tmp_path).step_s == TIMES)
        assert chat.timed == [1, 2, 4, 4, 8, 16]

    async def test_a_model_that_goes_meanwhile_frees_what_is_timed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The widths that were known are kept, and the next load goes on from them."""
        soon(monkeypatch)
        chat = Scrutinised()
        chat.width_gate.close()
        async with serving(tmp_path, chat):
            await asyncio.to_thread(chat.width_gate.reached.wait, 60)
            asyncio.get_running_loop().call_later(0.1, chat.width_gate.open)
        assert chat.freed == [1, 2, 4]
        assert kept(tmp_path).step_s == TIMES[:2]
        later = Scrutinised()
        async with serving(tmp_path, later):
            await until(lambda: kept(tmp_path).step_s == TIMES)
        assert later.timed == [4, 8, 16]

    async def test_a_pass_that_fails_is_logged_and_rows_run_together(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        soon(monkeypatch)
        chat = Scrutinised(fails_at=4)
        with structlog.testing.capture_logs() as logged:
            async with serving(tmp_path, chat) as client:
                await until(lambda: chat.timed == [1, 2, 4])
                await until(lambda: any(e["event"] == "steps_not_timed" for e in logged))
                await answered(client, 3)
        assert max(chat.steps) == 3
        assert len(kept(tmp_path).step_s) == 2

    async def test_rows_take_turns_as_soon_as_the_times_say_so(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """They do so before the widest width is known: missing times are no reason to wait."""
        soon(monkeypatch)
        chat = Scrutinised(timed_s=lambda rows: 0.01 * rows * rows)
        chat.width_gate.close()
        async with serving(tmp_path, chat) as client:
            await asyncio.to_thread(chat.width_gate.reached.wait, 60)
            asked = asyncio.create_task(answered(client, 2))
            await until(lambda: chat.jobs)
            chat.width_gate.open()
            await asked
            assert set(chat.steps) == {1}

    async def test_a_width_too_large_for_memory_is_not_timed_and_holds_none(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        soon(monkeypatch)
        chat = Scrutinised(kv_cost=KvCost(1), max_context=2000)
        async with serving(tmp_path, chat, cache_max_bytes=2500, load_wait_s=3) as client:
            await until(lambda: len(kept(tmp_path).step_s) == 4)
            long = {"messages": [{"role": "user", "content": "x" * 1500}], "max_tokens": 1}
            answer = await client.post("/v1/chat/completions", json={**BODY, **long})
            assert answer.status_code == 200
        assert chat.timed == [1, 2, 4, 8]


class TestVerdicts:
    """Small files that anything may have happened to."""

    def test_verdicts_are_read_and_written_by_this_user_alone(self, tmp_path: Path) -> None:
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
            *(b"", b"{", b"[]", b"null", b'"x"', b"[" * 3000, b"\xff\x00"),
            json.dumps(asdict(PASSED) | {"rows": "no"}).encode(),
            json.dumps(asdict(PASSED) | {"problem": 1}).encode(),
            json.dumps(asdict(PASSED) | {"step_s": ["x"]}).encode(),
        ],
    )
    def test_an_unsound_file_is_no_verdict(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "d.json").write_bytes(content)
        (tmp_path / "e.json").mkdir()
        verdicts = VerdictStore(tmp_path)
        assert verdicts.read("d") == verdicts.read("e") == Verdict()
        verdicts.write("d", PASSED)
        assert verdicts.read("d") == PASSED


async def test_doctor_runs_all_of_a_test_whatever_is_kept(tmp_path: Path) -> None:

    async def digest() -> str:
        return "d"

    engine, verdicts = Scrutinised(findings=[Verdict(), FAILED]), VerdictStore(tmp_path)
    verdicts.write("d", PASSED)
    spec = ChatSpec(id="chat", kind="chat", source=PathSource(tmp_path))
    async with Lane() as lane:
        test = SelfTest(
            spec, engine, lane, Budget(1000), verdicts, digest, LIMITS, kv=KvCost(0), is_on=True
        )
        assert await test.run_to_end() == FAILED
    assert engine.held == [FAILED]
    assert verdicts.read("d") == FAILED


async def test_doctor_keeps_a_verdict_whose_steps_could_not_all_be_timed(tmp_path: Path) -> None:
    async def digest() -> str:
        return "d"

    engine, verdicts = Scrutinised(findings=[PASSED], fails_at=4), VerdictStore(tmp_path)
    spec = ChatSpec(id="chat", kind="chat", source=PathSource(tmp_path))
    async with Lane() as lane:
        test = SelfTest(
            spec, engine, lane, Budget(1000), verdicts, digest, LIMITS, kv=KvCost(0), is_on=True
        )
        verdict = await test.run_to_end()
    assert verdict == replace(PASSED, step_s=verdict.step_s) == verdicts.read("d")
    assert len(verdict.step_s) == 2


def test_a_digest_names_what_a_verdict_depends_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The architecture, its number formats, the device and on a CPU the kernels of its BLAS; not
    when its files were written.
    """

    def digest(folder: Path, device: Device = Device.CPU, dtype: str | None = None) -> str:
        return self_test_digest(Checkpoint("m", folder), device, Numbers(dtype=dtype))

    one = write_chat(tmp_path / "one")
    assert digest(one) == digest(write_chat(tmp_path / "again", seed=1))
    others = {
        digest(one),
        digest(one, dtype="float16"),
        digest(one, Device.METAL),
        digest(write_chat(tmp_path / "wide", intermediate_size=128)),
        digest(write_chat(tmp_path / "far", rope_theta=1e6)),
    }
    other = replace(BLAS, config="OpenBLAS 0.3.29 SkylakeX")
    monkeypatch.setattr(f"{self_test_digest.__module__}.BLAS", other)
    others.add(digest(one))
    monkeypatch.setattr(f"{self_test_digest.__module__}.cpu_threads", lambda: 99)
    assert len({*others, digest(one)}) == 7


def test_the_layout_of_a_digest_changes_with_a_reason_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one has every model that was ever tested, tested again."""
    written: list[dict[str, Any]] = []
    folder = write_chat(tmp_path / "m")

    def dumps(named: dict[str, Any], **options: Any) -> str:
        written.append(named)
        return json.JSONEncoder(**options).encode(named)

    monkeypatch.setattr(f"{self_test_digest.__module__}.json.dumps", dumps)
    numbers = Numbers(dtype="float16", is_packed=True, is_fused=True, kv_bits=4)
    self_test_digest(Checkpoint("m", folder), Device.CPU, numbers)
    [named] = written
    names = ("blas", "config", "device", "dtype", "fused", "kv_bits", "test", "versions", "weights")
    assert tuple(sorted(named)) == names
    assert [named[name] for name in ("dtype", "fused", "kv_bits")] == [["float16", True], True, 4]
