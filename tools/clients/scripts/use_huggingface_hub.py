"""The examples for huggingface_hub's InferenceClient, and for the same client of asyncio."""

import features
from huggingface_hub import AsyncInferenceClient, InferenceClient, constants
from subjects import City, GetWeather

constants.HF_HUB_OFFLINE = False  # Offline, this client refuses servers on this machine, too.
client = InferenceClient(base_url=features.BASE_URL, api_key=features.API_KEY)

OPTIONS = {"model": features.MODEL, "temperature": 0, "max_tokens": 200}
QUESTION = [{"role": "user", "content": features.QUESTION}]
WEATHER_QUESTION = [{"role": "user", "content": features.WEATHER_QUESTION}]
WEATHER_TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": GetWeather.model_json_schema()},
}
FORCED = {"type": "function", "function": {"name": "get_weather"}}


async def text() -> None:
    answer = client.chat_completion(QUESTION, **OPTIONS).choices[0].message.content
    features.check_capital(answer)
    other = AsyncInferenceClient(base_url=features.BASE_URL, api_key=features.API_KEY)
    assert (await other.chat_completion(QUESTION, **OPTIONS)).choices[0].message.content == answer


def stream() -> None:
    chunks = list(client.chat_completion(QUESTION, stream=True, stream_options={"include_usage": True}, **OPTIONS))
    parts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    whole = client.chat_completion(QUESTION, **OPTIONS)
    features.check_streamed(parts, whole.choices[0].message.content)
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def tools() -> None:
    message = (
        client.chat_completion(WEATHER_QUESTION, tools=[WEATHER_TOOL], tool_choice=FORCED, **OPTIONS).choices[0].message
    )
    (call,) = message.tool_calls
    arguments = GetWeather.model_validate_json(call.function.arguments)
    result = {
        "role": "tool",
        "tool_call_id": call.id,
        "content": features.weather.report(arguments.city, arguments.unit),
    }
    features.weather.check_called()
    answer = client.chat_completion([*WEATHER_QUESTION, message, result], tools=[WEATHER_TOOL], **OPTIONS)
    assert answer.choices[0].message.content


def tools_streamed() -> None:
    chunks = client.chat_completion(WEATHER_QUESTION, tools=[WEATHER_TOOL], tool_choice=FORCED, stream=True, **OPTIONS)
    calls = [call for chunk in chunks for choice in chunk.choices for call in choice.delta.tool_calls or ()]
    assert len(calls) > 1
    arguments = GetWeather.model_validate_json("".join(call.function.arguments or "" for call in calls))
    features.weather.report(arguments.city, arguments.unit)
    features.weather.check_called()


def auto() -> None:
    answer = client.chat_completion(WEATHER_QUESTION, tools=[WEATHER_TOOL], tool_choice="auto", **OPTIONS)
    message = answer.choices[0].message
    assert message.content or message.tool_calls


def structured() -> None:
    schema = City.model_json_schema()
    for form in (
        {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}},
        {"type": "json_object", "value": schema},
        {"type": "json", "value": schema},
    ):
        answer = client.chat_completion(QUESTION, response_format=form, **OPTIONS)
        City.model_validate_json(answer.choices[0].message.content)


def embeddings() -> None:
    address = f"{features.EMBEDDINGS_URL.removesuffix('/v1')}/embed"
    features.check_vectors(client.feature_extraction(features.TEXTS, model=address).tolist())


features.run(text, stream, tools, tools_streamed, auto, structured, embeddings)
