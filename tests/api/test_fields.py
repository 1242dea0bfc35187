"""The table of request fields in docs/api.md, walked against the running server."""

import functools
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from httpx2 import AsyncClient
from openai.types import completion_create_params as completions
from openai.types import decision_create_params as decisions
from openai.types import embedding_create_params as embeddings
from openai.types.chat import completion_create_params as chat
from openai.types.responses import response_create_params as responses

from gateway.api.paths import PATHS, UNSERVED
from tests.api.conftest import some_models
from tests.api.harness import error_of
from tests.fakes import ScriptedChat, ScriptedEmbedder, ScriptedEngines
from tests.serving_app import served

pytestmark = pytest.mark.anyio
ROOMY = 1000  # tokens: a question takes more than the scripted model has room for
PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
USER = [{"role": "user", "content": "hi"}]
MINIMAL: dict[str, dict[str, Any]] = {
    "/admin/models/pull": {"model": "writer"},
    "/v1/embeddings": {"model": "any-size", "input": "hi"},
    "/v1/chat/completions": {"model": "writer", "messages": USER},
    "/v1/completions": {"model": "writer", "prompt": "hi"},
    "/v1/responses": {"model": "writer", "input": "hi"},
    "/v1/messages": {"model": "writer", "max_tokens": 3, "messages": USER},
    "/v1/messages/count_tokens": {"model": "writer", "messages": USER},
    "/v1/embed": {"model": "any-size", "inputs": "hi"},
    "/v2/embed": {"model": "any-size", "texts": ["hi"]},
    "/v1/embed_sparse": {"model": "any-size", "inputs": "hi"},
    "/v1/pooling": {"model": "any-size", "input": "hi"},
    "/v1/tokenize": {"model": "writer", "prompt": "hi"},
    "/v1/detokenize": {"model": "writer", "tokens": [104]},
    "/v1/rerank": {"model": "judge", "query": "hi", "documents": ["hi"]},
    "/v1/score": {"model": "judge", "text_1": "hi", "text_2": "hi"},
    "/v1/decisions": {
        "model": "writer",
        "input": "hi",
        "questions": [{"type": "predicate", "instructions": "It is so."}],
    },
}
OPENAI: dict[str, list[type]] = {
    "/v1/embeddings": [embeddings.EmbeddingCreateParams],
    "/v1/chat/completions": [
        chat.CompletionCreateParamsBase, chat.CompletionCreateParamsStreaming,
    ],
    "/v1/completions": [
        completions.CompletionCreateParamsBase, completions.CompletionCreateParamsStreaming,
    ],
    "/v1/responses": [
        responses.ResponseCreateParamsBase, responses.ResponseCreateParamsStreaming,
    ],
    "/v1/decisions": [decisions.DecisionCreateParams],
}  # fmt: skip
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
FUNCTION = {"name": "f", "parameters": SCHEMA}
VALUES: dict[str, Any] = {
    "output": "dense", "task": "embed",
    "encoding_format": "base64", "dimensions": 2, "truncate": True, "prompt_name": "query",
    "repetition_penalty": 1.1, "min_tokens": 1, "ignore_eos": True, "stop_token_ids": [5],
    "temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.1, "stop": ["x"], "seed": 1,
    "presence_penalty": 1, "frequency_penalty": -1, "logit_bias": {"5": 1}, "max_tokens": 3,
    "max_completion_tokens": 3, "max_output_tokens": 16, "n": 1, "best_of": 1, "echo": True,
    "stream": True, "stream_options": {"include_usage": True}, "service_tier": "flex",
    "response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a+"},
    "guided_json": SCHEMA, "guided_regex": "a+", "guided_choice": ["a"],
    "guided_grammar": 'start: "a"', "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": "auto", "parallel_tool_calls": False, "functions": [FUNCTION],
    "function_call": "auto", "reasoning_effort": "low", "chat_template_kwargs": {"a": 1},
    "thinking_token_budget": 9,
    "instructions": "Be brief.", "text": {"format": {"type": "json_object"}},
    "reasoning": {"effort": "low"}, "include": ["message.output_text.logprobs"],
    "truncation": "disabled", "metadata": {"a": "b"}, "background": True,
    "max_tokens_per_doc": 5, "top_n": 1, "return_documents": True, "raw_scores": True,
    "use_activation": False, "add_special_tokens": False, "return_token_strs": True,
    "continue_final_message": False, "add_generation_prompt": True,
    "store": False, "modalities": ["audio"], "suffix": "x", "use_beam_search": True,
}  # fmt: skip
BESIDE: dict[tuple[str, str], dict[str, Any]] = {
    ("/v1/chat/completions", "top_logprobs"): {"logprobs": True, "top_logprobs": 2},
    ("/v1/chat/completions", "logprobs"): {"logprobs": True},
    ("/v1/completions", "logprobs"): {"logprobs": 2},
    ("/v1/responses", "tools"): {"tools": [{"type": "function", **FUNCTION}]},
    ("/v1/responses", "top_logprobs"): {
        "top_logprobs": 2,
        "include": ["message.output_text.logprobs"],
    },
    ("/v1/responses", "n"): {"n": 2},
    ("/v1/tokenize", "messages"): {"messages": USER, "prompt": None},
    ("/v1/embed", "normalize"): {"normalize": False},
    ("/v2/embed", "input_type"): {"input_type": "search_query"},
    ("/v2/embed", "embedding_types"): {"embedding_types": ["int8"]},
    ("/v2/embed", "output_dimension"): {"output_dimension": 2},
    ("/v2/embed", "truncate"): {"truncate": "NONE"},
    ("/v2/embed", "inputs"): {
        "inputs": [{"content": [{"type": "text", "text": "hi"}]}],
        "texts": None,
    },
    **{
        (path, name): {name: value}
        for path in ("/v1/messages", "/v1/messages/count_tokens")
        for name, value in {
            "tools": [{"name": "f", "input_schema": SCHEMA}],
            "tool_choice": {"type": "auto"},
            "thinking": {"type": "adaptive"},
            "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
            "output_format": {"type": "json_schema", "schema": SCHEMA},
            "stop_sequences": ["x"],
        }.items()
    },
    ("/v1/responses", "logprobs"): {"logprobs": True},
}


