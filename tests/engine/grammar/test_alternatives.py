"""No value fits two of the alternatives that are said to be held apart.

Judged by jsonschema_rs: a value that fits the compiled schema fits the caller's.
"""

import copy
import json
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.engine.grammar.unenforced import hold
from gateway.errors import BadRequest
from tests.engine.grammar.drawn_rows import compiled

VALUES: list[Any] = [
    *(None, True, False, 0, 1, 1.0, 2, -1, 1.5, 1e20, "", "a", "ab", "1"),
    *([], [1], [1.0], [True], ["a"], [1, "a"], [[]], [{}]),
    *({}, {"a": 1}, {"a": 1.0}, {"a": True}, {"a": "x"}, {"a": None}, {"a": [1]}, {"a": {}}),
    *({"b": 1}, {"b": "x"}, {"a": 1, "b": 1}, {"a": 1.5, "b": "x"}, {"a": "x", "k": 1}),
    *({"a": {"k": "x"}}, {"k": "x"}, {"k": "y", "a": 1}, {"a": 2, "b": 2, "k": "x"}),
]
TYPES = ["null", "boolean", "integer", "number", "string", "array", "object"]
OBJECT = {"type": "object"}


def fits(schema: Any, value: Any) -> bool:
    return jsonschema_rs.Draft202012Validator(schema).is_valid(value)


NUMBERS: list[Any] = [
    [{"type": "integer"}, {"type": "number"}],
    [{"type": "number"}, {"type": ["integer", "null"]}],
    [{"type": "integer"}, {"type": "number", "maximum": 5}],
]


@pytest.mark.parametrize("ways", NUMBERS, ids=str)
@pytest.mark.parametrize("within", [{}, {"type": "integer"}, {"type": ["number", "string"]}])
def test_an_integer_is_a_number_too(ways: Any, within: dict[str, Any]) -> None:
    """Every integer fits both alternatives, which is none of them, so the keyword is named."""
    assert compiled({**within, "oneOf": ways}).unenforced == ("#/oneOf",)
    nested = {**OBJECT, "properties": {"n": {**within, "oneOf": ways}}, "required": ["n"]}
    assert compiled(nested).unenforced == ("#/properties/n/oneOf",)
    with pytest.raises(BadRequest, match="`oneOf` at # "):
        compiled({**within, "oneOf": ways}, strict=True)


leaves = st.one_of(
    st.sampled_from(TYPES).map(lambda name: {"type": name}),
    st.lists(st.sampled_from(TYPES), min_size=1, max_size=2, unique=True).map(
        lambda names: {"type": names}
    ),
    st.sampled_from(VALUES).map(lambda value: {"const": value}),
    st.lists(st.sampled_from(VALUES[:22]), min_size=1, max_size=2).map(lambda few: {"enum": few}),
    st.sampled_from(
        [
            *(True, False, {}, {"minimum": 1}, {"maximum": 1.0}, {"exclusiveMinimum": 1}),
            *({"type": "number", "multipleOf": 2}, {"type": "string", "pattern": "^a"}),
            *({"type": "string", "maxLength": 1}, {"type": "string", "minLength": 2}),
            *({"type": "array", "maxItems": 1}, {"type": "array", "items": {"type": "number"}}),
            *({"type": "integer", "const": 1.0}, {"type": "string", "enum": [1, "a"]}),
            *({"required": ["a"]}, {"required": ["b"]}, {**OBJECT, "additionalProperties": False}),
            *({"const": 1, "enum": [2, 1.0]}, {"$ref": "#/$defs/R"}),
        ]
    ),
)


def _more(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    objects = st.fixed_dictionaries(
        {"properties": st.dictionaries(st.sampled_from("abk"), inner, max_size=3)},
        optional={
            "type": st.sampled_from(["object", ["object", "null"]]),
            "required": st.lists(st.sampled_from("abk"), unique=True, max_size=2),
            "additionalProperties": st.one_of(st.booleans(), inner),
            "patternProperties": st.dictionaries(st.sampled_from(["^a", "k"]), inner, max_size=1),
        },
    )
    ways = st.lists(inner, min_size=2, max_size=3)
    return st.one_of(
        objects,
        objects,
        st.fixed_dictionaries({"type": st.just("array"), "items": inner}),
        st.fixed_dictionaries({"oneOf": ways}, optional={"type": st.sampled_from(TYPES)}),
        st.fixed_dictionaries({"anyOf": ways}),
    )


ways = st.lists(st.recursive(leaves, _more, max_leaves=4), min_size=2, max_size=3)
around = st.fixed_dictionaries(
    {},
    optional={
        "type": st.one_of(st.sampled_from(TYPES), st.just(["number", "object"])),
        "required": st.lists(st.sampled_from("abk"), unique=True, max_size=2),
        "properties": st.dictionaries(st.sampled_from("ab"), leaves, max_size=2),
        "additionalProperties": st.booleans(),
        "anyOf": st.just([{"type": "object"}, {"type": "number"}]),
    },
)


@pytest.mark.generator(weight=1)
@settings(max_examples=1500, deadline=None, database=None)
@given(ways=ways, around=around, definition=leaves)
def test_alternatives_held_apart_let_only_fitting_values_through(
    ways: list[Any], around: dict[str, Any], definition: Any
) -> None:
    """Types, constants, ranges and names that two alternatives may share."""
    schema = {**around, "oneOf": ways, "$defs": {"R": definition}}
    try:
        part = hold(copy.deepcopy(schema), 400)
    except BadRequest:
        return
    if part.unenforced:
        return
    for value in VALUES:
        assert not fits(part.schema, value) or fits(schema, value), json.dumps(value)
