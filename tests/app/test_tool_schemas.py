"""Functions whose parameters no grammar holds whole, over a socket, on real MLX."""

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from gateway.engine.hub import Hub
from tests.checkpoints import write_chat
from tests.cpu_engines import cpu_engines
from tests.serving_app import catalog, served

pytestmark = pytest.mark.anyio

# Each keyword is one that grammars have; these patterns they cannot take.
LOOKING = {"type": "string", "pattern": "^(?=.*[0-9])[a-z0-9]+$"}
LARGE = {"type": "string", "pattern": "^(a{99999}){99999}$"}


def function(name: str, *, strict: bool | None = None, **properties: Any) -> dict[str, Any]:
    return {
        "name": name,
        "strict": strict,
        "parameters": {
            "type": "object",
            "properties": {**properties, "ok": {"type": "boolean"}},
            "required": ["ok"],
        },
    }


def nested(functions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": each} for each in functions]


WIDE = [function("look", word=LOOKING), function("grow", word=LARGE), function("plain")]


@pytest.fixture(scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[httpx2.AsyncClient]:
    """Serve a tiny chat model, to all of them."""
    folder = tmp_path_factory.mktemp("served")
    write_chat(folder / "tiny")
    models = catalog(folder, {"tiny": {"kind": "chat", "source": "path:tiny"}})
    hub = Hub(endpoint="http://127.0.0.1:9")
    async with served(models, cpu_engines(hub, structured_compile_timeout_s=60)) as found:
        yield found


async def chat(
    client: httpx2.AsyncClient, functions: list[dict[str, Any]], choice: Any, **more: Any
) -> httpx2.Response:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hello there!"}],
        "max_tokens": 40,
        "tools": nested(functions),
        "tool_choice": choice,
        **more,
    }
    return await client.post("/v1/chat/completions", json=body)


NAMED = {"type": "function", "function": {"name": "look"}}
ALLOWED = {
    "type": "allowed_tools",
    "allowed_tools": {
        "mode": "required",
        "tools": [{"type": "function", "function": {"name": each}} for each in ("plain", "grow")],
    },
}


@pytest.mark.parametrize(
    ("choice", "named"),
    [
        ("required", "look%23%2Fproperties%2Fword%2Fpattern,grow%23%2Fproperties%2Fword%2Fpattern"),
        (NAMED, "look%23%2Fproperties%2Fword%2Fpattern"),
        (ALLOWED, "grow%23%2Fproperties%2Fword%2Fpattern"),
        ("auto", None),
    ],
    ids=["required", "named", "allowed", "auto"],
)
async def test_keywords_of_a_function_that_do_not_compile_are_named(
    client: httpx2.AsyncClient, choice: Any, named: str | None
) -> None:
    """An answer's schema is treated alike; calls that are free are held to nothing."""
    answer = await chat(client, WIDE, choice)
    assert answer.status_code == 200, answer.text
    assert answer.headers.get("x-gateway-unenforced") == named


@pytest.mark.parametrize("choice", ["auto", "required", NAMED], ids=["auto", "required", "named"])
async def test_a_strict_function_is_refused_by_name(
    client: httpx2.AsyncClient, choice: Any
) -> None:
    strict = [function("look", strict=True, word=LOOKING), function("plain", strict=True)]
    answer = await chat(client, strict, choice)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"] == (
        "The parameters of 'look': The JSON Schema keyword `pattern` at #/properties/word cannot "
        "be enforced here, and 'strict' asks for all of the schema."
    )
    assert (error["param"], error["code"]) == ("tools", "invalid_json_schema")
