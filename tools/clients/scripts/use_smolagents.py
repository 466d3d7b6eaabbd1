"""The examples for smolagents."""

from features import API_KEY, BASE_URL, MODEL, QUESTION, WEATHER_QUESTION, check_capital, check_streamed, run, weather
from smolagents import ChatMessage, OpenAIModel, ToolCallingAgent, tool
from subjects import City

model = OpenAIModel(model_id=MODEL, api_base=BASE_URL, api_key=API_KEY, temperature=0, max_tokens=200)
# The demo model repeats its calls.
caller = OpenAIModel(
    model_id=MODEL, api_base=BASE_URL, api_key=API_KEY, temperature=0, max_tokens=200, parallel_tool_calls=False
)

question = [ChatMessage(role="user", content=[{"type": "text", "text": QUESTION}])]


@tool
def get_weather(city: str, unit: str) -> str:
    """Report the weather in a city.

    Args:
        city: The city.
        unit: The unit of the temperature.
    """
    return weather.report(city, unit)


def text() -> None:
    check_capital(model.generate(question).content)


def stream() -> None:
    parts = [delta.content or "" for delta in model.generate_stream(question)]
    check_streamed(parts, model.generate(question).content)


def tools() -> None:
    agent = ToolCallingAgent(tools=[get_weather], model=caller, max_steps=2)
    agent.run(WEATHER_QUESTION)
    calls = [call for step in agent.memory.steps for call in getattr(step, "tool_calls", None) or ()]
    assert calls, [getattr(step, "error", None) for step in agent.memory.steps]
    for call in calls:
        arguments = {"get_weather": {"city", "unit"}, "final_answer": {"answer"}}[call.name]
        assert set(call.arguments) == arguments, f"{call.name} was called with {call.arguments}"


def structured() -> None:
    schema = {"name": "city", "schema": City.model_json_schema()}
    answer = model.generate(question, response_format={"type": "json_schema", "json_schema": schema})
    City.model_validate_json(answer.content)


run(text, stream, tools, structured)
