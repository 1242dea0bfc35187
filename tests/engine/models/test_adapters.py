"""LoRA adapters: rows of several in one batch answer as merged models do alone."""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.tuner.utils import load_adapters

from benchmarks.loading import load_generation
from gateway.engine.device import Device
from gateway.engine.generation.engine import GenerationEngine
from gateway.engine.models.adapters import read_adapter
from gateway.errors import ModelLoadFailed
from gateway.jobs.chat import Adapter, Sampling
from tests.checkpoints import merge_adapter, write_adapter, write_chat
from tests.engine.generation.harness import JOBS, PROMPTS, Answer, Batch, load_adapter, open_engine

GREEDY = Sampling(temperature=0)
PLENTY = 1 << 30
# No two adapters are alike in rank, scale and projections.
ADAPTERS: dict[str, dict[str, Any]] = {
    "small": {"seed": 1, "rank": 2},
    "large": {"seed": 2, "rank": 9, "scale": 1.0},
    "queries": {"seed": 3, "rank": 4, "scale": 4.0, "only": "q_proj"},
}

Asked = tuple[str, str, dict[str, Any]]
"""An adapter's name or none, a text, and what else a job has."""


class World:
    """A base, its adapters, and the models that these are when merged."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self.base = write_chat(folder / "base", **config)
        self.folders = {
            name: write_adapter(folder / name, self.base, **given)
            for name, given in ADAPTERS.items()
        }
        self.merged = {
            name: open_engine(merge_adapter(folder / f"{name}-merged", self.base, adapter))
            for name, adapter in self.folders.items()
        }
        self.merged[""] = open_engine(self.base)

    def alone(self, asked: Asked) -> Answer:
        """Answer a job by the merged model, alone."""
        name, text, given = asked
        batch = Batch(self.merged[name])
        row = batch.ask(text, given)
        while batch.is_busy:
            batch.step(64)
        return batch.answers[row]

    def open(self, **given: Any) -> "Adapted":
        engine = open_engine(self.base, **given)
        numbers = {name: add(engine, name, folder) for name, folder in self.folders.items()}
        return Adapted(engine, numbers)

    def close(self) -> None:
        for engine in self.merged.values():
            engine.close()


class Adapted(Batch):
    """Rows of an engine with adapters."""

    def __init__(self, engine: GenerationEngine, numbers: dict[str, int]) -> None:
        super().__init__(engine)
        self.numbers = numbers

    def ask_one(self, asked: Asked) -> int:
        name, text, given = asked
        adapter = Adapter(self.numbers[name], name) if name else None
        return self.ask(text, {**given, "adapter": adapter})


def add(engine: GenerationEngine, name: str, folder: Path) -> int:
    return load_adapter(engine, name, folder).number


def run(batch: Adapted, jobs: Sequence[Asked]) -> list[Answer]:
    """Hear some jobs together."""
    rows = [batch.ask_one(job) for job in jobs]
    while batch.is_busy:
        batch.step(64)
    assert not batch.faults
    return [batch.answers[row] for row in rows]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("plain"), {})
    yield world
    world.close()


@pytest.fixture
def engine(plain: World) -> Iterator[GenerationEngine]:
    """Open the base alone."""
    engine = open_engine(plain.base)
    yield engine
    engine.close()


@pytest.fixture
def batch(plain: World) -> Iterator[Adapted]:
    """Open it with all adapters, and room for every prompt."""
    batch = plain.open(prefix_cache_bytes=PLENTY)
    yield batch
    batch.engine.close()


def test_each_adapter_says_something_of_its_own(plain: World) -> None:
    """Otherwise the tests here would show nothing."""
    said = {plain.alone((name, PROMPTS[1], JOBS[0])).text for name in ("", *ADAPTERS)}
    assert len(said) == 1 + len(ADAPTERS)


def test_kv_of_one_adapter_is_never_used_for_another(plain: World, batch: Adapted) -> None:
    """The second time each finds its own, and only then."""
    jobs = [(name, PROMPTS[1], JOBS[0]) for name in ("", *ADAPTERS)]
    expected = [plain.alone(job).text for job in jobs]
    for is_known in (False, True):
        found = [run(batch, [job])[0] for job in jobs]
        assert [answer.text for answer in found] == expected
        assert [answer.cached_tokens > 0 for answer in found] == [is_known] * len(jobs)


def test_nobody_waits_for_the_prompt_of_another_adapter(batch: Adapted) -> None:
    """KV read for one cannot be continued by the others: they are read together."""
    for name in ADAPTERS:
        batch.ask_one((name, PROMPTS[1], JOBS[0]))
    batch.prefill(4096)
    assert batch.size.rows == len(ADAPTERS)


def test_an_adapter_leaves_nothing_behind(
    plain: World, batch: Adapted, engine: GenerationEngine
) -> None:
    """Neither rows, KV, bytes nor modules; one that is added later has another number."""
    bare, engine = engine.nbytes(), batch.engine
    run(batch, [(name, PROMPTS[1], JOBS[0]) for name in ADAPTERS])
    rows = [batch.ask_one((name, "Hi", JOBS[0])) for name in ADAPTERS]
    batch.step(64)
    for name in ADAPTERS:
        engine.drop_adapter(batch.numbers[name])
    batch.change()
    assert (batch.count, engine.prefixes.pool_bytes, engine.nbytes()) == (0, 0, bare)
    assert not [each for each in engine._model.modules() if hasattr(each, "lora_a")]
    assert not any(batch.answers[row].ends for row in rows)
    again = add(engine, "small", plain.folders["small"])
    assert again not in batch.numbers.values()
    batch.numbers["small"] = again
    job = ("small", PROMPTS[1], JOBS[0])
    (found,) = run(batch, [job])
    assert found.says_as(plain.alone(job))
    assert not found.cached_tokens


def test_a_quantized_base_is_adapted_too(plain: World) -> None:
    engine, reference = open_engine(plain.base), open_engine(plain.base)
    layers: Any = nn  # untyped
    for each in (engine, reference):
        layers.quantize(each._model, group_size=32, bits=4)
    try:
        tokens = mx.array([[5, 6, 7, 8]] * 3)
        without = engine._model(tokens)
        numbers = [add(engine, name, plain.folders[name]) for name in ("small", "large")]
        load_adapters(reference._model, str(plain.folders["large"]))
        expected = reference._model(tokens)
        with engine.adapters.applied([numbers[1]] * 3):
            alike = engine._model(tokens)
        with engine.adapters.applied([numbers[1], 0, numbers[0]]):
            mixed = engine._model(tokens)
        assert mx.allclose(alike, expected, atol=1e-3, rtol=1e-3)
        assert mx.allclose(mixed[0], expected[0], atol=1e-3, rtol=1e-3)
        assert mx.allclose(mixed[1], without[1], atol=1e-3, rtol=1e-3)
        assert not mx.allclose(mixed[2], without[2], atol=0.1)
    finally:
        engine.close()
        reference.close()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_adapted_by_row_too(plain: World, dtype: str) -> None:
    """MLX itself gathers only float32 factors on a CPU."""
    engine = load_generation(plain.base, name="chat", device=Device.CPU, dtype=dtype)
    try:
        numbers = [add(engine, name, folder) for name, folder in plain.folders.items()]
        tokens = mx.array([[5, 6, 7, 8]] * 4)
        rows = [*numbers, 0]
        with engine.adapters.applied(rows):
            mixed = engine._model(tokens)
        assert mixed.dtype == engine.adapters.dtype == getattr(mx, dtype)
        for row, number in enumerate(rows):
            with engine.adapters.applied([number]):
                alone = engine._model(tokens[:1])
            largest: Any = mx.abs(alone).max()
            assert mx.allclose(mixed[row], alone[0], rtol=0.0, atol=0.1 * largest.item())
    finally:
        engine.close()


def rewrite(folder: Path, change: Any) -> None:
    file = folder / "adapters.safetensors"
    weights: Any = mx.load(str(file))
    mx.eval(weights)
    change(weights)
    mx.save_safetensors(str(file), weights)


def reconfigure(folder: Path, **changes: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


Q_PROJ = "model.layers.0.self_attn.q_proj"


def set_factor(name: str, value: mx.array) -> Any:
    return lambda folder: rewrite(folder, lambda weights: weights.update({name: value}))


def set_factors(name: str, inputs: int) -> Any:
    factors = {f"{name}.lora_a": mx.zeros((inputs, 4)), f"{name}.lora_b": mx.zeros((4, 64))}
    return lambda folder: rewrite(folder, lambda weights: weights.update(factors))


def set_rank(rank: Any, scale: Any = 2.0) -> Any:
    return lambda folder: reconfigure(folder, lora_parameters={"rank": rank, "scale": scale})


HOSTILE: dict[str, tuple[Any, str]] = {
    "another width": (
        set_factor(f"{Q_PROJ}.lora_a", mx.zeros((48, 4))),
        rf"{Q_PROJ}.lora_a is \(48, 4\), but its base needs \(64, 4\)",
    ),
    "another rank than the config's": (
        set_factor(f"{Q_PROJ}.lora_b", mx.zeros((5, 64))),
        rf"{Q_PROJ}.lora_b is \(5, 64\), not \(4, 64\), as the rank in",
    ),
    "one factor": (
        lambda folder: rewrite(folder, lambda weights: weights.pop(f"{Q_PROJ}.lora_b")),
        rf"lacks {Q_PROJ}.lora_b",
    ),
    "an unknown module": (
        set_factor("model.layers.9.self_attn.q_proj.lora_a", mx.zeros((64, 4))),
        "lacks model.layers.9.self_attn.q_proj.lora_b",
    ),
    "not a number": (
        set_factor(
            f"{Q_PROJ}.lora_a", mx.concatenate([mx.full((1, 4), math.nan), mx.zeros((63, 4))])
        ),
        rf"{Q_PROJ}.lora_a has values that are not finite",
    ),
    "integers": (
        set_factor(f"{Q_PROJ}.lora_a", mx.zeros((64, 4), mx.int32)),
        rf"{Q_PROJ}.lora_a is of type I32",
    ),
    "experts": (
        set_factor(f"{Q_PROJ}.lora_a", mx.zeros((2, 4, 64))),
        "only linear projections are adapted",
    ),
    "DoRA by its weights": (set_factor(f"{Q_PROJ}.m", mx.zeros((64,))), "DoRA's magnitudes"),
    "DoRA by its config": (
        lambda folder: reconfigure(folder, fine_tune_type="dora"),
        "fine_tune_type 'dora'",
    ),
    "rank 0": (set_rank(0), "rank 0, not a whole number from 1 on"),
    "rank true": (set_rank(True), "rank True"),
    "no scale": (set_rank(4, None), "scale None, not a number"),
    "an infinite scale": (set_rank(4, math.inf), "scale inf, not a number"),
    "an endless scale": (set_rank(4, 1e39), "lora_b has values that are not finite"),
    "no config": (lambda folder: (folder / "adapter_config.json").unlink(), "no adapter_config"),
    "a broken config": (
        lambda folder: (folder / "adapter_config.json").write_text("{"),
        "not valid JSON",
    ),
    "no weights": (lambda folder: (folder / "adapters.safetensors").unlink(), "no adapters.safe"),
    "cut off": (
        lambda folder: (folder / "adapters.safetensors").write_bytes(
            (folder / "adapters.safetensors").read_bytes()[:-100]
        ),
        "not a whole safetensors file",
    ),
    "a module that the base lacks": (
        set_factors("model.layers.2.mlp.up_proj", 64),
        r"its base has no model\.layers\.2\.mlp\.up_proj",
    ),
    "an embedding": (
        set_factors("model.embed_tokens", 1026),
        r"model\.embed_tokens is no linear projection",
    ),
    "PEFT's": (
        lambda folder: (folder / "adapters.safetensors").rename(
            folder / "adapter_model.safetensors"
        ),
        "PEFT's format",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_wrong_with_an_adapter_is_named_and_nothing_of_it_stays(
    plain: World, engine: GenerationEngine, tmp_path: Path, name: str
) -> None:
    damage, message = HOSTILE[name]
    folder = write_adapter(tmp_path / "broken", plain.base)
    damage(folder)
    before = engine.nbytes()
    with pytest.raises(ModelLoadFailed, match=message):
        add(engine, "broken", folder)
    assert engine.nbytes() == before


def test_a_rank_beyond_the_projections_is_refused(
    plain: World, engine: GenerationEngine, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "adapter", plain.base, rank=65)
    with pytest.raises(ModelLoadFailed, match="its rank, 65, is larger than"):
        add(engine, "adapter", folder)


def test_a_load_that_is_given_up_leaves_nothing(
    plain: World, engine: GenerationEngine, monkeypatch: Any
) -> None:
    """A step for each module here; the second one never comes."""
    monkeypatch.setattr("gateway.engine.models.adapters.SLICE_BYTES", 0)
    before = engine.nbytes()
    steps = engine.adapters.add_in_steps(read_adapter("small", plain.folders["small"]))
    assert next(steps) is None
    assert engine.nbytes() > before
    steps.close()
    assert engine.nbytes() == before


@pytest.mark.parametrize("order", [("small", "queries", "large"), ("large", "queries", "small")])
def test_an_adapter_adds_the_bytes_that_were_asked_for_whatever_ranks_others_have(
    plain: World, engine: GenerationEngine, order: Sequence[str]
) -> None:
    """Its weights' bytes are asked of the memory budget before it is added, and so is no more."""
    adapters = {}
    for name in order:
        before, files = engine.nbytes(), read_adapter(name, plain.folders[name])
        adapters[name] = load_adapter(engine, name, plain.folders[name])
        asked = files.weights * engine.adapters.dtype.size
        assert adapters[name].nbytes == engine.nbytes() - before == asked
    for name in order:
        before = engine.nbytes()
        engine.drop_adapter(adapters[name].number)
        assert before - engine.nbytes() == adapters[name].nbytes


def test_a_device_that_cannot_gather_adds_adapters_all_the_same(
    monkeypatch: pytest.MonkeyPatch, plain: World
) -> None:
    gather = mx.gather_mm

    def missing(*args: Any, **given: Any) -> mx.array:
        raise RuntimeError("GatherMM has no CUDA implementation.")

    monkeypatch.setattr(mx, "gather_mm", missing)
    adapted = plain.open()
    monkeypatch.setattr(mx, "gather_mm", gather)
    jobs = [
        (name, PROMPTS[0], {"sampling": GREEDY, "max_tokens": 20}) for name in ("small", "large")
    ]
    found = run(adapted, jobs)
    for answer, job in zip(found, jobs, strict=True):
        assert answer.says_as(plain.alone(job))
    adapted.engine.close()
