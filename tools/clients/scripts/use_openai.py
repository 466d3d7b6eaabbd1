"""The examples for the openai package, of each of its major versions."""

import json
from pathlib import Path

import features
import openai
from subjects import City, GetWeather

client = openai.OpenAI(base_url=features.BASE_URL, api_key=features.API_KEY)

base = {"model": features.MODEL, "temperature": 0, "max_tokens": 200}
question = {**base, "messages": [{"role": "user", "content": features.QUESTION}]}
weather_question = {**base, "messages": [{"role": "user", "content": features.WEATHER_QUESTION}]}


get_weather = openai.pydantic_function_tool(GetWeather, name="get_weather")
forced = {"type": "function", "function": {"name": "get_weather"}}


def text() -> None:
    answer = client.chat.completions.create(**question)
    features.check_capital(answer.choices[0].message.content)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def stream() -> None:
    chunks = client.chat.completions.create(**question, stream=True, stream_options={"include_usage": True})
    parts = []
    usage = None
    for chunk in chunks:
        parts += [choice.delta.content or "" for choice in chunk.choices]
        usage = chunk.usage
    features.check_streamed(parts)
    assert usage.completion_tokens > 1


def tools() -> None:
    answer = client.chat.completions.create(**weather_question, tools=[get_weather], tool_choice=forced)
    message = answer.choices[0].message
    (call,) = message.tool_calls
    result = features.weather.report(**json.loads(call.function.arguments))
    features.weather.check_called()
    history = [*weather_question["messages"], message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    answer = client.chat.completions.create(**base, messages=history, tools=[get_weather])
    assert answer.choices[0].message.content


def tools_streamed() -> None:
    with client.chat.completions.stream(**weather_question, tools=[get_weather], tool_choice="required") as events:
        deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
        message = events.get_final_completion().choices[0].message
    assert len(deltas) > 1
    for call in message.tool_calls:
        assert isinstance(call.function.parsed_arguments, GetWeather)


def auto() -> None:
    answer = client.chat.completions.create(**weather_question, tools=[get_weather])
    assert answer.choices[0].message.content or answer.choices[0].message.tool_calls


def structured() -> None:
    answer = client.chat.completions.parse(**question, response_format=City)
    assert isinstance(answer.choices[0].message.parsed, City)


def responses() -> None:
    options = {"model": features.MODEL, "temperature": 0, "max_output_tokens": 200}
    first = client.responses.create(**options, input=features.QUESTION)
    with client.responses.stream(**options, input=features.QUESTION) as events:
        parts = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert events.get_final_response().usage.output_tokens == first.usage.output_tokens
    features.check_streamed(parts, first.output_text)
    second = client.responses.create(**options, input="And of Italy?", previous_response_id=first.id)
    assert second.output_text
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    assert client.responses.retrieve(second.id).output_text == second.output_text


def embeddings() -> None:
    embedder = openai.OpenAI(base_url=features.EMBEDDINGS_URL, api_key=features.API_KEY)
    answer = embedder.embeddings.create(model=features.EMBEDDER, input=features.TEXTS)  # asks for base64 by itself
    features.check_vectors([item.embedding for item in answer.data])
    assert answer.usage.total_tokens == answer.usage.prompt_tokens
    ids = embedder.embeddings.create(model=features.EMBEDDER, input=[[2, 5, 6, 3], [2, 5, 6, 3]]).data
    assert ids[0].embedding == ids[1].embedding


def speech() -> None:
    listener = openai.OpenAI(base_url=features.SPEECH_URL, api_key=features.API_KEY).audio
    sound = {"file": Path(features.SOUND), "model": features.TRANSCRIBER}
    whole = listener.transcriptions.create(**sound).text
    features.check_capital(whole)
    *deltas, done = listener.transcriptions.create(**sound, stream=True)
    assert (done.text, "".join(event.delta for event in deltas)) == (whole, whole)
    in_words = {"response_format": "verbose_json", "timestamp_granularities": ["word"]}
    words = listener.transcriptions.create(**sound, **in_words).words
    assert [word.word for word in words] == whole.split()
    assert listener.translations.create(**sound).text


features.run(text, stream, tools, tools_streamed, auto, structured, responses, embeddings, speech)
