"""What a head gains is measured with the answers that the model gives without it."""

import re
from pathlib import Path

import pytest

from demo.measure_head import measure
from demo.train_head import CHAT
from tests.checkpoints import AFTER_LAST, add_head, write_chat


def test_a_head_whose_guesses_are_right_saves_as_many_passes(tmp_path: Path) -> None:
    folder = add_head(write_chat(tmp_path, **AFTER_LAST), is_right=True)
    said = measure(folder, 1)
    found = re.match(
        r"8 answers: (\d+) of (\d+) guesses right, (\d+) passes for (\d+); speed ", said
    )
    assert found, said
    right, guesses, passes, without = map(int, found.groups())
    assert guesses / 2 < right <= guesses
    # A right guess saves a pass, unless the answer ends before it.
    assert 0 < without - passes <= right
    assert re.search(r"median \d+\.\d\d, half of them between \d+\.\d\d and \d+\.\d\d$", said)


def test_a_model_without_a_head_is_refused_with_the_next_step() -> None:
    with pytest.raises(SystemExit, match=r"has no head that fits: .*demo\.train_head"):
        measure(CHAT, 1)
