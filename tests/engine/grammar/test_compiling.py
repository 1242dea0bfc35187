"""A row writes only text that the caller's grammar asked for; other grammars are refused."""

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from gateway.engine.grammar.calls import answer_grammar
from gateway.engine.grammar.compiling import GrammarBounds, compile_grammar, try_grammar
from gateway.engine.grammar.schema_bounds import Shape
from gateway.errors import BadRequest
from gateway.jobs.chat import Calling, Function, Grammar
from gateway.serving.sandbox import Sandbox
from gateway.settings import Settings
from tests.engine.grammar.drawn_rows import (
    OPEN,
    allowed,
    answer,
    compiled,
    ids,
    schema_grammar,
    tokenizer,
)
from tests.sandboxes import sandbox

TEXT = {"type": "string"}
D4 = {"$schema": "http://json-schema.org/draft-04/schema#"}
D7 = {"$schema": "http://json-schema.org/draft-07/schema#"}
NAME = {"type": "string", "title": "Name", "description": "A name"}
NULLABLE = {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}


def thing(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def closed(**properties: Any) -> dict[str, Any]:
    return {**thing(**properties), "additionalProperties": False}


ENTITY = closed(name=NAME, entity_type_id={"type": "integer", "minimum": 0, "maximum": 9})
EDGE = closed(
    relation_type=TEXT,
    source_entity_id={"type": "integer"},
    fact=NAME,
    valid_at=NULLABLE,
    invalid_at=NULLABLE,
)
TREE = {
    "$ref": "#/$defs/Node",
    "$defs": {
        "Node": closed(
            value={"type": "integer"},
            children={"type": "array", "items": {"$ref": "#/$defs/Node"}, "maxItems": 2},
        )
    },
}
DEEP: dict[str, Any] = {"type": "boolean"}
for _level in range(30):
    DEEP = closed(a=DEEP)

SCHEMAS: dict[str, Any] = {
    "entities": {
        "$defs": {"Entity": ENTITY},
        **closed(extracted_entities={"type": "array", "items": {"$ref": "#/$defs/Entity"}}),
    },
    "edges": {
        "$defs": {"Edge": EDGE},
        **closed(edges={"type": "array", "items": {"$ref": "#/$defs/Edge"}}),
    },
    "timestamps": {"type": "object", "properties": {"valid_at": NULLABLE, "invalid_at": NULLABLE}},
    "resolutions": closed(
        entity_resolutions={
            "type": "array",
            "items": closed(id={"type": "integer"}, name=TEXT, duplicates={"type": "array"}),
        }
    ),
    "tree": TREE,
    "linked list": {
        "$defs": {"L": closed(next={"anyOf": [{"$ref": "#/$defs/L"}, {"type": "null"}]})},
        "$ref": "#/$defs/L",
    },
    "definitions": {"definitions": {"a": {"type": "null"}}, "$ref": "#/definitions/a"},
    "enum": {"enum": ["red", "grün", 7, None, True, {"a": [1]}, 'a"b\\\n', "\u2028", "😀"]},
    "typed enum": {"type": "string", "enum": ["a", "b"]},
    "const": {"const": {"a": [1, 2.5, None, True, "é\n"]}},
    "small const": {"enum": [0.1, 1e-7, -250.5]},
    "anyOf": {"anyOf": [{"type": "integer"}, closed(a=TEXT), {"type": "array", "items": TEXT}]},
    "oneOf by type": {"oneOf": [{"type": "integer"}, {"type": "string"}]},
    "discriminated": {
        "oneOf": [closed(kind={"const": "cat"}, n=TEXT), closed(kind={"const": "dog"}, m=TEXT)],
        "discriminator": {"propertyName": "kind"},
    },
    "allOf": {"allOf": [thing(a={"type": "integer"}), thing(b={"type": "null"})]},
    "date-time": {"type": "string", "format": "date-time"},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "email": {"type": "string", "format": "email", "maxLength": 20},
    "uri": {"type": "string", "format": "uri", "maxLength": 20},
    "ipv4": {"type": "string", "format": "ipv4"},
    "ipv6": {"type": "string", "format": "ipv6"},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-\\d{3}$"},
    "loose pattern": {"type": "string", "pattern": "ab+", "maxLength": 12},
    "alternation": {"type": "string", "pattern": "^(foo|ba[rz])$"},
    "lengths": {"type": "string", "minLength": 2, "maxLength": 5},
    "integer range": {"type": "integer", "minimum": -12, "maximum": 345},
    "exclusive": {"type": "integer", "exclusiveMinimum": 1.5, "exclusiveMaximum": 4},
    "number range": {"type": "number", "minimum": 0, "maximum": 1},
    "multiple": {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 2},
    "integer": {"type": "integer"},
    "number": {"type": "number"},
    "int64": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    "items": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    "no uniqueness": {"type": "array", "items": {"type": "null"}, "uniqueItems": False},
    "tuple": {"type": "array", "prefixItems": [{"type": "integer"}, TEXT], "items": False},
    "old tuple": {**D7, "items": [{"type": "integer"}, TEXT], "additionalItems": False},
    "unicode": closed(**{"ключ": {"const": "значение"}, 'qu"ote\n': {"enum": ["日本", "ß"]}}),
    "any extra": thing(a={"type": "null"}),
    "extra schema": {**thing(a=TEXT), "additionalProperties": {"type": "integer"}},
    "map": {"type": "object", "additionalProperties": {"type": "array", "items": TEXT}},
    "few": {"type": "object", "additionalProperties": {"type": "null"}, "maxProperties": 2},
    "nullable": {"type": ["string", "null"], "maxLength": 4},
    "empty object": closed(),
    "any object": {"type": "object"},
    "any array": {"type": "array"},
    "any": {},
    "true": True,
    "pydantic any": closed(data={"title": "Data"}, more=True),
    "deep": DEEP,
}


FORMATS = jsonschema.FormatChecker()


@pytest.mark.parametrize("name", SCHEMAS)
def test_whatever_is_said_fits_the_schema(name: str) -> None:
    schema = SCHEMAS[name]
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    checker = validator(schema, format_checker=FORMATS)
    for shape in (
        Shape(complete=False, closed=False),
        Shape(max_string_chars=9, max_array_items=3),
    ):
        grammar = compiled(schema, shape)
        for seed in range(8):
            said = answer(grammar.matcher(), seed)
            checker.validate(json.loads(said))


def test_any_text_goes_through_a_string_unchanged() -> None:
    grammar = compiled(closed(a=TEXT))
    for value in ("héllo", "日本語 😀", 'quote " slash \\ / tab \t', "\u2028", "a\nb", "e\u0301"):
        for ascii_only in (False,) if value.isascii() is False else (False, True):
            said = json.dumps({"a": value}, ensure_ascii=ascii_only, separators=(",", ":"))
            matcher = grammar.matcher(ids(said))
            assert matcher.error is None, (value, matcher.error)
            assert matcher.is_over


def test_special_tokens_are_never_text() -> None:
    """A string allows neither control tokens nor added ones, nor ids that have no token."""
    inside = allowed(compiled(TEXT).matcher(ids('"a')))
    assert len(inside) >= 900
    assert not set(inside) & {*range(8), 1024, 1025, 1026, 1027, 1028, 1029}


INNER = {"$defs": {"c": {"$id": "c.json", "type": "integer"}}}
UNHELD: list[tuple[Any, str]] = [
    (closed(a={"not": {"multipleOf": 2}}), "#/properties/a/not"),
    (closed(a={"if": {"multipleOf": 2}, "then": {"minimum": 4}}), "#/properties/a/if"),
    ({"type": "array", "uniqueItems": True}, "#/uniqueItems"),
    ({"type": "array", "contains": TEXT}, "#/contains"),
    ({"type": "object", "propertyNames": {"format": "email"}}, "#/propertyNames"),
    ({"type": "object", "dependentSchemas": {"a": {}}}, "#/dependentSchemas"),
    ({**D7, "type": "object", "dependencies": {"a": {"required": ["b"]}}}, "#/dependencies"),
    ({"allOf": [thing(a=TEXT)], "unevaluatedProperties": False}, "#/unevaluatedProperties"),
    ({"type": "object", "minProperties": 2}, "#/minProperties"),
    (
        {"$ref": "#/components/U", "components": {"U": {"type": "array", "uniqueItems": True}}},
        "#/components/U/uniqueItems",
    ),
    ({**thing(a=TEXT, b=TEXT), "required": [], "maxProperties": 1}, "#/maxProperties"),
    ({"$dynamicRef": "#a"}, "#/$dynamicRef"),
    (closed(a={"$ref": "https://example.com/schema"}), "#/properties/a/$ref"),
    ({"type": "string", "pattern": "(?=a)b"}, "#/pattern"),
    ({"type": "string", "pattern": "(a)\\1"}, "#/pattern"),
    (closed(**{"a/b": {"oneOf": [TEXT, {"minLength": 2}]}}), "#/properties/a~1b/oneOf"),
    ({"const": 2**53 + 1}, "#/const"),
    # Exclusive bounds less than 1 apart, and alternatives that differ further inside.
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "#/exclusiveMinimum"),
    ({"type": "number", "exclusiveMinimum": 5, "exclusiveMaximum": 5.5}, "#/exclusiveMinimum"),
    ({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}, "#/exclusiveMaximum"),
    ({"oneOf": [thing(a=thing(k={"const": k})) for k in "xy"]}, "#/oneOf"),
    # U+007F, which llguidance leaves out of what it writes.
    ({"enum": ["a\x7fb", "zz"]}, "#/enum"),
    ({"items": {"enum": [["\x7f"]]}}, "#/items/enum"),
    ({"const": [{"\x7f": 1}]}, "#/const"),
    # llguidance may follow a reference beside an inner address to another place.
    *(({"allOf": [{"$ref": ref}], **INNER}, "#/allOf/0/$ref") for ref in ("#/$defs/c", "c.json")),
    ({"allOf": [{"$ref": "#here"}], **INNER}, "#/allOf/0/$ref"),
    ({"type": "integer", "minimum": 2**60}, "#/minimum"),
    ({**D7, "items": [{"type": "array", "uniqueItems": True}]}, "#/items/0/uniqueItems"),
]


