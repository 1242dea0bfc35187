"""Rows on a device whose failed work looks as if it had succeeded."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.engine.generation.engine import GenerationEngine
from gateway.engine.generation.self_test import BatchSelfTest
from gateway.jobs import Sampling, Verdict
from tests.checkpoints import HYBRID, SLIDING, STATEFUL, write_chat
from tests.engine.generation.harness import PLENTY, SCHEMA, SEEDED, Batch, open_engine, watch
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
ACTS = st.sampled_from(["park", "preempt", "leave", "clear_prefixes", "synchronize", "probe"])


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


def act_on(batch: Batch, act: str, row: int) -> None:
    """Do something with a row, or beside it, as the scheduler does."""
    if act in ("clear_prefixes", "synchronize"):
        getattr(batch.engine, act)()
    elif act == "probe":
        with suppress(RuntimeError):
            batch.engine.probe()
    else:
        getattr(batch.engine, act)(row)
        if act != "leave":
            batch.engine.resume(row)


@pytest.mark.generator(weight=2)
@pytest.mark.parametrize(
    "kind", ["looking up", "drafted", "packed", "sliding", "stateful", "hybrid"]
)
def test_no_row_is_given_what_failed_late(engines: dict[str, GenerationEngine], kind: str) -> None:
    """Whichever work fails, and whatever is done with rows meanwhile: each says what it says alone,
    or ends with an error; and so does the next one, which goes on from what was kept.
    """
    engine = engines[kind]
    alone: dict[int, Any] = {}

    def told(device: LateDevice, number: int) -> Any:
        batch = Batch(engine)
        row = batch.join(*JOBS[number])
        batch.finish()
        return batch.answers[row]

    with LateDevice().installed() as device:
        for number in range(len(JOBS)):
            alone[number] = told(device, number)
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
        engine.clear_prefixes()
        with LateDevice().installed() as device:
            device.fail_at(work, text)
            batch = Batch(engine)
            rows = {batch.join(*JOBS[number]): number for number in chosen}
            left: set[int] = set()
            step = 0
            while batch.is_busy:
                if batch.open and step in acts:
                    row = batch.open[step % len(batch.open)]
                    left |= {row} if acts[step] == "leave" else set()
                    act_on(batch, acts[step], row)
                batch.step()
                step += 1
            for row in rows.keys() - left:
                answer = batch.answers[row]
                assert answer.error or answer.says_as(alone[rows[row]]), (rows[row], answer)
            device.relent()
            for number in chosen:
                assert told(device, number).says_as(alone[number])
        engine._faults.take()

    run()


def test_the_next_pass_is_built_while_the_step_runs_and_launched_once_it_is_over(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that is raised at a launch is then of no step whose tokens are read."""
    engine = open_engine(folders["plain"])
    batch = Batch(engine)
    for text, asked in JOBS[:2]:
        batch.join(text, {**asked, "max_tokens": 20})
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
        batch.hear(engine.decode())
        batch.hear(engine.decode())
        monkeypatch.undo()
    assert events == ["build", "eval", "synchronize", *["async_eval"] * 3] * 2


def test_the_self_test_believes_no_zeros(engines: dict[str, GenerationEngine]) -> None:
    """Its verdict on a device that fails counts for this load alone, or there is none."""
    engine = engines["sliding"]

    def tested() -> Verdict | None:
        test = BatchSelfTest(engine._model, engine._vocab_size, 400, mx.float32)
        try:
            return list(test.verdicts())[-1]
        except RuntimeError:
            return None

    with LateDevice().installed() as device:
        assert tested() == Verdict(True, True, True, True)
        works = device.works
        for work in {*range(0, works, 9), *range(works - 3, works)}:
            device.fail_at(work, TIMEOUT)
            verdict = tested()
            assert verdict is None or not verdict.is_lasting, work
            assert not device.is_due, work
