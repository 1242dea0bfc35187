"""The way through a schema's references is measured before anything follows it."""

import json
import time
from typing import Any

import pytest

from gateway.engine.grammar.compiling import Bounds, read_schema
from gateway.engine.grammar.references import MAX_PATH, check_path, longest_path
from gateway.errors import BadRequest

TEXT: dict[str, Any] = {"type": "string"}


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