@pytest.mark.parametrize(("schema", "pointer"), UNHELD, ids=ascii)
def test_a_keyword_that_no_grammar_holds_is_named_and_refused_if_strict(
    schema: Any, pointer: str
) -> None:
    """The rest of the schema is held. A refusal names keyword and place."""
    assert compiled(schema, Shape(max_string_chars=9)).unenforced[0] == pointer
    with pytest.raises(BadRequest) as caught:
        compiled(schema, Shape(max_string_chars=9), strict=True)
    place, _, keyword = pointer.rpartition("/")
    assert f"`{keyword}` at {place} " in caught.value.message
    assert caught.value.code == "invalid_json_schema"
    assert caught.value.part == "answer_form"


LOOP = {**thing(a={"$ref": "#/$defs/R", "required": ["b"]}), "required": []}
NAMED = {"type": "object", "patternProperties": {"^a": TEXT}}


def test_definitions_that_nothing_leads_to_ask_for_nothing() -> None:
    unique = {"type": "array", "uniqueItems": True}
    assert not compiled({**closed(a=TEXT), "$defs": {"u": unique}}).unenforced
    led_to = {**closed(a={"$ref": "#/$defs/o/anyOf/0"}), "$defs": {"o": {"anyOf": [unique]}}}
    assert compiled(led_to).unenforced == ("#/$defs/o/anyOf/0/uniqueItems",)


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"not": {}}, "allows no finite answer"),
        ({"$ref": "#/$defs/Gone"}, "`$ref` at # leads nowhere: `#/$defs/Gone`"),
        (closed(a={"$ref": "#b"}), "`$ref` at #/properties/a leads nowhere: `#b`"),
        (closed(**{"a/b": {"type": 1}}), "`type` at #/properties/a~1b/type"),
        ({"type": "integer", "minimum": 1, "exclusiveMinimum": True}, "exclusiveMinimum"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "`minimum` at # is above `maximum`"),
        ({"enum": []}, "`enum` at # is empty"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "finite"),
        ({"anyOf": [{"$ref": "#"}]}, "finite"),
        ({**closed(), "required": ["z"]}, "impossible"),
        ({"$ref": "#/$defs/A", "$defs": {"A": closed(x={"$ref": "#/$defs/A"})}}, "finite"),
        ({**TEXT, "x-guidance": {"coerce_one_of": True}}, "x-guidance"),
        (False, "false"),
        ({**NAMED, "allOf": [{"patternProperties": {"b": TEXT}}]}, "two of its `patternPropert"),
        ({"$ref": "#/$defs/R", "$defs": {"R": LOOP}}, "beside a `$ref` that leads in a circle"),
        ({"minimum": "1"}, "`minimum` at #/minimum must be a number in draft 2020-12"),
        ({"required": "a"}, "`required` at #/required must be an array in draft 2020-12"),
        ({"minLength": -1}, "`minLength` at #/minLength must be at least 0 in draft 2020-12"),
        ({"minLength": 1.5}, "`minLength` at #/minLength must be an integer in draft 2020-12"),
        ({"multipleOf": 0}, "`multipleOf` at #/multipleOf must be above 0 in draft 2020-12"),
        ({"anyOf": []}, "`anyOf` at #/anyOf must have at least 1 item in draft 2020-12"),
        ({"required": ["a", "a"]}, "must have no item twice in draft 2020-12"),
        ({"properties": {"a": 1}}, "`a` at #/properties/a must be a boolean or an object in"),
        ({"type": "strin"}, "`type` at #/type must be the name of a type, or an array of such"),
        ({"items": [{}]}, "`items` at #/items must be a boolean or an object in draft 2020-12"),
        ({**D4, "exclusiveMinimum": 1}, "#/exclusiveMinimum must be a boolean in draft 4"),
        ({**D7, "items": 1}, "`items` at #/items is not allowed in draft 7"),
        ({"minItems": True}, "`minItems` at #/minItems must be an integer in draft 2020-12"),
        ({"minItems": -1.0}, "`minItems` at #/minItems must be at least 0 in draft 2020-12"),
        (closed(a={"pattern": "^[z-a]$"}), "`pattern` at #/properties/a cannot be read: invalid"),
        ({"items": {"pattern": "(/"}}, "`pattern` at #/items cannot be read: unclosed group."),
        ({"patternProperties": {"a": {}, "(b": {}}}, "`patternProperties` at # cannot be read: un"),
    ],
    ids=str,
)
@pytest.mark.parametrize("strict", [False, True])
def test_what_is_no_schema_or_has_no_answer_is_refused(
    schema: Any, named: str, strict: bool
) -> None:
    with pytest.raises(BadRequest) as caught:
        compiled(schema, Shape(max_string_chars=9), strict=strict)
    assert named in caught.value.message
    assert "coerce_one_of" not in caught.value.message
    assert "https://" not in caught.value.message
    assert caught.value.code == "invalid_json_schema"
    assert caught.value.part == "answer_form"


