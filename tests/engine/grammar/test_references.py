"""References lead where JSON Schema says, and no further than they may."""

from typing import Any

import pytest

from gateway.engine.grammar.compiling import GrammarBounds
from gateway.engine.grammar.schemas import reachable
from gateway.errors import BadRequest
from tests.engine.grammar.drawn_rows import compiled, ids

TEXT: dict[str, Any] = {"type": "string"}


def to(name: str) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{name}"}


def chain(length: int) -> dict[str, Any]:
    """Make a schema that leads through `length` subschemas and one more."""
    links = {f"d{i}": {"items": to(f"d{i + 1}")} for i in range(length // 2)}
    return {"$defs": {**links, f"d{length // 2}": TEXT}, **to("d0")}


def test_a_way_that_is_too_long_is_refused_before_it_is_compiled() -> None:
    """llguidance follows it by native recursion, and a process has a limited stack."""
    bounds = GrammarBounds()
    reachable(chain(bounds.max_path - 2), bounds.max_path)
    with pytest.raises(BadRequest, match="leads through more than 400 subschemas"):
        reachable(chain(bounds.max_path), bounds.max_path)


D7: dict[str, Any] = {"$schema": "http://json-schema.org/draft-07/schema#"}
NAMED: list[Any] = [
    {"$ref": "#here", "$defs": {"i": {"$dynamicAnchor": "here", **TEXT}}},
    {**D7, "allOf": [{"$ref": "#i"}], "definitions": {"i": {"$id": "#i", **TEXT}}},
    {"$id": "http://e/a", "$ref": "http://e/a#/$defs/i", "$defs": {"i": TEXT}},
    {"$id": "http://e/a", "$ref": "a#/$defs/i", "$defs": {"i": TEXT}},
]


@pytest.mark.parametrize("schema", NAMED, ids=str)
def test_a_reference_by_anchor_or_by_the_schemas_own_address_is_followed(schema: Any) -> None:
    grammar = compiled(schema, strict=True)
    assert grammar.matcher(ids('"a"')).may_end
    assert grammar.matcher(ids("1")).error
