"""The examples for LangChain's ChatAnthropic, and its standard tests of it."""

from typing import Literal

import features
import langchain_anthropic_standard_tests
import langchain_standard
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from subjects import City

ROOT_URL = features.BASE_URL.removesuffix("/v1")
model = ChatAnthropic(model=features.MODEL, base_url=ROOT_URL, api_key=features.API_KEY, temperature=0, max_tokens=200)

LEAST_TESTS = 40  # standard tests that pass with a small model


@tool
def get_weather(city: str, unit: Literal["celsius", "fahrenheit"] = "celsius") -> str:
    """Report the weather in a city."""
    return features.weather.report(city, unit)


def text() -> None:
    features.check_capital(model.invoke(features.QUESTION).text)


def stream() -> None:
    features.check_streamed(
        [chunk.text for chunk in model.stream(features.QUESTION)], model.invoke(features.QUESTION).text
    )


def tools() -> None:
    question = HumanMessage(features.WEATHER_QUESTION)
    call = model.bind_tools([get_weather], tool_choice="get_weather").invoke([question])
    results = [get_weather.invoke(each) for each in call.tool_calls]
    features.weather.check_called()
    assert model.bind_tools([get_weather], tool_choice={"type": "none"}).invoke([question, call, *results]).text


def tools_streamed() -> None:
    chunks = list(model.bind_tools([get_weather], tool_choice="any").stream(features.WEATHER_QUESTION))
    for call in sum(chunks[1:], chunks[0]).tool_calls:
        get_weather.invoke(call)
    features.weather.check_called()


def auto() -> None:
    agent = create_agent(model, tools=[get_weather], system_prompt="You are a helpful assistant.")
    answer = agent.invoke({"messages": [HumanMessage(features.WEATHER_QUESTION)]}, {"recursion_limit": 5})
    assert answer["messages"][-1].text
    features.weather.check_obeyed()


def structured() -> None:
    for method in ("json_schema", "function_calling"):
        city = model.with_structured_output(City, method=method).invoke(features.QUESTION)
        assert isinstance(city, City), f"with the method {method} it is {city!r}"


def standard() -> None:
    langchain_standard.check(langchain_anthropic_standard_tests, LEAST_TESTS)


features.run(text, stream, tools, tools_streamed, auto, structured, standard)
