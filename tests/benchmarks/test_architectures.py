"""The table of architectures: made, compared and written."""

import pytest

from benchmarks import architectures
from gateway.engine.models.notes import EQUAL

GOOD = dict.fromkeys(
    ("alone", "chunks", "together", "prefix", "self-test", "as served", "ahead"), ""
)


@pytest.mark.slow
def test_a_process_goes_on_with_the_next() -> None:
    found = dict(architectures.each_tried(["nobody_knows", "llama"], 1))
    assert "error" in found["nobody_knows"]
    assert found["llama"] == GOOD


def test_those_that_are_equal_share_a_row_and_others_say_what_differs() -> None:
    """The worse of both ways of reading a prompt is shown."""
    text = architectures.table(
        {
            "llama": GOOD,
            "qwen3": GOOD,
            "odd": {**GOOD, "chunks": "token 3, by 0.5", "self-test": "rows: a | b"},
            "gone": {"error": "the process died of signal 11"},
        }
    )
    assert "| llama, qwen3 | equal | equal | equal | passed | equal | equal |" in text
    assert "| odd | token 3, by 0.5 | equal | equal | rows: a / b | equal | equal |" in text
    assert "- gone: the process died of signal 11" in text
    assert "4 architectures: 3 could be made, 2 are equal in all" in text


def test_the_list_in_the_package_is_that_of_the_document() -> None:
    """Those are batched before a test of their own has ended."""
    lines = architectures.DOCUMENT.read_text(encoding="utf-8").splitlines()
    [equal] = [
        line
        for line in lines
        if line.endswith("| equal | equal | equal | passed | equal | equal |")
    ]
    assert equal.split("|")[1].strip().split(", ") == architectures.EQUAL.read_text().split()
    assert set(architectures.EQUAL.read_text().split()) == EQUAL
