"""A caller's patterns and grammars are read in time that is linear in their length.

Python's `re` holds the interpreter's lock: a search that is quadratic stops every request.
"""

import contextlib
import time
from collections.abc import Callable

import pytest

from gateway.engine.grammar.compiling import _check_lark
from gateway.engine.grammar.patterns import as_ecma, is_holdable
from gateway.errors import BadRequest

SHORT, LONG = 4_000, 16_000


def seconds(work: Callable[[str], object], text: str) -> float:
    """Measure the processor time of the faster of two runs."""
    taken = []
    for _ in range(2):
        started = time.thread_time()
        with contextlib.suppress(BadRequest):
            work(text)
        taken.append(time.thread_time() - started)
    return min(taken)


@pytest.mark.parametrize("work", [as_ecma, is_holdable])
@pytest.mark.parametrize(
    "form", [("[", "[^", "]"), ("[^", '"', ""), ("", "[", ""), ("", "[^", ""), ("", "\\u{", "")]
)
def test_a_pattern_of_many_brackets(
    work: Callable[[str], object], form: tuple[str, str, str]
) -> None:
    before, many, after = form
    short, long = (seconds(work, before + many * n + after) for n in (SHORT, LONG))
    assert long < 9 * short + 0.05


@pytest.mark.parametrize("form", [('"', '\\"'), ("/", "\\/"), ("", '"a" '), ("", "/a/ ")])
def test_a_grammar_of_many_quotes(form: tuple[str, str]) -> None:
    before, many = form
    short, long = (
        seconds(lambda text: _check_lark(text), f"start: {before}{many * n}") for n in (SHORT, LONG)
    )
    assert long < 9 * short + 0.05


@pytest.mark.parametrize(
    "source", ['start: "a', "start: /a", 'start: /a\n"/ <|im_end|> /"b/', 'start: "a" <|im_end|>']
)
def test_a_grammar_hides_nothing_in_a_text_that_is_none(source: str) -> None:
    """A regex may go over lines: the part between two regexes is no text."""
    with pytest.raises(BadRequest, match=r"without an end|not supported"):
        _check_lark(source)
