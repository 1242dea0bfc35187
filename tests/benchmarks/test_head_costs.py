"""What a head costs is measured on a model that has one."""

from pathlib import Path

import pytest

from benchmarks.head_costs import load, measure_rest
from tests.checkpoints import HEADED, add_head, write_chat


def test_a_model_is_loaded_with_its_head_and_without_it(tmp_path: Path) -> None:
    folder = add_head(write_chat(tmp_path, **HEADED))
    for has_head in (True, False):
        seconds, busy, megabytes = load(folder, has_head)
        assert min(seconds, busy, megabytes) > 0


def test_a_model_without_a_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="it has no head"):
        load(write_chat(tmp_path, **HEADED), True)


def test_a_resting_heads_steps_are_timed_by_turns(tmp_path: Path) -> None:
    told = measure_rest(add_head(write_chat(tmp_path, **HEADED)), rows=2, rounds=2)
    assert told.startswith("rows: 2; a step while the head rests: ")
