"""How LangChain's standard tests, which each of its integrations has to pass, run with this server."""

import sys
from types import ModuleType
from typing import Any

import features
import pytest
import standard_tests
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage

# These tests need a better model than a small one. Errors of the server still fail them.
FOR_BETTER_MODELS = {
    "test_agent_loop": "the model has to decide to call a tool",
    "test_json_mode": "the model has to write fields that only the prompt names",
    "test_structured_output_pydantic_2_v1": "the model has to add no fields where the schema lets it",
    "test_tool_calling": "the model has to copy a number",
    "test_tool_calling_async": "the model has to copy a number",
    "test_unicode_tool_call_integration": "the model has to copy Japanese words",
}
# How these tests fail with a small one. A client may have more errors.
OF_SMALL_MODELS: list[type[Exception]] = [AssertionError, OutputParserException]
# These tests do not ask a server.
NOT_RUN = {
    "test_serdes": "it compares the client with a snapshot in its own repository",
    "test_stream_time": "it plays back recorded answers",
}


def pytest_itemcollected(item: pytest.Function) -> None:
    if reason := FOR_BETTER_MODELS.get(item.originalname):
        item.add_marker(pytest.mark.xfail(reason=reason, raises=tuple(OF_SMALL_MODELS)))
    if reason := NOT_RUN.get(item.originalname):
        item.add_marker(pytest.mark.skip(reason=reason))


class Chat:
    """What all chat models here have. The model that is tried reads text only."""

    supports_model_override = True
    model_override_value = features.MODEL
    counted: tuple[str, ...] = ()  # details of usage
    # LangChain's class of tests has both.
    chat_model_class: Any
    chat_model_params: Any

    @property
    def supported_usage_metadata_details(self) -> dict[str, list[str]]:
        return {"invoke": [*self.counted], "stream": [*self.counted]}

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        return {"temperature": 0, "max_tokens": 200}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        model = self.chat_model_class(**self.standard_chat_model_params, **self.chat_model_params)
        model.invoke(features.QUESTION)
        if not stream:
            return model.invoke(features.QUESTION)
        first, *others = model.stream(features.QUESTION)
        return sum(others, first)

    invoke_with_cache_creation_input = invoke_with_reasoning_output = invoke_with_cache_read_input


def check(tests: ModuleType, least: int, *of_small_models: type[Exception]) -> None:
    """Run the tests of a module. At least `least` must pass."""
    OF_SMALL_MODELS.extend(of_small_models)
    # One event loop for all tests, because clients share their connections.
    settings = ("asyncio_mode=auto", "asyncio_default_test_loop_scope=session")
    standard_tests.run(
        *(str(tests.__file__), "-c", "/dev/null", *(f"--override-ini={each}" for each in settings)),
        least=least,
        errors=(BaseException,),
        plugins=(sys.modules[__name__],),
    )
