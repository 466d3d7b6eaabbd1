"""The examples for every chat model of LangChain."""

from collections.abc import Callable
from typing import Any, Literal

import features
from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from subjects import City


@tool
def get_weather(city: str, unit: Literal["celsius", "fahrenheit"] = "celsius") -> str:
    """Report the weather in a city."""
    return features.weather.report(city, unit)


def examples(model: BaseChatModel, **after_result: Any) -> tuple[Callable[[], None], ...]:
    """Return the examples. `after_result` are options of `bind_tools` for the answer to a tool's result."""

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
        assert model.bind_tools([get_weather], **after_result).invoke([question, call, *results]).text

    def tools_streamed() -> None:
        first, *others = model.bind_tools([get_weather], tool_choice="any").stream(features.WEATHER_QUESTION)
        for call in sum(others, first).tool_calls:
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

    return text, stream, tools, tools_streamed, auto, structured
