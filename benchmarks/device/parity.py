"""Rows in every way that the engine reads them, beside the same rows alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import gateway.engine  # noqa: F401  (first: OpenBLAS must be there before mlx)

import mlx.core as mx  # isort: skip
from mlx_lm.models.switch_layers import SwitchGLU

from benchmarks.adapters import load, write_adapter
from benchmarks.device.forcing import Outcome, Row, answer, answer_alone, quoting, tokens_of
from benchmarks.device.shapes import load_tokenizer
from benchmarks.loading import load_cross_encoder, load_embedding
from gateway.bench.requests import Texts
from gateway.engine.device import Device
from gateway.engine.generation.engine import GenerationEngine
from gateway.engine.generation.loading import read_chat_setup
from gateway.engine.generation.prepare import ChatSetup
from gateway.engine.kv.prefix_cache import PrefixPool
from gateway.engine.kv.quantized import quantize_kv
from gateway.engine.models.decoders import Numbers, floating_dtype, read_decoder
from gateway.errors import GatewayError
from gateway.jobs.chat import Adapter


@dataclass(frozen=True, slots=True)
class Bound:
    """The most by which a logprob may move, in nats, and the most by which all may, on average."""

    worst: float
    mean: float


# float32: ways differ by 2e-5 at most on a CPU (small shapes). A CPU of mlx computes rows of halves
# one by one: ways differ by 0, and by 0.095 in bfloat16 beyond a sliding window. Other devices add
# in another order for each shape, and may differ by what a type itself rounds. So these are above
# what the same bfloat16 weights give in a type beside float32, row by row: bfloat16 0.20 to 0.30 at
# worst in 4 to 6 layers and 0.40 in 28, on average 0.03 to 0.11; float16 0.018 and 0.05, on average
# 0.005 and 0.011. Rows that get each other's logits differ by some nats.
BOUNDS: Final = {
    "float32": Bound(1e-3, 1e-4),
    "float16": Bound(0.06, 0.02),
    "bfloat16": Bound(0.5, 0.15),
}
# Different rounding gives KV in fewer bits other codes, and a router other experts. So these are
# shares of the cost of the bits themselves beside plain KV, capped by LOSS_BOUNDS.
# Measured: 0.003 at most in float32, 0.24 in float16 and 0.39 in bfloat16, at worst.
KV_SHARES: Final = {"float32": 0.05, "float16": 0.5, "bfloat16": 0.75}
# The average cost that bits may have: three times their highest in small shapes on a CPU,
# 0.026 in float32 and float16, 0.22 in bfloat16 (weights in 4 bits; 0.058 without). With experts,
# 0.13 in float32, 0.42 in bfloat16; float16 was not measured and is as float32. Adapters, which
# change every answer, move logprobs by 2.1 to 3.1 on average.
LOSS_BOUNDS: Final = {"float32": 0.08, "float16": 0.08, "bfloat16": 0.66}
EXPERTS_LOSS_BOUNDS: Final = {"float32": 0.4, "float16": 0.4, "bfloat16": 1.25}
# Vectors and scores, in standard deviations between inputs: 7e-4 at most in float32 on a CPU, where
# float32 itself has steps of 1e-4 of them (random rerankers score all pairs much the same).
VECTOR_BOUNDS: Final = {"float32": 5e-3, "float16": 0.05, "bfloat16": 0.4}
LENGTHS: Final = (5, 70, 20)  # tokens of the prompts; one has a whole block for a prefix
ANSWER_TOKENS: Final = 20
QUOTED: Final = 10
LATE: Final = 1  # row
PREFIX_BYTES: Final = 4 << 30
SPECULATE_ROWS: Final = 4
KV_BITS: Final = 8
RANK: Final = 4
ADAPTER_SCALE: Final = 20.0  # an adapter then moves logprobs by more than any bound


@dataclass(frozen=True, slots=True)
class Comparison:
    """One way of reading beside another: the worst difference in nats, and where it is.

    `flips` are places at which the likeliest token is another, though by more than the bound.
    `most_mean` bounds the mean; `bound` is None where only that is bounded.
    `is_ok` is None for a mere figure, or one not done (`note` says which): no verdict.
    """

    mode: str
    bound: float | None
    places: int = 0
    worst: float = 0.0
    mean: float = 0.0
    where: str = ""
    flips: int = 0
    is_ok: bool | None = None
    note: str = ""
    most_mean: float | None = None


@dataclass(frozen=True, slots=True)
class Subject:
    """A loaded model, of which engines are made that share its weights."""

    setup: ChatSetup
    model: Any

    @classmethod
    def load(cls, folder: Path, device: Device, dtype: str) -> "Subject":
        """Load a folder as it is written: quantized weights stay so."""
        setup = read_chat_setup(folder, name=folder.name, max_context=None)
        numbers = Numbers(dtype=dtype, is_packed=True)
        steps = read_decoder(setup.checkpoint, device=device, numbers=numbers)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return cls(setup, end.value)

    def engine(self, prefix_bytes: int = 0, speculate_rows: int = 0) -> GenerationEngine:
        return GenerationEngine(
            self.model,
            replace(self.setup, sampling_defaults={}),
            prefixes=PrefixPool(prefix_bytes),
            speculate_rows=speculate_rows,
        )

    @property
    def dtype(self) -> str:
        return str(floating_dtype(self.model)).removeprefix("mlx.core.")

    @property
    def bound(self) -> Bound:
        return BOUNDS[self.dtype]

    @property
    def most_loss(self) -> float:
        """Return how far KV in fewer bits may be from plain KV, on average."""
        has_experts = any(isinstance(module, SwitchGLU) for _, module in self.model.named_modules())
        return (EXPERTS_LOSS_BOUNDS if has_experts else LOSS_BOUNDS)[self.dtype]


def compare(mode: str, alone: Outcome, other: Outcome, bound: Bound) -> Comparison:
    """Compare two outcomes of the same rows and tokens, place by place."""
    worst, where, flips, distances = -1.0, "", 0, []
    pairs = zip(alone.places, other.places, strict=True)
    for number, (expected, places) in enumerate(pairs):
        for position, (one, two) in enumerate(zip(expected, places, strict=True)):
            if one.token != two.token:
                raise ValueError(f"row {number}, token {position}: another token was forced")
            distance = abs(one.logprob - two.logprob)
            distance = math.inf if math.isnan(distance) else distance
            distances.append(distance)
            if distance > worst:
                worst, where = distance, f"row {number}, token {position}"
            flips += one.best != two.best and one.margin > bound.worst
    mean = sum(distances) / max(1, len(distances))
    is_near = worst <= bound.worst and mean <= bound.mean
    is_ok = is_near and not flips and not other.faults and bool(distances)
    note, count = "; ".join(other.faults), len(distances)
    return Comparison(mode, bound.worst, count, worst, mean, where, flips, is_ok, note, bound.mean)


def compare_chat(
    folder: Path, scratch: Path, device: Device, dtype: str, more_tokens: int = 0
) -> list[Comparison]:
    """Compare every way of reading of a chat model. The longest prompt is longer by `more_tokens`,
    so that it is longer than a window.
    """
    subject = Subject.load(folder, device, dtype)
    rows = draw_rows(folder, more_tokens)
    return [
        run_self_test(subject),
        *compare_ways(subject, rows, "", subject.bound),
        *compare_adapters(subject, rows, scratch),
        *compare_kv_bits(subject, rows),
    ]


def compare_kv_bits(subject: Subject, rows: Sequence[Row]) -> list[Comparison]:
    """Compare rows with KV in fewer bits with plain KV, and in every way with themselves alone.

    The subject's KV stays in fewer bits.
    """
    plain, given = _references(subject, rows), subject.bound
    try:
        quantize_kv(subject.setup.checkpoint, subject.model, KV_BITS)
    except GatewayError as error:
        return [Comparison("kv_bits", given.worst, note=str(error))]
    packed = _references(subject, _given(rows, plain))
    loss = compare(f"kv_bits {KV_BITS} beside plain KV", plain, packed, given)
    share, most = KV_SHARES[subject.dtype], subject.most_loss
    is_ok = loss.mean <= most and not packed.faults and bool(loss.places)
    loss = replace(loss, bound=None, most_mean=most, is_ok=is_ok)
    # what they cost must not widen a bound without end, or nonsense would be right
    bound = Bound(
        max(given.worst, min(share * loss.worst, most)),
        max(given.mean, min(share * loss.mean, most)),
    )
    return [loss, *compare_ways(subject, rows, f"kv_bits {KV_BITS}: ", bound)]


def draw_rows(folder: Path, more_tokens: int = 0) -> list[Row]:
    """Draw prompts of plain words, with answers that quote them."""
    tokenizer, random = load_tokenizer(folder), Random(0)
    plain = [token for token in range(300, 4000) if _is_word(tokenizer.decode([token]))]
    lengths = [*LENGTHS]
    lengths[1] += more_tokens
    prompts = [random.choices(plain, k=length) for length in lengths]
    return [Row(prompt, quoting(prompt, ANSWER_TOKENS, QUOTED)) for prompt in prompts]


def _is_word(text: str) -> bool:
    return text.isascii() and text.strip().isalpha()


def _references(subject: Subject, rows: Sequence[Row]) -> Outcome:
    """Answer rows alone, each for itself, with nothing kept or read ahead."""
    return answer_alone(subject.engine(), rows)


def run_self_test(subject: Subject) -> Comparison:
    """Run the test that each model is put to when it is loaded."""
    verdict = list(subject.engine().self_test())[-1]
    # None is what was not tested
    is_ok = all((verdict.single, verdict.rows, verdict.prefixes, verdict.window))
    return Comparison("self-test", subject.bound.worst, is_ok=is_ok, note=verdict.problem)


def compare_ways(
    subject: Subject, rows: Sequence[Row], prefix: str, bound: Bound
) -> list[Comparison]:
    """Compare rows together, late, from a kept prefix and read ahead with the rows alone."""
    alone = _references(subject, rows)
    rows = _given(rows, alone)
    keeping = subject.engine(PREFIX_BYTES)
    answer_alone(keeping, rows)  # what the next ones begin with
    outcomes = {
        "alone again": _references(subject, rows),
        "together": answer(subject.engine(), rows),
        "late": answer(subject.engine(), rows, late=LATE),
        "prefix, alone": answer_alone(keeping, rows),
        "prefix, together": answer(keeping, rows),
        "ahead, alone": answer_alone(subject.engine(0, SPECULATE_ROWS), rows),
        "ahead, together": answer(subject.engine(0, SPECULATE_ROWS), rows),
    }
    return [
        _qualify(mode, compare(prefix + mode, alone, outcome, bound), outcome)
        for mode, outcome in outcomes.items()
    ]


def _qualify(mode: str, comparison: Comparison, outcome: Outcome) -> Comparison:
    """Take the verdict back where the mode's own event did not happen."""
    if mode.endswith(("together", "late")):
        last = len(outcome.places) - 1
        if not (last in outcome.beside if mode.endswith("late") else outcome.beside):
            note = "; ".join(filter(None, (comparison.note, "not done: rows run one at a time")))
            return replace(comparison, is_ok=None, note=note)
    if mode.startswith("prefix"):
        if not outcome.cached:
            return replace(comparison, is_ok=None, note="not done: nothing was kept")
        return replace(comparison, note=f"{outcome.cached} tokens not read again")
    if mode.startswith("ahead"):
        if not outcome.drafted:
            return replace(comparison, is_ok=None, note="not done: its caches cannot go back")
        drafts = f"{outcome.accepted} of {outcome.drafted} drafted tokens taken"
        return replace(comparison, note=drafts)
    return comparison


