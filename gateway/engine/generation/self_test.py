"""A test of whether a model's sequences may be batched.

Some of mlx-lm's architectures compute other logits in a batch than alone, without an error. For
example, padding leaks into a state.
"""

import hashlib
import json
import math
import platform
import random
from collections.abc import Generator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any, Final, TypeAlias

import mlx.core as mx
from mlx_lm.generate import PromptProcessingBatch
from mlx_lm.models.cache import make_prompt_cache

from gateway.engine.compiled_code import name_failure
from gateway.engine.device import BLAS, Device, confirm, cpu_threads, evaluate
from gateway.engine.device_faults import classify
from gateway.engine.kv.layers import can_batch, make_batch_caches
from gateway.engine.kv.prefix_cache import BLOCK, PrefixCache, PrefixPool
from gateway.engine.models.checkpoint import Listing
from gateway.engine.models.decoders import Numbers
from gateway.engine.models.notes import EQUAL
from gateway.engine.models.unread import architecture
from gateway.engine.vision.features import Images
from gateway.engine.vision.sight import Sight
from gateway.errors import Fault
from gateway.jobs.steps import Verdict

# The largest difference that rounding may cause: the root mean square difference of logits, divided
# by the standard deviation of the logits alone. In float32, the logits of tiny random models
# differed by at least 0.1 if they were wrong, and by 1e-6 if they were right.
BOUNDS: Final = {mx.float32: 1e-2, mx.float16: 3e-2, mx.bfloat16: 1e-1}
LENGTHS: Final = (5, 9, 16)  # prompts' lengths in tokens: short, since the test blocks the lane
ANSWER_TOKENS: Final = 3  # fixed tokens after each prompt, so that ties in sampling don't matter
PADDED: Final = 4  # rows of the test that varies the padding
CHUNK: Final = 256
IMAGE_PLACE: Final = 3  # the index of the image's first token in its prompt
IMAGE_SIZE: Final = (2, 4)  # the image's rows and columns of tokens
ALONE: Final = Verdict(False, False, False, True, "its KV cache cannot be batched")
LONGEST_WINDOW: Final = 8192

Tokens: TypeAlias = list[int]
Steps: TypeAlias = Generator[None]


@dataclass(slots=True, eq=False)
class _Row:
    """A made-up prompt and answer, and their logits at each decode step."""

    prompt: Tokens
    answer: Tokens
    reference: str = "those alone"
    expected: list[mx.array] = field(default_factory=list)
    logits: list[mx.array] = field(default_factory=list)
    images: Images | None = None

    @property
    def inputs(self) -> Tokens:
        return [self.prompt[-1], *self.answer]

    @property
    def is_over(self) -> bool:
        return len(self.logits) == len(self.inputs)


@dataclass(slots=True)
class _Batch:
    rows: list[_Row]
    cache: list[Any]


