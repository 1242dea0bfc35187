"""What is told of a run: rows, notes, JSON."""

from gateway.bench import report
from gateway.bench.engine import Best
from gateway.bench.figures import Figures, Spread
from gateway.bench.kinds import Kind
from gateway.bench.load import Line

SPREAD = Spread(0.0101, 0.02, 0.1)
EMBEDDED = Line(
    Kind.EMBEDDINGS, "vectors", 8, Figures(40, 20.0, 40.0, SPREAD, None), 50.0, Best(32, 80.04)
)
WRITTEN = Line(
    Kind.CHAT, "tokens", 2, Figures(0, 0.0, 12.5, None, SPREAD, {"timed out": 1, "502": 2})
)
SILENT = Line(Kind.CHAT, "tokens", 1, Figures(0, 0.0, 0.0, None, None))


def test_a_row_has_a_cell_for_each_column() -> None:
    """With the engine's, and without; what was not measured is a dash."""
    for with_engine in (True, False):
        width = len(report.columns(with_engine=with_engine))
        lines = [EMBEDDED, WRITTEN, SILENT]
        assert {len(row) for row in report.rows(lines, with_engine=with_engine)} == {width}
    embedded, written = report.rows([EMBEDDED, WRITTEN], with_engine=True)
    assert embedded[2:] == (
        *("20.0", "40.0", "10.1", "20.0", "100.0", "–", "–", "0", "50.0", "0.80"),
    )
    assert written[2:] == (*("0.0", "12.5", "–", "–", "–", "10.1", "20.0", "3", "–", "–"),)


def test_notes_say_what_the_table_has_no_room_for() -> None:
    """Errors by name, what was too short to measure, and the engine's best batch."""
    assert report.notes([EMBEDDED, WRITTEN, SILENT]) == [
        "chat, 2 clients: 2 × 502",
        "chat, 2 clients: 1 × timed out",
        "chat, 1 clients: no request ended in time; give a longer --duration",
        "the engine at its best: 80.0 vectors/s, 32 a batch",
    ]
    assert report.notes([]) == []


def test_json_is_in_milliseconds() -> None:
    """And names the unit."""
    embedded, written = report.as_json([EMBEDDED, WRITTEN], {"kind": "x"})["results"]
    assert embedded["latency_ms"] == {"p50": 10.1, "p95": 20.0, "p99": 100.0}
    assert embedded["vectors_per_s"] == 40.0
    assert embedded["engine_vectors_per_s"] == 50.0
    assert embedded["ratio"] == 0.8
    assert embedded["engine_best"] == {"batch": 32, "rate": 80.04}
    assert written["errors"] == {"timed out": 1, "502": 2}
    assert written["latency_ms"] is None
    assert "ratio" not in written
