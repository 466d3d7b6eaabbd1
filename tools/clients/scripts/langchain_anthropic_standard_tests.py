"""LangChain's standard tests of ChatAnthropic. use_langchain_anthropic.py runs them."""

from typing import Any

import features
import pytest
from langchain_anthropic import ChatAnthropic
from langchain_standard import Chat
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests


class AnthropicMessages(Chat):
    chat_model_class = ChatAnthropic
    supports_anthropic_inputs = True
    counted = ("cache_read_input", "cache_creation_input")

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": features.MODEL,
            "base_url": features.BASE_URL.removesuffix("/v1"),
            "api_key": features.API_KEY,
        }


class TestMessages(AnthropicMessages, ChatModelIntegrationTests):
    """The tests of a chat model."""

    @pytest.mark.xfail(reason="the model has to make one call, and the demo model repeats it", raises=AssertionError)
    def test_tool_calling_with_no_arguments(self, model: ChatAnthropic) -> None:
        super().test_tool_calling_with_no_arguments(model)


class TestUnitsOfMessages(AnthropicMessages, ChatModelUnitTests):
    """The unit tests of a chat model."""
