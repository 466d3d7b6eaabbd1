"""The examples for dspy. Its programs have typed outputs; by default it asks for them in the text of the prompt."""

from typing import Literal

import dspy
from features import (
    API_KEY,
    BASE_URL,
    EMBEDDINGS_URL,
    QUESTION,
    TEXTS,
    WEATHER_QUESTION,
    Weather,
    check_capital,
    check_streamed,
    check_vectors,
    run,
)

server = {"model": "openai/demo", "api_base": BASE_URL, "api_key": API_KEY}
dspy.configure(lm=dspy.LM(**server, temperature=0, max_tokens=200))
embedder = dspy.Embedder("openai/embedder", api_base=EMBEDDINGS_URL, api_key=API_KEY)

uncached = {"temperature": 0, "max_tokens": 200, "cache": False}


class Place(dspy.Signature):
    """Say where the city lies."""

    city: str = dspy.InputField()
    country: str = dspy.OutputField()
    kind: Literal["capital", "other"] = dspy.OutputField()


def text() -> None:
    check_capital(dspy.LM(**server, **uncached)(QUESTION)[0])


async def stream() -> None:
    answer = dspy.Predict("question -> answer")
    listener = dspy.streaming.StreamListener(signature_field_name="answer")
    with dspy.context(lm=dspy.LM(**server, **uncached), adapter=dspy.ChatAdapter()):
        program = dspy.streamify(answer, stream_listeners=[listener])
        values = [value async for value in program(question=QUESTION)]
    parts = [value.chunk for value in values if isinstance(value, dspy.streaming.StreamResponse)]
    check_streamed(parts, values[-1].answer)


def structured() -> None:
    with dspy.context(adapter=dspy.JSONAdapter()):  # sends the type as a schema, to which the server holds the answer
        place = dspy.Predict(Place)(city="Paris")
    assert isinstance(place.country, str), repr(place)
    assert place.kind in ("capital", "other"), repr(place)


def auto() -> None:
    weather = Weather()
    agent = dspy.ReAct("question -> answer", tools=[weather.report], max_iters=2)
    with dspy.context(adapter=dspy.JSONAdapter()):
        assert agent(question=WEATHER_QUESTION).answer


def responses() -> None:
    asker = dspy.LM(**server, **uncached, model_type="responses")
    answer = asker(QUESTION)[0]
    check_capital(answer["text"] if isinstance(answer, dict) else answer)


def embeddings() -> None:
    check_vectors(embedder(TEXTS).tolist())


run(text, stream, auto, structured, responses, embeddings)
