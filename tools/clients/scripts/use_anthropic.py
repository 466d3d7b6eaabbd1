"""The examples for the anthropic package, which asks /v1/messages."""

import anthropic
import features
from subjects import City, GetWeather
from subjects import get_weather as report_weather

ROOT_URL = features.BASE_URL.removesuffix("/v1")
client = anthropic.Anthropic(base_url=ROOT_URL, api_key=features.API_KEY)

# The package has no temperature any more.
base = {"model": features.MODEL, "max_tokens": 200, "extra_body": {"temperature": 0}}
question = {**base, "messages": [{"role": "user", "content": features.QUESTION}]}
weather_question = {**base, "messages": [{"role": "user", "content": features.WEATHER_QUESTION}]}
get_weather = {"name": "get_weather", "description": GetWeather.__doc__, "input_schema": GetWeather.model_json_schema()}


def text() -> None:
    answer = client.messages.create(**question)
    features.check_capital(answer.content[0].text)
    counted = client.messages.count_tokens(model=features.MODEL, messages=question["messages"])
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == counted.input_tokens


def stream() -> None:
    with client.messages.stream(**question) as events:
        parts = list(events.text_stream)
        whole = events.get_final_message()
    features.check_streamed(parts, whole.content[0].text)
    assert whole.usage.output_tokens > 1


forced = {"type": "tool", "name": "get_weather"}
# The runner of tools asks for a thread first, and sends the whole conversation where there are none.
run = {**weather_question, "tools": [anthropic.beta_tool(report_weather)], "tool_choice": forced, "max_iterations": 2}


def tools() -> None:
    answer = client.messages.create(**weather_question, tools=[get_weather], tool_choice=forced)
    (call,) = answer.content
    assert answer.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": features.weather.report(**call.input)}
    features.weather.check_called()
    turns = [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    messages = [*weather_question["messages"], *turns]
    assert client.messages.create(**{**base, "messages": messages}, tools=[get_weather]).content
    answers = list(client.beta.messages.tool_runner(**run))
    assert [each.stop_reason for each in answers] == ["tool_use"] * 2
    assert all(each._request_id for each in answers)
    features.weather.check_obeyed()


def tools_streamed() -> None:
    for events in client.beta.messages.tool_runner(**run, stream=True):
        assert events.get_final_message().stop_reason == "tool_use"
    features.weather.check_called()


def structured() -> None:
    answer = client.messages.parse(**question, output_format=City)
    assert isinstance(answer.parsed_output, City)


features.run(text, stream, tools, tools_streamed, structured)
