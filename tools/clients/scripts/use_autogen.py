"""The examples for autogen."""

import json

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import ModelClientStreamingChunkEvent, TextMessage
from autogen_core import CancellationToken
from autogen_core.models import AssistantMessage, FunctionExecutionResult, FunctionExecutionResultMessage, UserMessage
from autogen_core.tools import FunctionTool
from autogen_ext.agents.openai import OpenAIAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient
from features import API_KEY, BASE_URL, MODEL, QUESTION, WEATHER_QUESTION, check_capital, check_streamed, run, weather
from openai import AsyncOpenAI
from subjects import City, get_weather

abilities = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True}
client = OpenAIChatCompletionClient(
    model=MODEL,
    base_url=BASE_URL,
    api_key=API_KEY,
    temperature=0,
    max_tokens=200,
    model_info={"family": "unknown", **abilities},
)

weather_tool = FunctionTool(get_weather, description="Report the weather in a city.")


def assistant(**options: object) -> AssistantAgent:
    return AssistantAgent("assistant", model_client=client, system_message="You are a helpful assistant.", **options)


async def text() -> None:
    check_capital((await assistant().run(task=QUESTION)).messages[-1].content)


async def stream() -> None:
    messages = [message async for message in assistant(model_client_stream=True).run_stream(task=QUESTION)]
    parts = [message.content for message in messages if isinstance(message, ModelClientStreamingChunkEvent)]
    check_streamed(parts, messages[-1].messages[-1].content)


async def tools() -> None:
    asked = UserMessage(content=WEATHER_QUESTION, source="user")
    (call,) = (await client.create([asked], tools=[weather_tool], tool_choice=weather_tool)).content
    result = await weather_tool.run_json(json.loads(call.arguments), CancellationToken())
    weather.check_called()
    results = [FunctionExecutionResult(content=result, call_id=call.id, name=call.name, is_error=False)]
    history = [
        asked,
        AssistantMessage(content=[call], source="assistant"),
        FunctionExecutionResultMessage(content=results),
    ]
    assert (await client.create(history, tools=[weather_tool])).content


async def tools_streamed() -> None:
    asked = UserMessage(content=WEATHER_QUESTION, source="user")
    parts = [part async for part in client.create_stream([asked], tools=[weather_tool], tool_choice="required")]
    for call in parts[-1].content:
        await weather_tool.run_json(json.loads(call.arguments), CancellationToken())
    weather.check_called()


async def auto() -> None:
    agent = assistant(tools=[get_weather], reflect_on_tool_use=True)
    assert (await agent.run(task=WEATHER_QUESTION)).messages[-1].content
    weather.check_obeyed()


async def structured() -> None:
    city = (await assistant(output_content_type=City).run(task=QUESTION)).messages[-1].content
    assert isinstance(city, City), repr(city)


async def responses() -> None:
    openai = AsyncOpenAI(base_url=BASE_URL, api_key=API_KEY)
    agent = OpenAIAgent("assistant", "An assistant.", openai, MODEL, "You are helpful.", temperature=0)
    for question, check in ((QUESTION, check_capital), ("And of Italy?", bool)):  # a talk that goes on
        asked = [TextMessage(content=question, source="user")]
        check((await agent.on_messages(asked, CancellationToken())).chat_message.content)


run(text, stream, tools, tools_streamed, auto, structured, responses)
