"""The examples for pydantic-ai over responses, which it asks by default."""

import features
from pydantic_ai import Agent, Embedder, NativeOutput, ToolOutput
from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
from pydantic_ai.models.openai import OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from subjects import City, get_weather

model = OpenAIResponsesModel(
    features.MODEL, provider=OpenAIProvider(base_url=features.BASE_URL, api_key=features.API_KEY)
)
embedder = OpenAIEmbeddingModel(
    features.EMBEDDER, provider=OpenAIProvider(base_url=features.EMBEDDINGS_URL, api_key=features.API_KEY)
)

settings = {"temperature": 0, "max_tokens": 200}
agent = Agent(model, model_settings=settings)


def text() -> None:
    features.check_capital(agent.run_sync(features.QUESTION).output)


async def stream() -> None:
    async with agent.run_stream(features.QUESTION) as result:
        # By default it puts together what comes within a tenth of a second, which may be the whole answer.
        parts = [part async for part in result.stream_text(delta=True, debounce_by=None)]
    features.check_streamed(parts, (await agent.run(features.QUESTION)).output)


def tools() -> None:
    forced = Agent(model, output_type=get_weather, model_settings=settings)
    assert "18 degrees" in forced.run_sync(features.WEATHER_QUESTION).output
    features.weather.check_called()


def auto() -> None:
    assert Agent(model, tools=[get_weather], model_settings=settings).run_sync(features.WEATHER_QUESTION).output
    features.weather.check_obeyed()


def structured() -> None:
    for output_type in (NativeOutput(City), ToolOutput(City)):
        city = Agent(model, output_type=output_type, model_settings=settings).run_sync(features.QUESTION).output
        assert isinstance(city, City), f"with {output_type} it is {city!r}"


def responses() -> None:
    first = agent.run_sync(features.QUESTION)
    further = {**settings, "openai_previous_response_id": "auto"}
    second = agent.run_sync("And of Italy?", message_history=first.all_messages(), model_settings=further)
    assert second.output
    assert second.usage.input_tokens > first.usage.total_tokens


def embeddings() -> None:
    features.check_vectors(Embedder(embedder).embed_documents_sync(features.TEXTS).embeddings)


features.run(text, stream, tools, auto, structured, responses, embeddings)
