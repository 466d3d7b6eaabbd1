"""LangChain's standard tests of ChatOpenAI on chat and on responses, and of OpenAIEmbeddings. use_langchain.py runs
them."""

from typing import Any

import features
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from langchain_standard import Chat
from langchain_tests.integration_tests import ChatModelIntegrationTests, EmbeddingsIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests, EmbeddingsUnitTests


class OpenAIChat(Chat):
    chat_model_class = ChatOpenAI
    supports_json_mode = True
    counted = ("reasoning_output", "cache_read_input")

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": features.MODEL,
            "base_url": features.BASE_URL,
            "api_key": features.API_KEY,
            "stream_usage": True,
            "model_kwargs": {"parallel_tool_calls": False},  # The demo model repeats its calls.
        }


class OpenAIResponses(OpenAIChat):
    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**super().chat_model_params, "use_responses_api": True}


class Embeddings:
    embeddings_class = OpenAIEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {
            "model": features.EMBEDDER,
            "base_url": features.EMBEDDINGS_URL,
            "api_key": features.API_KEY,
            "check_embedding_ctx_length": False,
        }


class TestChat(OpenAIChat, ChatModelIntegrationTests):
    """The tests of a chat model."""


class TestResponses(OpenAIResponses, ChatModelIntegrationTests):
    """The same tests over responses."""


class TestEmbeddings(Embeddings, EmbeddingsIntegrationTests):
    """The tests of embeddings."""


class TestUnitsOfChat(OpenAIChat, ChatModelUnitTests):
    """The unit tests of a chat model."""


class TestUnitsOfResponses(OpenAIResponses, ChatModelUnitTests):
    """The same unit tests over responses."""


class TestUnitsOfEmbeddings(Embeddings, EmbeddingsUnitTests):
    """The unit tests of embeddings."""
