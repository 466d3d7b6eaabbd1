"""The examples for LangChain's ChatAnthropic, and its standard tests of it."""

import features
import langchain_anthropic_standard_tests
import langchain_chat
import langchain_standard
from langchain_anthropic import ChatAnthropic

ROOT_URL = features.BASE_URL.removesuffix("/v1")
model = ChatAnthropic(model=features.MODEL, base_url=ROOT_URL, api_key=features.API_KEY, temperature=0, max_tokens=200)

LEAST_TESTS = 40  # standard tests that pass with a small model


def standard() -> None:
    langchain_standard.check(langchain_anthropic_standard_tests, LEAST_TESTS)


features.run(*langchain_chat.examples(model, tool_choice={"type": "none"}), standard)
