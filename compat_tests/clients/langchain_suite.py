"""LangChain's standard integration suites, against CHAT_MODEL of the gateway at OPENAI_BASE_URL."""

import os
from pathlib import Path
from typing import Any

import httpx
import pytest
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from langchain_tests.integration_tests import ChatModelIntegrationTests, EmbeddingsIntegrationTests

MODEL = os.environ["CHAT_MODEL"]
SEES = MODEL == "seeing"
PICTURE = Path(__file__).parents[2] / "tests" / "golden" / "vision" / "wide.png"
_WRONG = "calls the function with other values than were asked for"
_NONE = "has no format for calls, so that it answers in text"
# What a model of this size cannot: the calls themselves are well-formed.
CANNOT = {
    "demo-chat": dict.fromkeys(
        ["test_tool_calling", "test_tool_calling_async", "test_unicode_tool_call_integration"],
        _WRONG,
    ),
    "smollm2-135m": {
        "test_tool_calling": _NONE,
        "test_tool_calling_async": _NONE,
        "test_agent_loop": _NONE,
        "test_unicode_tool_call_integration": _WRONG,
    },
}


class TestChat(ChatModelIntegrationTests):
    """The chat model on board."""

    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": MODEL, "api_key": "unused", "max_retries": 0, "stream_usage": True}

    @property
    def supports_image_inputs(self) -> bool:
        return SEES

    @property
    def supports_image_tool_message(self) -> bool:
        return SEES

    @property
    def supports_anthropic_inputs(self) -> bool:
        return SEES

    @pytest.fixture(autouse=True)
    def _read_the_picture_from_a_file(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The suite downloads the picture that it sends."""
        answer = httpx.Response(200, content=PICTURE.read_bytes())
        monkeypatch.setattr(httpx, "get", lambda *_, **__: answer)

    @pytest.fixture(autouse=True)
    def _say_what_it_cannot(self, request: pytest.FixtureRequest) -> None:
        name = request.node.originalname
        if (reason := CANNOT.get(MODEL, {}).get(name)) is not None:
            request.applymarker(pytest.mark.xfail(reason=f"{MODEL} {reason}"))


class TestEmbeddings(EmbeddingsIntegrationTests):
    """The embedding model on board."""

    @property
    def embeddings_class(self) -> type[OpenAIEmbeddings]:
        return OpenAIEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {
            "model": "all-minilm-l6-v2",
            "api_key": "unused",
            "check_embedding_ctx_length": False,
        }