def _given(rows: Sequence[Row], alone: Outcome) -> list[Row]:
    """Return the rows with the tokens that they had alone."""
    tokens = tokens_of(alone)
    return [replace(row, tokens=given) for row, given in zip(rows, tokens, strict=True)]


def compare_adapters(subject: Subject, rows: Sequence[Row], scratch: Path) -> list[Comparison]:
    """Compare rows of two adapters and of none, in one batch, with the same rows alone."""
    engine = subject.engine()  # the modules that take adapters know one engine
    adapters: list[Adapter] = []
    for number in range(2):
        mx.random.seed(number)
        folder = scratch / f"adapter-{number}"
        adapters.append(load(engine, write_adapter(folder, engine, RANK, ADAPTER_SCALE)))
    places = [adapters[0], None, adapters[1]]
    plain = answer_alone(engine, rows)
    rows = _given(rows, plain)
    adapted = [replace(row, adapter=place) for row, place in zip(rows, places, strict=True)]
    alone = answer_alone(engine, adapted)
    effect = _effect(plain, alone, adapted, subject.bound)
    comparisons = [effect]
    for mode, late in (("adapters together", 0), ("adapters late", LATE)):
        outcome = answer(engine, adapted, late=late)
        comparison = _qualify(mode, compare(mode, alone, outcome, subject.bound), outcome)
        if not effect.is_ok and comparison.is_ok:
            comparison = replace(comparison, is_ok=None, note="not done: adapters have no effect")
        comparisons.append(comparison)
    for adapter in adapters:
        engine.drop_adapter(adapter.number)
    return comparisons


