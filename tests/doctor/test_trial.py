"""The meaning of a trial's numbers."""

from dataclasses import replace

import numpy as np
import pytest

from gateway.doctor.trial import judge_distance, judge_verdict, judge_widths
from gateway.jobs.steps import Verdict

PASSED = Verdict(single=True, rows=True, prefixes=True, window=True)
ROWS = np.ones((4, 8), dtype=np.float32)


def test_a_self_test_that_ran_out_of_memory_is_a_warning() -> None:
    """It says nothing of batches."""
    short = replace(PASSED, rows=False, problem="rows: [malloc] no", is_lasting=False)
    assert judge_verdict(PASSED).state == "ok"
    assert judge_verdict(short).state == "warn"
    assert judge_verdict(replace(short, is_lasting=True)).state == "fail"


@pytest.mark.parametrize(
    ("row", "state"), [(1.0, "ok"), (1.009, "ok"), (1.011, "fail"), (np.nan, "fail")]
)
def test_one_row_that_is_too_far_fails_the_batch(row: float, state: str) -> None:
    """It is measured as a share of the rows, so that logits and unit vectors are judged alike."""
    for scale in (0.05, 20.0):
        batched = scale * ROWS
        batched[2] *= row
        assert judge_distance(scale * ROWS, batched, 0.01).state == state


def test_rows_without_any_number_are_no_success() -> None:
    assert judge_distance(0 * ROWS, 0 * ROWS, 0.01).state == "fail"


def test_the_widths_are_named_at_which_rows_take_turns() -> None:
    """Two streams are slower in one batch on a Mac with an M1."""
    m1 = judge_widths((0.030, 0.109, 0.125, 0.130, 0.137))
    assert (m1.state, m1.measured["step_s"][2]) == ("ok", 0.109)
    assert "30 with 1, 109 with 2" in m1.message
    turns = "rows take turns, 2 as 1 (1.82 × the tokens), 3 as 1 (1.30 × the tokens)."
    assert m1.message.endswith(turns)
    flat = judge_widths((0.030, 0.031))
    assert flat.message == "ms of a decode step by rows: 30 with 1, 31 with 2; all run together."
    assert judge_widths(()).state == "skip"
