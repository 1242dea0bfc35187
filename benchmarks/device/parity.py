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

from benchmarks.adapters import load, write_adapter
from benchmarks.device.forcing import Outcome, Row, answer, answer_alone, quoting, tokens_of
from benchmarks.device.shapes import load_tokenizer
from gateway.bench.workloads import Texts
from gateway.engine.decoders import floating_dtype, read_decoder
from gateway.engine.device import Device
from gateway.engine.embedding.cross_encoder import load_cross_encoder
from gateway.engine.embedding.engine import load_embedding
from gateway.engine.generation.engine import GenerationEngine
from gateway.engine.generation.loading import ChatSetup, read_chat_setup
from gateway.engine.generation.quantized_kv import quantize_kv
from gateway.errors import GatewayError
from gateway.jobs import Adapter

# By how much a token's logprob may move, in nats.
BOUNDS: Final = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.1}
# By how much a number of a vector of length 1 may.
VECTOR_BOUNDS: Final = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 2e-2}
LENGTHS: Final = (5, 70, 20)  # tokens of the prompts; one has a whole block for a prefix
ANSWER_TOKENS: Final = 20
QUOTED: Final = 10
LATE: Final = 1  # row
PREFIX_BYTES: Final = 4 << 30
SPECULATE_ROWS: Final = 4
KV_BITS: Final = 8
RANK: Final = 4
ADAPTER_SCALE: Final = 20.0  # so that an adapter moves logprobs by more than any bound


@dataclass(frozen=True, slots=True)
class Comparison:
    """One way of reading beside another: the worst difference in nats, and where it is.

    `flips` are places at which the likeliest token is another, though by more than the bound.
    `is_ok` is None for what is a figure, or not done (`note` says which): no verdict.
    """

    mode: str
    bound: float
    places: int = 0
    worst: float = 0.0
    mean: float = 0.0
    where: str = ""
    flips: int = 0
    is_ok: bool | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Subject:
    """A loaded model, of which engines are made that share its weights."""

    setup: ChatSetup
    model: Any

    @classmethod
    def load(cls, folder: Path, device: Device, dtype: str) -> "Subject":
        """Load a folder as it is written: quantised weights stay so."""
        setup = read_chat_setup(
            folder, name=folder.name, max_context=None, chat_template=None, template_args={}
        )
        steps = read_decoder(setup.checkpoint, device=device, dtype=dtype, is_packed=True)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return cls(setup, end.value)

    def engine(self, prefix_bytes: int = 0, speculate_rows: int = 0) -> GenerationEngine:
        return GenerationEngine(
            self.setup.checkpoint.name,
            self.model,
            self.setup.chat,
            self.setup.structured,
            max_context=self.setup.max_context,
            vocab_size=self.setup.vocab_size,
            prefix_cache_bytes=prefix_bytes,
            speculate_rows=speculate_rows,
        )

    @property
    def bound(self) -> float:
        return BOUNDS[str(floating_dtype(self.model)).removeprefix("mlx.core.")]


def compare(mode: str, alone: Outcome, other: Outcome, bound: float) -> Comparison:
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
            flips += one.best != two.best and one.margin > bound
    is_ok = worst <= bound and not flips and not other.faults and bool(distances)
    mean = sum(distances) / max(1, len(distances))
    note = "; ".join(other.faults)
    return Comparison(mode, bound, len(distances), worst, mean, where, flips, is_ok, note)


def compare_chat(
    folder: Path, scratch: Path, device: Device, dtype: str, more_tokens: int = 0
) -> list[Comparison]:
    """Compare every way of reading of a chat model. The longest prompt is longer by `more_tokens`,
    so that it is longer than a window.
    """
    subject = Subject.load(folder, device, dtype)
    rows = draw_rows(folder, more_tokens)
    comparisons = [_run_self_test(subject), *compare_ways(subject, rows, "")]
    comparisons += _compare_adapters(subject, rows, scratch)
    plain = _references(subject, rows)
    try:
        quantize_kv(subject.setup.checkpoint, subject.model, KV_BITS)
    except GatewayError as error:
        return [*comparisons, Comparison("kv_bits", subject.bound, note=str(error))]
    packed = _references(subject, _given(rows, plain))
    loss = compare(f"kv_bits {KV_BITS} beside plain KV", plain, packed, subject.bound)
    comparisons.append(replace(loss, is_ok=None, note="a figure, no verdict"))
    return comparisons + compare_ways(subject, rows, f"kv_bits {KV_BITS}: ")


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


