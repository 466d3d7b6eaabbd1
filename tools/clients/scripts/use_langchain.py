"""The examples for LangChain's ChatOpenAI and OpenAIEmbeddings, and its standard tests of them."""

from typing import Literal

import features
import langchain_standard
import langchain_standard_tests
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from subjects import City

model = ChatOpenAI(
    model=features.MODEL, base_url=features.BASE_URL, api_key=features.API_KEY, temperature=0, max_tokens=200
)
embedder = OpenAIEmbeddings(
    model=features.EMBEDDER,
    base_url=features.EMBEDDINGS_URL,
    api_key=features.API_KEY,
    check_embedding_ctx_length=False,
)

LEAST_TESTS = 90  # standard tests that pass with a small model


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
    assert model.bind_tools([get_weather]).invoke([question, call, *results]).text


def tools_streamed() -> None:
    chunks = list(model.bind_tools([get_weather], tool_choice="any").stream(features.WEATHER_QUESTION))
    message = chunks[0]
    for chunk in chunks[1:]:
        message += chunk
    for call in message.tool_calls:
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


def responses() -> None:
    asker = ChatOpenAI(
        model=features.MODEL,
        base_url=features.BASE_URL,
        api_key=features.API_KEY,
        temperature=0,
        max_tokens=200,
        use_responses_api=True,
        use_previous_response_id=True,
    )
    first = asker.invoke(features.QUESTION)
    features.check_streamed([chunk.text for chunk in asker.stream(features.QUESTION)], first.text)
    second = asker.invoke([HumanMessage(features.QUESTION), first, HumanMessage("And of Italy?")])
    assert second.text
    assert second.usage_metadata["input_tokens"] > first.usage_metadata["total_tokens"]


def embeddings() -> None:
    features.check_vectors(embedder.embed_documents(features.TEXTS))


def standard() -> None:
    langchain_standard.check(langchain_standard_tests, LEAST_TESTS)


features.run(text, stream, tools, tools_streamed, auto, structured, responses, embeddings, standard)