class BatchSelfTest:
    """A comparison of batched rows with the same rows alone."""

    def __init__(
        self,
        model: Any,
        vocab_size: int,
        longest: int,  # the model's maximum context
        dtype: mx.Dtype,
        sight: Sight | None = None,
    ) -> None:
        self._model = model
        self._sight = sight
        self._longest = longest
        self._bound = bound_of(dtype)
        self._vocab_size = vocab_size
        self._random = random.Random(0)
        self.verdict = Verdict()

    def verdicts(self) -> Generator[Verdict]:
        """Run the test, one pass per step; yield the result so far."""
        for _ in self.steps():
            yield self.verdict
        yield self.verdict

    def steps(self) -> Steps:
        if not can_batch(self._model):
            self.verdict = ALONE
            return
        rows = [self._draw_tokens(length) for length in LENGTHS]
        for row in rows:
            yield from self._alone(row)
        yield from self._try("rows", rows, self._together(*rows))
        if self.verdict.rows:
            padded = _Row([], [], "those with other padding")
            yield from self._try("rows", [padded], self._exchange_padding(padded))
        yield from self._try("single", rows[1:2], self._single(rows[1]))
        # If the context is shorter than a block, no prompt can be cached.
        if BLOCK + LENGTHS[0] + ANSWER_TOKENS > self._longest:
            self._note(prefixes=True)
        else:
            long = self._draw_tokens(BLOCK + LENGTHS[0])
            yield from self._alone(long)
            prefixes = PrefixCache(make_prompt_cache(self._model), PrefixPool(1 << 40))
            tested, trial = [long], self._from_a_prefix(long, prefixes)
            has_room = 2 * BLOCK + LENGTHS[0] + ANSWER_TOKENS <= self._longest
            if prefixes.needs_block_ends and self.verdict.rows and has_room:
                longer, again = self._draw_tokens(2 * BLOCK + LENGTHS[0]), replace(long)
                yield from self._alone(longer)
                pieces = self._in_pieces(longer, long, rows[2], prefixes)
                yield from self._try("rows", [longer, long, rows[2]], pieces)
                tested, trial = [again], self._continue(again, prefixes)
            yield from self._try("prefixes", tested, trial)
        window = window_of(self._model, self._longest)
        if window is None or not self.verdict.rows:
            self._note(window=True)
        else:
            long = self._draw_tokens(window + LENGTHS[0])
            yield from self._alone(long)
            together = self._together(rows[0], rows[1], long)
            yield from self._try("window", [*rows[:2], long], together)
        if self._sight is not None and self.verdict.rows:
            seen = self._draw_tokens(LENGTHS[-1])
            seen.prompt, seen.images = self._sight.make_up(seen.prompt, IMAGE_PLACE, IMAGE_SIZE)
            yield from self._alone(seen)
            together = self._together(rows[1], seen, rows[0])
            yield from self._try("images", [rows[1], seen, rows[0]], together)

    def _draw_tokens(self, length: int) -> _Row:
        end = length + ANSWER_TOKENS
        tokens = [self._random.randrange(1, self._vocab_size) for _ in range(end)]
        return _Row(tokens[:length], tokens[length:])

    def _note(self, **findings: Any) -> None:
        self.verdict = replace(self.verdict, **findings)

    def _try(self, what: str, rows: Sequence[_Row], trial: Steps) -> Steps:
        for row in rows:
            row.logits = []
        try:
            for _ in trial:
                confirm()
                yield
            problem = next(filter(None, (self._gap(row) for row in rows)), "")
            confirm()
        except Exception as raised:
            error = name_failure(raised)
            problem = f"{type(error).__name__}: {str(error)[:200]}"
            fault = classify(error)
            if fault is Fault.FATAL:
                raise
            if fault is not Fault.ROW:
                self._note(is_lasting=False)
        self._note(**{what: not problem})
        if problem:
            self._note(problem=self.verdict.problem or f"{what}: {problem}")

    def _gap(self, row: _Row) -> str:
        """Describe the difference if half of a row's logits are too far apart; else return ""."""
        # All logits of one pass may differ because of a tie in the choice of experts.
        gaps = [_distance(*pair) for pair in zip(row.expected, row.logits, strict=True)]
        far = [gap for gap in gaps if not gap <= self._bound]
        if 2 * len(far) < len(gaps):
            return ""
        apart = f"logits {max(gaps):.2g} apart from {row.reference}"
        return f"{apart}, where {self._bound:g} is allowed"

    def _alone(self, row: _Row) -> Steps:
        cache, model = make_prompt_cache(self._model), self._reader([row])
        for start in range(0, len(row.prompt) - 1, CHUNK):
            chunk = row.prompt[start : min(start + CHUNK, len(row.prompt) - 1)]
            model(mx.array([chunk]), cache=cache)
            evaluate([layer.state for layer in cache])
            yield
        for token in row.inputs:
            row.expected.append(self._launch_pass([token], cache, [row])[0])
            yield

    def _reader(self, rows: Sequence[_Row]) -> Any:
        if self._sight is None or all(row.images is None for row in rows):
            return self._model
        reader = self._sight.reader(rows)
        reader.begin([0] * len(rows))
        return reader

    def _launch_pass(self, tokens: Tokens, cache: list[Any], rows: Sequence[_Row] = ()) -> mx.array:
        """Run a pass of one token per row; return the logits, (rows, vocabulary)."""
        with self._sight.placed(rows) if self._sight is not None and rows else nullcontext():
            logits: mx.array = self._model(mx.array(tokens)[:, None], cache=cache)[:, -1, :]
        logits = logits.astype(mx.float32)
        evaluate(logits, [layer.state for layer in cache])
        return logits

    def _read(
        self,
        rows: list[_Row],
        caches: list[list[Any]] | None = None,
        known: int = 0,
        model: Any = None,
    ) -> Generator[None, None, _Batch]:
        """Read prompts; the first `known` tokens of the first one are in its cache already."""
        caches = caches or [make_batch_caches(self._model) for _ in rows]
        batch = PromptProcessingBatch(
            model or self._reader(rows), list(range(len(rows))), caches, prefill_step_size=1 << 30
        )
        prompts = [row.prompt[known if row is rows[0] else 0 : -1] for row in rows]
        chunk = CHUNK if len(rows) == 1 else max(map(len, prompts))
        for start in range(0, max(map(len, prompts)), chunk):
            batch.prompt([prompt[start : start + chunk] for prompt in prompts])
            yield
        return _Batch(rows, batch.prompt_cache)

    def _decode(self, batch: _Batch) -> Steps:
        inputs = [row.inputs[len(row.logits)] for row in batch.rows]
        found = self._launch_pass(inputs, batch.cache, batch.rows)
        for row, logits in zip(batch.rows, found, strict=True):
            row.logits.append(logits)
        yield
        on = [i for i, row in enumerate(batch.rows) if not row.is_over]
        if on and len(on) < len(batch.rows):
            for layer in batch.cache:
                layer.filter(on)
        batch.rows = [batch.rows[i] for i in on]

    def _finish(self, batch: _Batch) -> Steps:
        while batch.rows:
            yield from self._decode(batch)

    def _single(self, row: _Row) -> Steps:
        yield from self._finish((yield from self._read([row])))

    def _together(self, first: _Row, second: _Row, late: _Row) -> Steps:
        """Read two rows together, padded; then add a third that was read separately."""
        for row in (first, second, late):
            row.logits = []
        batch = yield from self._read([first, second])
        yield from self._decode(batch)
        joining = yield from self._read([late])
        yield from self._decode(joining)
        yield from self._join(batch, joining)

    def _exchange_padding(self, padded: _Row) -> Steps:
        """Read short prompts beside a longer one twice, with different padding tokens."""
        # Rounding is the same in both passes, because they have the same shapes.
        rows = [self._draw_tokens(LENGTHS[0]) for _ in range(PADDED)]
        rows.append(self._draw_tokens(LENGTHS[-1]))
        padding = mx.array(self._draw_tokens(LENGTHS[-1]).prompt[:-1])

        def with_padding(tokens: mx.array, cache: Any) -> Any:
            """Run the model with other padding: mlx-lm pads with 0, which no prompt here has."""
            return self._model(mx.where(tokens == 0, padding, tokens), cache=cache)

        for model, results in ((self._model, padded.expected), (with_padding, padded.logits)):
            batch = yield from self._read(rows, model=model)
            logits = self._launch_pass([row.prompt[-1] for row in rows], batch.cache)
            results += list(logits[:PADDED])
            yield

    def _join(self, batch: _Batch, joining: _Batch) -> Steps:
        for layer, joining_layer in zip(batch.cache, joining.cache, strict=True):
            layer.extend(joining_layer)
        batch.rows = batch.rows + joining.rows
        yield from self._finish(batch)

    def _from_a_prefix(self, row: _Row, prefixes: PrefixCache) -> Steps:
        block = _Row([*row.prompt[:BLOCK], 0], [])
        read = yield from self._read([block])
        prefixes.store(row.prompt[:BLOCK], read.cache, 0)
        yield from self._continue(row, prefixes)

    def _in_pieces(self, longer: _Row, long: _Row, short: _Row, prefixes: PrefixCache) -> Steps:
        """Read two prompts up to block ends and cache states there; then read the rest with a third
        prompt.
        """
        first: Any  # untyped in mlx-lm
        first, second = (
            PromptProcessingBatch(
                self._model,
                ids,
                [make_batch_caches(self._model) for _ in ids],
                prefill_step_size=1 << 30,
            )
            for ids in ([0, 1], [2])
        )
        first.prompt([longer.prompt[: 2 * BLOCK], long.prompt[:BLOCK]])
        yield
        prefixes.store(long.prompt[:BLOCK], first.prompt_cache, 1)
        first.extend(second)
        first.prompt([longer.prompt[2 * BLOCK : -1], long.prompt[BLOCK:-1], short.prompt[:-1]])
        yield
        yield from self._finish(_Batch([longer, long, short], first.prompt_cache))

    def _continue(self, row: _Row, prefixes: PrefixCache) -> Steps:
        known, cache = prefixes.take(row.prompt[:-1])
        batch = yield from self._read([row], [cache] if cache else None, known)
        yield from self._finish(batch)


