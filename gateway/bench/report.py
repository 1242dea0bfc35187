"""Measured lines → a table's rows, or JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from gateway.bench.figures import Spread
from gateway.bench.load import Line

NOTHING = "–"
_COLUMNS = (
    "Work", "Clients", "Requests/s", "Units/s",
    "p50 ms", "p95 ms", "p99 ms", "First p50 ms", "First p95 ms", "Errors",
)  # fmt: skip
_ENGINE_COLUMNS = ("Engine/s", "Ratio")


def columns(*, with_engine: bool) -> tuple[str, ...]:
    """Return the names of the table's columns."""
    return _COLUMNS + (_ENGINE_COLUMNS if with_engine else ())


def rows(lines: Sequence[Line], *, with_engine: bool) -> list[tuple[str, ...]]:
    """Return the table's rows."""
    return [_row(line) + (_engine_cells(line) if with_engine else ()) for line in lines]


def _row(line: Line) -> tuple[str, ...]:
    figures = line.figures
    whole, first = figures.latency, figures.first
    return (
        f"{line.kind} ({line.unit})",
        str(line.clients),
        f"{figures.requests_per_s:.1f}",
        f"{figures.units_per_s:.1f}",
        *_milliseconds(whole, "p50", "p95", "p99"),
        *_milliseconds(first, "p50", "p95"),
        str(sum(figures.errors.values())),
    )


def _milliseconds(spread: Spread | None, *names: str) -> list[str]:
    return [NOTHING if spread is None else f"{getattr(spread, name) * 1000:.1f}" for name in names]


def _engine_cells(line: Line) -> tuple[str, ...]:
    if not line.engine:
        return NOTHING, NOTHING
    return f"{line.engine:.1f}", f"{line.figures.units_per_s / line.engine:.2f}"


def notes(lines: Sequence[Line]) -> list[str]:
    """Return what the table has no room for: errors by name, the engine's best batch."""
    texts = [
        f"{line.kind}, {line.clients} clients: {count} × {name}"
        for line in lines
        for name, count in sorted(line.figures.errors.items())
    ]
    texts += [
        f"{line.kind}, {line.clients} clients: no request ended in time; give a longer --duration"
        for line in lines
        if not line.figures.requests and not line.figures.errors
    ]
    if lines and (best := lines[0].best) is not None:
        texts.append(
            f"the engine at its best: {best.rate:.1f} {lines[0].unit}/s, {best.batch} a batch"
        )
    return texts


def as_json(lines: Sequence[Line], asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything measured, with times in milliseconds and rates per second."""
    return {**asked, "results": [_line_json(line) for line in lines]}


def _line_json(line: Line) -> dict[str, Any]:
    figures = line.figures
    found: dict[str, Any] = {
        "kind": line.kind,
        "clients": line.clients,
        "requests": figures.requests,
        "requests_per_s": figures.requests_per_s,
        f"{line.unit}_per_s": figures.units_per_s,
        "latency_ms": _spread_ms(figures.latency),
        "first_token_ms": _spread_ms(figures.first),
        "errors": dict(figures.errors),
    }
    if line.engine:
        found |= {
            f"engine_{line.unit}_per_s": line.engine,
            "ratio": figures.units_per_s / line.engine,
        }
    if line.best is not None:
        found["engine_best"] = asdict(line.best)
    return found


def _spread_ms(spread: Spread | None) -> dict[str, float] | None:
    if spread is None:
        return None
    return {name: seconds * 1000 for name, seconds in asdict(spread).items()}
