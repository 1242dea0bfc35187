"""Graphiti's own clients, pointed at the gateway, and a graph in memory to fill.

The demo model writes nonsense, so it is held to short strings and few items: an episode then
makes a graph of a handful of nodes. Everything else is as in demo/models.yaml.
"""

import importlib
import importlib.util
import json
import logging
import os
import warnings
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from compat_tests.conftest import started

HAS_GRAPHITI = all(importlib.util.find_spec(name) for name in ("graphiti_core", "kuzu"))
collect_ignore_glob = [] if HAS_GRAPHITI else ["test_*.py"]

# Read by graphiti_core when it is imported.
os.environ["GRAPHITI_TELEMETRY_ENABLED"] = "false"
os.environ["EMBEDDING_DIM"] = "384"
if HAS_GRAPHITI:
    with warnings.catch_warnings(action="ignore"):  # what it deprecates is not ours to mend
        importlib.import_module("graphiti_core")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the tests that were left out, and the reason."""
    if not HAS_GRAPHITI:
        terminalreporter.write_line(
            "compat_tests/graphiti is left out: graphiti-core is not installed (make compat-ci)"
        )


@pytest.fixture(scope="session")
def small_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a gateway whose demo model is brief."""
    with started(
        tmp_path_factory.mktemp("graphiti"),
        GATEWAY_DEMO_CHAT_STRUCTURED_MAX_STRING_CHARS="20",
        GATEWAY_DEMO_CHAT_STRUCTURED_MAX_ARRAY_ITEMS="3",
    ) as address:
        yield address


class Clients:
    """Graphiti's clients as its users build them, keeping every reply beside its schema."""

    def __init__(self, url: str) -> None:
        self._base_url = f"{url}/v1"
        self.replies: list[tuple[type[BaseModel] | None, dict[str, Any]]] = []
        self._made: list[Any] = []

    def llm(self, kind: str) -> Any:
        """Give an LLM client: json_schema and json_object are the generic one's two modes."""
        from graphiti_core.llm_client.openai_client import OpenAIClient
        from graphiti_core.llm_client.openai_generic_client import OpenAIGenericClient

        if kind == "responses":
            client = OpenAIClient(config=self._config())
        else:
            client = OpenAIGenericClient(config=self._config(), structured_output_mode=kind)
        generate = client.generate_response

        async def kept(
            messages: Any, response_model: type[BaseModel] | None = None, *args: Any, **named: Any
        ) -> dict[str, Any]:
            reply: dict[str, Any] = await generate(messages, response_model, *args, **named)
            self.replies.append((response_model, reply))
            return reply

        client.generate_response = kept
        return self._kept(client)

    def embedder(self) -> Any:
        """Give the embedder, with the model that it asks for by itself."""
        from graphiti_core.embedder.openai import OpenAIEmbedder, OpenAIEmbedderConfig

        config = OpenAIEmbedderConfig(api_key="unused", base_url=self._base_url)
        return self._kept(OpenAIEmbedder(config))

    def reranker(self) -> Any:
        """Give the cross-encoder: one call of one token for each passage."""
        from graphiti_core.cross_encoder.openai_reranker_client import OpenAIRerankerClient

        return self._kept(OpenAIRerankerClient(config=self._config()))

    def check_replies(self) -> set[str]:
        """Hold every reply to its own model, strictly; name the models seen."""
        assert self.replies
        for model, reply in self.replies:
            if model is not None:
                model.model_validate_json(json.dumps(reply), strict=True)
        return {model.__name__ for model, _ in self.replies if model is not None}

    async def close(self) -> None:
        """Close the connections, which Graphiti leaves open."""
        for made in self._made:
            await made.client.close()

    def _kept(self, made: Any) -> Any:
        self._made.append(made)
        return made

    def _config(self) -> Any:
        from graphiti_core.llm_client.config import LLMConfig

        # Greedy, so that a run repeats: sampled, a toy now and then names a thing "", which
        # Graphiti then asks an embedding of, and empty input is refused here as at OpenAI's.
        return LLMConfig(
            temperature=0,
            api_key="unused",
            base_url=self._base_url,
            model="gpt-4.1-mini",
            small_model="gpt-4.1-mini",
        )


@pytest.fixture
async def clients(small_url: str, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Clients]:
    """Give the clients; fail on errors that they would have hidden by asking again."""
    caplog.set_level(logging.INFO, logger="openai")
    clients = Clients(small_url)
    yield clients
    await clients.close()
    hidden = [
        record.getMessage()
        for record in caplog.get_records("call")
        if record.getMessage().startswith("Retrying")
        or (record.levelno >= logging.ERROR and record.name.startswith("graphiti_core."))
    ]
    assert not hidden


@pytest.fixture
async def driver() -> Any:
    """Make an empty graph in memory, with its full-text indices."""
    from graphiti_core.driver.kuzu_driver import KuzuDriver

    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        driver = KuzuDriver()
    driver._database = ""  # Graphiti reads it, the driver lacks it
    await driver.graph_ops.build_indices_and_constraints(driver)
    return driver
