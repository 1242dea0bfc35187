"""The form of an answer that a request asks for, in all the ways there are."""

import json
import re
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import ValidationError

from gateway.errors import BadRequest
from gateway.jobs.chat import Grammar
from gateway.wire.chat import ChatRequest
from gateway.wire.generation import ANY_OBJECT, schema_from_prompt
from gateway.wire.validation import read_request

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}
TEXT = '{"type":"object","properties":{"b":{"type":"string"},"a":{"type":"integer"}}}'
NAMED = {"name": "x", "schema": SCHEMA}


def grammar(**fields: Any) -> Grammar | None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return read_request(orjson.dumps(body), ChatRequest, strict=True).request.form()[1]


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": NAMED}},
        {"response_format": {"type": "json_schema", "json_schema": {**NAMED, "strict": True}}},
        {"response_format": {"type": "json_object", "value": SCHEMA}},  # huggingface_hub's
        {"response_format": {"type": "json", "value": SCHEMA}},  # TGI's
        {"response_format": {"type": "json", "value": TEXT}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": TEXT}},
        {"guided_json": SCHEMA},
        {"guided_json": TEXT},
    ],
)
def test_a_schema_keeps_the_order_of_its_keys(fields: dict[str, Any]) -> None:
    strict = fields.get("response_format", {}).get("json_schema", {}).get("strict", False)
    assert grammar(**fields) == Grammar("json_schema", TEXT, strict=strict)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        {"structured_outputs": {"json_object": True}},
    ],
)
def test_any_object_is_a_schema_too(fields: dict[str, Any]) -> None:
    assert grammar(**fields) == Grammar("json_schema", '{"type":"object"}')


@pytest.mark.parametrize(
    ("form", "told"),
    [
        ({"type": "json"}, "type 'json' needs a 'value'"),
        ({"type": "json_schema", "json_schema": {"strict": True}}, "strict 'json_schema' needs a"),
        (
            {"type": "json_schema", "json_schema": {"strict": True, "schema": None}},
            "a strict 'json_schema' needs a 'schema'",
        ),
        ({"type": "text", "value": SCHEMA}, "does not go with type 'text'"),
        ({"type": "json_schema", "json_schema": NAMED, "value": SCHEMA}, "does not go with type"),
        ({"type": "json", "value": 3}, "response_format.value"),
        ({"type": "json", "value": "{"}, "is not JSON"),
    ],
)
def test_a_value_without_its_type_is_refused(form: dict[str, Any], told: str) -> None:
    with pytest.raises(BadRequest, match=told) as caught:
        grammar(response_format=form)
    assert (caught.value.param or "").startswith("response_format")


def test_regex_choice_and_grammar_have_two_names_each() -> None:
    for name, value, source in (
        ("regex", "[a-z]+", "[a-z]+"),
        ("choice", ["a", "b"], '["a","b"]'),
        ("grammar", 'start: "x"', 'start: "x"'),
    ):
        expected = Grammar(name, source)  # type: ignore[arg-type]
        assert grammar(structured_outputs={name: value}) == expected
        assert grammar(**{f"guided_{name}": value}) == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}, "guided_regex": "a"},
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        {"structured_outputs": {"json": {}, "json_object": True}},
        {"response_format": {"type": "json_object", "json_schema": NAMED, "value": {}}},
        {"guided_regex": "a", "guided_json": SCHEMA},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "yaml"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": []}}},
        {"structured_outputs": {"json": "{"}},
        {"structured_outputs": {"choice": []}},
        {"guided_choice": []},
        {"guided_regex": ""},
        {"response_format": "json"},
    ],
)
def test_what_is_no_form_or_two_at_once_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises((BadRequest, ValidationError)):
        grammar(**fields)


def test_two_forms_are_told_apart_by_name() -> None:
    both = "'structured_outputs.regex' and 'structured_outputs.choice' ask for different"
    with pytest.raises(BadRequest, match=both):
        grammar(structured_outputs={"regex": "a", "choice": ["a"], "json_object": False})
    with pytest.raises(BadRequest, match="'response_format' and 'guided_regex' ask for different"):
        grammar(response_format={"type": "json_object"}, guided_regex="a")