def _effect(plain: Outcome, alone: Outcome, rows: Sequence[Row], bound: Bound) -> Comparison:
    """Compare rows with adapters with the same without: each must move by more than the bound."""
    still = []
    for number, row in enumerate(rows):
        one, two = Outcome([plain.places[number]]), Outcome([alone.places[number]])
        moved = compare("", one, two, bound)
        if row.adapter and not (moved.worst > bound.worst and moved.mean > bound.mean):
            still.append(f"row {number}")
    effect = compare("adapters beside the base", plain, alone, bound)
    note = f"no effect above the bound: {', '.join(still)}" if still else "above the bound is right"
    note = "; ".join((note, *alone.faults))
    is_ok = not still and not alone.faults and math.isfinite(effect.worst)
    return replace(effect, is_ok=is_ok, note=note)


def compare_vectors(
    mode: str, alone: npt.NDArray[Any], together: npt.NDArray[Any], bound: float
) -> Comparison:
    """Compare vectors, (inputs, numbers), or scores, of inputs alone and in one batch.

    In standard deviations between inputs: random models give all texts much the same vector.
    """
    one, two = (part.astype(np.float64).reshape(len(part), -1) for part in (alone, together))
    distances = np.abs(one - two).max(axis=1) / one.std(axis=0).max()
    distances = np.nan_to_num(distances, nan=math.inf)
    place = int(distances.argmax())
    worst, mean = float(distances[place]), float(distances.mean())
    where, is_ok = f"input {place}", worst <= bound
    return Comparison(mode, bound, len(one), worst, mean, where, is_ok=is_ok)


