"""What is counted for rows before they join is never less than what they hold then."""

import random
from pathlib import Path
from typing import Any

import pytest

from gateway.engine.backend import Device
from gateway.engine.decoders import parameters
from gateway.engine.generation import GenerationEngine
from gateway.engine.loading import load_generation
from gateway.engine.sizes import kv_bytes
from gateway.engine.weights import Checkpoint
from gateway.jobs import GenerateJob, RowJob, Sampling
from gateway.serving.generation.memory import rectangle
from tests.checkpoints import write_chat
from tests.fakes import caller


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat(tmp_path_factory.mktemp("chat"))


def open_engine(folder: Path) -> GenerationEngine:
    return load_generation(
        folder,
        name="chat",
        device=Device.CPU,
        dtype=None,
        max_context=None,
        chat_template=None,
        template_args={},
        prefix_cache_bytes=1_000_000,
    )


def row(prompt: int, max_tokens: int) -> RowJob:
    return RowJob(
        prompt=[2 + i % 40 for i in range(prompt)],
        max_tokens=max_tokens,
        sampling=Sampling(temperature=0),
        is_bare=True,
    )


def held(engine: GenerationEngine) -> int:
    """Count the bytes of KV that rows hold: all but weights and prefixes."""
    weights = sum(array.nbytes for array in parameters(engine._model))
    return engine.nbytes() - weights - engine.kept_bytes


@pytest.mark.parametrize("seed", range(4))
def test_rows_hold_no_more_kv_than_is_counted(folder: Path, seed: int) -> None:
    """Whoever joins and leaves, and whoever is long beside whoever is short."""
    chance = random.Random(seed)
    engine = open_engine(folder)
    token = kv_bytes(Checkpoint("chat", folder), Device.CPU, None, 1)
    lengths: dict[int, int] = {}
    most = 0
    for _ in range(120):
        if chance.random() < 0.25 and len(lengths) < 6:
            job = row(chance.choice([3, 20, 300, 700]), chance.choice([2, 30, 200]))
            lengths[engine.join(job)] = len(job.prompt) + job.max_tokens
        if lengths and chance.random() < 0.05:
            gone = chance.choice(list(lengths))
            engine.leave(gone)
            del lengths[gone]
        deltas = engine.prefill(256) if engine.is_prefilling else []
        for delta in (*deltas, *engine.decode()):
            assert delta.error is None
            if delta.finish_reason is not None:
                del lengths[delta.row]
        most = max(most, held(engine))
        # A row that has just ended, or left, may still be in the rectangle that is being copied.
        assert held(engine) <= rectangle([*lengths.values()]) * token
    assert most > 0


def test_a_curtailed_row_ends_with_length(folder: Path) -> None:
    """At the tokens it is given, whatever it was allowed before; a stranger's id is fine."""
    engine = open_engine(folder)
    first = engine.join(row(10, 50))
    while engine.is_prefilling:
        engine.prefill(512)
    said, ends = 0, []
    engine.curtail(first + 7, 1)
    engine.curtail(first, 5)
    while engine.is_decoding:
        for delta in engine.decode():
            said += delta.tokens
            ends.append(delta.finish_reason)
    assert said == 5
    assert ends[-1] == "length"


def test_what_is_kept_of_prompts_can_be_forgotten(folder: Path) -> None:
    """And is kept again from the next one on."""
    engine = open_engine(folder)
    for expected in (0, 0):
        assert engine.kept_bytes == expected
        engine.join(row(200, 1))
        while engine.is_prefilling:
            engine.prefill(512)
        assert engine.kept_bytes > 0
        engine.forget()


def test_a_row_says_whether_its_caller_has_bounded_it(folder: Path) -> None:
    """An open one may be as long as the context: its memory is counted otherwise."""
    engine = open_engine(folder)
    asked: dict[str, Any] = {
        "caller": caller(),
        "messages": [{"role": "user", "content": "Hello"}],
        "sampling": Sampling(temperature=0),
    }
    (bounded,) = engine.plan(GenerateJob(**asked, max_tokens=10))
    (unbounded,) = engine.plan(GenerateJob(**asked))
    assert (bounded.is_open, bounded.max_tokens) == (False, 10)
    assert unbounded.is_open
    assert unbounded.max_tokens == engine.max_context - len(unbounded.prompt)
