"""What was measured → a finding: pure decisions, without mlx."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

import jsonschema  # type: ignore[import-untyped]

from gateway.errors import PassFault
from gateway.jobs import TokenLogprob, Verdict
from gateway.logs import human_bytes

State = Literal["ok", "warn", "fail", "skip"]

STD_NATS: Final = 3.5  # the standard deviation of SmolLM2-135M's logits at a place, as measured
# Memory that may stay allocated. None does on a CPU; a GPU may keep constants of what it has
# compiled. It is the KV of 23 tokens of SmolLM2-135M.
SLACK_BYTES: Final = 1 << 20
WORTH_IT: Final = 1.05  # times as fast; rates of a second differ by some percent by themselves


@dataclass(frozen=True, slots=True)
class Finding:
    """A check's outcome, in words and in numbers. Only `fail` means that something is wrong."""

    check: str
    state: State
    said: str
    measured: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How much numbers may differ by rounding alone.

    `logits`: the root mean square of a position's differences, in standard deviations.
    `distance`: the length of two vectors' difference, as a share of the first's length; that of
    logits, as a share of their root mean square.
    `tie_nats`: how much likelier a token may be than the one chosen instead of it.
    """

    logits: float
    distance: float
    tie_nats: float


def tolerance(device: str, dtype: str, logits: float) -> Tolerance:
    """Return what is allowed on a device, where the engine allows `logits` (BOUNDS in
    gateway/engine/generation/self_test.py).

    It is generous to float32 on a CPU, where rows and vectors differed by 1e-6. Elsewhere the other
    two follow from `logits`: a difference of two logits is off by √2 times as much as one logit.
    """
    if (device, dtype) == ("cpu", "float32"):
        return Tolerance(logits, distance=1e-3, tie_nats=1e-3)
    return Tolerance(logits, distance=logits, tie_nats=math.sqrt(2) * STD_NATS * logits)


def judge_vectors(distance: float, texts: int, allowed: Tolerance) -> Finding:
    """Compare vectors with those of sentence-transformers."""
    return _judge_distance("vectors", distance, texts, allowed, "those of sentence-transformers")


def judge_texts_together(distance: float, texts: int, allowed: Tolerance) -> Finding:
    """Compare the vectors of a batch with those of the same texts alone."""
    return _judge_distance("batch", distance, texts, allowed, "the same texts alone")


def judge_pairs_together(distance: float, pairs: int, allowed: Tolerance) -> Finding:
    """Compare the logits of a batch with those of the same pairs alone."""
    return _judge_distance("batch", distance, pairs, allowed, "the same pairs alone", "logits")


def _judge_distance(
    check: str,
    distance: float,
    texts: int,
    allowed: Tolerance,
    others: str,
    noun: str = "vectors",
) -> Finding:
    is_close = distance <= allowed.distance  # False for NaN
    return Finding(
        check,
        "ok" if is_close else "fail",
        f"{texts} {noun} are {distance:.1g} away from {others}; {allowed.distance:g} is allowed.",
        {"texts": texts, "apart": distance, "allowed": allowed.distance},
    )


def judge_rows_together(verdict: Verdict, allowed: Tolerance) -> Finding:
    """Judge the self-test of rows in a batch, and after a kept prompt, against rows alone."""
    measured = {**asdict(verdict), "allowed": allowed.logits}
    if not verdict.problem:
        message = (
            f"logits in a batch are those alone, within {allowed.logits:g} standard deviations."
        )
        return Finding("batch", "ok", message, measured)
    if not verdict.is_lasting:
        message = f"memory ran out, so it is not known: {verdict.problem}."
        return Finding("batch", "warn", message, measured)
    message = f"{verdict.problem}. The gateway runs its rows one at a time."
    return Finding("batch", "fail", message, measured)


def judge_answer(text: str, expected: str, *, is_known_to: bool) -> Finding:
    """Look for `expected` in an answer, since answers that are equal may still be nonsense.

    A failure is a warning only, unless the model is known to give this answer.
    """
    measured = {"text": text, "expected": expected}
    if expected in text:
        return Finding("answer", "ok", f"it says “{expected}”.", measured)
    message = f"it does not say “{expected}”, but “{text}”."
    return Finding("answer", "fail" if is_known_to else "warn", message, measured)


@dataclass(frozen=True, slots=True)
class Parting:
    """The token at which an answer in a batch parts from the answer to its prompt alone.

    `nats` is how much likelier, alone, the token of the answer alone is than the other; infinite if
    the other is not among the likeliest.
    """

    token: int
    nats: float


def find_parting(alone: Sequence[TokenLogprob], batched: Sequence[TokenLogprob]) -> Parting | None:
    """Return where two answers part; None if they are the same."""
    for i, (mine, theirs) in enumerate(zip(alone, batched, strict=False)):
        if mine.chosen.bytes != theirs.chosen.bytes:
            likely = {each.bytes: each.logprob for each in mine.top}
            other = likely.get(theirs.chosen.bytes, -math.inf)
            return Parting(i, mine.chosen.logprob - other)
    if len(alone) == len(batched):
        return None
    return Parting(min(len(alone), len(batched)), math.inf)


def judge_greedy(
    partings: Sequence[Parting | None], tokens: int, neighbours: int, allowed: Tolerance
) -> Finding:
    """Judge answers in a batch: they part from those alone only at a near tie."""
    parted = [each for each in partings if each is not None]
    wrong = [each for each in parted if not each.nats <= allowed.tie_nats]
    measured = {
        "answers": len(partings),
        "tokens": tokens,
        "partings": [asdict(each) for each in parted],
        "allowed_nats": allowed.tie_nats,
    }
    rows = f"{len(partings)} answers of {tokens} tokens"
    tie = f"a tie is {allowed.tie_nats:.2g} nats"
    if wrong:
        worst = max(wrong, key=lambda each: each.nats)
        message = (
            f"{len(wrong)} of {rows} are others beside {neighbours} rows: from token {worst.token} "
            f"on, {worst.nats:.2g} nats less likely alone; {tie}."
        )
        return Finding("greedy", "fail", message, measured)
    ties = f"; {len(parted)} parted at one" if parted else ""
    message = f"{rows} are the same alone and beside {neighbours} rows; {tie}{ties}."
    return Finding("greedy", "ok", message, measured)


def judge_structured(
    text: str, schema: Mapping[str, Any], *, is_whole: bool, may_think: bool
) -> Finding:
    """Judge an answer that was held to a schema.

    An answer that was cut off proves nothing if the model may still have been thinking.
    """
    measured = {"text": text, "is_whole": is_whole}
    if not is_whole and may_think:
        return Finding("structured", "warn", "cut while it may have been thinking.", measured)
    try:
        value = json.loads(text)
    except ValueError:
        return Finding("structured", "fail", f"its answer is no JSON: “{text}”.", measured)
    if not jsonschema.Draft202012Validator(schema).is_valid(value):
        message = f"its answer does not match the schema: “{text}”."
        return Finding("structured", "fail", message, measured)
    return Finding("structured", "ok", "its answer matches the schema.", measured)


def judge_cancelled(rows_before: int, rows_after: int, deltas_after: int) -> Finding:
    """Judge a row that left: it is gone at once, no other is, and no delta of it follows."""
    measured = {"rows_before": rows_before, "rows_after": rows_after, "heard_after": deltas_after}
    if rows_after != rows_before - 1:
        message = f"of {rows_before} rows {rows_after} are there after one has left."
        return Finding("cancelled", "fail", message, measured)
    if deltas_after:
        message = f"a row that has left has sent {deltas_after} deltas since."
        return Finding("cancelled", "fail", message, measured)
    return Finding("cancelled", "ok", "a row that leaves is gone at once.", measured)


def judge_faults(faults: Sequence[PassFault]) -> list[Finding]:
    """Return a failure if a pass has failed, even if its rows were run again and ended well."""
    if not faults:
        return []
    messages = [fault.message for fault in faults]
    return [Finding("faults", "fail", f"passes have failed: {messages[0]}.", {"faults": messages})]


def judge_memory(before: int, loaded: int, idle: int, after: int) -> Finding:
    """Judge the bytes held before a model's load, after it, after its work, and after its close."""
    measured = {"before": before, "loaded": loaded, "idle": idle, "after": after}
    of_rows, of_model = idle - loaded, after - before
    if of_rows > SLACK_BYTES:
        message = f"{human_bytes(of_rows)} of its work stay while nothing runs."
        return Finding("memory", "fail", message, measured)
    if of_model > SLACK_BYTES:
        message = (
            f"{human_bytes(of_model)} of {human_bytes(loaded - before)} stay after it is closed."
        )
        return Finding("memory", "fail", message, measured)
    return Finding(
        "memory", "ok", f"all of {human_bytes(loaded - before)} is given back.", measured
    )


def judge_speed(unit: str, rates: Mapping[int, float]) -> Finding:
    """Report units a second, by rows at once; no speed is wrong."""
    each = ", ".join(f"{rate:.3g} with {rows}" for rows, rate in rates.items())
    message = f"{unit}/s by rows at once: {each}."
    return Finding("speed", "ok", message, {f"{unit}_per_s": {str(n): r for n, r in rates.items()}})


def judge_fused(gains: Mapping[int, float]) -> Finding:
    """Say whether `fuse_projections` is worth it, from how many times as fast it is by rows."""
    each = ", ".join(f"{gain:.2f} with {rows}" for rows, gain in gains.items())
    is_worth_it = min(gains.values()) >= 1 and max(gains.values()) >= WORTH_IT
    advice = "set it in models.yaml" if is_worth_it else "leave it out"
    message = f"times as fast with `fuse_projections: true`, by rows at once: {each}; {advice}."
    return Finding("fused", "ok", message, {"gains": {str(rows): g for rows, g in gains.items()}})
