"""The page of one device: verdicts, figures, and a block from which the table of all is made."""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Final

from benchmarks.device.machine import Machine
from benchmarks.device.parity import Comparison
from benchmarks.device.results import Figure, Result

TITLES: Final = {
    "tokens": "Tokens a second",
    "time to first token": "Time to first token",
    "memory at the peak": "Memory at the peak",
    "host time": "Host time",
    "embeddings": "Embeddings a second",
    "a turn of the lane": "A turn of the lane",
    "public cells": "Embeddings and reranking beside mlxcel's tables",
}
HOW: Final = {
    "tokens": "So many answers begin at once, greedy and equally long; prompts of 32 tokens (30 "
    "words over HTTP) are in the time. The median of rounds in which each party has its turn, "
    "after a first that does not count. Over HTTP both servers run as they come.",
    "time to first token": "One prompt of so many tokens that nothing has read before, or of so "
    "many words and a template over HTTP, in milliseconds.",
    "memory at the peak": "mx.get_peak_memory of a batch, reset before it: weights (both parties' "
    "where theirs are others), KV and what a pass needs, in MiB.",
    "host time": "CPU time of the Python thread alone (time.thread_time), divided by tokens and "
    "rows, with a model as deep as Qwen3 0.6B and 64 wide, next to no work for the device, whose "
    "threads do not count. Prefill of 32 tokens is in it.",
    "embeddings": "Texts of 15 words: in one pass of the engine, or over HTTP, a text a request.",
    "a turn of the lane": "What it takes to gain the lane and give it back; with a call, to its "
    "thread and back as well; with a step, also a decode step of a model.",
    "public cells": "One request's texts in one pass of the engine, without tokenizer and HTTP: "
    "the median of five passes, after one that does not count. A short text has 18 tokens, a long "
    "one as many as mlxcel's paragraph has with the model's tokenizer (256 to 686), a pair 34. "
    "mlxcel's columns are its own figures on other devices, with tokenizer and HTTP, for trained "
    "weights (https://github.com/lablup/mlxcel, docs/benchmark_results/embeddings-rerank-*: GB10 "
    "2026-08-26, M5 Max and M1 Ultra 2026-09-09).",
}


def failures(results: Mapping[str, Result]) -> list[str]:
    """Name the parity verdicts that failed, and the parity parts that did not run."""
    verdicts = [
        f"{part}: {comparison.mode}"
        for part, result in results.items()
        for comparison in result.comparisons
        if comparison.is_ok is False
    ]
    broken = [
        part
        for part, result in results.items()
        if part.startswith("parity") and result.status == "failed"
    ]
    return verdicts + broken


def has_verdict(results: Mapping[str, Result]) -> bool:
    """Return True if anything was compared: else nothing was found right either."""
    return any(
        comparison.is_ok is not None
        for result in results.values()
        for comparison in result.comparisons
    )


def write_page(machine: Machine, results: Mapping[str, Result], day: str, *, is_small: bool) -> str:
    """Write the page as Markdown."""
    size = (
        "Shapes are small, as they are by default on a CPU (`--small`): their figures show that "
        "everything runs, not what a real model does."
        if is_small
        else "Shapes are whole."
    )
    lines = [
        f"# {machine.device}, {day}",
        "",
        f"Measured by `make device` on {machine.describe()}. {size} Weights are random, so speeds "
        "are as trained models' and answers are not.",
        "",
        *_verdicts(machine, results),
        *(line for name in TITLES for line in _figures(machine, results, name)),
        *_not_run(results),
        "## In short",
        "",
        "```json",
        json.dumps(summarize(machine, results, day, is_small=is_small)),
        "```",
    ]
    return "\n".join(lines) + "\n"


