"""Every number of an answer is one that a double holds: to most readers 1e999 is infinite."""

import json
import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.engine.grammar.calls import answer_grammar
from gateway.engine.grammar.compiling import compile_grammar
from gateway.engine.grammar.matching import Matcher, open_part
from gateway.engine.grammar.schema_bounds import Shape
from gateway.jobs.chat import Calling, Function, Grammar
from tests.engine.grammar.drawn_rows import ENDS, OPEN, allowed, compiled, ids, text, tokenizer

NUMBER = {"type": "number"}
THING = {"type": "object", "properties": {"n": NUMBER}, "required": ["n"]}
FORMS: list[tuple[Any, str]] = [
    (NUMBER, ""),
    ({}, "["),
    ({"type": "object"}, '{"a \\"1e":[true,-'),
    ({"type": "array", "items": {"type": ["number", "string"]}}, '["a\\\\",1e5,'),
    ({**THING, "additionalProperties": False}, '{"n":'),
    ({"type": "integer"}, "-"),
    ({"$defs": {"N": NUMBER}, "items": {"$ref": "#/$defs/N"}}, "[0.5,1e"),
]
CALL = answer_grammar(Calling(functions=[Function("f", THING)], forced=True), None, None)


def write(matcher: Matcher, start: str, rng: random.Random) -> str:
    """Go on with nines, or with an exponent, as long as a grammar allows it.

    Return the tokens, with the digit that an exponent may want.
    """
    said = ids(start)
    for token in said:
        matcher.consume(token)
    begun = len(said)
    for _ in range(330):
        spelled = {
            token: tokenizer().tokens.decode_bytes([token])
            for token in allowed(matcher)
            if token not in ENDS
        }
        on = [token for token, word in spelled.items() if {*word} <= {*b"9eE+"}]
        if matcher.error or not on:
            break
        if rng.random() < 0.99 and len(on) > 1:
            on = [token for token in on if {*spelled[token]} == {*b"9"}] or on
        said.append(rng.choice(on))
        matcher.consume(said[-1])
    assert matcher.error is None
    number = text(said[begun:])
    return number if number[-1:].isdigit() else f"{number}0"


@pytest.mark.parametrize(("schema", "start"), FORMS, ids=str)
@pytest.mark.parametrize("shape", [OPEN, Shape()], ids=["as written", "as served"])
def test_no_number_becomes_infinite(schema: Any, start: str, shape: Shape) -> None:
    """Neither by digits nor by an exponent, at the root or where the schema is open."""
    grammar = compiled(schema, shape)
    for seed in range(3):
        number = write(grammar.matcher(), start, random.Random(seed))
        before = start[len(start.rstrip("-1e")) :]
        assert math.isfinite(float(before + number)), number


def test_the_arguments_of_a_forced_call_have_finite_numbers() -> None:
    assert CALL is not None
    grammar = compile_grammar(tokenizer(), CALL)
    number = write(grammar.matcher(), '{"name":"f","arguments":{"n":1e30', random.Random(1))
    assert float(f"1e30{number}") < math.inf


@pytest.mark.parametrize(
    ("said", "is_taken"),
    [
        *(("1.7976931348623157e308", True), ("1.8e308", False), ("1e0000000000309", False)),
        *(("-1E+308", True), ("-1E+309", False), ("1e-999", True), ("1" * 309, True)),
        *(("9" * 309, False), ("1" * 309 + "e1", False), ("0." + "0" * 300 + "1e5", True)),
        ("0." + "9" * 300, True),
    ],
)
def test_whatever_a_double_holds_may_be_written(said: str, is_taken: bool) -> None:
    *before, last = ids(said)
    matcher = compiled(NUMBER).matcher(before)
    assert matcher.error is None
    assert (last in allowed(matcher)) == is_taken


def test_texts_may_have_any_digits() -> None:
    for said in ('"1e999', '"\\\\1e99', '"\\"' + "9" * 400):
        assert {*ids("9")} <= {*allowed(compiled({}).matcher(ids(said)))}


pieces = st.lists(st.sampled_from(['"', "\\", "1", "e", ".", "-", ",", "a", "é", "0" * 50]))


@settings(max_examples=100, deadline=None, database=None)
@given(pieces, pieces)
def test_the_open_part_of_a_text_says_all_that_counts_for_the_rest(
    first: list[str], rest: list[str]
) -> None:
    before, after = "".join(first).encode(), "".join(rest).encode()
    assert open_part(open_part(before) + after) == open_part(before + after)


@settings(max_examples=50, deadline=None, database=None)
@given(st.lists(st.text(max_size=5) | st.floats(allow_nan=False, allow_infinity=False), max_size=4))
def test_nothing_is_open_after_a_text_or_a_list(values: list[Any]) -> None:
    said = json.dumps([*values, "x"]).encode()
    assert open_part(said) == b""
    assert open_part(said[:-2]) == b'"'


@pytest.mark.parametrize("key", ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
@pytest.mark.parametrize("bound", [1e-100, -1e-300, 5e-324])
def test_a_bound_too_small_to_be_held_is_named(key: str, bound: float) -> None:
    grammar = Grammar("json_schema", json.dumps({"type": "number", key: bound}))
    assert compile_grammar(tokenizer(), grammar).unenforced == (f"#/{key}",)
