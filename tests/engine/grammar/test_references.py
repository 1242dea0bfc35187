"""References lead where JSON Schema says, and the way through them is measured beforehand."""

import json
import time
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from referencing import Registry
from referencing.exceptions import Unresolvable

from gateway.engine.grammar.compiling import Bounds, read_schema
from gateway.engine.grammar.references import MAX_PATH, check_path, longest_path
from gateway.errors import BadRequest
from tests.engine.grammar.drawn_rows import compiled, ids

TEXT: dict[str, Any] = {"type": "string"}
WHOLE: dict[str, Any] = {"type": "integer"}


def to(name: str) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{name}"}


@pytest.mark.parametrize(
    ("schema", "length"),
    [
        (TEXT, 1),
        ({"items": {"items": TEXT}}, 3),
        ({"properties": {"a": TEXT, "b": {"anyOf": [TEXT, {"not": TEXT}]}}}, 4),
        ({"$defs": {"a": {"items": TEXT}}}, 1),
        ({"$defs": {"a": {"items": TEXT}}, "items": to("a")}, 4),
        # Two ways, of which the longer counts; the order in which they are found does not.
        ({"$defs": {"a": to("b"), "b": to("c"), "c": TEXT}, "anyOf": [to("a"), to("c")]}, 5),
        ({"$defs": {"a": to("b"), "b": to("c"), "c": TEXT}, "anyOf": [to("c"), to("a")]}, 5),
        # Those that come round count once each, with what is inside them.
        ({"$defs": {"a": {"items": to("a")}}, "items": to("a")}, 4),
        ({"$defs": {"a": {"items": to("b")}, "b": {"items": to("a")}}, "items": to("a")}, 6),
        ({"items": {"$ref": "#"}}, 2),
        # A pointer may lead anywhere, and is written as in any URI.
        ({"x": {"y": {"items": TEXT}}, "items": {"$ref": "#/x/y"}}, 4),
        ({"$defs": {"a b": {"items": TEXT}}, "items": {"$ref": "#/%24defs/a%20b"}}, 4),
        ({"$id": "http://x/y", "$defs": {"a": TEXT}, "$ref": "http://x/y#/$defs/a"}, 2),
        ({"items": {"$ref": "#/nowhere"}}, 2),
        # What may be anywhere counts as everywhere: five objects are in this document.
        ({"$defs": {"a": {"$anchor": "q", "items": TEXT}}, "$ref": "#q"}, 5),
        ({"$defs": {"a": {"$id": "q", "items": TEXT}}, "$ref": "q"}, 5),
    ],
)
def test_the_longest_way_down_is_counted(schema: Any, length: int) -> None:
    """In subschemas, through references too."""
    assert longest_path(schema) == length


def test_a_way_that_is_just_short_enough_is_followed() -> None:
    """One link more is refused, in our own words."""
    links = {f"d{i}": to(f"d{i + 1}") for i in range(MAX_PATH - 2)}
    last = f"d{MAX_PATH - 2}"
    check_path({"$defs": {**links, last: TEXT}, "$ref": "#/$defs/d0"})
    with pytest.raises(BadRequest, match=f"leads through {MAX_PATH + 1} subschemas"):
        check_path({"$defs": {**links, last: {"items": TEXT}}, "$ref": "#/$defs/d0"})


def test_the_bound_is_held_before_a_schema_is_walked() -> None:
    """Reading refuses it; nothing later sees it."""
    links = {f"d{i}": {"items": to(f"d{i + 1}")} for i in range(2000)}
    with pytest.raises(BadRequest, match="subschemas"):
        read_schema(json.dumps({"$defs": {**links, "d2000": TEXT}, **to("d0")}), Bounds())


def nested_targets(size: int) -> Any:
    """Make targets inside one another, around many subschemas."""
    schema: Any = {"anyOf": [{} for _ in range(size)]}
    for i in range(60):
        schema = {"items": schema, "$ref": "#" + "/items" * (i % 50)}
    return schema


def test_measuring_takes_time_in_proportion() -> None:
    """Four times the subschemas below sixty nested targets take not sixteen times as long."""
    seconds = []
    for size in (5_000, 20_000):
        schema = nested_targets(size)
        tries = []
        for _ in range(5):  # the least: the collector of garbage is in some of them
            started = time.process_time()
            longest_path(schema)
            tries.append(time.process_time() - started)
        seconds.append(min(tries))
    assert seconds[1] < 12 * seconds[0]


