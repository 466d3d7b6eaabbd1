"""Requests of the tests of generation routes, and the templates, tools and answers that these share."""

import json
from typing import Any

import httpx

from oaiserve.engine.request import ChatPrompt, Grammar, Request
from tests.serving import Served

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
ROUTES = (CHAT, RESPONSES, MESSAGES)  # routes with tools
REQUIRED: dict[str, Any] = {CHAT: "required", RESPONSES: "required", MESSAGES: {"type": "any"}}
HI = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {  # bodies for the routes that generate
    COMPLETIONS: {"prompt": "Hi"},
    CHAT: {"messages": HI},
    RESPONSES: {"input": "Hi"},
    MESSAGES: {"model": "org/demo", "messages": HI, "max_tokens": 16},
}

CHATML = "{% for message in messages %}{{ message.role }}: {{ message.content }}{% endfor %}"  # it knows no tools
OPEN = "{{ messages }}</think> add <think>"  # The double puts the mark after the prompt.
HYBRID = "{{ messages }}{{ tools }}<tool_call></think>{{ enable_thinking }}"
THOUGHT = ("<think>", "\n", "I", " think", ".", "</th", "ink>", "\n\n", "Yes", ".")

PARAMETERS = {
    "type": "object",
    "properties": {"zone": {"enum": ["utc", "cet"]}},
    "required": ["zone"],
    "additionalProperties": False,
}
ZONE = '{"zone": "utc"}'
CALL = '<tool_call>\n{"name": "get_time", "arguments": ' + ZONE + "}\n</tool_call>"
PIECES = ("<tool", '_call>\n{"name": "get_time", ', '"arguments": {"zo', 'ne": "utc"}', "}\n</tool", "_call>")


def tool(route: str, name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    """Return a tool in the form of this route."""
    schema = {} if parameters is None else {"input_schema" if route == MESSAGES else "parameters": parameters}
    function = {"name": name, **schema, **more}
    if route == CHAT:
        return {"type": "function", "function": function}
    return function if route == MESSAGES else {"type": "function", **function}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def answered(response: httpx.Response) -> Any:
    """Return the body of an answer that is no refusal."""
    assert response.status_code == 200, response.text
    return response.json()


def refused(
    response: httpx.Response, param: str | None, says: str = "", *, status: int = 400, code: str | None = None
) -> None:
    """Check the status of a refusal, its parameter, words of its message, and its code if one is given."""
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (status, param, code or error["code"]), error
    assert says in error["message"]


def stream_of(served: Served, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
    """Return the chunks of a stream. Check that it ends with [DONE], and that no character of a text ends a line."""
    response = served.post(path, **{**BODIES[path], "stream": True, **body})
    assert response.status_code == 200, response.text
    assert len(response.text.splitlines()) == response.text.count("\n")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def submitted(served: Served) -> tuple[Request, ChatPrompt]:
    """Return the next request that has reached the engine, and its prompt."""
    request = served.engine.submitted.get()
    (prompt,) = request.prompts
    assert isinstance(prompt, ChatPrompt)
    return request, prompt


def chatted(served: Served, **body: Any) -> tuple[Request, ChatPrompt]:
    """Chat, and return the request that reaches the engine, and its prompt."""
    answered(served.chat(**body))
    return submitted(served)


def grammar_of(served: Served, **body: Any) -> Grammar:
    """Chat, and return the grammar that the answer has to follow."""
    grammar = chatted(served, **body)[0].params.grammar
    assert grammar is not None
    return grammar
