"""LangChain's standard integration suites, against the gateway at OPENAI_BASE_URL."""

from typing import Any

import pytest
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from langchain_tests.integration_tests import ChatModelIntegrationTests, EmbeddingsIntegrationTests


class TestChat(ChatModelIntegrationTests):
    """The chat model on board."""

    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "demo-chat", "api_key": "unused", "max_retries": 0, "stream_usage": True}

    @pytest.mark.xfail(reason="demo-chat calls the function, with another number than was asked")
    def test_tool_calling(self, model: Any) -> None:
        super().test_tool_calling(model)

    @pytest.mark.xfail(reason="demo-chat calls the function, with another number than was asked")
    async def test_tool_calling_async(self, model: Any) -> None:
        await super().test_tool_calling_async(model)

    @pytest.mark.xfail(reason="demo-chat calls the function without the name that it was asked for")
    def test_unicode_tool_call_integration(self, model: Any, **more: Any) -> None:
        super().test_unicode_tool_call_integration(model, **more)


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
