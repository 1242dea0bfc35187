"""docs/coming-from.md is true: what it names is here; what it calls none is named or refused."""

import inspect
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import pytest
from httpx2 import AsyncClient
from mlx_lm import server

from gateway.cli import COMMANDS
from gateway.settings import Settings, variable
from tests.fakes import ScriptedEngines
from tests.processes import ROOT
from tests.serving_app import catalog, served

pytestmark = pytest.mark.anyio
PAGE: Final = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
MODELS: Final[dict[str, dict[str, Any]]] = {
    "chat": {"kind": "chat", "source": "path:."},
    "embedding": {"kind": "embedding", "source": "path:."},
}
MESSAGES: Final = [{"role": "user", "content": "Hello"}]
CHAT: Final = {"model": "chat", "messages": MESSAGES, "max_tokens": 2}
SERVED: Final[dict[str, Any]] = {
    "stream": False,
    "temperature": 0,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 1,
    "stop": ["x"],
    "repetition_penalty": 1.1,
    "reasoning_effort": "low",
    "response_format": {"type": "json_object"},
}
OF_CHAT: Final = {
    "num_ctx": 4096,
    "num_batch": 8,
    "num_gpu": 1,
    "num_thread": 2,
    "options": {"num_ctx": 1},
    "mirostat": 1,
    "mirostat_tau": 5,
    "typical_p": 0.9,
    "repeat_last_n": 8,
    "keep_alive": "5m",
    "ttl": 60,
    "template": "x",
    "xtc_probability": 0.5,
    "xtc_threshold": 0.1,
    "repetition_context_size": 20,
    "presence_context_size": 20,
    "role_mapping": {},
    "adapters": "a",
    "draft_model": "d",
    "num_draft_tokens": 3,
    "think": True,
}


def section(heading: str) -> str:
    return PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def test_each_command_is_one() -> None:
    named = set(re.findall(r"`mlx-gateway ([a-z]+)", PAGE))
    assert len(named) > 5
    known = {each.__name__.rstrip("_") for group in COMMANDS.values() for each in group}
    assert named <= {*known, "models"}


def test_each_variable_is_one() -> None:
    named = set(re.findall(r"GATEWAY_[A-Z_]+", PAGE))
    assert len(named) > 5
    assert named <= {variable(name) for name in Settings.model_fields}


def test_each_option_of_mlx_lms_server_is_one_of_its() -> None:
    known = set(re.findall(r'"(--[a-z-]+)"', inspect.getsource(server.main)))
    left = re.findall(r"^\| ([^|]*) \|", section("mlx-lm's server"), flags=re.MULTILINE)
    named = {option for cell in left for option in re.findall(r"`(--[a-z-]+)", cell)}
    assert len(named) > 5
    assert named == known


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[AsyncClient]:
    async with served(catalog(tmp_path, MODELS), ScriptedEngines()) as client:
        yield client


async def test_fields_that_are_served_are_not_called_ignored(client: AsyncClient) -> None:
    answer = await client.post("/v1/chat/completions", json={**CHAT, **SERVED})
    assert answer.status_code == 200, answer.text
    assert "x-gateway-ignored" not in answer.headers


@pytest.mark.parametrize("field", OF_CHAT)
async def test_a_field_without_a_counterpart_is_named_as_ignored(
    client: AsyncClient, field: str
) -> None:
    answer = await client.post("/v1/chat/completions", json={**CHAT, field: OF_CHAT[field]})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-gateway-ignored"] == field


@pytest.mark.parametrize(
    ("path", "status", "body"),
    [
        ("/v1/completions", 400, {"model": "chat", "prompt": "a", "suffix": "b"}),
        ("/embed", 422, {"inputs": ["a"], "normalize": False}),
        ("/embed", 422, {"inputs": ["a"], "truncation_direction": "Left"}),
    ],
)
async def test_what_the_page_calls_refused_is(
    client: AsyncClient, path: str, status: int, body: dict[str, Any]
) -> None:
    assert (await client.post(path, json=body)).status_code == status


@pytest.mark.parametrize(
    "path",
    [
        *("/api/chat", "/api/generate", "/api/embed", "/api/tags", "/api/v1/chat"),
        *("/api/v0/models", "/embed_all", "/predict", "/similarity", "/decode"),
    ],
)
async def test_a_path_that_is_not_served_is_a_404(client: AsyncClient, path: str) -> None:
    assert (await client.post(path, json={})).status_code == 404
