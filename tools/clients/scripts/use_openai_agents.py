"""The examples for openai-agents over responses, which it asks by default.

With AGENTS_CHECKOUT, a folder with its repository, they include its integration tests, which no package has.
"""

import os
from dataclasses import replace

import openai
import standard_tests
from agents import (
    Agent,
    ModelSettings,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    responses_websocket_session,
    set_tracing_disabled,
)
from features import API_KEY, BASE_URL, MODEL, QUESTION, WEATHER_QUESTION, check_capital, check_streamed, run, weather
from openai import AsyncOpenAI
from openai.types.responses import ResponseFunctionCallArgumentsDeltaEvent, ResponseTextDeltaEvent
from subjects import City, get_weather

CHECKOUT = os.environ.get("AGENTS_CHECKOUT")
LEAST_TESTS = 1  # Nearly all of the 67 need a better model.

client = AsyncOpenAI(base_url=BASE_URL, api_key=API_KEY)
model = OpenAIResponsesModel(model=MODEL, openai_client=client)
set_tracing_disabled(True)

weather_tool = function_tool(get_weather)


def agent(**options: object) -> Agent:
    return Agent(
        name="Assistant", model=model, **{"model_settings": ModelSettings(temperature=0, max_tokens=200), **options}
    )


def weather_agent(tool_choice: str) -> Agent:
    settings = ModelSettings(temperature=0, max_tokens=200, tool_choice=tool_choice)
    return agent(tools=[weather_tool], model_settings=settings)


async def text() -> None:
    check_capital((await Runner.run(agent(), QUESTION)).final_output)


async def stream() -> None:
    result = Runner.run_streamed(agent(), QUESTION)
    events = [event.data async for event in result.stream_events() if event.type == "raw_response_event"]
    check_streamed([data.delta for data in events if isinstance(data, ResponseTextDeltaEvent)], result.final_output)


async def tools() -> None:
    assert (await Runner.run(weather_agent("get_weather"), WEATHER_QUESTION)).final_output
    weather.check_called()


async def tools_streamed() -> None:
    result = Runner.run_streamed(weather_agent("get_weather"), WEATHER_QUESTION)
    events = [event.data async for event in result.stream_events() if event.type == "raw_response_event"]
    assert sum(isinstance(data, ResponseFunctionCallArgumentsDeltaEvent) for data in events) > 1
    assert result.final_output
    weather.check_called()


async def auto() -> None:
    assert (await Runner.run(weather_agent("auto"), WEATHER_QUESTION)).final_output
    weather.check_obeyed()


async def structured() -> None:
    city = (await Runner.run(agent(output_type=City), QUESTION)).final_output
    assert isinstance(city, City), repr(city)


async def responses() -> None:
    first = await Runner.run(agent(), QUESTION)
    second = await Runner.run(agent(), "And of Italy?", previous_response_id=first.last_response_id)
    assert second.final_output
    before, after = (result.context_wrapper.usage for result in (first, second))
    assert after.input_tokens > before.total_tokens


async def websocket() -> None:
    """Run two turns on one socket: the first calls a tool, and the second sends only its own question. The first answer
    equals the one over HTTP."""
    caller = replace(weather_agent("get_weather"), model=MODEL)
    async with responses_websocket_session(base_url=BASE_URL, api_key=API_KEY) as session:
        first = await session.run(caller, WEATHER_QUESTION)
        result = session.run_streamed(
            replace(agent(), model=MODEL), QUESTION, previous_response_id=first.last_response_id
        )
        events = [event.data async for event in result.stream_events() if event.type == "raw_response_event"]
    weather.check_called()
    over_http = await Runner.run(weather_agent("get_weather"), WEATHER_QUESTION)
    assert first.final_output == over_http.final_output
    check_streamed([data.delta for data in events if isinstance(data, ResponseTextDeltaEvent)], result.final_output)


def standard() -> None:
    """Run the integration tests of the repository. None may get an error from the server."""
    os.environ |= {
        "OPENAI_AGENTS_INTEGRATION_MODEL": MODEL,
        "OPENAI_API_KEY": API_KEY,
        "OPENAI_BASE_URL": BASE_URL,
    }
    tests = f"{CHECKOUT}/integration_tests"
    standard_tests.run(
        *(f"{tests}/openai", "-c", f"{tests}/pytest.ini"),
        least=LEAST_TESTS,
        errors=(openai.APIError, ConnectionError),
    )


more = [standard] if CHECKOUT else []
run(text, stream, tools, tools_streamed, auto, structured, responses, websocket, *more)
