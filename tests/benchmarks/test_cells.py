"""The public cells of `make device`: each is measured, and stands beside the others' figures."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.device import cells
from benchmarks.device.page import write_page
from benchmarks.device.results import Result
from gateway.engine.device import Device
from tests.benchmarks.test_device import MACHINE

MODELS = [*cells.EMBEDDERS, *cells.RERANKERS]


@pytest.mark.slow
def test_every_cell_is_measured_with_small_shapes(tmp_path: Path) -> None:
    figures = cells.measure_cells(tmp_path, Device.CPU, is_small=True)
    assert all(math.isfinite(figure.value) and figure.value > 0 for figure in figures)
    assert [(figure.shape, figure.at) for figure in figures] == [
        (f"{model.name}, small", at) for model in MODELS for at in model.theirs
    ]


@pytest.mark.parametrize(
    "model", [*cells.EMBEDDERS, *cells.RERANKERS], ids=lambda model: model.name
)
def test_whole_shapes_stand_beside_the_figures_of_others(model: cells.Model) -> None:
    asked: list[tuple[int, int]] = []

    def compute(rows: Any) -> None:
        asked.append((len(rows), len(rows[0])))

    engine = SimpleNamespace(dtype="mlx.core.float32", vocab_size=99, close=lambda: None)
    of_model = dict.fromkeys(model.theirs, (2, 3))
    figures = cells._measure(model, engine, compute, cells._rows, of_model, is_small=False)
    assert asked == [(2, 3)] * (cells.ROUNDS + 1) * len(of_model)
    page = write_page(MACHINE, {cells.NAME: Result("done", figures=figures)}, "d", is_small=False)
    for at, theirs in model.theirs.items():
        [line] = [
            line
            for line in page.splitlines()
            if f"| {model.name} |" in line and f"| {at} |" in line
        ]
        shown = [cell.strip() for cell in line.split("|")[5:8]]
        given = [None if cell == "–" else float(cell) for cell in shown]
        assert given == [each and pytest.approx(each, rel=0.01) for each in theirs]
    assert "github.com/lablup/mlxcel" in page
