"""Schemas are tightened as copies; a value that fits the copy fits the original."""

import json
from typing import Any

import pytest

from gateway.engine.grammar.schema_bounds import Shape, bound_strings, close_objects, complete
from tests.engine.grammar.drawn_rows import OPEN, allowed, answer, compiled, ids

TEXT: dict[str, Any] = {"type": "string"}
NULLABLE = {"anyOf": [TEXT, {"type": "null"}]}


def thing(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def test_bounds_are_added_where_there_are_none() -> None:
    schema = {
        "$defs": {"A": {"type": "array", "items": TEXT}},
        **thing(
            a={"type": "array", "prefixItems": [TEXT], "items": TEXT, "maxItems": 50},
            b={"anyOf": [{"type": "string", "minLength": 9}, {"type": "string", "maxLength": 2}]},
            c={"type": "object", "additionalProperties": TEXT},
        ),
    }
    limited = bound_strings(schema, 5, 3)
    short = {"type": "string", "maxLength": 5}
    assert limited["$defs"]["A"] == {"type": "array", "items": short, "maxItems": 3}
    assert limited["properties"]["a"] == {
        "type": "array",
        "prefixItems": [short],
        "items": short,
        "maxItems": 50,
    }
    assert limited["properties"]["b"]["anyOf"] == [
        {"type": "string", "minLength": 9, "maxLength": 9},
        {"type": "string", "maxLength": 2},
    ]
    names = limited["properties"]["c"]
    assert list(names["patternProperties"].values()) == [short]
    assert (names["additionalProperties"], names["maxProperties"]) == (False, 3)


def test_an_added_bound_is_no_less_than_the_required_items() -> None:
    many = bound_strings({"type": "array", "minItems": 9}, 5, 3)
    assert isinstance(many, dict)
    assert many["maxItems"] == 9


def test_settled_strings_keep_their_own_bounds() -> None:
    """Enumerations, constants, formats, patterns; and data that only looks like a schema."""
    for schema in (
        {"type": "string", "enum": ["long enough"]},
        {"const": {"type": "string"}},
        {"type": "string", "format": "uuid"},
        {"type": "string", "pattern": "^a{9}$"},
        {"$ref": "#/$defs/x"},
        {"type": "boolean", "default": {"type": "string"}, "examples": [TEXT]},
        {"type": "integer", "minimum": 0, "exclusiveMaximum": 9},
    ):
        assert bound_strings(schema, 3, 3) == schema


def test_numbers_are_bounded_where_strings_are() -> None:
    """A small model goes on with digits as it does with letters."""
    for seed in range(5):
        told = answer(compiled({"type": "number"}, Shape(max_string_chars=3)).matcher(), seed)
        assert len(told) <= 22


@pytest.mark.parametrize("shape", [Shape(), Shape(max_string_chars=3)])
@pytest.mark.parametrize(
    ("schema", "start", "digits"),
    [
        ({"type": "number", "minimum": 0, "maximum": 1}, "0.", 10),
        ({"type": "number", "exclusiveMinimum": -1.5, "exclusiveMaximum": 0}, "-0.", 10),
        ({"type": ["number", "null"], "minimum": 0.25, "maximum": 0.75}, "0.", 10),
        ({"type": "number", "minimum": 1e-6, "maximum": 1}, "0.", 10),
        ({"type": "number", "minimum": 0}, "1", 15),
        ({"type": "number", "maximum": 5}, "-1", 15),
    ],
    ids=str,
)
def test_numbers_with_bounds_end(schema: Any, start: str, digits: int, shape: Shape) -> None:
    matcher = compiled(schema, shape).matcher(ids(start))
    said = 0
    while not matcher.is_over and said <= digits:
        more = {ids(digit)[0] for digit in "137"} & {*allowed(matcher)}
        if not more:
            break
        matcher.consume(min(more))
        said += 1
    assert matcher.may_end
    assert said <= digits


def test_numbers_keep_the_digits_that_their_bounds_need() -> None:
    """A multipleOf keeps them too; bounds that only finer numbers fit are left as they came."""
    small = {"type": "number", "minimum": 0.00025, "maximum": 0.0003}
    assert compiled(small, Shape(max_string_chars=3)).matcher(ids("0.00027")).may_end
    for schema in (
        {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.5},
        {"type": "number", "minimum": 1e-9, "maximum": 2e-9},
    ):
        assert bound_strings(schema, None, None) == schema
    finer = compiled({"type": "number", "minimum": 1e-9, "maximum": 2e-9}, Shape())
    assert finer.matcher(ids("0.0000000015")).may_end


COUNTED: list[tuple[dict[str, Any], list[Any]]] = [
    ({"type": "array", "items": {"type": "null"}, "minItems": 1.0, "maxItems": 2.0}, [[None] * 2]),
    ({"type": "string", "minLength": 1.0, "maxLength": 2.0}, ["ab"]),
    ({"type": "object", "additionalProperties": {"const": 1.0}, "maxProperties": 1.0}, [{"a": 1}]),
    ({**thing(a=TEXT, b=TEXT), "minProperties": 1.0}, [{"b": "x"}]),
    ({"type": "integer", "minimum": 2.0, "exclusiveMaximum": 1e1, "multipleOf": 4.0}, [4, 8]),
    ({"type": "array", "contains": {"const": 1.0}, "minContains": 1.0, "maxItems": 1e3}, [[1]]),
    ({"type": "string", "maxLength": 2**32}, ["a" * 99]),
    ({"type": "array", "maxItems": 1e300}, [[1, 2, 3]]),
]


@pytest.mark.parametrize(("schema", "values"), COUNTED, ids=str)
@pytest.mark.parametrize("shape", [OPEN, Shape(), Shape(max_array_items=3)], ids=str)
def test_a_whole_float_counts_as_an_integer(
    schema: dict[str, Any], values: list[Any], shape: Shape
) -> None:
    """A count may also be larger than any answer."""
    for value in values:
        said = json.dumps(value, separators=(",", ":"))
        assert compiled(schema, shape).matcher(ids(said)).may_end
    if "contains" not in schema:
        assert not compiled(schema, shape, strict=True).unenforced


def test_integers_are_always_exact() -> None:
    whole = {"minimum": -(2**53 - 1), "maximum": 2**53 - 1}
    assert bound_strings({"type": "integer"}, None, None) == {"type": "integer", **whole}
    assert bound_strings({"type": ["integer", "null"]}, None, None)["maximum"] == 2**53 - 1
    above = {"type": "integer", "exclusiveMinimum": 3}
    assert bound_strings(above, None, None) == {**above, "maximum": 2**53 - 1}
    for schema in ({"type": "number"}, {}, True, {"enum": [1]}):
        assert bound_strings(schema, None, None) == schema
    grammar = compiled({"type": "integer"})
    for said in ("9007199254740991", "-9007199254740991"):
        assert grammar.matcher(ids(said)).is_over
    assert grammar.matcher(ids("9007199254740992")).error


def test_open_values_are_bounded_all_the_way_down() -> None:
    for schema in ({}, {"type": "object"}, thing(a={}, b=True)):
        grammar = compiled(schema, Shape(max_string_chars=4, max_array_items=2))
        for seed in range(5):
            assert is_small(json.loads(answer(grammar.matcher(), seed)))


def is_small(value: Any) -> bool:
    children = [*value.values()] if isinstance(value, dict) else value
    if isinstance(children, list):
        return len(children) <= 2 and all(map(is_small, children))
    return not isinstance(value, str) or len(value) <= 4


def test_properties_that_may_say_nothing_are_all_emitted() -> None:
    """Graphiti's EdgeTimestamps has no `required`; a field optional in earnest stays so."""
    stamps = thing(valid_at={**NULLABLE, "default": None}, invalid_at=NULLABLE)
    assert complete(stamps)["required"] == ["valid_at", "invalid_at"]
    some = {**thing(a=TEXT, b=NULLABLE, c={"type": ["integer", "null"]}), "required": ["b"]}
    assert complete(some) == some
    del some["properties"]["a"]
    assert complete(some)["required"] == ["b", "c"]
    assert complete({**stamps, "maxProperties": 1}) == {**stamps, "maxProperties": 1}


def test_recursion_is_not_made_endless() -> None:
    """A default that stands for no child must not become a child that always has one."""
    node = {"$defs": {"N": thing(next={"$ref": "#/$defs/N", "default": None})}, "$ref": "#/$defs/N"}
    assert complete(node) == node
    listed = {"$defs": {"N": thing(next={"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]})}}
    assert complete({**listed, "$ref": "#/$defs/N"})["$defs"]["N"]["required"] == ["next"]


def test_objects_are_closed_unless_others_speak_of_them() -> None:
    """Extra properties only where the schema says so, or names none."""
    assert close_objects(thing(a=TEXT))["additionalProperties"] is False
    for schema in (
        {**thing(a=TEXT), "additionalProperties": True},
        {"type": "object"},
        {"allOf": [thing(a=TEXT), thing(b=TEXT)]},
        {**thing(a=TEXT), "anyOf": [thing(b=TEXT), thing(c=TEXT)]},
        {**thing(a=TEXT), "required": ["z"]},
    ):
        assert close_objects(schema) == schema
