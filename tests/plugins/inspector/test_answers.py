"""With --inspect, clients get the bytes that they get without it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.missing_plugins import is_served
from tests.plugins.inspector.inspected import content_of, served, tokens_of
from tests.world.serving import Place

QUESTION = [{"role": "user", "content": "Grüße, 你好 and more?"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {"type": "object", "properties": {"name": {"enum": ["Anna", "Bert"]}}, "required": ["name"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
CHAT = "/v1/chat/completions"
ALL_REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": QUESTION}),
    "stream": (CHAT, {"messages": QUESTION, "stream": True, "stream_options": {"include_usage": True}}),
    "stream of several tokens": (CHAT, {"messages": QUESTION, "stream": True, "stream_interval": 3}),
    "greedy": (CHAT, {"messages": QUESTION, "temperature": 0}),
    "choices": (CHAT, {"messages": QUESTION, "n": 3, "stream": True}),
    "log-probabilities": (CHAT, {"messages": QUESTION, "logprobs": True, "top_logprobs": 2, "stream": True}),
    "stop strings": (CHAT, {"messages": QUESTION, "stop": ["e", "\u00e9\u00e9"], "stream": True, "min_tokens": 5}),
    "schema": (CHAT, {"messages": QUESTION, "response_format": FORMAT, "stream": True, "stream_interval": 2}),
    "tools": (CHAT, {"messages": QUESTION, "tools": [TOOL], "tool_choice": "required", "stream": True}),
    "completion": ("/v1/completions", {"prompt": ["One", "Two"], "n": 2, "logprobs": 1, "echo": True}),
    "best of": ("/v1/completions", {"prompt": "One", "best_of": 3}),
    "token ids": ("/v1/completions", {"prompt": [[72, 73], [80]], "stream": True, "return_token_ids": True}),
    "prompt log-probabilities": ("/v1/completions", {"prompt": "One", "prompt_logprobs": 1}),
    "messages": ("/v1/messages", {"messages": QUESTION, "stream": True}),
    "responses": ("/v1/responses", {"input": "Hello", "store": False}),
}
REQUESTS = {name: each for name, each in ALL_REQUESTS.items() if is_served(each[0])}


@pytest.fixture(scope="module")
def plain(place_of_module: Place, small_model: Path) -> Iterator[httpx.Client]:
    with served(place_of_module, small_model, inspect=0) as client:
        yield client


@pytest.fixture(scope="module")
def inspected(place_of_module: Place, small_model: Path) -> Iterator[httpx.Client]:
    with served(place_of_module, small_model, inspect=100) as client:
        yield client


def ask(client: httpx.Client, name: str, request_id: str = "") -> httpx.Response:
    path, body = REQUESTS[name]
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    sampling = {} if path in ("/v1/messages", "/v1/responses") else {"seed": 7}
    if not sampling:
        body = body | {"temperature": 0}
    fields = {"model": "small", limit: 24, **sampling, **body}
    response = client.post(path, json=fields, headers={"x-request-id": request_id} if request_id else {})
    assert response.status_code == 200, response.text
    return response


@pytest.mark.parametrize("name", REQUESTS)
def test_an_answer_has_the_same_bytes_alone(name: str, plain: httpx.Client, inspected: httpx.Client) -> None:
    assert content_of(ask(inspected, name)) == content_of(ask(plain, name))


def test_answers_have_the_same_bytes_in_company(plain: httpx.Client, inspected: httpx.Client, place: Place) -> None:
    # The last digits of a log-probability may depend on the other rows of a step of PyTorch.
    names = [name for name in REQUESTS if "logprobs" not in str(REQUESTS[name])]
    alone = [content_of(ask(plain, name)) for name in names]
    with place.threads() as threads:
        together = [*threads.map(lambda name: content_of(ask(inspected, name)), names)]
    assert together == alone


@pytest.mark.parametrize("name", REQUESTS)
def test_each_token_of_an_answer_is_kept_with_its_certainty(name: str, inspected: httpx.Client) -> None:
    request_id = f"kept-{name.replace(' ', '-')}"
    ask(inspected, name, request_id)
    kept = tokens_of(inspected, request_id)
    answer = kept["answer"]
    assert len(answer["texts"]) == len(answer["ids"]) == len(answer["logprobs"]) == answer["num_tokens"] > 0
    assert not kept["is_open"]
    assert all(value is None or value <= 0 for value in answer["logprobs"])
    assert any(value is not None for value in answer["logprobs"])
    if name != "schema":  # A grammar forces tokens, which are not drawn.
        assert None not in answer["logprobs"] or name == "tools"