def _run_self_test(subject: Subject) -> Comparison:
    """Run the test that each model is put to when it is loaded."""
    verdict = list(subject.engine().self_test())[-1]
    is_ok = False not in (verdict.single, verdict.rows, verdict.prefixes, verdict.window)
    return Comparison("self-test", subject.bound, is_ok=is_ok, note=verdict.problem)


def compare_ways(subject: Subject, rows: Sequence[Row], prefix: str) -> list[Comparison]:
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
        _qualify(mode, compare(prefix + mode, alone, outcome, subject.bound), outcome)
        for mode, outcome in outcomes.items()
    ]


def _qualify(mode: str, comparison: Comparison, outcome: Outcome) -> Comparison:
    """Take the verdict back where what the mode is about did not happen."""
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


def _compare_adapters(subject: Subject, rows: Sequence[Row], scratch: Path) -> list[Comparison]:
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
    effect = compare("adapters beside the base", plain, alone, subject.bound)
    comparisons = [
        replace(effect, is_ok=None, note="a figure, no verdict"),
        compare("adapters together", alone, answer(engine, adapted), subject.bound),
        compare("adapters late", alone, answer(engine, adapted, late=LATE), subject.bound),
    ]
    for adapter in adapters:
        engine.drop_adapter(adapter.number)
    return comparisons


def compare_vectors(
    mode: str, alone: Sequence[npt.NDArray[Any]], together: npt.NDArray[Any], bound: float
) -> Comparison:
    """Compare vectors, or scores as vectors of one number, of inputs alone and in one batch."""
    distances = [
        float(np.abs(one.astype(np.float64) - two.astype(np.float64)).max())
        for one, two in zip(alone, together, strict=True)
    ]
    distances = [math.inf if math.isnan(distance) else distance for distance in distances]
    place = max(range(len(distances)), key=lambda at: distances[at])
    worst = distances[place]
    mean = sum(distances) / len(distances)
    where = f"input {place}"
    return Comparison(mode, bound, len(distances), worst, mean, where, 0, worst <= bound)


def compare_embeddings(folder: Path, device: Device, dtype: str) -> list[Comparison]:
    """Compare vectors of texts of several lengths, each alone and all in one pass."""
    engine = load_embedding(folder, name=folder.name, device=device, dtype=dtype)
    rows = engine.encode(_texts())
    alone = [engine.embed([row])[0] for row in rows]
    together = engine.embed(rows)
    cosines = [float(one @ two) for one, two in zip(alone, together, strict=True)]
    engine.close()
    comparison = compare_vectors("embeddings together", alone, together, VECTOR_BOUNDS[dtype])
    return [replace(comparison, note=f"least cosine {min(cosines):.6f}")]


def compare_scores(folder: Path, device: Device, dtype: str) -> list[Comparison]:
    """Compare scores of pairs of several lengths, each alone and all in one pass."""
    engine = load_cross_encoder(folder, name=folder.name, device=device, dtype=dtype)
    pairs = engine.encode_pairs("which station is near the river", _texts())
    alone = [engine.score([pair]) for pair in pairs]
    together = engine.score(pairs)
    engine.close()
    bound = BOUNDS[dtype]
    comparison = compare_vectors("rerank together", alone, together[:, None], bound)
    spread = float(together.max() - together.min())
    return [replace(comparison, note=f"scores from {spread:.3f} apart")]


def _texts() -> list[str]:
    texts = Texts(7, [3, 40, 12, 120, 25, 7, 60, 1])
    return [texts[number] for number in range(16)]
