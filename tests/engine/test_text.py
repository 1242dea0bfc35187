"""Text as it grows: whole characters, and no part of a stop string."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gateway.engine.text import Decoder, StopScanner, held_back

DEMO = Path(__file__).parents[2] / "gateway" / "demo" / "chat" / "tokenizer.json"
TOKENIZER: Tokenizer = Tokenizer.from_file(str(DEMO))


def stream(text: str, stops: tuple[str, ...] = ()) -> tuple[list[str], StopScanner]:
    """Push a text's tokens one at a time."""
    decoder, scanner = Decoder(TOKENIZER, ()), StopScanner(stops)
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    pieces = [scanner.push(decoder.push(token)) for token in ids]
    return [*pieces, scanner.flush()], scanner


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=60))
def test_any_text_comes_through_whole_in_whole_characters(text: str) -> None:
    """Emoji of four bytes come as one piece, when the last byte is there."""
    pieces, _ = stream(text)
    assert "".join(pieces) == TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False).ids)
    assert not any("\ufffd" in piece for piece in pieces)


def test_half_a_character_at_the_end_is_dropped() -> None:
    """There is nothing right to show for it."""
    ids = TOKENIZER.encode("ok🙂", add_special_tokens=False).ids
    decoder = Decoder(TOKENIZER, ())
    assert "".join(decoder.push(token) for token in ids[:-1]) == "ok"


def test_silent_tokens_have_no_text() -> None:
    """The end of a turn is no part of it."""
    decoder = Decoder(TOKENIZER, {2})
    ids = TOKENIZER.encode("a b", add_special_tokens=False).ids
    assert "".join(map(decoder.push, [2, *ids, 2])) == "a b"


@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_a_stop_string_ends_the_text_before_it(text: str, stops: list[str]) -> None:
    """Never a letter of it, however the tokens fall; the first to be complete counts."""
    pieces, growing = stream(text, tuple(stops))
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    assert growing.is_stopped == bool(found)
    assert "".join(pieces) == (text[: min(found)[1]] if found else text)


def test_a_stop_string_inside_another_ends_the_text_first() -> None:
    """It is complete first."""
    pieces, _ = stream("xabby", ("abby", "b"))
    assert "".join(pieces) == "xa"


@pytest.mark.parametrize(
    ("text", "stops", "held"),
    [
        ("abc", ["cd"], 1),
        ("abc", ["bcd", "cd"], 2),
        ("abc", ["x"], 0),
        ("abc", [], 0),
        ("", ["a"], 0),
    ],
)
def test_only_what_may_begin_a_stop_string_is_held_back(
    text: str, stops: list[str], held: int
) -> None:
    """Everything else is told at once."""
    assert held_back(text, stops) == held