def _verdicts(machine: Machine, results: Mapping[str, Result]) -> Iterator[str]:
    yield from (
        "## Parity",
        "",
        "Each row's answer alone is given again, token by token, in each way; the logprobs of "
        "these tokens may differ by the bound, in nats, and the likeliest token may be another "
        "only where it is likelier than the second by less than the bound. With `kv_bits` rows are "
        "compared with the same rows alone with `kv_bits`; what these cost beside plain KV is "
        "bounded on average. Adapters must move their rows by more than the bound. Embeddings and "
        "scores are compared in standard deviations between inputs.",
        "",
        f"On {machine.describe()}.",
        "",
        "| Model | Way | Places | Worst | Where | Mean | Bound | Other likeliest | Verdict |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    )
    for result in results.values():
        for comparison in result.comparisons:
            yield _verdict_row(result.subject, comparison)
    yield ""


def _verdict_row(subject: str, comparison: Comparison) -> str:
    verdict = {True: "ok", False: "**fail**", None: "–"}[comparison.is_ok]
    if comparison.note:
        verdict += f" ({_cell(comparison.note)})"
    numbers = ("–",) * 5
    if comparison.places:
        numbers = (
            str(comparison.places),
            f"{comparison.worst:.2g}",
            comparison.where,
            f"{comparison.mean:.2g}",
            _bound(comparison),
        )
    cells = (subject, comparison.mode, *numbers, str(comparison.flips), verdict)
    return "| " + " | ".join(cells) + " |"


def _bound(comparison: Comparison) -> str:
    if comparison.bound is not None and comparison.most_mean is None:
        return f"{comparison.bound:.2g}"
    mean = f"mean {comparison.most_mean:.2g}"
    return mean if comparison.bound is None else f"{comparison.bound:.2g}, {mean}"


def _figures(machine: Machine, results: Mapping[str, Result], name: str) -> Iterator[str]:
    """Write the figures of one name: a row a case, a column a party."""
    every = [figure for result in results.values() for figure in result.figures]
    figures = [figure for figure in every if figure.name == name]
    if not figures:
        return
    parties = list(dict.fromkeys(figure.who for figure in figures))
    yield from (
        f"## {TITLES[name]}",
        "",
        HOW[name],
        "",
        f"On {machine.describe()}; in {figures[0].unit}.",
        "",
        f"| Model | dtype | Case | {' | '.join(parties)} | |",
        f"| --- | --- | --- | {'--- | ' * len(parties)}--- |",
    )
    rows: dict[tuple[str, str, str], list[Figure]] = {}
    for figure in figures:
        rows.setdefault((figure.shape, figure.dtype, figure.at), []).append(figure)
    for case, members in rows.items():
        values = {figure.who: _number(figure.value) for figure in members}
        notes = "; ".join(f"{figure.who}: {figure.note}" for figure in members if figure.note)
        cells = (*case, *(values.get(party, "–") for party in parties), _cell(notes))
        yield "| " + " | ".join(cells) + " |"
    yield ""


def _not_run(results: Mapping[str, Result]) -> Iterator[str]:
    missing = {part: result for part, result in results.items() if result.status != "done"}
    if not missing:
        return
    yield from ("## Not measured", "")
    for part, result in missing.items():
        last = result.error.strip().rpartition("\n")[2]
        yield f"- {part} ({result.status}): {_cell(last)}"
    yield ""


def summarize(
    machine: Machine, results: Mapping[str, Result], day: str, *, is_small: bool
) -> dict[str, object]:
    """Return the short figures, for the table of all devices."""
    verdicts = [
        comparison.is_ok
        for result in results.values()
        for comparison in result.comparisons
        if comparison.is_ok is not None
    ]
    short = {
        f"{figure.name}, {figure.shape}, {figure.dtype}, {figure.at}, {figure.who}": round(
            figure.value, 2
        )
        for result in results.values()
        for figure in result.figures
        if figure.name in ("tokens", "time to first token") and math.isfinite(figure.value)
    }
    return {
        "device": machine.device,
        "kind": machine.kind,
        "memory_gib": round(machine.memory_bytes / (1 << 30), 1),
        "system": machine.system,
        "mlx": machine.mlx,
        "mlx_lm": machine.mlx_lm,
        "commit": machine.commit,
        "date": day,
        "small": is_small,
        "verdicts": len(verdicts),
        "failed": len(failures(results)),
        "figures": short,
    }


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "–"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ").strip()[:300]
