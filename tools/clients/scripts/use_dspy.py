"""The examples for dspy. All that its programs ask for is structured; the type is sent as a schema if dspy knows of a
server that it holds answers to schemas, for which it is registered."""

from typing import Literal

import dspy
import features
from dspy.lm15 import AccessPolicy, ModelSupport, OpenAIChatCompat, ProviderDefinition, register_provider

access = AccessPolicy(provider="local-server", base_url=features.BASE_URL)
support = ModelSupport(function_calling=True, response_schema=True)
register_provider(ProviderDefinition.chat(access, compat=OpenAIChatCompat()), supports=support)
lm = dspy.LM("local-server/demo", api_key=features.API_KEY, temperature=0, max_tokens=200, cache=False)
dspy.configure(lm=lm, adapter=dspy.JSONAdapter())
embedder = dspy.Embedder("openai/embedder", api_base=features.EMBEDDINGS_URL, api_key=features.API_KEY)


class Place(dspy.Signature):
    """Say where the city lies."""

    city: str = dspy.InputField()
    kind: Literal["capital", "other"] = dspy.OutputField()
    country: str = dspy.OutputField()


def text() -> None:
    features.check_capital(lm(features.QUESTION)[0])


async def stream() -> None:
    listener = dspy.streaming.StreamListener(signature_field_name="answer")
    program = dspy.streamify(dspy.Predict("question -> answer"), stream_listeners=[listener])
    values = [value async for value in program(question=features.QUESTION)]
    parts = [value.chunk for value in values if isinstance(value, dspy.streaming.StreamResponse)]
    assert len(parts) > 1, f"the text came in one part: {parts}"
    assert values[-1].answer in "".join(parts), f"streamed {parts}, whole {values[-1]}"  # with the quotes of JSON


def structured() -> None:
    place = dspy.Predict(Place)(city="Paris")
    assert isinstance(place.country, str), repr(place)
    assert place.kind in ("capital", "other"), repr(place)


def responses() -> None:
    options = {"temperature": 0, "max_tokens": 200, "cache": False}
    asker = dspy.LM(
        "openai/demo", model_type="responses", api_base=features.BASE_URL, api_key=features.API_KEY, **options
    )
    answer = asker(features.QUESTION)[0]
    features.check_capital(answer["text"] if isinstance(answer, dict) else answer)


def embeddings() -> None:
    features.check_vectors(embedder(features.TEXTS).tolist())


features.run(text, stream, structured, responses, embeddings)
