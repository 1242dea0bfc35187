"""Rows on a device whose failed work looks as if it had succeeded."""

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.steps import Steps
from gateway.engine.device import give_back
from gateway.engine.device_faults import classify
from gateway.engine.drafts.draft_model import DraftModel
from gateway.engine.generation.engine import GenerationEngine
from gateway.engine.generation.self_test import BatchSelfTest
from gateway.engine.models.adapters import read_adapter
from gateway.jobs.chat import Adapter, Sampling
from gateway.jobs.steps import Verdict
from gateway.serving.faults import DeviceHealth
from gateway.serving.generation.batcher import GenerationBatcher
from tests.checkpoints import HYBRID, SLIDING, STATEFUL, write_adapter, write_chat
from tests.engine.generation.harness import (
    PLENTY,
    SCHEMA,
    SEEDED,
    Answer,
    Batch,
    open_engine,
    watch,
)
from tests.generators import within_share
from tests.simulated_device import NO_MEMORY, TIMEOUT, LateDevice

KINDS: dict[str, dict[str, Any]] = {
    "plain": {}, "sliding": SLIDING, "stateful": STATEFUL, "hybrid": HYBRID,
    "wide": {"head_dim": 32},
}  # fmt: skip
SEA = "tell me of the sea and of the old man and his boat " * 3
JOBS: list[tuple[str, dict[str, Any]]] = [
    (SEA, {"sampling": Sampling(temperature=0, ignore_eos=True), "max_tokens": 9}),
    ("Hello", {"sampling": SEEDED, "max_tokens": 7, "logprobs": 2}),
    (SEA + "and how", {"sampling": Sampling(temperature=0), "grammar": SCHEMA, "max_tokens": 12}),
    ("x y x y x y x y", {"sampling": Sampling(temperature=0, ignore_eos=True), "max_tokens": 11}),
]
ACTS = st.sampled_from(
    ["parking", "preempting", "leaving", "clear_prefixes", "synchronize", "probe"]
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("late")
    return {kind: write_chat(root / kind, **config) for kind, config in KINDS.items()}


@pytest.fixture(scope="module")
def engines(folders: dict[str, Path]) -> dict[str, GenerationEngine]:
    plain = folders["plain"]
    return {
        **{kind: open_engine(folders[kind], PLENTY) for kind in ("sliding", "stateful", "hybrid")},
        "looking up": open_engine(plain, PLENTY, 8),
        "drafted": open_engine(plain, PLENTY, 8, draft=plain),
        "packed": open_engine(folders["wide"], PLENTY, kv_bits=8),
    }


def told(engine: GenerationEngine, text: str, asked: dict[str, Any]) -> Answer:
    """Return the answer of a row alone in its batch."""
    batch = Batch(engine)
    row = batch.ask(text, asked)
    batch.finish()
    return batch.answers[row]


def act_on(batch: Batch, act: str, row: int) -> None:
    """Do something with a row, or beside it, as the scheduler does."""
    if act == "clear_prefixes":
        batch.change(clear_prefixes=True)
    elif act == "synchronize":
        batch.engine.synchronize()
    elif act == "probe":
        with suppress(RuntimeError):
            batch.engine.probe()
    else:
        batch.change(**{act: [row]})
        if act != "leaving":
            batch.change(resuming=[row])


@pytest.mark.generator(weight=2)
@pytest.mark.parametrize(
    "kind", ["looking up", "drafted", "packed", "sliding", "stateful", "hybrid"]
)
def test_no_row_is_given_work_that_failed_late(
    engines: dict[str, GenerationEngine], kind: str
) -> None:
    """Whichever work fails, each row answers as it would alone, or ends with an error.

    So it is whatever else is done with rows meanwhile, and for the next row, which goes on from
    kept KV.
    """
    engine = engines[kind]
    alone: dict[int, Any] = {}

    with LateDevice().installed():
        for number, asked in enumerate(JOBS):
            alone[number] = told(engine, *asked)
            assert alone[number].ends

    @settings(max_examples=200, deadline=None, database=None)
    @given(
        work=st.integers(0, 60),
        text=st.sampled_from([TIMEOUT, NO_MEMORY]),
        chosen=st.lists(st.integers(0, len(JOBS) - 1), min_size=1, max_size=4, unique=True),
        acts=st.dictionaries(st.integers(0, 12), ACTS, max_size=3),
    )
    @within_share
    def run(work: int, text: str, chosen: list[int], acts: dict[int, str]) -> None:
        Steps(engine).change(clear_prefixes=True)
        with LateDevice().installed() as device:
            device.fail_at(work, text)
            batch = Batch(engine)
            rows = {batch.ask(*JOBS[number]): number for number in chosen}
            left: set[int] = set()
            step = 0
            while batch.is_busy:
                if batch.open and step in acts:
                    row = batch.open[step % len(batch.open)]
                    left |= {row} if acts[step] == "leaving" else set()
                    act_on(batch, acts[step], row)
                batch.step()
                step += 1
            for row in rows.keys() - left:
                answer = batch.answers[row]
                assert answer.error or answer.says_as(alone[rows[row]]), (rows[row], answer)
            device.relent()
            for number in chosen:
                assert told(engine, *JOBS[number]).says_as(alone[number])

    run()


LONG = {"sampling": Sampling(temperature=0, ignore_eos=True), "max_tokens": 16}


@pytest.mark.parametrize("meanwhile", ["another model works", "the others go on"])
@pytest.mark.parametrize("act", ["leaving", "parking", "preempting"])
def test_late_failures_of_a_row_that_leaves_reach_no_other(
    folders: dict[str, Path], act: str, meanwhile: str
) -> None:
    """A row that leaves has its neighbours' KV moved together, and may take its own along."""
    engine, other = (open_engine(folders["plain"], PLENTY) for _ in range(2))
    texts = ["Hello you", "tell me of the sea", "what is that"]
    with LateDevice().installed() as device:
        alone = [told(engine, text, LONG) for text in texts]
        for work in range(0, 8, 2):
            batch = Batch(engine)
            batch.change(clear_prefixes=True)
            rows = [batch.ask(text, LONG) for text in texts]
            for _ in range(3):
                batch.step()
            device.fail_at(work, TIMEOUT)
            batch.change(**{act: [rows[0]]})
            if meanwhile == "another model works":
                engine.synchronize()  # the lane does so before another's turn
                with suppress(RuntimeError):
                    told(other, "hi", LONG)
            else:
                batch.step()
            batch.change(resuming=[rows[0]])
            batch.finish()
            device.relent()
            for row, right in zip(rows[act == "leaving" :], alone[act == "leaving" :], strict=True):
                answer = batch.answers[row]
                assert answer.error or answer.says_as(right), work


def test_an_adapter_that_comes_or_goes_late_spoils_no_other(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """Factors of several adapters are one array, which is made anew."""
    names = ("a", "b")
    files = {
        name: write_adapter(tmp_path / name, folders["plain"], seed=ord(name)) for name in names
    }

    def load(engine: GenerationEngine, name: str) -> Adapter:
        steps = engine.adapters.add_in_steps(read_adapter(name, files[name]))
        adapter = list(steps)[-1]
        assert adapter is not None
        return adapter

    def ask(adapter: Adapter) -> Answer:
        Steps(engine).change(clear_prefixes=True)
        return told(engine, "tell me of", {**LONG, "adapter": adapter})

    with LateDevice().installed() as device:
        for act in ("load", "drop"):
            for work in range(0, 60, 8):
                engine = open_engine(folders["plain"])
                first = load(engine, "a")
                second = load(engine, "b") if act == "drop" else None
                right = ask(first)
                device.fail_at(work, TIMEOUT)
                with suppress(RuntimeError):
                    load(engine, "b") if second is None else engine.drop_adapter(second.number)
                was_reached = not device.is_due
                device.relent()
                assert ask(first).says_as(right), (act, work)
                if not was_reached:
                    break
            assert work > 3


def test_an_adapter_that_goes_takes_no_error_of_others_along(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    engine = open_engine(folders["plain"])
    files = write_adapter(tmp_path / "a", folders["plain"])
    texts = ["tell me of the sea", "what is that"]
    with LateDevice().installed() as device:
        alone = [told(engine, text, LONG) for text in texts]
        for work in range(4):
            *_, adapter = engine.adapters.add_in_steps(read_adapter("a", files))
            batch = Batch(engine)
            batch.ask("Hello you", {**LONG, "adapter": adapter})
            rows = [batch.ask(text, LONG) for text in texts]
            for _ in range(3):
                batch.step()
            device.fail_at(work, TIMEOUT)
            assert adapter is not None
            with suppress(RuntimeError):
                engine.drop_adapter(adapter.number)
            batch.finish()
            device.relent()
            for row, right in zip(rows, alone, strict=True):
                assert batch.answers[row].error or batch.answers[row].says_as(right), work


def test_memory_is_shed_once_the_step_under_way_is_known(folders: dict[str, Path]) -> None:
    """The wait for freed buffers would take its error, and only log it."""
    engine = open_engine(folders["plain"], PLENTY, 8, draft=folders["plain"])
    health = DeviceHealth(classify)
    texts = ["Hello you", "tell me of the sea"]
    with LateDevice().installed() as device, health.shedding(give_back):
        alone = [told(engine, text, LONG) for text in texts]
        batch = Batch(engine)
        rows = [batch.ask(text, LONG) for text in texts]
        while batch.is_reading:
            batch.hear(batch.prefill(512))
        drafter = engine._drafts.sources[-1]
        assert isinstance(drafter, DraftModel)

        def run_out(*_: object) -> Any:
            device.fail_at(0, TIMEOUT)  # the pass that is launched next
            raise RuntimeError(NO_MEMORY.format(9))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DraftModel, "draft", run_out)
            batch.hear(batch.decode())
        [fault] = batch.faults
        assert fault.is_pressure
        lane = SimpleNamespace(health=health)
        batcher: Any = SimpleNamespace(engine=engine, _interrupt=threading.Event(), _lane=lane)
        GenerationBatcher._heed(batcher, [fault])
        batch.finish()
        assert device.failures == 1
        for row, right in zip(rows, alone, strict=True):
            assert batch.answers[row].error or batch.answers[row].says_as(right)


def test_a_piece_of_a_file_that_failed_late_is_not_kept(folders: dict[str, Path]) -> None:
    writer, reader = (open_engine(folders["plain"], PLENTY) for _ in range(2))
    with LateDevice().installed() as device:
        right = told(writer, SEA * 3, LONG)
        pieces = [writer.prefixes.copy_piece(0, piece) for piece in writer.prefixes.pieces(0)]
        assert pieces
        for work in range(8):
            Steps(reader).change(clear_prefixes=True)
            device.fail_at(work, TIMEOUT)
            with suppress(RuntimeError):
                for piece in reversed(pieces):
                    assert piece is not None
                    reader.prefixes.put_piece(0, "", piece)
            device.relent()
            assert told(reader, SEA * 3, LONG).says_as(right), work
        assert told(reader, SEA * 3, LONG).cached_tokens > 0


def test_all_arrays_of_a_model_are_there_once_it_is_loaded(tmp_path: Path) -> None:
    """Those too that no file has: if their first pass failed, they would be wrong for good."""
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    engine = open_engine(write_chat(tmp_path / "scaled", rope_scaling=scaling))
    hidden = [
        array
        for module in engine._model.modules()
        for name, array in module.items()
        if name == "_freqs"
    ]
    assert hidden
    graph = tmp_path / "graph.dot"
    mx.export_to_dot(str(graph), *hidden)
    assert "rectangle" not in graph.read_text()  # an operation that is left to do


def test_the_next_pass_is_built_while_the_step_runs_and_launched_once_it_is_over(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that is raised at a launch is then of no step whose tokens are read."""
    engine = open_engine(folders["plain"])
    batch = Batch(engine)
    for text, asked in JOBS[:2]:
        batch.ask(text, {**asked, "max_tokens": 20})
    events: list[str] = []

    def noting(name: str, own: Callable[..., None]) -> Callable[..., None]:
        def call(*arrays: Any) -> None:
            events.append(name)
            own(*arrays)

        return call

    with LateDevice().installed():
        batch.step()
        watch(engine, lambda _: events.append("build"))
        for name in ("eval", "synchronize", "async_eval"):
            monkeypatch.setattr(mx, name, noting(name, getattr(mx, name)))
        batch.hear(batch.decode())
        batch.hear(batch.decode())
        monkeypatch.undo()
    assert events == ["build", "eval", "synchronize", *["async_eval"] * 3] * 2


def test_the_self_test_believes_no_zeros(engines: dict[str, GenerationEngine]) -> None:
    """Its verdict on a device that fails counts for this load alone, or there is none."""
    engine = engines["sliding"]

    def tested() -> Verdict | None:
        test = BatchSelfTest(engine._model, engine._setup.vocab_size, 400, mx.float32)
        try:
            return list(test.verdicts())[-1]
        except RuntimeError:
            return None

    with LateDevice().installed() as device:
        assert tested() == Verdict(True, True, True, True)
        works = device.works
        for work in {*range(0, works, 25), *range(works - 3, works)}:
            device.fail_at(work, TIMEOUT)
            verdict = tested()
            assert verdict is None or not verdict.is_lasting, work
            assert not device.is_due, work