def read_probe(model: Any, vocab_size: int) -> None:
    """Run a short made-up prompt and wait for its logits. Raises the device's error."""
    test = BatchSelfTest(model, vocab_size, LENGTHS[0], mx.float32)
    list(test._alone(test._draw_tokens(LENGTHS[0])))


def bound_of(dtype: mx.Dtype) -> float:
    return BOUNDS.get(dtype, BOUNDS[mx.bfloat16])


def is_listed(model: Any) -> bool:
    return architecture(type(model)) in EQUAL


def _distance(expected: mx.array, logits: mx.array) -> float:
    """Return the root mean square difference of logits, in standard deviations of `expected`.

    Entries that are not finite in `expected` are left out.
    """
    is_number = mx.isfinite(expected)
    count = mx.maximum(is_number.sum(), 1)
    mean = mx.where(is_number, expected, 0).sum() / count
    variance = mx.where(is_number, mx.square(expected - mean), 0).sum() / count
    mean_square = mx.where(is_number, mx.square(expected - logits), 0).sum() / count
    distance: Any = mx.sqrt(mean_square / mx.maximum(variance, 1e-12)).item()
    if math.isnan(distance):
        return math.inf
    return float(distance)


def window_of(model: Any, longest: int) -> int | None:
    """Return the longest sliding window that a test prompt can exceed; None if there is none."""
    cache = make_prompt_cache(model)
    layers = [inner for layer in cache for inner in getattr(layer, "caches", (layer,))]
    sizes = [getattr(layer, "max_size", None) or 0 for layer in layers]
    limit = min(LONGEST_WINDOW, longest - LENGTHS[0] - ANSWER_TOKENS)
    return max((size for size in sizes if 0 < size <= limit), default=None)


def count_tokens(model: Any, longest: int) -> int:
    return max(window_of(model, longest) or 0, 2 * BLOCK) + LENGTHS[0] + ANSWER_TOKENS


def self_test_digest(checkpoint: Listing, device: Device, numbers: Numbers) -> str:
    """Hash everything that a verdict depends on, except the weights' values, which don't decide
    whether batching works. Raises ModelLoadFailed for incomplete files.
    """
    known: Any = mx.device_info() if device is not Device.CPU else {}  # untyped in mlx's stubs
    named = {
        "config": checkpoint.config(),
        "weights": sorted(
            (name, tensor.dtype, tensor.shape) for name, tensor in checkpoint.tensors().items()
        ),
        "versions": [version(package) for package in ("mlx", "mlx-lm", "mlx-gateway")],
        "device": [device.value, platform.machine(), str(known.get("device_name"))],
        "blas": [BLAS.config, cpu_threads()] if device is Device.CPU else None,
        "dtype": [numbers.dtype, numbers.is_packed],
        "fused": numbers.is_fused,
        "kv_bits": numbers.kv_bits,
        "test": [LENGTHS, ANSWER_TOKENS, PADDED, sorted(BOUNDS.values()), BLOCK],
    }
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()
