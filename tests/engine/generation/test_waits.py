"""A decode step waits for the device once: where it reads its tokens. All else is launched.

On a GPU any other wait would let the device run dry: Python prepares the next pass while the last
one runs. The tests count calls, not time.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from benchmarks.steps import Steps
from gateway.engine.generation.engine import GenerationEngine
from gateway.engine.kv.prefix_cache import BLOCK
from gateway.jobs.chat import Sampling
from tests.checkpoints import HYBRID, SLIDING, STATEFUL, write_chat
from tests.engine.generation.harness import (
    PLENTY,
    PROMPTS,
    SCHEMA,
    SEEDED,
    Batch,
    open_engine,
    watch,
)

READS: Final = (
    *("item", "tolist", "__array__", "__bool__", "__int__", "__float__", "__index__"),
    *("__complex__", "__repr__", "__bytes__", "__getstate__", "__reduce__", "__dlpack__"),
)
ENDLESS: Final = 9_999_999


class Waits:
    """Counts the calls that wait for arrays which no call has waited for before."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._evaluated: dict[int, mx.array] = {}  # held, lest an id be given again

    def note(self, name: str, *trees: object) -> None:
        leaves: Any = tree_flatten(list(trees))
        new = [leaf for _, leaf in leaves if isinstance(leaf, mx.array)]
        new = [array for array in new if id(array) not in self._evaluated]
        if new or name == "synchronize":
            self.calls.append(name)
        self._evaluated.update((id(array), array) for array in new)


@contextmanager
def counted() -> Iterator[Waits]:
    """Count the waits while entered. NumPy reads arrays by their buffers, so it is counted too."""
    waits = Waits()

    def noting(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **given: Any) -> Any:
            waits.note(name, *args)
            return own(*args, **given)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("eval", "synchronize", "save", "savez", "save_safetensors"):
            patch.setattr(mx, name, noting(name, getattr(mx, name)))
        for name in READS:
            if name in vars(mx.array):
                patch.setattr(mx.array, name, noting(name, getattr(mx.array, name)))
        for name in ("array", "asarray", "frombuffer"):
            patch.setattr(np, name, noting(f"np.{name}", getattr(np, name)))
        yield waits


READERS: list[Callable[[mx.array], object]] = [
    lambda array: array.tolist(),
    lambda array: bool(array.sum()),
    lambda array: array.sum().item(),
    lambda array: np.array(array),
    lambda array: mx.eval(array),
    lambda array: mx.synchronize(),
    lambda array: repr(array),
]


@pytest.mark.parametrize("read", READERS)
def test_whatever_waits_is_counted(read: Callable[[mx.array], object]) -> None:
    array = mx.arange(3) + 1
    with counted() as waits:
        read(array)
    assert len(waits.calls) == 1


KINDS: dict[str, dict[str, Any]] = {
    "plain": {}, "sliding": SLIDING, "stateful": STATEFUL, "hybrid": HYBRID,
}  # fmt: skip
# Cases differ in the kind of model, the KV that its engine keeps, and its rows' requests.
PLAIN = Sampling(temperature=0, ignore_eos=True)
SAMPLED = [
    Sampling(temperature=0.8, top_k=20, seed=1, ignore_eos=True),
    Sampling(temperature=1.1, min_p=0.1, seed=2, ignore_eos=True),
    Sampling(temperature=0.7, top_p=0.9, top_k=40, seed=3, ignore_eos=True),
    Sampling(temperature=0.7, seed=4, frequency_penalty=0.5, presence_penalty=0.2),
    Sampling(temperature=0.7, seed=5, repetition_penalty=1.2, logit_bias={7: -2.0}),
    # A nucleus is sure only once it is looked at: whether it is is read with the tokens.
    Sampling(temperature=0.3, top_p=0.8, seed=6, ignore_eos=True),
]
ASKED: dict[str, list[dict[str, Any]]] = {
    "greedy": [{"sampling": PLAIN}] * 4,
    "sampled": [{"sampling": sampling} for sampling in SAMPLED],
    "logprobs": [{"sampling": PLAIN, "logprobs": k} for k in (0, 2, 5)],
    "sampled logprobs": [{"sampling": sampling, "logprobs": 3} for sampling in SAMPLED],
    "grammar": [{"sampling": SEEDED, "grammar": SCHEMA}, {"sampling": PLAIN}],
}


