"""Values in calls that their format has no right words for."""

import time
from collections.abc import Mapping
from typing import Any

import pytest

from gateway.engine.answers.call_values import Allowed, Call, Schemas, read_all
from gateway.engine.answers.output_parts import arguments_json
from gateway.engine.answers.tool_formats import tool_format

_ANY: dict[str, Any] = {"type": ["string", "integer"]}
_A_TEXT: dict[str, Any] = {"properties": {"a": {"type": "string"}}}
SCHEMAS = {"f": {"type": "object", "properties": {"a": {}, "n": {"type": "number"}}}}


def read_qwen(text: str, schemas: Schemas) -> list[Call]:
    return read_all(tool_format("qwen3_coder").read, text, schemas)


def read_json(text: str, schemas: Schemas) -> list[Call]:
    return read_all(tool_format("openai").read, text, schemas)


def read_python(text: str, schemas: Schemas) -> list[Call]:
    return read_all(tool_format("lfm2").read, text, schemas)


@pytest.mark.parametrize("name", ["a", "n"])
@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "-Infinity", "1e999", "{1, 2}", "[1, {2}]", "[b'a']"]
)
def test_arguments_that_json_has_no_words_for_are_text(name: str, value: str) -> None:
    body = f"<function=f>\n<parameter={name}>\n{value}\n</parameter>\n</function>"
    (call,) = read_qwen(body, SCHEMAS)
    assert call == {"name": "f", "arguments": {name: value}}
    arguments_json(call["arguments"])


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_a_call_in_json_with_a_number_that_is_none_cannot_be_written(number: str) -> None:
    (call,) = read_json(f'{{"name": "f", "arguments": {{"n": {number}}}}}', SCHEMAS)
    with pytest.raises(ValueError, match="JSON compliant"):
        arguments_json(call["arguments"])


@pytest.mark.parametrize(
    "text",
    ["[f(3)]", "[f(3, n=4)]", "[f(**{'n': 3})]", "[f(n=1+2)]", "[f(a=x), f(n=3)]", "[f"],
)
def test_a_call_in_python_that_is_none_by_names_and_values_is_not_read(text: str) -> None:
    with pytest.raises((ValueError, SyntaxError)):
        read_python(text, SCHEMAS)


def test_calls_in_python_may_have_the_literals_of_json() -> None:
    text = "[f(a=true, n=-1.5), a.g(o={'k': null, 'l': [false, None]})]"
    assert read_python(text, SCHEMAS) == [
        {"name": "f", "arguments": {"a": True, "n": -1.5}},
        {"name": "a.g", "arguments": {"o": {"k": None, "l": [False, None]}}},
    ]


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"allOf": [{"type": ["string", "integer"]}, {"type": "string"}]}, "10115"),
        ({"type": ["string", "integer"], "allOf": [{"type": "string"}]}, "10115"),
        (
            {"allOf": [{"type": ["string", "integer"]}, {"minLength": 1}, {"type": "integer"}]},
            10115,
        ),
        ({"$ref": "#/$defs/any", "type": ["string", "null"]}, "10115"),
        ({"$ref": "#/$defs/any", "anyOf": [{"type": "string"}, {"type": "null"}]}, "10115"),
        ({"allOf": [{"type": "number"}, {"type": ["integer", "string"]}]}, 10115),
        ({"anyOf": [{"type": "string"}, {"minimum": 3}]}, "10115"),
        ({"type": ["integer", "null"], "anyOf": [{"type": "null"}, {"minimum": 3}]}, 10115),
    ],
)
def test_keywords_beside_one_another_narrow_the_types(schema: Any, value: Any) -> None:
    whole = {"properties": {"a": schema}, "$defs": {"any": {"type": ["string", "integer"]}}}
    body = "<function=f>\n<parameter=a>\n10115\n</parameter>\n</function>"
    (call,) = read_qwen(body, {"f": whole})
    assert call["arguments"] == {"a": value}


@pytest.mark.parametrize(
    ("some", "other", "types"),
    [
        (["number"], ["integer"], {"integer"}),
        (["number", "string"], ["integer", "null"], {"integer"}),
        (["number", "string"], ["number"], {"number", "integer"}),
        (["number", "integer"], ["integer"], {"integer"}),
        (["integer", "string"], ["string"], {"string"}),
        (["string"], ["null"], set()),
        (["number", "integer"], ["string"], set()),
    ],
)
def test_an_integer_is_a_number(some: list[str], other: list[str], types: set[str]) -> None:
    for pair in ((some, other), (other, some)):
        assert Allowed({}).types({"allOf": [{"type": each} for each in pair]}) == types


@pytest.mark.parametrize(
    ("types", "text", "value"),
    [("integer", "2.0", "2"), ("number", "2.0", "2.0"), ("number", "2", "2")],
)
def test_a_whole_number_is_an_integer_only_where_no_other_may_be(
    types: str, text: str, value: str
) -> None:
    body = f"<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>"
    (call,) = read_qwen(body, {"f": {"properties": {"a": {"type": types}}}})
    assert repr(call["arguments"]["a"]) == value