def test_one_grammar_in_the_fields_of_two_versions_of_vllm_counts_as_one() -> None:
    """guidance's VLLMModel sends it so."""
    text = 'start: "yes" | "no"'
    asked = grammar(guided_grammar=text, structured_outputs={"grammar": text})
    assert asked == Grammar("grammar", text)


def test_a_form_that_is_strict_in_one_field_is_strict() -> None:
    strict = {"type": "json_schema", "json_schema": {**NAMED, "strict": True}}
    asked = grammar(response_format=strict, guided_json=TEXT)
    assert asked == Grammar("json_schema", TEXT, strict=True)


def ways(kind: str, value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each way to ask for a form: the name that errors have of it, and the fields."""
    yield f"structured_outputs.{kind}", {"structured_outputs": {kind: value}}
    yield f"guided_{kind}", {f"guided_{kind}": value}
    if kind == "json":
        text = json.dumps(value)
        yield "structured_outputs.json", {"structured_outputs": {"json": text}}
        yield "guided_json", {"guided_json": text}
        form: dict[str, Any] = {"type": "json_schema", "json_schema": {"schema": value}}
        yield "response_format.json_schema", {"response_format": form}
        yield "response_format.value", {"response_format": {"type": "json", "value": text}}
        yield "response_format.value", {"response_format": {"type": "json_object", "value": value}}
        if value == {"type": "object"}:
            yield "structured_outputs.json_object", {"structured_outputs": {"json_object": True}}
            yield "response_format", {"response_format": {"type": "json_object"}}


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.sampled_from([0, 1, 1.0, "0", ""]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner),
    max_leaves=4,
)
WANTED = st.one_of(
    st.tuples(
        st.just("json"),
        st.just({"type": "object"}) | st.dictionaries(st.sampled_from("abc"), JSON_VALUES),
    ),
    st.tuples(st.just("choice"), st.lists(st.sampled_from("ab"), min_size=1, max_size=2)),
    st.tuples(st.sampled_from(["regex", "grammar"]), st.sampled_from(["a", "b", '["a"]'])),
)


def turned(value: Any) -> Any:
    """Write the keys of all objects in the other order."""
    if isinstance(value, dict):
        return {key: turned(inner) for key, inner in reversed(value.items())}
    return [turned(inner) for inner in value] if isinstance(value, list) else value


@given(st.data())
def test_two_ways_to_ask_count_as_one_where_they_mean_the_same(data: st.DataObject) -> None:
    kind, value = data.draw(WANTED)
    other_kind, other_value = data.draw(st.just((kind, turned(value))) | WANTED)
    name, fields = data.draw(st.sampled_from(list(ways(kind, value))))
    other_name, other_fields = data.draw(st.sampled_from(list(ways(other_kind, other_value))))
    asked = {**fields, **other_fields}
    if len(asked) == 1:  # one field has both as parts, or only the second
        assume("structured_outputs" in asked and name != other_name)
        asked = {field: {**fields[field], **other_fields[field]} for field in asked}
    texts = [json.dumps(each, sort_keys=True) for each in (value, other_value)]
    if kind == other_kind and texts[0] == texts[1]:
        assert grammar(**asked) in (grammar(**fields), grammar(**other_fields))
        return
    with pytest.raises(BadRequest, match="ask for different formats") as caught:
        grammar(**asked)
    assert set(re.findall("'(.*?)'", caught.value.message)) == {name, other_name}


def test_a_schema_at_the_end_of_the_prompt_is_held_to_where_the_model_says_so() -> None:
    """Graphiti's json_object mode: a toy would answer with anything."""
    prompt = f"Answer as JSON in the following format:\n\n{TEXT}"
    assert schema_from_prompt(ANY_OBJECT, prompt) == Grammar("json_schema", TEXT)
    for other in ("Just talk.", "In this format:\n\n{", 'Like so:\n\n{"a": 1}', "x\n\n[1]"):
        assert schema_from_prompt(ANY_OBJECT, other) == ANY_OBJECT
    regex = Grammar("regex", "a")
    assert schema_from_prompt(regex, prompt) == regex
    assert schema_from_prompt(None, prompt) is grammar(response_format={"type": "text"}) is None
