"""`make device`'s judgement of engines that are right and wrong, and of parts that die."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import gateway.engine  # noqa: F401  (first: OpenBLAS must be there before mlx)

import mlx.core as mx  # isort: skip

from benchmarks.device import __main__ as device_main
from benchmarks.device.__main__ import main, run_parts, run_process
from benchmarks.device.forcing import Outcome, Place, Row, answer, answer_alone
from benchmarks.device.machine import Machine
from benchmarks.device.page import failures, write_page
from benchmarks.device.parity import (
    Bound,
    Comparison,
    Subject,
    compare,
    compare_ways,
    draw_rows,
)
from benchmarks.device.parts import Part
from benchmarks.device.results import Figure, Result, State
from benchmarks.device.shapes import SHAPES, folder_of
from benchmarks.device.table import END, START, update
from gateway.doctor.report import Checked, Finding, Report
from gateway.engine.device import Device
from gateway.registry import ChatSpec, PackageSource

VERSIONS = ("macOS-26", "3.12.1", "0.32.4", "0.32.2", "c0ffee")
MACHINE = Machine("A Chip", "metal", 24 << 30, 10, *VERSIONS)
BOUND = Bound(0.1, 0.1)
OK = Comparison("together", 1e-3, 10, 1e-5, 1e-6, "row 0, token 3", 0, is_ok=True)
WRONG = replace(OK, mode="late", worst=0.5, is_ok=False)
ON = ("qwen3-8b, small", "4bit (ours as float32)", "8 streams")
FIGURE = Figure("tokens", 812.5, "tokens/s", "gateway's engine", *ON)
THEIRS = replace(FIGURE, value=650.0, who="BatchGenerator")
# A part's process: {} is what it does before it writes a result.
PART = """
import sys, json, os
{}
from benchmarks.device.results import Result
open(sys.argv[-1], "w").write(json.dumps(Result("done").to_json()))
"""


class Spoiled:
    """A model whose logits of several rows are changed."""

    def __init__(self, model: Any, spoil: Callable[[mx.array], mx.array]) -> None:
        self._model = model
        self._spoil = spoil

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, tokens: mx.array, **more: Any) -> mx.array:
        logits: mx.array = self._model(tokens, **more)
        return self._spoil(logits) if len(tokens) > 1 else logits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = tmp_path_factory.mktemp("models")
    return folder_of(SHAPES["qwen3-0.6b"], "float32", models, is_small=True)


@pytest.fixture(scope="module")
def subject(folder: Path) -> Subject:
    return Subject.load(folder, Device.CPU, "float32")


@pytest.fixture(scope="module")
def rows(folder: Path) -> list[Row]:
    return draw_rows(folder)


def together(
    subject: Subject, rows: list[Row], spoil: Callable[[mx.array], mx.array]
) -> Comparison:
    """Compare rows together, of a model that is changed, with the rows alone."""
    alone = answer_alone(subject.engine(), rows)
    given = [
        replace(row, tokens=[place.token for place in places])
        for row, places in zip(rows, alone.places, strict=True)
    ]
    spoiled = Subject(subject.setup, Spoiled(subject.model, spoil))
    return compare("together", alone, answer(spoiled.engine(), given), subject.bound)


def test_rows_in_every_way_are_as_they_are_alone(subject: Subject, rows: list[Row]) -> None:
    """Prefixes are taken, and drafts read ahead, right and wrong ones, or it is no proof."""
    comparisons = compare_ways(subject, rows, "", subject.bound)
    assert {comparison.mode: comparison.is_ok for comparison in comparisons} == dict.fromkeys(
        (comparison.mode for comparison in comparisons), True
    )
    drafts = next(each.note for each in comparisons if each.mode == "ahead, alone")
    taken, drafted = (int(word) for word in drafts.split() if word.isdigit())
    assert 0 < taken < drafted


def test_rows_that_get_each_others_logits_are_noticed(subject: Subject, rows: list[Row]) -> None:
    comparison = together(subject, rows, lambda logits: logits[::-1])
    assert comparison.is_ok is False
    assert comparison.worst > 1
    assert comparison.flips > 0


@pytest.mark.parametrize(("by", "is_ok"), [(5e-3, False), (1e-5, True)])
def test_logits_that_move_by_more_than_the_bound_are_noticed(
    subject: Subject, rows: list[Row], by: float, is_ok: bool
) -> None:
    """One logit of two is raised, so that shares change."""
    comparison = together(subject, rows, lambda logits: logits + by * (mx.arange(4096) % 2))
    assert comparison.is_ok is is_ok
    assert comparison.where.startswith("row ")


def test_what_is_no_number_is_wrong() -> None:
    alone = Outcome([[Place(5, -1.0, 5, 0.2)]])
    comparison = compare("m", alone, Outcome([[Place(5, float("nan"), 5, 0.2)]]), BOUND)
    assert comparison.is_ok is False
    saved = Result("done", comparisons=[comparison]).to_json()
    assert Result.from_json(json.loads(json.dumps(saved))).comparisons == [comparison]


def test_results_are_kept_and_those_of_other_versions_dropped(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "state.json"
    result = Result("done", 2.0, "", "qwen3", [OK], [FIGURE])
    State.load(file, {"mlx": "1"}).add("a", result)
    state = State.load(file, {"mlx": "1"})
    assert (state.results, state.dropped) == ({"a": result}, 0)
    other = State.load(file, {"mlx": "2"})
    assert (other.results, other.dropped) == ({}, 1)
    file.write_text("{")
    assert State.load(file, {"mlx": "1"}).results == {}


@pytest.mark.slow
def test_a_part_that_dies_is_recorded_and_the_next_one_runs(tmp_path: Path) -> None:
    """It alone is tried again by the next run, once."""
    deeds = {"dies": "os.abort()", "hangs": "import time; time.sleep(60)", "works": ""}
    ran: list[str] = []

    def run(part: Part) -> Result:
        ran.append(part.name)
        return run_process(("-c", PART.format(deeds[part.name])), 5 if part.name != "hangs" else 1)

    listed = [Part(name, 1, lambda _: Result("done")) for name in deeds]
    state = State.load(tmp_path / "state.json", {})
    run_parts(listed, state, run, is_again=False)
    assert ran == list(deeds)
    statuses = {name: result.status for name, result in state.results.items()}
    assert statuses == {"dies": "failed", "hangs": "failed", "works": "done"}
    assert "status -6" in state.results["dies"].error
    assert "longer than 1 s" in state.results["hangs"].error
    again: list[str] = []

    def succeed(part: Part) -> Result:
        again.append(part.name)
        return Result("done")

    for _ in range(2):
        run_parts(listed, state, succeed, is_again=False)
    assert again == ["dies", "hangs"]


@pytest.mark.parametrize(
    ("result", "status"),
    [
        (Result("skipped", error="too small"), 1),
        (Result("failed", error="status -6"), 1),
        (Result("done", comparisons=[replace(OK, is_ok=None)]), 1),
        (Result("done", comparisons=[OK, WRONG]), 1),
        (Result("done", comparisons=[OK]), 0),
    ],
)
def test_a_run_without_a_verdict_has_not_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, result: Result, status: int
) -> None:
    monkeypatch.setattr(device_main, "_run", lambda part, *_, **__: result)
    places = [f"--{name}={tmp_path / name}" for name in ("state", "models", "out", "pages")]
    assert main(["--small", "--part", "1", *places]) == status
    (page,) = (tmp_path / "pages").glob("*.md")
    is_listed = f"- parity qwen3-0.6b float32 ({result.status}): " in page.read_text()
    assert is_listed is (result.status != "done")


def test_the_page_says_of_each_figure_what_it_was_measured_on() -> None:
    loss = replace(OK, mode="kv_bits", bound=None, mean=0.02, most_mean=0.08)
    results = {
        "parity x": Result("done", 1, "", "qwen3-8b, 4bit, metal", [OK, WRONG, loss]),
        "speed x": Result("done", 1, figures=[FIGURE, THEIRS]),
        "http x": Result("skipped", error="aiohttp is not installed"),
    }
    text = write_page(MACHINE, results, "2027-01-02", is_small=False)
    for section in text.split("\n## ")[1:3]:
        assert MACHINE.describe() in section
    assert "| 0.02 | mean 0.08 |" in text
    assert "| qwen3-8b, small | 4bit (ours as float32) | 8 streams | 812 | 650 |" in text
    assert "0.5 | row 0, token 3" in text
    assert "**fail**" in text
    assert "- http x (skipped): aiohttp is not installed" in text
    assert failures(results) == ["parity x: late"]


def test_pages_and_pasted_reports_of_doctor_have_their_rows(tmp_path: Path) -> None:
    source = PackageSource("llm_small", "m.gguf")
    spec = ChatSpec(id="small", kind="chat", source=source)
    speed = Finding("speed", "ok", "", {"tokens_per_s": {"1": 12.3, "8": 40.0}})
    device = {"device": "metal", "device_name": "Apple M9", "memory_bytes": 32 << 30}
    block = Report(device, [], [Checked(spec, [speed])]).as_block("2027-01-02")
    (tmp_path / "apple-m9-2027-01-02.md").write_text(f"# Apple M9\n\n```json\n{block}\n```\n")
    results = {"speed x": Result("done", 1, "", "", [OK], [FIGURE, THEIRS])}
    page = write_page(MACHINE, results, "2027-01-02", is_small=False)
    (tmp_path / "a-chip-2027-01-02.md").write_text(page)
    (tmp_path / "README.md").write_text(f"before\n{START}\nold\n{END}\nafter\n")
    update(tmp_path)
    row = (tmp_path / "README.md").read_text()
    assert (row[:7], row[-6:], row.count("old")) == ("before\n", "after\n", 0)
    assert "qwen3-8b, small, 4bit (ours as float32): 812 ÷ 650 = 1.25" in row
    assert "[Apple M9, 2027-01-02](apple-m9-2027-01-02.md) | 32 GiB (metal)" in row
    assert "1 ok" in row
    assert "llm_small, unknown: 12 | llm_small, unknown: 40" in row
