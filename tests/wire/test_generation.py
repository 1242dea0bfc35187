"""What form an answer is asked for in, in all the ways there are."""

from typing import Any

import orjson
import pytest
from pydantic import ValidationError

from gateway.errors import BadRequest
from gateway.jobs import Grammar
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
    with pytest.raises(BadRequest, match="one form alone, and has regex and choice"):
        grammar(structured_outputs={"regex": "a", "choice": ["a"], "json_object": False})
    with pytest.raises(BadRequest, match="'response_format' and 'guided_regex' each ask"):
        grammar(response_format={"type": "json_object"}, guided_regex="a")


def test_a_schema_at_the_end_of_the_prompt_is_held_to_where_the_model_says_so() -> None:
    """Graphiti's json_object mode: a toy would answer with anything."""
    prompt = f"Answer as JSON in the following format:\n\n{TEXT}"
    assert schema_from_prompt(ANY_OBJECT, prompt) == Grammar("json_schema", TEXT)
    for other in ("Just talk.", "In this format:\n\n{", 'Like so:\n\n{"a": 1}', "x\n\n[1]"):
        assert schema_from_prompt(ANY_OBJECT, other) == ANY_OBJECT
    regex = Grammar("regex", "a")
    assert schema_from_prompt(regex, prompt) == regex
    assert schema_from_prompt(None, prompt) is grammar(response_format={"type": "text"}) is None