def compare_embeddings(folder: Path, device: Device, dtype: str) -> list[Comparison]:
    """Compare vectors of texts of several lengths, each alone and all in one pass."""
    engine = load_embedding(folder, name=folder.name, device=device, dtype=dtype)
    rows = engine.encode(_texts())
    alone = np.concatenate([engine.embed([row]) for row in rows])
    together = engine.embed(rows)
    cosine = float((alone * together).sum(axis=1).min())
    engine.close()
    comparison = compare_vectors("embeddings together", alone, together, VECTOR_BOUNDS[dtype])
    return [replace(comparison, note=f"least cosine {cosine:.6f}")]


def compare_scores(folder: Path, device: Device, dtype: str) -> list[Comparison]:
    """Compare scores of pairs of several lengths, each alone and all in one pass."""
    engine = load_cross_encoder(folder, name=folder.name, device=device, dtype=dtype)
    pairs = engine.encode_pairs("which station is near the river", _texts())
    alone = np.concatenate([engine.score([pair]) for pair in pairs])
    together = engine.score(pairs)
    engine.close()
    bound = VECTOR_BOUNDS[dtype]
    comparison = compare_vectors("rerank together", alone, together, bound)
    return [replace(comparison, note=f"scores differ by {np.ptp(together):.2g} among inputs")]


def _texts() -> list[str]:
    texts = Texts(7, [3, 40, 12, 120, 25, 7, 60, 1])
    return [texts[number] for number in range(8)]