D7: dict[str, Any] = {"$schema": "http://json-schema.org/draft-07/schema#"}
INNER: list[Any] = [
    {
        "$id": "http://e/",
        "$ref": "b.json",
        "$defs": {
            "b": {"$id": "b.json", "$ref": "#/$defs/i", "$defs": {"i": TEXT}},
            "i": WHOLE,
        },
    },
    {
        "$id": "http://e/",
        "$ref": "b.json",
        "$defs": {
            "i": {"$anchor": "here", **WHOLE},
            "b": {
                "$id": "b.json",
                "allOf": [{"$ref": "#here"}],
                "$defs": {"i": {"$anchor": "here", **TEXT}},
            },
        },
    },
    {
        "$id": "http://e/",
        "$ref": "d/x.json",
        "$defs": {
            "x": {"$id": "x.json", **WHOLE},
            "d": {"$id": "d/", "$defs": {"x": {"$id": "x.json", **TEXT}}},
        },
    },
    {"$ref": "#here", "$defs": {"i": {"$dynamicAnchor": "here", **TEXT}}},
    {"allOf": [{"id": "x", "$ref": "#/$defs/i"}], "$defs": {"i": TEXT}},
    {
        **D7,
        "allOf": [{"$id": "b.json", "$ref": "#/definitions/i"}],
        "definitions": {"i": TEXT},
    },
    {**D7, "allOf": [{"$ref": "#i"}], "definitions": {"i": {"$id": "#i", **TEXT}}},
]


@pytest.mark.parametrize("schema", INNER, ids=str)
def test_a_reference_is_relative_to_the_nearest_identifier(schema: Any) -> None:
    """Pointers and anchors too: of two places that share one, that of its own resource counts."""
    grammar = compiled(schema, strict=True)
    assert grammar.matcher(ids('"a"')).may_end
    assert grammar.matcher(ids("1")).error


@pytest.mark.parametrize("ref", ["#/$defs/i", "#here", "b.json#/$defs/i", "#/x"])
def test_a_reference_that_finds_nothing_in_its_resource_is_named(ref: str) -> None:
    """Though something is there in the document: a strict schema is refused."""
    inner = {"$id": "b.json", "allOf": [{"$ref": ref}], "x": {"$ref": "#/$defs/i"}}
    schema = {"$ref": "b.json", "$defs": {"b": inner, "i": {"$anchor": "here", **WHOLE}}}
    assert compiled(schema).unenforced == ("#/$defs/b/allOf/0/$ref",)
    with pytest.raises(BadRequest, match="ref"):
        compiled(schema, strict=True)


_LEAF = st.fixed_dictionaries(
    {"type": st.sampled_from(["string", "integer"])},
    optional={"$anchor": st.sampled_from(["h", "k"])},
)
_REFS = (
    *("#/$defs/p", "#/$defs/q", "#h", "#k", "b.json", "x.json", "d/x.json", "../b.json"),
    *("b.json#/$defs/p", "b.json#h", "x.json#/$defs/q", "x.json#h", "d/#k"),
)


def _resource(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(
        {
            "$id": st.sampled_from(["b.json", "d/", "x.json", "d/x.json", "http://e/b.json"]),
            "$ref": st.sampled_from(_REFS),
            "$defs": st.fixed_dictionaries({"p": inner, "q": _LEAF}),
        }
    )


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    schema=_resource(st.one_of(_LEAF, _resource(st.one_of(_LEAF, _resource(_LEAF))))),
    root=st.sampled_from(["http://e/", "http://e/d/b.json"]),
)
def test_a_reference_leads_where_another_reader_follows_it(schema: Any, root: str) -> None:
    """Into resources inside resources, whose definitions and anchors have the same names."""
    schema = {**schema, "$id": root}
    judge = jsonschema.Draft202012Validator(schema, registry=Registry())
    try:
        grammar = compiled(schema)
        fitting = [value for value in ("a", 1, None) if judge.is_valid(value)]
    except (BadRequest, RecursionError, Unresolvable):
        return
    said = [value for value in ("a", 1, None) if grammar.matcher(ids(json.dumps(value))).may_end]
    assert grammar.unenforced or said == fitting
