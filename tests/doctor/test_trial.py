"""What the numbers of a trial mean."""

from dataclasses import replace

import numpy as np
import pytest

from gateway.doctor.trial import judge_distance, judge_verdict
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
    """As a share of what rows are, so that logits and unit vectors are judged alike."""
    for scale in (0.05, 20.0):
        batched = scale * ROWS
        batched[2] *= row
        assert judge_distance(scale * ROWS, batched, 0.01).state == state


def test_rows_without_any_number_are_no_success() -> None:
    assert judge_distance(0 * ROWS, 0 * ROWS, 0.01).state == "fail"
