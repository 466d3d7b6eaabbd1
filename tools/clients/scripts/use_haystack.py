"""The examples for haystack's OpenAIChatGenerator, OpenAIResponsesChatGenerator and OpenAIDocumentEmbedder."""

from typing import Annotated, Literal

import features
from haystack.components.agents import Agent
from haystack.components.embedders import OpenAIDocumentEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage, Document, StreamingChunk
from haystack.tools import tool
from haystack.utils import Secret
from subjects import City

settings = {"temperature": 0, "max_tokens": 200}
generator = OpenAIChatGenerator(
    model=features.MODEL,
    api_base_url=features.BASE_URL,
    api_key=Secret.from_token(features.API_KEY),
    generation_kwargs=settings,
)
embedder = OpenAIDocumentEmbedder(
    model=features.EMBEDDER, api_base_url=features.EMBEDDINGS_URL, api_key=Secret.from_token(features.API_KEY)
)

question = [ChatMessage.from_user(features.QUESTION)]
weather_question = ChatMessage.from_user(features.WEATHER_QUESTION)
forced = {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}}


@tool
def get_weather(city: Annotated[str, "the city"], unit: Annotated[Literal["celsius", "fahrenheit"], "the unit"]) -> str:
    """Report the weather in a city."""
    return features.weather.report(city, unit)


def text() -> None:
    features.check_capital(generator.run(question)["replies"][0].text)


def stream() -> None:
    chunks: list[StreamingChunk] = []
    (reply,) = generator.run(question, streaming_callback=chunks.append)["replies"]
    features.check_streamed([chunk.content for chunk in chunks], reply.text)


def tools() -> None:
    (reply,) = generator.run([weather_question], tools=[get_weather], generation_kwargs=forced)["replies"]
    results = []
    for call in reply.tool_calls:
        results.append(ChatMessage.from_tool(get_weather.invoke(**call.arguments), origin=call))
    features.weather.check_called()
    (answer,) = generator.run([weather_question, reply, *results], tools=[get_weather])["replies"]
    assert answer.text


def tools_streamed() -> None:
    chunks: list[StreamingChunk] = []
    (reply,) = generator.run(
        [weather_question],
        tools=[get_weather],
        generation_kwargs={"tool_choice": "required"},
        streaming_callback=chunks.append,
    )["replies"]
    assert len(chunks) > 1
    for call in reply.tool_calls:
        get_weather.invoke(**call.arguments)
    features.weather.check_called()


def auto() -> None:
    agent = Agent(chat_generator=generator, tools=[get_weather], max_agent_steps=3)
    assert agent.run(messages=[weather_question])["messages"][-1]
    features.weather.check_obeyed()


def structured() -> None:
    (reply,) = generator.run(question, generation_kwargs={"response_format": City})["replies"]
    City.model_validate_json(reply.text)


def responses() -> None:
    asker = OpenAIResponsesChatGenerator(
        model=features.MODEL,
        api_base_url=features.BASE_URL,
        api_key=Secret.from_token(features.API_KEY),
        generation_kwargs={"temperature": 0, "max_output_tokens": 200},
    )
    chunks: list[StreamingChunk] = []
    (first,) = asker.run(question)["replies"]
    asker.run(question, streaming_callback=chunks.append)
    features.check_streamed([chunk.content for chunk in chunks], first.text)
    further = {"previous_response_id": first.meta["id"]}
    assert asker.run([ChatMessage.from_user("And of Italy?")], generation_kwargs=further)["replies"][0].text


def embeddings() -> None:
    documents = embedder.run([Document(content=text) for text in features.TEXTS])["documents"]
    features.check_vectors([document.embedding for document in documents])


features.run(text, stream, tools, tools_streamed, auto, structured, responses, embeddings)
