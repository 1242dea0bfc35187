"""Grammars made to kill: each is a 400, in a process that must outlive it."""

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest

from tests.processes import DEMO, Served, command, started

Schema = dict[str, Any]
USER = [{"role": "user", "content": "hi"}]
CHAT: Schema = {"model": "demo-chat", "messages": USER, "max_tokens": 4}


def chain(length: int, link: Callable[[Schema], Schema], last: Schema | None = None) -> Schema:
    """Make a schema whose references lead from one definition to the next."""
    names = [format(i, "x") for i in range(length + 1)]
    defs = {name: link({"$ref": f"#/$defs/{after}"}) for name, after in itertools.pairwise(names)}
    return {"$ref": "#/$defs/0", "$defs": {**defs, names[-1]: last or {"type": "string"}}}


def required(ref: Schema) -> Schema:
    return {"type": "object", "properties": {"n": ref}, "required": ["n"]}


CHAINS = {
    "objects": chain(1500, required),
    "items": chain(4000, lambda ref: {"type": "array", "items": ref}),
    "bare": chain(7000, lambda ref: ref),
    "optional": chain(2000, lambda ref: {"type": "object", "properties": {"n": ref}}),
    "anyOf": chain(3500, lambda ref: {"anyOf": [ref, {"type": "null"}]}),
    "prefixItems": chain(2000, lambda ref: {"type": "array", "prefixItems": [ref]}),
    "percent": json.loads(json.dumps(chain(1500, required)).replace("#/$", "#/%24")),
}
BY_ID = {
    "$ref": "u0",
    "$defs": {
        **{f"{i}": {"$id": f"u{i}", **required({"$ref": f"u{i + 1}"})} for i in range(1500)},
        "z": {"$id": "u1500", "type": "string"},
    },
}


def _tool(schema: Schema, **more: Any) -> Schema:
    parameters = {**schema, "type": "object"}
    return {"type": "function", "function": {"name": "f", "parameters": parameters, **more}}


def ways(schema: Schema) -> dict[str, Schema]:
    """Give the requests that have a schema, each in another field."""
    named = {"name": "x", "schema": schema}
    return {
        "response_format": {"response_format": {"type": "json_schema", "json_schema": named}},
        "guided_json": {"guided_json": schema},
        "structured_outputs": {"structured_outputs": {"json": schema}},
        "text.format": {"input": "hi", "text": {"format": {"type": "json_schema", **named}}},
        "strict tool": {"tools": [_tool(schema, strict=True)]},
        "forced tool": {
            "tools": [_tool(schema)],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
        },
    }


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve the demo model, for real, in a process that a native crash would end."""
    folder = tmp_path_factory.mktemp("gateway")
    with started(command("serve", "--models", str(DEMO)), folder) as served:
        yield served


def ask(served: Served, body: Schema) -> httpx2.Response:
    path = "responses" if "input" in body else "chat/completions"
    base = {"model": "demo-chat"} if "input" in body else CHAT
    return httpx2.post(f"{served.url}/v1/{path}", json={**base, **body}, timeout=60)


@pytest.mark.parametrize(
    ("kind", "way"),
    [*((kind, "response_format") for kind in CHAINS), *(("objects", way) for way in ways({}))],
)
def test_a_long_chain_of_references_is_refused(served: Served, kind: str, way: str) -> None:
    answer = ask(served, ways(CHAINS[kind])[way])
    assert answer.status_code == 400, answer.text[:300]
    assert "subschemas" in answer.json()["error"]["message"]
    assert served.process.poll() is None
    assert ask(served, {}).status_code == 200


def test_a_long_chain_in_a_prompt_is_refused(served: Served) -> None:
    """A prompt that ends with a schema, as clients write it for servers without `json_schema`."""
    links = {format(i, "x"): {"$ref": f"#/{i + 1:x}"} for i in range(600)}
    schema = {"properties": {"n": {"$ref": "#/0"}}, **links}
    text = "Respond with a JSON object in the following format:\n\n" + json.dumps(schema)
    body = {
        "response_format": {"type": "json_object"},
        "messages": [{"role": "user", "content": text}],
    }
    answer = ask(served, body)
    assert answer.status_code == 400, answer.text[:300]
    assert "subschemas" in answer.json()["error"]["message"]


def test_a_long_chain_by_ids_is_named(served: Served) -> None:
    """It is left out, and the answer is checked by it, in a process that outlives that too."""
    answer = ask(served, ways(BY_ID)["response_format"])
    assert answer.status_code == 200, answer.text[:300]
    assert answer.headers["x-gateway-unenforced"].startswith("%23%2F%24ref")
    assert answer.headers["x-gateway-schema-valid"] == "false"
    assert ask(served, {}).status_code == 200
