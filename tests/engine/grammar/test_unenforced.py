"""Answers by a grammar are valid by the schema as the caller wrote it, whatever its keywords.

Judged by `jsonschema`, a library that the grammars know nothing of.
"""

import contextlib
import json
import random
import re
from collections.abc import Collection
from datetime import date, datetime, time
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from referencing import Registry

from gateway.engine.grammar.patterns import OWN_FORMATS, is_holdable
from gateway.engine.grammar.schema_bounds import Shape
from gateway.errors import BadRequest
from tests.engine.grammar.drawn_rows import (
    CLOSERS,
    ENDS,
    OPEN,
    allowed,
    answer,
    compiled,
    ids,
    text,
    tokenizer,
)

TEXT: dict[str, Any] = {"type": "string"}
WHOLE: dict[str, Any] = {"type": "integer"}
SERVED = Shape(max_string_chars=8, max_array_items=3)


def thing(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


def fits(schema: Any, value: Any) -> bool:
    draft = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    return bool(draft(schema, registry=Registry()).is_valid(value))


def takes(schema: Any, value: Any, shape: Shape = OPEN) -> bool:
    said = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return compiled(schema, shape).matcher(ids(said)).may_end


LOOSENED = {"oneOf": [thing("a", a=WHOLE), thing("a", "b", a=WHOLE, b=WHOLE)]}
OVERLAPS: list[Any] = [
    LOOSENED,
    {"anyOf": [LOOSENED, {"type": "null"}]},
    {"$defs": {"L": LOOSENED}, **thing("x", x={"$ref": "#/$defs/L"})},
    {"oneOf": [thing("a", a=WHOLE), {"$ref": "#/$defs/B"}], "$defs": {"B": LOOSENED["oneOf"][1]}},
    {"oneOf": [thing(a=WHOLE), thing("b", b=WHOLE)]},
    {"oneOf": [{"type": "string"}, {"type": "string", "minLength": 6}]},
    {"oneOf": [{"type": "array", "items": WHOLE}, {"type": "array", "maxItems": 2}]},
    {"oneOf": [thing(a={**TEXT, "default": ""}, b=TEXT), thing("c", c=TEXT)]},
    {"type": "object", "properties": {"k": TEXT}, "oneOf": [{"required": ["k"]}, {"required": []}]},
    {"oneOf": [{"multipleOf": 2}, {"multipleOf": 3}], "type": "integer"},
]


@pytest.mark.parametrize("schema", OVERLAPS, ids=str)
@pytest.mark.parametrize("shape", [OPEN, SERVED], ids=["as written", "tightened"])
def test_a_tightened_alternative_makes_no_schema_looser(schema: Any, shape: Shape) -> None:
    grammar = compiled(schema, shape)
    if grammar.unenforced:
        assert all(pointer.endswith("/oneOf") for pointer in grammar.unenforced)
        with pytest.raises(BadRequest, match="oneOf"):
            compiled(schema, shape, strict=True)
        return
    for seed in range(12):
        said = json.loads(answer(grammar.matcher(), seed))
        assert fits(schema, said), said


WAYS: dict[str, Any] = {
    "oneOf": [
        {"properties": {"error": TEXT, "reason": TEXT}, "required": ["error"]},
        {"properties": {"ok": {"type": "boolean"}}, "required": ["ok"]},
    ]
}
KINDS: dict[str, Any] = {
    "oneOf": [{"properties": {"k": {"const": k}, k: WHOLE}, "required": [k]} for k in "xy"]
}
HELD: list[tuple[Any, list[Any]]] = [
    ({**thing(a=TEXT), "minProperties": 1}, [{}, {"a": "x"}]),
    ({**thing(a=TEXT, b=TEXT, c=TEXT), "minProperties": 1}, [{}, {"b": "x"}, {"a": "x", "c": ""}]),
    ({"type": "array", "maxItems": 1, "uniqueItems": True}, [[], [1], [1, 1]]),
    ({"type": "array", "uniqueItems": False}, [[], [1, 1]]),
    ({"oneOf": [{"const": 1}, {"const": 2}]}, [1, 2, 3]),
    ({"oneOf": [{"$ref": "#/$defs/A"}, {"type": "null"}], "$defs": {"A": TEXT}}, ["a", None, 1]),
    ({"type": "object", **KINDS, **thing("k", k=TEXT)}, [{"k": "x", "x": 1}, {"k": "z", "x": 1}]),
    ({"type": "object", **WAYS}, [{"error": ""}, {"ok": True}, {"error": "", "ok": True}, {}]),
    ({"$schema": "https://example.com/own-draft", "items": TEXT}, [["a"], [1]]),
    ({"$defs": {"A": {"$anchor": "here", **TEXT}}, "items": {"$ref": "#here"}}, [["a"], [1]]),
    (
        {"$id": "https://x.org/s.json", "$defs": {"A": TEXT}, "items": {"$ref": "s.json#/$defs/A"}},
        [["a"], [1]],
    ),
    (
        {"$schema": "http://json-schema.org/draft-07/schema#",
         "items": [TEXT, {"$ref": "#/items/0"}], "additionalItems": False},
        [["a", "b"], ["a", 1], ["a", "b", "c"]],
    ),
    # Nothing stands beside a reference before 2019-09.
    *(
        (
            {"$schema": draft, **thing("a", a={"$ref": "#/definitions/A", "type": "integer"}),
             "definitions": {"A": TEXT}},
            [{"a": "x"}, {"a": 1}],
        )
        for draft in ("http://json-schema.org/draft-04/schema#",
                      "http://json-schema.org/draft-07/schema#")
    ),
    (
        {"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/properties/a",
         "minLength": 9, "properties": {"a": {**TEXT, "maxLength": 2}}},
        ["ab", "abc", ["ab"]],
    ),
    (
        {"$schema": "https://json-schema.org/draft/2019-09/schema", "definitions": {"A": TEXT},
         "items": {"$ref": "#/definitions/A", "maxLength": 1}},
        [["a"], ["ab"], [1]],
    ),
    (
        {"items": {"$ref": "#/components/schemas/A"},
         "components": {"schemas": {"A": {"$ref": "#/components/schemas/B"}, "B": TEXT}}},
        [["a"], [1]],
    ),
    ({"type": "object", "patternProperties": {"^a": WHOLE}, "required": ["ab"],
      "additionalProperties": False}, [{"ab": 1}, {}]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "values"), HELD, ids=str)
def test_a_schema_held_whole_takes_exactly_the_values_that_fit(
    schema: Any, values: list[Any]
) -> None:
    assert not compiled(schema, strict=True).unenforced
    assert [value for value in values if takes(schema, value)] == [
        value for value in values if fits(schema, value)
    ]
    for shape in (OPEN, SERVED):
        for seed in range(3):
            said = json.loads(answer(compiled(schema, shape).matcher(), seed))
            assert fits(schema, said), said


@pytest.mark.parametrize("draft", ["draft-04", "draft-06", "draft-07", "draft/2019-09"])
def test_each_draft_is_checked_by_its_own_schema(draft: str) -> None:
    """A list of `items` is fine until 2019-09; `exclusiveMinimum` was a boolean in draft 4."""
    scheme = "https" if "/" in draft else "http"
    named = {"$schema": f"{scheme}://json-schema.org/{draft}/schema#"}
    assert takes({**named, "items": [TEXT]}, ["a"])
    exclusive = {**named, "minimum": 1, "exclusiveMinimum": True}
    if draft == "draft-04":
        assert not takes(exclusive, 1)
        return
    with pytest.raises(BadRequest, match="exclusiveMinimum"):
        compiled(exclusive)


def test_dates_are_days_that_there_were() -> None:
    """No year 0000, no second 60, and 29 February in leap years alone."""
    day = re.compile(OWN_FORMATS["date"])
    for year in ("0000", "0001", "0004", "1900", "2000", "2023", "2024", "2100", "9999"):
        for rest in ("01-31", "02-28", "02-29", "02-30", "04-31", "12-31"):
            said = f"{year}-{rest}"
            try:
                date.fromisoformat(said)
                is_day = True
            except ValueError:
                is_day = False
            assert bool(day.search(said)) == is_day, said
    for name in ("date", "time", "date-time"):
        grammar = compiled({"type": "string", "format": name})
        read: Any = {"date": date, "time": time, "date-time": datetime}[name]
        for seed in range(60):
            read.fromisoformat(json.loads(answer(grammar.matcher(), seed)))
    clock = compiled({"type": "string", "format": "time"})
    assert clock.matcher(ids('"23:59:6')).error
    assert clock.matcher(ids('"23:59:59Z"')).may_end
    stamp = {"type": "string", "format": "date-time", "pattern": "^2024-02-29"}
    assert takes(stamp, "2024-02-29T00:00:00Z")
    assert not takes({**stamp, "pattern": "^2023-02-29"} | {"pattern": "^202"}, "2023-02-29T00:00Z")


@pytest.mark.parametrize(
    "schema",
    [
        {**thing(a=WHOLE), "additionalProperties": TEXT},
        {**thing(**{"a\n": WHOLE}), "additionalProperties": TEXT},
        {**thing(**{"a\x01": WHOLE}), "additionalProperties": TEXT},
        {"type": "object", "patternProperties": {"^a$": WHOLE}},
        {**thing(), "required": ["a"], "additionalProperties": TEXT, "minProperties": 2},
    ],
    ids=str,
)
def test_a_name_is_not_spelled_in_two_ways(schema: Any) -> None:
    """`"\\u0061"` would stand beside `a`, whose schema would not hold it."""
    for shape in (OPEN, SERVED):
        grammar = compiled(schema, shape)
        declared = {"a", *schema.get("properties", {})}
        for name in ("\\u0061", "\\u0061\\n", "a\\u000a", "\\u0061\\u0001"):
            for value in ('"x"', "1"):
                is_declared = json.loads(f'"{name}"') in declared
                assert not is_declared or not grammar.matcher(ids(f'{{"{name}":{value}}}')).may_end


FORMATS = ("uri", "email", "duration", "hostname", "date-time", "date", "time", "uuid", "ipv6")
ENDLESS: list[Any] = [
    *({"type": "string", "format": name} for name in FORMATS),
    *({"type": "string", "format": name, "pattern": "."} for name in FORMATS),
    {"type": "string", "pattern": "^[a-z]+$"},
    {"type": "string", "pattern": "a.*b|c"},
    {"type": "string", "pattern": "^(a+b*)+$", "minLength": 2},
    {"type": "string", "pattern": "^[a-z]{20,}$"},
    {"anyOf": [{"type": "string", "pattern": "x"}, {"format": "email"}]},
    {"type": "object", "additionalProperties": WHOLE},
]


@pytest.mark.parametrize("schema", ENDLESS, ids=str)
def test_every_string_is_bounded(schema: Any) -> None:
    grammar = compiled(schema, Shape(max_string_chars=8, max_array_items=2))
    for seed in range(4):
        matcher, rng = grammar.matcher(), random.Random(seed)
        said: list[int] = []
        while not matcher.is_over:
            following = [token for token in _going_on(matcher) or [] if token]
            if not following:
                break
            said.append(rng.choice(following))
            matcher.consume(said[-1])
            assert len(said) < 1500, text(said)[:300]
        value = json.loads(text(said))
        assert fits(schema, value)
        assert max(map(len, _strings(value)), default=0) <= 64


def _going_on(matcher: Any) -> list[int]:
    """List the tokens that may follow; leave out closing ones where there are others."""
    tokens = [token for token in allowed(matcher) if token not in ENDS]
    spell = tokenizer().tokens.decode_bytes
    on = [token for token in tokens if not spell([token]).startswith(CLOSERS)]
    return on or tokens


def _strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [*value, *(part for each in value.values() for part in _strings(each))]
    if isinstance(value, list):
        return [part for each in value for part in _strings(each)]
    return [value] if isinstance(value, str) else []


@pytest.mark.parametrize(
    "pattern",
    [
        *("^[[:alpha:]]{2}$", "^[a-z&&[aeiou]]$", "^[a--b]$", "^[a~~b]$", "^[]a]$", "^[^]a]$"),
        *("^[\\x00-\\x1f]$", "^[\\u0000-!#-~]$"),
        *("^[^[a]$", "^\\cA$", "^[\\Z]$", "^\\Aa$", "^\\0$", "^{a}$", "^a{,5}$"),
        *("^(?:[a-z]{1,100}){1,100}$", "^((a{0,20}b){9}c){30}$", "^(a{99999}){99999}$"),
    ],
)
def test_a_pattern_that_means_something_else_or_repeats_too_much_is_named(pattern: str) -> None:
    """llguidance would take it, and let through wrong values, or fail within an answer."""
    assert not is_holdable(pattern)
    schema = thing(v={"type": "string", "pattern": pattern, "maxLength": 3})
    assert compiled(schema).unenforced == ("#/properties/v/pattern",)
    names = {"type": "object", "patternProperties": {pattern: WHOLE}}
    assert compiled(names).unenforced == ("#/patternProperties",)


@pytest.mark.parametrize(
    "pattern",
    [
        "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$",
        *("^.{1,65535}$", "^([a-z]{1,63}\\.){0,8}[a-z]{1,63}$", "^[\\[\\]a-z-]+$", "^\\[\\[a$"),
        *("^\\p{L}{2}\\{\\u0041\\-\\/$", "^[\\p{L}\\d]}$", "^[^\\x00-\\x1f]$"),
    ],
)
def test_a_usual_pattern_is_held(pattern: str) -> None:
    assert compiled({"type": "string", "pattern": pattern}, strict=True)


@pytest.mark.parametrize(
    "pattern",
    ['^[^"]$', "^[^\\\\]$", '^[^"a-c]*$', "^\\[[^\\]\\\\]$", "^[^\\x22]+$", '^a[^"]|[^b"]$'],
)
def test_a_class_that_excludes_quotes_and_backslashes_lets_none_through(pattern: str) -> None:
    for value in ('"', "\\", "a", "b", "é", "[", '["', "[\\", "[a", 'x"', "a\\", 'a"', "\n"):
        is_fit = bool(re.search(pattern, value))
        assert takes({"type": "string", "pattern": pattern}, value) == is_fit, value


SPACES = (*"\t\n\r \u00a0\u1680\u2000\u200a\u2028\u2029\u202f\u205f\u3000\ufeff",)
ENDS_OF_LINES = ("\n", "\r", "\u2028", "\u2029")
OTHERS = ("\u0085", "\u180e", "\u200b", "a", "é", '"', "\\", ".", "s", "-")


@pytest.mark.parametrize(
    ("pattern", "taken"),
    [
        (r"^\s$", SPACES),
        (r"^[\s]$", SPACES),
        (r"^[^\S]$", SPACES),
        (r"^\S$", OTHERS),
        (r"^[^\s]$", OTHERS),
        (r"^[\S]$", OTHERS),
        (r"^[\s\S]$", (*SPACES, *OTHERS)),
        (r'^[^"\s]$', {*OTHERS} - {'"'}),
        (r"^[\s.-]$", (*SPACES, ".", "-")),
        (r"^.$", {*SPACES, *OTHERS} - {*ENDS_OF_LINES}),
        (r"^\.$", "."),
        (r"^[.\\s]$", (".", "\\", "s")),
    ],
)
def test_white_space_and_ends_of_lines_are_those_of_ecma(
    pattern: str, taken: Collection[str]
) -> None:
    """Rust differs: U+0085 is white space, U+FEFF is none, a dot matches a carriage return."""
    schema = {"type": "string", "pattern": pattern}
    assert {value for value in (*SPACES, *OTHERS) if takes(schema, value)} == {*taken}


def test_an_address_is_one_that_validators_take() -> None:
    email = {"type": "string", "format": "email"}
    for value in ("a@b.co", "a.b+c@d-e.f0", "o'neil@x.museum"):
        assert takes(email, value)
    for value in ("a@b", "a@[1.2.3.4]", ".a@b.co", "a..b@c.de", "a.@b.co", "a@-b.c", "é@b.c"):
        assert not takes(email, value)
    assert not takes(email, f"a@{'b' * 64}.co")


values = st.recursive(
    st.sampled_from([None, True, False, 0, 1, 2.5, -3, "", "a", "b", "ab"]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2), st.dictionaries(st.sampled_from("abk"), inner, max_size=3)
    ),
    max_leaves=4,
)
leaves = st.sampled_from(
    [
        TEXT, WHOLE, True, False, {},
        {"type": "number"}, {"type": "null"}, {"type": ["string", "null"]}, {"enum": ["a", 1]},
        {"const": "a"}, {"const": 1}, {"type": "integer", "minimum": 1},
        {"type": "integer", "maximum": 0}, {"type": "string", "minLength": 2}, {"minLength": 1},
        {"$ref": "#/$defs/R"}, {"$ref": "#/$defs/S"}, {"type": "string", "maxLength": 1},
        {"required": ["a"]}, {"required": ["b"]}, {"type": "array", "uniqueItems": True},
    ]
)  # fmt: skip


