"""Predictions as markdown: beside measurements, and rates by replicas."""

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.simulation.checking import Point
from benchmarks.simulation.cluster import Prediction, capacity, limits_of, predict
from benchmarks.simulation.device import Device
from benchmarks.simulation.load import Mix
from benchmarks.simulation.replica import Limits
from gateway.bench.figures import Figures
from gateway.settings import Settings

RATES = (1, 10, 100, 1000, 10_000)
REPLICAS = (1, 2, 4, 8, 16, 32, 64)
MIXES = {
    "embeddings of 200 tokens": Mix(chats=0, text_tokens=200),
    "chats: 128 tokens read, 128 written": Mix(chats=1, prompt_tokens=128, answer_tokens=128),
    "one such chat in a hundred requests": Mix(
        chats=0.01, text_tokens=200, prompt_tokens=128, answer_tokens=128
    ),
}
LEAST_REQUESTS = 2000
SHORTEST_S = 10.0
SHORTEST_WITH_CHATS_S = 40.0
NEAR = 1.1  # rates further beyond what the replicas manage are not simulated: they are full


def checked(points: Sequence[Point]) -> str:
    """Return the table of runs, with measured / predicted."""
    rows = ["| Run | Kind | Requests/s | p95, ms |", "| --- | --- | --- | --- |"]
    for point in points:
        pairs = {
            "embeddings": (point.measured[False], point.predicted.embeddings),
            "chats": (point.measured[True], point.predicted.chats),
        }
        rows += [
            f"| {point.name}, {point.per_s:g}/s | {kind} | {_rates(*pair)} | {_p95s(*pair)} |"
            for kind, pair in pairs.items()
            if pair[1].requests
        ]
    return "\n".join(rows)


def _rates(measured: Figures, predicted: Figures) -> str:
    return _ratio(measured.requests_per_s, predicted.requests_per_s)


def _p95s(measured: Figures, predicted: Figures) -> str:
    if measured.latency is None or predicted.latency is None:
        return "none"
    return _ratio(1000 * measured.latency.p95, 1000 * predicted.latency.p95)


def _ratio(measured: float, predicted: float) -> str:
    return f"{measured:.4g} / {predicted:.4g} = {measured / predicted:.2f}"


def predicted_tables(device: Device) -> str:
    """Return a table for each mix: the most that one replica answers, and p95 by rate."""
    limits = limits_for(device)
    return "\n\n".join(_table(device, name, mix, limits) for name, mix in MIXES.items())


def limits_for(device: Device) -> Limits:
    """Return a gateway's own limits, with no more answers at once than the device has room for."""
    limits = limits_of(Settings(_env_file=None))  # type: ignore[call-arg]
    rows = limits.generation.max_batch_size
    most = min(rows, device.rows or rows)
    return replace(limits, generation=replace(limits.generation, max_batch_size=most))


def _table(device: Device, name: str, mix: Mix, limits: Limits) -> str:
    shortest_s = SHORTEST_WITH_CHATS_S if mix.chats else SHORTEST_S

    def run(rate: float, replicas: int = 1) -> Prediction:
        seconds = max(shortest_s, LEAST_REQUESTS / rate)
        return predict(device, mix, rate, seconds=seconds, replicas=replicas, limits=limits)

    most = capacity(run, 0.05)
    head = " | ".join(f"{rate:,}/s" for rate in RATES)
    lines = [
        f"Predicted for a {device.name}, {name}; one replica keeps up with {most:.3g} requests/s.",
        "",
        f"| Replicas | {head} |",
        "| --- |" + " --- |" * len(RATES),
    ]
    for replicas in REPLICAS:
        cells = []
        for rate in RATES:
            found = None
            if rate <= NEAR * most * replicas:
                found = run(rate, replicas)
            cells.append(cell(found))
        lines.append(f"| {replicas} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(found: Prediction | None) -> str:
    """Return the p95 of each kind, or `full` where answers do not keep up with requests."""
    if found is None or not found.keeps_up:
        return "full"
    kinds = [each.latency for each in (found.embeddings, found.chats) if each.latency is not None]
    return ", ".join(
        f"{each.p95:.2f} s" if each.p95 >= 1 else f"{1000 * each.p95:.0f} ms" for each in kinds
    )