@pytest.mark.parametrize(
    ("kind", "source", "named"),
    [
        ("json_schema", "{", "not JSON"),
        ("json_schema", '"text"', "object or a boolean"),
        ("json_schema", '{"const":NaN}', "NaN"),
        ("json_schema", '{"const":1e999}', "1e999"),
        ("json_schema", '{"a":' * 200 + "1" + "}" * 200, "levels deep"),
        ("json_schema", "[" * 100_000, "JSON"),
        ("json_schema", '{"title":"' + "x" * 300_000 + '"}', "bytes"),
        ("regex", "(?<=a)b", "look-around"),
        ("regex", "(a", "unclosed group"),
        ("regex", r"(a)\1", "backreferences"),
        ("regex", r"[^\s\S]", "no answer"),
        ("regex", "a" * 40_000, "characters"),
        ("choice", '["a",1]', "strings"),
        ("choice", "a", "JSON array"),
        ("grammar", "start: X", '"X"'),
        ("grammar", "start: start", "no answer"),
        ("grammar", 'start: "a" <|user|>', "<|user|>"),
        ("grammar", 'start: @other | "a"', "@other"),
        ("grammar", '%llguidance {"no_forcing": true}\nstart: "a"', "%llguidance"),
        ("grammar", 'start: "a"\n%llguidance {}', "%llguidance"),
        ("grammar", 'start: %json {"type": "object"}', "%json"),
        ("grammar", 'start: /a(?=b)/ "c"', "look-around"),
        ("grammar", "nonsense", "nonsense"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_reason(
    kind: Any, source: str, named: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        compile_grammar(tokenizer(), Grammar(kind, source))
    assert named in caught.value.message
    assert caught.value.code == (
        "invalid_json_schema" if kind == "json_schema" else "invalid_grammar"
    )


WIDE = {"type": "object", "properties": {f"property_{i}": TEXT for i in range(700)}}


@pytest.mark.parametrize("schema", [WIDE, closed(name=TEXT, n={"type": "integer"}, wide=WIDE)])
def test_what_is_too_wide_to_follow_is_refused_at_once(schema: Any) -> None:
    """A refusal at the first steps of an answer would come too late."""
    with pytest.raises(BadRequest, match="too wide"):
        compiled(schema, Shape())


def calls(*functions: Function) -> Grammar:
    grammar = answer_grammar(Calling(functions=list(functions), forced=True), None, None)
    assert grammar is not None
    return grammar


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"type": ["object", "null"]},
        {"anyOf": [{"type": "array"}, {"type": "object", "properties": {"a": TEXT}}]},
        {"$ref": "#/$defs/T", "$defs": {"T": {"properties": {"a": {"$ref": "#/$defs/T"}}}}},
    ],
    ids=str,
)
def test_the_arguments_of_a_forced_call_are_an_object(parameters: dict[str, Any]) -> None:
    """They are one even if their schema allows other values."""
    grammar = compile_grammar(tokenizer(), calls(Function("f", parameters)), shape=OPEN)
    start = '{"name":"f","arguments":'
    assert grammar.matcher(ids(start + "{}}")).may_end
    for said in ("[", "null", "1"):
        assert grammar.matcher(ids(start + said)).error


def test_calls_may_be_longer_than_what_a_caller_writes() -> None:
    """Their schemas were bounded one by one; the whole has a bound of its own."""
    long = Grammar("calls", f'start: "a" // {"x" * 40_000}')
    assert answer(compile_grammar(tokenizer(), long).matcher(), 0) == "a"
    with pytest.raises(BadRequest, match="longer than 10 characters"):
        compile_grammar(tokenizer(), long, bounds=GrammarBounds(max_calls_chars=10))


def test_grammars_of_calls_leave_descriptions_out() -> None:
    """Long descriptions cost nothing; a parameter called `description` stays."""
    parameters = closed(description={**TEXT, "description": "d" * 40_000, "title": "t"})
    grammar = calls(Function("f", parameters))
    assert compile_grammar(tokenizer(), grammar, bounds=GrammarBounds(max_calls_chars=500))
    said = '{"name":"f","arguments":{"description":"x"}}'
    assert compile_grammar(tokenizer(), grammar).matcher(ids(said)).is_over


@pytest.mark.parametrize(
    ("kind", "source", "fits"),
    [
        ("regex", "[a-z]{2,4}-[0-9]+", r"[a-z]{2,4}-[0-9]+"),
        ("regex", "^(yes|no)$", "yes|no"),
        ("choice", '["red","grün","a\\nb","😀 x","(.*)"]', "red|grün|a\nb|😀 x|\\(\\.\\*\\)"),
        ("grammar", 'start: "a" start | "b"', "a*b"),
        ("grammar", 'root ::= "x" | "y" root', "y*x"),
        ("grammar", '%llguidance {}\n\nstart: x\nx[capture]: X\nX: "x" | "y"', "[xy]"),
        ("grammar", 'root ::= ob\nob ::= "{" ws "}"\nws ::= [ \\t\\n]*', r"\{\s*\}"),
        ("grammar", '# JSON\nroot   ::= "\\"" [^"\\\\]* "\\""', r'"[^"\\]*"'),
        ("grammar", 'start: "<|user|>" "!"', r"<\|user\|>!"),
    ],
)
def test_regexes_choices_and_grammars(kind: Any, source: str, fits: str) -> None:
    grammar = compile_grammar(tokenizer(), Grammar(kind, source))
    for seed in range(10):
        assert re.fullmatch(fits, answer(grammar.matcher(), seed))


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    """Give the sandbox that grammars are tried in."""
    with sandbox("grammar", 60) as box:
        yield box


def chain(length: int) -> Any:
    """Make a schema of which llguidance's recursion overflows any stack."""
    links = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{length}": TEXT}}


def test_a_grammar_that_ends_a_process_ends_the_sandbox(box: Sandbox) -> None:
    """It ends it whatever bound it slipped by: here there is none. The next grammar is compiled."""
    bounds = GrammarBounds(max_path=10**6)
    deadly = schema_grammar(chain(5000))
    for _ in range(2):  # the second time nothing is tried
        with pytest.raises(BadRequest, match=r"cannot be compiled: it ended the process.*SIG"):
            compile_grammar(tokenizer(), deadly, bounds=bounds, sandbox=box, shape=OPEN)
    compiled = compile_grammar(tokenizer(), schema_grammar(ENTITY), sandbox=box)
    assert answer(compiled.matcher(), 1)


def test_a_grammar_with_control_tokens_is_tried_as_well(box: Sandbox) -> None:
    """Our own may name the model's marks, of which the sandbox's tokenizer knows nothing."""
    spec = 'start: <|call|> call\ncall: %json {"type":"object"} </call>\n'
    try_grammar(box, spec, "invalid_grammar")
    deadly = "start: <|call|> %json " + json.dumps(chain(5000))
    with pytest.raises(BadRequest, match="it ended the process"):
        try_grammar(box, deadly, "invalid_grammar")


def test_a_grammar_that_takes_too_long_is_given_up() -> None:
    """Hundreds of patterns at once explode; the process is killed, and nothing of it goes on."""
    schema = {"allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(500)]}
    with sandbox("grammar", 0.3) as short, pytest.raises(TimeoutError):
        compile_grammar(tokenizer(), schema_grammar(schema), sandbox=short, shape=OPEN)


def test_a_text_without_a_choice_has_an_end() -> None:
    """All of it would be listed at each step, a second for half a million tokens."""
    with (
        sandbox("grammar", 20) as box,
        pytest.raises(BadRequest, match="it leaves no choice for over 131,072 bytes"),
    ):
        compile_grammar(tokenizer(), Grammar("regex", "(a{500}){900}"), sandbox=box)
    late = compile_grammar(tokenizer(), Grammar("regex", "[ab]{12}(a{500}){100}"))
    matcher = late.matcher(ids("ab" * 6))
    assert matcher.forced_tokens() == []
    assert matcher.error == "it leaves no choice for over 32,768 tokens"
    short = compile_grammar(tokenizer(), Grammar("regex", "[ab]c(a{500}){10}"))
    assert len(short.matcher(ids("a")).forced_tokens()) > 1000


@pytest.mark.slow
def test_no_compilation_takes_longer_than_two_seconds_unless_it_is_asked_to() -> None:
    """A step of many digits has as many states as its value."""
    costly = {"type": "integer", "multipleOf": 123_456_789, "minimum": 0, "maximum": 10**10 - 1}
    limit_s = Settings.model_fields["structured_compile_timeout_s"].default
    assert limit_s == 2
    with sandbox("grammar", limit_s) as box, pytest.raises(TimeoutError):
        compile_grammar(tokenizer(), schema_grammar(costly), sandbox=box)


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar("regex", "a{600}{600}{600}"), "it leaves no choice for over 32,768 tokens."),
        (
            Grammar("grammar", 'start: "a" b'),
            'line 1, column 8: unknown name: "b", in `start: "a" b`.',
        ),
    ],
)
def test_a_refusal_shows_no_line_that_the_caller_did_not_write(
    grammar: Grammar, message: str
) -> None:
    with pytest.raises(BadRequest) as refused:
        compile_grammar(tokenizer(), grammar)
    assert refused.value.message == f"The {grammar.kind} cannot be compiled: {message}"


