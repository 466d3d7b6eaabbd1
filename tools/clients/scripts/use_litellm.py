"""The examples for litellm."""

import json
from typing import Literal

import features
import litellm
from pydantic import BaseModel
from subjects import GetWeather

server = {"model": "openai/demo", "api_base": features.BASE_URL, "api_key": features.API_KEY}
embedder = {"model": "openai/embedder", "api_base": features.EMBEDDINGS_URL, "api_key": features.API_KEY}

question = [{"role": "user", "content": features.QUESTION}]
weather_question = [{"role": "user", "content": features.WEATHER_QUESTION}]
get_weather = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Report the weather in a city.",
        "parameters": GetWeather.model_json_schema(),
    },
}
forced = {"type": "function", "function": {"name": "get_weather"}}


class City(BaseModel):
    name: str
    country: str
    kind: Literal["capital", "other"]


def complete(messages: list, **options: object) -> litellm.ModelResponse:
    return litellm.completion(**server, messages=messages, temperature=0, max_tokens=200, **options)


def text() -> None:
    features.check_capital(complete(question).choices[0].message.content)


def stream() -> None:
    parts = [chunk.choices[0].delta.content or "" for chunk in complete(question, stream=True)]
    features.check_streamed(parts, complete(question).choices[0].message.content)


def tools() -> None:
    message = complete(weather_question, tools=[get_weather], tool_choice=forced).choices[0].message
    (call,) = message.tool_calls
    result = features.weather.report(**json.loads(call.function.arguments))
    features.weather.check_called()
    history = [*weather_question, message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    assert complete(history, tools=[get_weather]).choices[0].message.content


def tools_streamed() -> None:
    chunks = list(complete(weather_question, tools=[get_weather], tool_choice="required", stream=True))
    message = litellm.stream_chunk_builder(chunks, messages=weather_question).choices[0].message
    for call in message.tool_calls:
        features.weather.report(**json.loads(call.function.arguments))
    features.weather.check_called()


def auto() -> None:
    message = complete(weather_question, tools=[get_weather]).choices[0].message
    assert message.content or message.tool_calls


def structured() -> None:
    City.model_validate_json(complete(question, response_format=City).choices[0].message.content)


def responses() -> None:
    options = {**server, "temperature": 0, "max_output_tokens": 200}
    first = litellm.responses(**options, input=features.QUESTION)
    events = litellm.responses(**options, input=features.QUESTION, stream=True)
    parts = [event.delta for event in events if event.type == "response.output_text.delta"]
    features.check_streamed(parts, first.output_text)
    second = litellm.responses(**options, input="And of Italy?", previous_response_id=first.id)
    assert second.output_text
    assert second.usage.input_tokens > first.usage.total_tokens


def embeddings() -> None:
    features.check_vectors([item["embedding"] for item in litellm.embedding(**embedder, input=features.TEXTS).data])


features.run(text, stream, tools, tools_streamed, auto, structured, responses, embeddings)