def test_references_that_branch_are_each_read_once() -> None:
    """A million of them took seconds."""
    defs: dict[str, Any] = {
        f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 10} for i in range(6)
    }
    root = {"$defs": {**defs, "d6": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/d0"}]}}}
    start = time.thread_time()
    assert Allowed(root).types({"$ref": "#/$defs/d0"}) == {"integer"}
    allowed = Allowed(root)
    assert allowed.types(allowed.inner(root["$defs"]["d0"], "a")) == frozenset()
    assert time.thread_time() - start < 1


@pytest.mark.parametrize(
    "schema",
    [
        {"additionalProperties": {"type": "string"}},
        {"anyOf": [{"properties": {"a": {"type": "string"}}}, {"type": "null"}]},
        {"$ref": "#/$defs/all", "$defs": {"all": {"properties": {"a": {"type": "string"}}}}},
        {"properties": [], "allOf": [{"properties": {"a": {"type": "string"}}}]},
    ],
)
def test_an_argument_has_its_type_wherever_the_schema_states_it(schema: Any) -> None:
    text = "<tool_call><function=f>\n<parameter=a>\n7\n</parameter></function></tool_call>"
    (call,) = read_qwen(text, {"f": {"type": "object", **schema}})
    assert call["arguments"] == {"a": "7"}


def written(arguments: Mapping[str, str]) -> str:
    """Write a call of `f` whose arguments are these texts."""
    pairs = (f"<parameter={name}>\n{text}\n</parameter>" for name, text in arguments.items())
    return f"<tool_call><function=f>\n{''.join(pairs)}</function></tool_call>"


@pytest.mark.parametrize("word", ["anyOf", "allOf"])
@pytest.mark.parametrize("is_referred", [False, True], ids=["its own", "of a reference"])
def test_a_schema_of_many_parts_takes_little_time_for_each_argument(
    word: str, is_referred: bool
) -> None:
    """The lane waits for it: 200 arguments took four seconds."""
    many: dict[str, Any] = {word: [{"minProperties": i} for i in range(16_000)]}
    if is_referred:
        many = {"$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(16_000)}}
        many[word] = [{"$ref": "#/$defs/d0"}]
    of_many = {f"b{i}": {word: many.get(word)} for i in range(100)}
    schema = {"type": "object", "properties": {"a": {"type": "string"}, **of_many}, **many}
    names = ["a", *(f"a{i}" for i in range(100)), *of_many]
    start = time.process_time()
    (call,) = read_qwen(written(dict.fromkeys(names, "7")), {"f": schema})
    assert time.process_time() - start < 1
    assert call["arguments"] == {**dict.fromkeys(names, 7), "a": "7"}


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": "string"}}, "allOf": [{"additionalProperties": _ANY}]},
        {"additionalProperties": _ANY, "allOf": [{"properties": {"a": {"type": "string"}}}]},
        {"$ref": "#/$defs/any", "$defs": {"any": {"additionalProperties": _ANY}}, **_A_TEXT},
        {"anyOf": [_A_TEXT, {"minProperties": 1, **_A_TEXT}], "additionalProperties": _ANY},
    ],
)
def test_schemas_that_all_hold_narrow_what_an_argument_may_be(schema: Any) -> None:
    (call,) = read_qwen(written({"a": "7"}), {"f": schema})
    assert call["arguments"] == {"a": "7"}


def test_an_alternative_that_says_nothing_of_an_argument_narrows_nothing() -> None:
    schema = {"properties": {"a": _ANY}, "anyOf": [_A_TEXT, {"required": ["b"]}]}
    (call,) = read_qwen(written({"a": "7"}), {"f": schema})
    assert call["arguments"] == {"a": 7}


@pytest.mark.parametrize("name", ["a", "item"])
def test_the_items_of_a_list_say_nothing_of_an_argument(name: str) -> None:
    (call,) = read_qwen(written({name: "7"}), {"f": {"items": {"type": "string"}}})
    assert call["arguments"] == {name: 7}


def test_quotes_are_left_out_around_a_value_that_this_argument_lists() -> None:
    listed = {"$ref": "#/$defs/colour"}
    schema = {
        "properties": {"a": listed, "b": {"anyOf": [listed, {"type": "null"}]}, "c": {}},
        "$defs": {"colour": {"enum": ["red", '"blue"']}},
    }
    for text, value in (('"red"', "red"), ('"blue"', '"blue"'), ('"green"', '"green"')):
        (call,) = read_qwen(written({"a": text, "b": text, "c": f"'{value}'"}), {"f": schema})
        assert call["arguments"] == {"a": value, "b": value, "c": f"'{value}'"}