WRONG: dict[str, list[tuple[str, Any]]] = {
    "/v1/chat/completions": [
        ("messages", []), ("messages", "hi"), ("messages", None), ("temperature", -0.1),
        ("temperature", 2.1), ("temperature", "hot"), ("top_p", 1.1), ("min_p", -1),
        ("max_tokens", 0), ("max_tokens", -5), ("max_tokens", 1.5), ("n", 0), ("n", 129),
        ("stop", ["a"] * 65), ("stop", ["a" * 257]), ("stop", 3), ("seed", "x"),
        ("presence_penalty", 3), ("frequency_penalty", -3), ("logit_bias", {"a": 1}),
        ("logit_bias", {"5": 101}), ("logit_bias", []), ("stream", "yes"),
        ("chat_template_kwargs", []), ("logprobs", 1), ("top_logprobs", 21),
        ("top_logprobs", 5), ("tools", {}), ("tool_choice", "sometimes"),
        ("response_format", "json"), ("reasoning_effort", "very"), ("parallel_tool_calls", 1),
    ],
    "/v1/completions": [
        ("prompt", None), ("prompt", ""), ("prompt", []), ("prompt", ["a", ""]), ("prompt", [[]]),
        ("prompt", ["a", [1]]), ("prompt", 5), ("prompt", [-1]), ("prompt", [True]),
        ("prompt", {}), ("max_tokens", 0), ("n", 0), ("best_of", 2), ("logprobs", 6),
        ("logprobs", True), ("echo", "yes"), ("suffix", "end"), ("stop", [5]), ("temperature", 3),
        ("logit_bias", {"a": 1}), ("seed", 0.5), ("stream", 1), ("structured_outputs", []),
        ("guided_regex", 3), ("guided_choice", "a"),
    ],
    "/v1/responses": [
        ("input", None), ("input", []), ("input", 3), ("model", ""), ("temperature", 3),
        ("max_output_tokens", 0), ("tools", {}), ("tools", [{"type": "mcp"}]), ("tool_choice", 3),
        ("parallel_tool_calls", "no"), ("text", "json"), ("text", {"format": {"type": "xml"}}),
        ("reasoning", "high"), ("include", "all"), ("metadata", []), ("top_logprobs", 21),
        ("stream", 1), ("previous_response_id", ""), ("store", "no"), ("conversation", {"id": "c"}),
        ("background", True), ("prompt", {"id": "p"}), ("response_format", {"type": "json_object"}),
        ("messages", [{"role": "user", "content": "hi"}]),
    ],
    "/v2/embed": [
        ("texts", "hi"), ("texts", []), ("texts", [""]), ("texts", None), ("images", ["data:"]),
        ("input_type", "image"), ("embedding_types", []), ("embedding_types", ["int4"]),
        ("output_dimension", 0), ("output_dimension", 5), ("max_tokens", 0),
        ("truncate", "START"), ("truncate", True), ("inputs", [{"content": []}]),
        ("inputs", [{"content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]),
    ],
    "/v1/embeddings": [
        ("encoding_format", "float64"), ("dimensions", 0), ("dimensions", -1),
        ("dimensions", "4"), ("dimensions", 1.5), ("model", ""), ("model", 7),
        ("truncate", "yes"), ("prompt_name", 3), ("output", "vectors"), ("output", []),
    ],
    "/v1/pooling": [("task", "token_classify"), ("encoding_format", "bytes"), ("input", [])],
}  # fmt: skip


@pytest.fixture(scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncClient]:
    """Give a client of the gateway that all cases share."""
    embedder = ScriptedEmbedder(outputs=("dense", "sparse", "multi_vector"), token_dimensions=4)
    engines = ScriptedEngines(embedder, ScriptedChat(max_context=ROOMY))
    models = some_models(tmp_path_factory.mktemp("models"))
    async with served(models, engines, admin_key="sesame") as client:
        client.headers["authorization"] = "Bearer sesame"
        yield client


@functools.cache
def rows() -> dict[str, tuple[list[str], list[str], list[str]]]:
    """Read the table: by path, the fields that are honoured, harmless, refused."""
    table = PAGE.partition("<!-- fields:")[2].partition("<!-- /fields -->")[0]
    found = {}
    for line in table.splitlines():
        if path := re.match(r"\| `POST ([^`]+)` \|", line):
            columns = [re.findall(r"`([^`]+)`", column) for column in line.split("|")[2:5]]
            found[path[1]] = (columns[0], columns[1], columns[2])
    return found


def body(path: str, field: str) -> dict[str, Any]:
    given = BESIDE.get((path, field), {field: VALUES.get(field, "x")})
    return {**given, **MINIMAL[path]} if field in MINIMAL[path] else {**MINIMAL[path], **given}


def cases(column: int) -> list[tuple[str, str]]:
    """List them, but for one that needs an earlier answer, and one that not every model reads."""
    cases = [(path, field) for path, columns in rows().items() for field in columns[column]]
    return [each for each in cases if each[1] not in ("previous_response_id", "instruction")]


@pytest.mark.parametrize("path", OPENAI)
def test_every_field_of_openais_is_in_the_table(path: str) -> None:
    known = {field for column in rows()[path] for field in column}
    asked = {field for params in OPENAI[path] for field in params.__annotations__}
    assert asked <= known


@pytest.mark.parametrize(("path", "field"), cases(0) + cases(1))
async def test_what_is_honoured_or_harmless_is_accepted(
    client: AsyncClient, path: str, field: str
) -> None:
    answer = await client.post(path, json=body(path, field))
    assert answer.status_code == 200, answer.text
    assert "x-gateway-ignored" not in answer.headers


@pytest.mark.parametrize(("path", "field"), cases(2))
async def test_what_is_refused_is_a_400_that_names_it(
    client: AsyncClient, path: str, field: str
) -> None:
    """Never an answer without it; TEI's status for it is 422."""
    answer = await client.post(path, json=body(path, field))
    assert answer.status_code == (422 if path in ("/v1/embed", "/v1/embed_sparse") else 400)
    error = answer.json()["error"]
    has_param = isinstance(error, dict) and "param" in error
    assert error["param"] == field if has_param else f"'{field}'" in str(error)


@pytest.mark.parametrize(
    ("path", "field", "value"), [(path, *each) for path, cases in WRONG.items() for each in cases]
)
async def test_a_wrong_value_is_refused_by_its_name(
    client: AsyncClient, path: str, field: str, value: Any
) -> None:
    answer = await client.post(path, json={**MINIMAL[path], field: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].split("[")[0].split(".")[0] == field


@pytest.mark.parametrize("path", MINIMAL)
async def test_a_null_is_as_good_as_nothing(client: AsyncClient, path: str) -> None:
    """SDKs in other languages write every field that they know, as null where it is not set."""
    nulls = {field: None for column in rows()[path] for field in column}
    answer = await client.post(path, json={**nulls, **MINIMAL[path]})
    assert answer.status_code == 200, answer.text
    assert "x-gateway-ignored" not in answer.headers


LLAMA_CPPS = [
    *("cache_prompt", "grammar", "id_slot", "json_schema", "lora", "mirostat", "n_cache_reuse"),
    *("n_predict", "n_probs", "post_sampling_probs", "repeat_penalty", "response_fields"),
    *(
        "return_progress",
        "return_tokens",
        "samplers",
        "thinking_budget_tokens",
        "timings_per_token",
    ),
]
LLAMA_CPP_PATHS = ["/v1/chat/completions", "/v1/completions"]


@pytest.mark.parametrize(
    ("path", "field"),
    [(path, "colour") for path in MINIMAL]
    + [(path, field) for path in LLAMA_CPP_PATHS for field in LLAMA_CPPS],
)
async def test_what_nobody_knows_is_named(client: AsyncClient, path: str, field: str) -> None:
    """Nobody is left to believe that it was followed; llama.cpp's own fields are named too."""
    answer = await client.post(path, json={**MINIMAL[path], field: 1})
    assert answer.status_code == 200
    assert answer.headers["x-gateway-ignored"] == field


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/models/", "/v1/models"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/models", "/v1/models"),
        ("/v1//embeddings", "/v1/embeddings"),
        ("/v1/v1/v1/responses/", "/v1/responses"),
        ("/health/", "/health"),
        ("/v1/nowhere/", None),
        ("/v2/models", None),
    ],
)
async def test_a_path_that_is_nearly_one_is_answered_with_the_one(
    client: AsyncClient, path: str, meant: str | None
) -> None:
    """Clients put /v1 before paths that have it already, and slashes behind."""
    answer = await client.get(path)
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["code"] == "unknown_url"
    assert error["message"].partition(". ")[2] == (f"Did you mean {meant}?" if meant else "")


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("/v1/audio/speech", "audio"),
        ("/v1/images/generations/", "images"),
        ("/v1/files", "files"),
        ("/files/file-1/content", "files"),
        ("/v1/v1/moderations", "moderations"),
        ("/v1//vector_stores/vs_1/files", "vector_stores"),
        ("/v1/fine_tuning/jobs", "fine_tuning"),
    ],
)
async def test_a_path_of_openais_that_is_not_served_says_so(
    client: AsyncClient, method: str, path: str, named: str
) -> None:
    error = error_of(await client.request(method, path), 404)
    assert (error["code"], error["type"]) == ("unknown_url", "invalid_request_error")
    assert error["message"] == (
        f"Invalid URL ({method} {path}). `/{named}` is not served here; "
        "/openapi.json lists the paths that are."
    )


@pytest.mark.parametrize(
    "path", ["/v1/audiobooks", "/v1/nowhere/files", "/v2/files", "/v1", "/v1/v2/images"]
)
async def test_a_path_of_nobodys_is_not_called_openais(client: AsyncClient, path: str) -> None:
    assert error_of(await client.get(path), 404)["message"] == f"Invalid URL (GET {path})"


@pytest.mark.parametrize("path", ["/v1/batches/b_1/cancel", "/batches", "/v1/messages/batches"])
async def test_batches_are_answered_with_their_replacement(client: AsyncClient, path: str) -> None:
    answer = await client.post(path, json={})
    assert "send each of their requests by itself" in answer.json()["error"]["message"]


def test_no_path_is_both_served_and_not() -> None:
    assert not UNSERVED & {path.split("/")[1] for path in PATHS}