def _more(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some = st.lists(inner, min_size=1, max_size=3)
    own = st.dictionaries(st.sampled_from("abk"), inner, max_size=3)
    objects = st.fixed_dictionaries(
        {"type": st.just("object"), "properties": own},
        optional={
            "required": st.lists(st.sampled_from("abk"), unique=True, max_size=2),
            "additionalProperties": inner,
            "oneOf": some,
            "anyOf": some,
            "allOf": some,
            "not": inner,
            "minProperties": st.integers(0, 2),
            "maxProperties": st.integers(0, 3),
            "patternProperties": st.dictionaries(st.sampled_from(["^a", "b"]), inner, max_size=1),
            "propertyNames": st.sampled_from([{"pattern": "^[ab]$"}, {"enum": ["a", "k"]}, TEXT]),
            "dependentRequired": st.just({"a": ["b"]}),
        },
    )
    return st.one_of(
        objects,
        objects,
        st.fixed_dictionaries({"oneOf": some}, optional={"type": st.just("object")}),
        st.fixed_dictionaries({"anyOf": some}, optional={"not": inner}),
        st.fixed_dictionaries({"allOf": some}),
        st.fixed_dictionaries({"if": inner, "then": inner}, optional={"else": inner}),
        st.fixed_dictionaries({"type": st.just("array"), "items": inner}),
        st.fixed_dictionaries({"type": st.just("array"), "prefixItems": some, "items": inner}),
    )


schemas = st.builds(
    lambda schema, r, s: (
        {**schema, "$defs": {"R": r, "S": s}} if isinstance(schema, dict) else schema
    ),
    st.recursive(leaves, _more, max_leaves=7),
    st.recursive(leaves, _more, max_leaves=3),
    st.sampled_from([TEXT, thing("a", a=WHOLE), thing("k", k={"const": "b"}, a={})]),
)


@pytest.mark.parametrize("shape", [OPEN, SERVED], ids=["as written", "tightened"])
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(schema=schemas)
def test_whatever_a_grammar_lets_through_fits_the_callers_schema(schema: Any, shape: Shape) -> None:
    """Only a grammar that names keywords as not enforced may let another answer through."""
    try:
        grammar = compiled(schema, shape)
    except BadRequest:
        return
    for seed in range(4):
        try:
            said = json.loads(answer(grammar.matcher(), seed, limit=600))
        except AssertionError:
            continue  # it went on and on, as some may where nothing is bounded
        with contextlib.suppress(RecursionError):  # jsonschema's, of a reference to itself alone
            assert grammar.unenforced or fits(schema, said), said
