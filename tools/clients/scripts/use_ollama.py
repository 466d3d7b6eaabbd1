"""The examples for the ollama package, which asks /api/chat, /api/generate and /api/embed."""

import json
import urllib.request

import features
import httpx
import ollama
from ollama import _types as types
from subjects import City, get_weather

ROOT_URL = features.BASE_URL.removesuffix("/v1")
client = ollama.Client(host=ROOT_URL)
embedder = ollama.Client(host=features.EMBEDDINGS_URL.removesuffix("/v1"))

base = {"model": features.MODEL, "options": {"temperature": 0, "num_predict": 200}}
question = {**base, "messages": [{"role": "user", "content": features.QUESTION}]}
# Requests by their routes, and objects within them by the names of their schemas.
REQUESTS = {
    "chat": types.ChatRequest,
    "generate": types.GenerateRequest,
    "embed": types.EmbedRequest,
    "embeddings": types.EmbeddingsRequest,
    "show": types.ShowRequest,
    "pull": types.PullRequest,
}
OBJECTS = {
    "OllamaMessage": types.Message,
    "MessageCall": types.Message.ToolCall,
    "CalledFunction": types.Message.ToolCall.Function,
}


def text() -> None:
    answer = client.chat(**question)
    features.check_capital(answer.message.content)
    assert answer.done_reason == "stop"
    assert answer.total_duration >= answer.prompt_eval_duration + answer.eval_duration > 0
    features.check_capital(client.generate(**base, prompt=features.QUESTION).response)


def stream() -> None:
    parts = list(client.chat(**question, stream=True))
    features.check_streamed([part.message.content for part in parts], client.chat(**question).message.content)
    assert parts[-1].done
    assert parts[-1].eval_count > 1


def auto() -> None:
    messages = [{"role": "user", "content": features.WEATHER_QUESTION}]
    answer = client.chat(**base, messages=messages, tools=[get_weather])
    calls = answer.message.tool_calls or []
    assert calls or answer.message.content
    # The model decides whether it calls, so a history with a call and its result is asked for in any case.
    called = types.Message.ToolCall.Function(name="get_weather", arguments={"city": "Paris", "unit": "celsius"})
    call = types.Message(role="assistant", tool_calls=[types.Message.ToolCall(function=called)])
    result = {"role": "tool", "tool_name": "get_weather", "content": get_weather(**called.arguments)}
    assert client.chat(**base, messages=[*messages, call, result], tools=[get_weather]).message.content


def structured() -> None:
    answer = client.chat(**question, format=City.model_json_schema())
    City.model_validate_json(answer.message.content)


def embeddings() -> None:
    features.check_vectors(embedder.embed(model=features.EMBEDDER, input=features.TEXTS).embeddings)


def documented() -> None:
    """Models, errors, and each field of the package's types, which the server's schema must have."""
    (model,) = [each.model for each in client.list().models]
    assert model == f"{features.MODEL}:latest"
    assert "completion" in client.show(model).capabilities
    assert [each.model for each in client.ps().models] == [model]
    assert client.pull(model).status == "success"
    try:
        client.chat(model="another", messages=question["messages"])
        refusal = None
    except ollama.ResponseError as error:
        refusal = error
    assert refusal is not None
    assert (refusal.status_code, "does not exist" in refusal.error) == (404, True)
    with urllib.request.urlopen(f"{ROOT_URL}/openapi.json") as response:
        document = json.load(response)
    schemas = document["components"]["schemas"]
    kinds = dict(OBJECTS)
    for name, kind in REQUESTS.items():
        body = document["paths"][f"/api/{name}"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        kinds[body["$ref"].rpartition("/")[2]] = kind
    for schema, kind in kinds.items():
        missing = kind.model_fields.keys() - schemas[schema]["properties"].keys()
        assert not missing, f"{kind.__name__} has fields that the server does not know: {missing}"
    body = question | {"stream": False, "options": {"num_predict": 1, **dict.fromkeys(types.Options.model_fields)}}
    assert "x-oaiserve-adapted" not in httpx.post(f"{ROOT_URL}/api/chat", json=body, timeout=60).headers


features.run(text, stream, auto, structured, embeddings, documented)