def test_parameters_that_cannot_be_held_to_are_refused_by_their_functions_name() -> None:
    odd = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=b)c"}}}
    grammar = calls(Function("plain", {"type": "object"}), Function('"od"d', odd, strict=True))
    with pytest.raises(BadRequest) as refused:
        compile_grammar(tokenizer(), grammar)
    assert refused.value.part == "tools"
    assert refused.value.message == (
        "The parameters of '\"od\"d': The JSON Schema keyword `pattern` at #/properties/a cannot "
        "be enforced here, and 'strict' asks for all of the schema."
    )


def test_calls_that_say_the_same_and_are_strict_in_one_are_two_grammars() -> None:
    """Otherwise one would get the outcome of the other."""
    strict, same, other = (Function("f", {}, strict=is_strict) for is_strict in (True, True, False))
    assert calls(strict) == calls(same) != calls(other)


def test_only_the_functions_that_do_not_compile_lose_a_keyword() -> None:
    """The rest of those functions, and all of the others, are enforced."""
    odd = thing(a={"type": "string", "pattern": "(?=b)c", "maxLength": 3}, b={"type": "integer"})
    grammar = calls(Function("odd", odd), Function("plain", thing(a={"const": 1})))
    compiled_calls = compile_grammar(tokenizer(), grammar, shape=OPEN)
    assert compiled_calls.unenforced == ("odd#/properties/a/pattern",)
    for said, fits in (
        ('{"name":"odd","arguments":{"a":"zz","b":1}}', True),
        ('{"name":"odd","arguments":{"a":"zzzz","b":1}}', False),
        ('{"name":"odd","arguments":{"a":"zz","b":"1"}}', False),
        ('{"name":"plain","arguments":{"a":1}}', True),
        ('{"name":"plain","arguments":{"a":2}}', False),
    ):
        assert compiled_calls.matcher(ids(said)).may_end == fits, said
