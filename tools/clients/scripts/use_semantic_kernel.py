"""The examples for semantic-kernel."""

from enum import StrEnum

import features
from openai import AsyncOpenAI
from semantic_kernel import Kernel
from semantic_kernel.agents import OpenAIResponsesAgent
from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import (
    OpenAIChatCompletion,
    OpenAIChatPromptExecutionSettings,
    OpenAITextEmbedding,
)
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function
from subjects import City

client = AsyncOpenAI(base_url=features.BASE_URL, api_key=features.API_KEY)
service = OpenAIChatCompletion(ai_model_id=features.MODEL, async_client=client)
embedding_client = AsyncOpenAI(base_url=features.EMBEDDINGS_URL, api_key=features.API_KEY)
embedder = OpenAITextEmbedding(ai_model_id=features.EMBEDDER, async_client=embedding_client)


class Unit(StrEnum):  # to this client Literal is an object
    CELSIUS = "celsius"
    FAHRENHEIT = "fahrenheit"


class WeatherPlugin:
    def __init__(self) -> None:
        self.weather = features.Weather()

    @kernel_function(description="Report the weather in a city.")
    def get_weather(self, city: str, unit: Unit) -> str:
        return self.weather.report(city, unit)


def history(question: str) -> ChatHistory:
    asked = ChatHistory()
    asked.add_user_message(question)
    return asked


def settings(**options: object) -> OpenAIChatPromptExecutionSettings:
    return OpenAIChatPromptExecutionSettings(temperature=0, max_tokens=200, **options)


async def text() -> None:
    features.check_capital(str(await service.get_chat_message_content(history(features.QUESTION), settings())))


async def stream() -> None:
    chunks = service.get_streaming_chat_message_content(history(features.QUESTION), settings())
    parts = [str(chunk) async for chunk in chunks]
    features.check_streamed(parts, str(await service.get_chat_message_content(history(features.QUESTION), settings())))


async def ask_about_weather(behavior: FunctionChoiceBehavior) -> features.Weather:
    plugin, kernel = WeatherPlugin(), Kernel()
    kernel.add_plugin(plugin, "weather")
    asked = settings(function_choice_behavior=behavior)
    assert await service.get_chat_message_content(history(features.WEATHER_QUESTION), asked, kernel=kernel)
    return plugin.weather


async def tools() -> None:
    (await ask_about_weather(FunctionChoiceBehavior.Required())).check_called()


async def tools_streamed() -> None:
    plugin, kernel = WeatherPlugin(), Kernel()
    kernel.add_plugin(plugin, "weather")
    asked = settings(function_choice_behavior=FunctionChoiceBehavior.Required())
    chunks = service.get_streaming_chat_message_content(history(features.WEATHER_QUESTION), asked, kernel=kernel)
    assert len([chunk async for chunk in chunks]) > 1
    plugin.weather.check_called()


async def auto() -> None:
    (await ask_about_weather(FunctionChoiceBehavior.Auto())).check_obeyed()


async def structured() -> None:
    answer = await service.get_chat_message_content(history(features.QUESTION), settings(response_format=City))
    City.model_validate_json(str(answer))


async def responses() -> None:
    agent = OpenAIResponsesAgent(ai_model_id=features.MODEL, client=client, temperature=0)
    first = await agent.get_response(messages=features.QUESTION)
    parts = [str(part) async for part in agent.invoke_stream(messages=features.QUESTION)]
    features.check_streamed(parts, str(first))
    assert str(await agent.get_response(messages="And of Italy?", thread=first.thread))


async def embeddings() -> None:
    features.check_vectors((await embedder.generate_embeddings(features.TEXTS)).tolist())


features.run(text, stream, tools, tools_streamed, auto, structured, responses, embeddings)