def begun(engine: GenerationEngine, jobs: list[dict[str, Any]], most: int = 200) -> Batch:
    batch = Batch(engine)
    for text, job in zip(PROMPTS * 3, jobs, strict=False):
        batch.ask(text, {"max_tokens": most, **job})
    while batch.is_reading:
        batch.prefill(512)
    batch.hear(batch.decode())
    return batch


def steps(batch: Batch, count: int) -> list[list[str]]:
    """Take decode steps; return the waiting calls of each."""
    waited = []
    for _ in range(count):
        with counted() as waits:
            batch.hear(batch.decode())
        waited.append(waits.calls)
    return waited


def end_soon(engine: GenerationEngine, place: int) -> None:
    """Let the row at a place of the batch end after a few more tokens."""
    steps = Steps(engine)
    assert engine._sequences._running is not None
    row = engine._sequences._running.seqs[place]
    steps.change(capped=[(row.id, len(row.tokens) + 4)])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("waits")
    return {
        kind: write_chat(root / kind, eos_token_id=[ENDLESS], **config)
        for kind, config in KINDS.items()
    }


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_waits_once_and_launches_the_next_pass_before_tokens_are_appended(
    folders: dict[str, Path], kind: str, asked: str
) -> None:
    engine = open_engine(folders[kind])
    batch = begun(engine, ASKED[asked])
    assert steps(batch, 4) == [["eval"]] * 4

    def lengths() -> list[int]:
        assert engine._sequences._running is not None
        return [len(row.tokens) for row in engine._sequences._running.seqs]

    launched: list[list[int]] = []
    watch(engine, lambda _: launched.append(lengths()))
    before = []
    for _ in range(3):
        before.append(lengths())
        batch.hear(batch.decode())
    assert launched == before
    assert not batch.faults


def test_a_draw_whose_window_was_too_small_waits_once_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is chosen again from logits on the device that the next pass has to read: inherent.

    The window grows with each such token, so that happens at most twice to a row.
    """
    monkeypatch.setattr("gateway.engine.generation.sampling._P_WINDOW", 64)
    engine = open_engine(write_chat(tmp_path / "m", eos_token_id=[ENDLESS]))
    hot = Sampling(temperature=2, top_p=0.99, seed=1, ignore_eos=True)
    batch = begun(engine, [{"sampling": hot}], 40)
    waited = [len(calls) for calls in steps(batch, 12)]
    assert set(waited) <= {1, 2}
    assert waited.count(2) <= 2


def test_a_row_that_ends_before_others_waits_once_more(folders: dict[str, Path]) -> None:
    """The KV of the last row moves into a slot that stays free. MLX writes into a buffer only while
    nothing under way reads it, and else copies all of it (`filter_layers`). Where slots were free
    before, all KV is copied into less memory, which waits for nothing.
    """
    engine = open_engine(folders["plain"])
    batch = begun(engine, ASKED["greedy"] * 3)
    waited = []
    for _ in range(2):
        end_soon(engine, 0)
        waited += steps(batch, 8)
    assert len(batch.open) == 10
    assert sorted(waited) == [["eval"]] * 15 + [["eval"] * 2]


def test_an_answer_that_ends_and_is_kept_waits_once_a_block(folders: dict[str, Path]) -> None:
    """A block is known to be finite before it is kept, so that no other answer begins with it."""
    engine = open_engine(folders["plain"], prefix_cache_bytes=PLENTY)
    length = BLOCK + 20
    batch = begun(engine, [{"sampling": PLAIN, "max_tokens": length}, {"sampling": PLAIN}], length)
    waited = [len(calls) for calls in steps(batch, length)]
    assert sum(waited) - len(waited) <= 2 * (1 + length // BLOCK) + 1
    assert [count for count in waited[: BLOCK // 2] if count > 1] == []


@pytest.mark.parametrize("kind", ["sliding", "stateful", "hybrid"])
def test_states_are_waited_for_at_ends_of_blocks_alone(folders: dict[str, Path], kind: str) -> None:
    """There they are copied, before the next pass writes over them."""
    engine = open_engine(folders[kind], prefix_cache_bytes=PLENTY)
    batch = begun(engine, [{"sampling": PLAIN}])
    assert engine._sequences._running is not None
    (row,) = engine._sequences._running.seqs
    waited: dict[bool, set[int]] = {False: set(), True: set()}
    for _ in range(BLOCK + 2):
        is_end = len(row.context) % BLOCK == 0
        ((*calls,),) = steps(batch, 1)
        waited[is_end].add(len(calls))
    assert waited[False] == {1}
    assert waited[True]
