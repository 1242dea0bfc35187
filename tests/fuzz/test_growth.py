"""Every field that is twice as large takes twice as long to read, not four times."""

from pathlib import Path

import pytest

from gateway.errors import ModelNotFound
from tests.fuzz.asking import POSTS, scripted
from tests.fuzz.growing import ANY, OWN, body, least, slow, uncollected, understood
from tests.fuzz.harness import FIELDS

pytestmark = pytest.mark.slow

SHORT, LONG = 100_000, 2_000_000  # bytes of one field, which are then four times as many


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("nbytes", [SHORT, pytest.param(LONG, marks=pytest.mark.soak)])
def test_a_proper_value_of_a_field_costs_time_in_proportion_to_its_length(
    path: str, nbytes: int, tmp_path: Path
) -> None:
    """Messages, calls, parts, tools, schemas, prompts; well formed or nearly."""
    models, _ = scripted(tmp_path)
    assert not slow(path, OWN, nbytes, models)


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("nbytes", [SHORT // 4, pytest.param(LONG, marks=pytest.mark.soak)])
def test_any_json_in_a_field_costs_time_in_proportion_to_its_length(
    path: str, nbytes: int, tmp_path: Path
) -> None:
    """Any JSON in any field, those that are refused and those that nobody knows among them."""
    models, _ = scripted(tmp_path)
    assert not slow(path, dict.fromkeys(FIELDS[path], ANY), nbytes, models)


@pytest.mark.parametrize("path", ["/chat/completions", "/responses"])
def test_a_list_that_is_all_wrong_is_refused_at_its_first_entry(path: str, tmp_path: Path) -> None:
    """Nobody would read the list's other faults, and they cost more than right entries."""
    models, _ = scripted(tmp_path)
    name = "messages" if path == "/chat/completions" else "input"

    def seconds(how: str) -> float:
        given = body(path, name, OWN[name][how](200_000))
        return least(lambda: understood(path, given, models), 3)

    with uncollected():
        assert seconds("wrong parts") < seconds("parts")


@pytest.mark.parametrize("size", [1 << 10, 1 << 20])
def test_a_name_in_a_path_costs_nothing_whatever_its_length(size: int, tmp_path: Path) -> None:
    """/v1/models and /admin look it up as requests do: a name that is too long is like no other."""
    models, _ = scripted(tmp_path)

    def look_up() -> None:
        with pytest.raises(ModelNotFound) as caught:
            models.resolve("writer"[:5] + "x" * size)
        assert len(caught.value.message) < 500

    with uncollected():
        assert least(look_up, 3) < 0.01
