"""Finished answers are judged by the whole schema, in bounded time, and without the network."""

import json
import socket
import threading
from typing import Any

import pytest

from gateway.engine.grammar.structured import fits
from tests.sandboxes import sandbox

UNIQUE = {"type": "array", "uniqueItems": True}
D4 = {"$schema": "http://json-schema.org/draft-04/schema#"}
D7 = {"$schema": "http://json-schema.org/draft-07/schema#"}
AWAY = "http://127.0.0.1:9/s.json"
CASES: list[tuple[Any, Any, bool | None]] = [
    (UNIQUE, [1, 2], True),
    (UNIQUE, [1, 1.0], False),
    ({"not": {"multipleOf": 2}}, 3, True),
    ({"pattern": "^(?=a)ab"}, "ab", True),
    ({"pattern": "^(?=a)ab"}, "b", False),
    ({"format": "email"}, "no address", True),
    ({**D4, "minimum": 1, "exclusiveMinimum": True}, 1, False),
    ({**D7, "dependencies": {"a": ["b"]}}, {"a": 1}, False),
    ({"$schema": "https://example.com/own-draft", "minimum": 1}, 0, False),
    ({"properties": {"a": {"$ref": AWAY}, "b": UNIQUE}}, {"a": 1, "b": [1, 1]}, False),
    ({"properties": {"a": {"$ref": AWAY}, "b": UNIQUE}}, {"a": 1, "b": [1]}, None),
    ({"properties": {"a": {"$ref": AWAY}}}, {"b": 1}, None),
    ({"not": {"$ref": AWAY}}, 1, None),
    ({"oneOf": [{"$ref": AWAY}, {"type": "integer"}]}, 1, None),
    ({"allOf": [{"$ref": AWAY}], "unevaluatedProperties": False}, {"a": 1}, None),
    ({"properties": {"a": {"$ref": f"{AWAY}#/gone"}}}, {"a": 1}, None),
    ({"$ref": "https://json-schema.org/draft/2020-12/schema"}, {"type": "string"}, True),
    ({"$id": "https://example.com/a", "$ref": "#/$defs/b", "$defs": {"b": UNIQUE}}, [1], True),
    (True, 1, True),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "answer", "verdict"), CASES, ids=str)
def test_answers_are_judged_by_the_schemas_own_draft(
    schema: Any, answer: Any, verdict: bool | None
) -> None:
    assert fits(json.dumps(schema), json.dumps(answer), None) is verdict


def test_what_is_no_json_fits_no_schema() -> None:
    assert fits("{}", "[1,", None) is False


def test_no_reference_is_ever_fetched() -> None:
    """A caller's schema makes the gateway connect to nobody."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.5)
        came = threading.Event()

        def serve() -> None:
            try:
                server.accept()
            except TimeoutError:
                return
            came.set()

        thread = threading.Thread(target=serve)
        thread.start()
        address = f"http://127.0.0.1:{server.getsockname()[1]}/s.json"
        assert fits(json.dumps({"$ref": address}), "1", None) is None
        thread.join()
        assert not came.is_set()


def test_a_schema_that_takes_too_long_gives_no_verdict() -> None:
    """The sandbox is the same judge, and outlives whatever it is given."""
    with sandbox("grammar") as judge:
        assert fits(json.dumps(UNIQUE), "[1,1]", judge) is False
        assert fits(json.dumps(UNIQUE), "[1]", judge) is True
        slow = {"pattern": "^(?=a)(a|a)*(a|a)*(a|a)*$"}
        assert fits(json.dumps(slow), json.dumps("a" * 5000 + "b"), judge) in (False, None)
        assert fits(json.dumps(UNIQUE), "[2]", judge) is True
