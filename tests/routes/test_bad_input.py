"""Tests that every malformed request gets its 4xx with OpenAI's error object, and does not affect other requests.

`BAD_REQUESTS` is data that can be sent to any oaiserve. Rows with `by="engine"` are refused by the engine, because they
need the vocabulary or the tokenizer.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from oaiserve.routes.door.foreign_paths import ours_for
from tests.missing_plugins import is_served
from tests.serving import Served

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
OUTSIDE = 2**31 - 1  # a token id that is in no vocabulary
BODY_LIMIT = 8 * 2**20  # the default


@dataclass(frozen=True)
class BadRequest:
    name: str
    path: str
    body: bytes | dict[str, Any]
    says: str  # in the message
    param: str | None = None
    status: int = 400
    code: str | None = None
    by: str = "http"
    method: str = "POST"
    content_type: str = "application/json"

    def send(self, client: httpx.Client) -> httpx.Response:
        content = self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()
        headers = {"content-type": self.content_type}
        return client.request(self.method, self.path, content=content, headers=headers)


def completion(name: str, says: str, param: str | None = None, /, **fields: Any) -> BadRequest:
    return BadRequest(name, COMPLETIONS, {"prompt": "Hi", **fields}, says, param)


def chat(name: str, says: str, param: str | None = None, /, **fields: Any) -> BadRequest:
    return BadRequest(name, CHAT, {"messages": HI, **fields}, says, param)


def raw(name: str, body: bytes, says: str, param: str | None = None) -> BadRequest:
    return BadRequest(name, COMPLETIONS, body, says, param)


def by_engine(name: str, says: str, param: str, **fields: Any) -> BadRequest:
    return BadRequest(name, COMPLETIONS, {"prompt": "Hi", **fields}, says, param, by="engine")


def unknown_model(name: str, asked: str, path: str, **request: Any) -> BadRequest:
    says = f"The model '{asked}' does not exist"
    return BadRequest(name, path, says=says, param="model", status=404, code="model_not_found", **request)


def other_task(name: str, path: str, body: dict[str, Any], says: str) -> BadRequest:
    return BadRequest(name, path, body, says, param="model", code="wrong_task")


def unsupported(name: str, value: Any, path: str = CHAT) -> BadRequest:
    body = {"messages": HI} if path == CHAT else {"prompt": "Hi"}
    says = f"'{name}' is not supported"
    return BadRequest(f"{name} on {path}", path, {**body, name: value}, says, name, code="unsupported_parameter")


BAD_REQUESTS = [
    # The body as such.
    raw("no body", b"", "The body is empty, and must be a JSON object."),
    raw("half an object", b'{"prompt": "Hi"', "not valid JSON"),
    raw("trailing comma", b'{"prompt": "Hi",}', "trailing comma"),
    raw("two values", b'{"prompt": "Hi"} {}', "trailing characters"),
    raw("a list", b'["Hi"]', "must be an object, got a list"),
    raw("not UTF-8", b'{"prompt": "\xff\xfe"}', "not UTF-8"),
    raw("UTF-16", '{"prompt": "Hi"}'.encode("utf-16"), "not valid JSON"),
    raw("a byte order mark and no more", b"\xef\xbb\xbf", "The body is empty"),
    raw("a raw control character", b'{"prompt": "a\nb"}', "not valid JSON"),
    raw("half a surrogate pair in a stop string", b'{"prompt": "Hi", "stop": "\\ud83d"}', "surrogate pair (byte 26)"),
    raw("half a pair after an escaped one", b'{"prompt": "", "stop": "\\\\ud83d\\ude00"}', "surrogate pair (byte 31)"),
    raw("an escaped half in half a body", b'{"prompt": "\\\\ud83d', "input data was truncated"),
    raw("NaN", b'{"prompt": "Hi", "temperature": NaN}', "not valid JSON"),
    raw("a number beyond floats", b'{"prompt": "Hi", "temperature": 1e999}', "within ±1.8e308", "temperature"),
    raw("an integer of 5000 digits", b'{"prompt": "Hi", "n": ' + b"9" * 5000 + b"}", "at most 4,300 digits", "n"),
    raw("an integer of 5000 digits in another API's field", b'{"prompt": "Hi", "text": ' + b"9" * 5000 + b"}", "4,300"),
    raw("an integer of 400 digits", b'{"prompt": "Hi", "seed": ' + b"9" * 400 + b"}", "must be <=", "seed"),
    raw("deep lists", b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    raw("deep unknown objects", b'{"x": ' + b'{"x":' * 100_000 + b"1" + b"}" * 100_001, "nested too deeply"),
    BadRequest("a form", COMPLETIONS, b"a=b", "application/json", content_type="application/x-www-form-urlencoded"),
    BadRequest("plain text", CHAT, {"messages": HI}, "application/json", content_type="text/plain"),
    BadRequest("over the limit", COMPLETIONS, b" " * (BODY_LIMIT + 1), "too large", status=413),
    # Method, path, model.
    BadRequest("GET", COMPLETIONS, b"", "GET is not allowed", status=405, method="GET"),
    BadRequest("unknown path", "/v1/nothing", {}, "no POST /v1/nothing", status=404),
    other_task("embeddings", "/v1/embeddings", {"input": "Hi"}, "with an embedding model"),
    other_task("score", "/v1/score", {"text_1": "Hi", "text_2": "ho"}, "with a reranker"),
    other_task("rerank", "/v1/rerank", {"query": "Hi", "documents": ["a"]}, "with a reranker"),
    unknown_model("unknown model", "gpt-9", COMPLETIONS, body={"model": "gpt-9", "prompt": "Hi"}),
    unknown_model("unknown model, chat", "", CHAT, body={"model": "", "messages": HI}),
    unknown_model("GET an unknown model", "a/b", "/v1/models/a/b", body=b"", method="GET"),
    # Prompts.
    BadRequest("no prompt", COMPLETIONS, {}, "Missing required parameter: 'prompt'", "prompt"),
    completion("prompt null", "must be a string or a list, got null", "prompt", prompt=None),
    completion("no prompts", "must not be an empty list", "prompt", prompt=[]),
    completion("no tokens", "must not be empty", "prompt", prompt=[[]]),
    completion("text and tokens", "must be a string, a list of strings", "prompt", prompt=["Hi", 5]),
    completion("null in a list", "'prompt[1]': must be an integer or a string", "prompt", prompt=["Hi", None]),
    completion("bools as tokens", "or a list, got a boolean", "prompt", prompt=[True, False]),
    completion("floats as tokens", "must be an integer >= 0, got 1.5", "prompt", prompt=[1.5]),
    completion("text in tokens", "'prompt[0][1]': must be an integer, got a string", "prompt", prompt=[[5, "Hi"]]),
    completion("bools in tokens", "'prompt[0][1]': must be an integer, got a boolean", "prompt", prompt=[[5, True]]),
    completion("negative token", "must be >= 0, got -1", "prompt", prompt=[5, -1]),
    completion("too many choices", "prompts times n must be <= 2048", "prompt", prompt=["Hi"] * 17, n=128),
    by_engine("empty prompt", "it has no tokens", "prompt", prompt=""),
    by_engine("empty prompt in a list", "it has no tokens", "prompt", prompt=["Hi", ""]),
    by_engine("token outside", "vocabulary", "prompt", prompt=[5, OUTSIDE]),
    # Sampling.
    completion("temperature as text", "must be a number, got a string", "temperature", temperature="1"),
    completion("top_k 1.5", "must be an integer, got 1.5", "top_k", top_k=1.5),
    completion("n true", "must be an integer, got a boolean", "n", n=True),
    completion("best_of 2 for 3", "must be >= n (3), got 2", "best_of", n=3, best_of=2),
    completion("best_of streamed", "must be equal to n (1) with 'stream'", "best_of", best_of=2, stream=True),
    completion("too many candidates", "times best_of must be <= 2048", "prompt", prompt=["Hi"] * 103, best_of=20),
    completion("max_tokens 1e300", "must be <= 2147483647", "max_tokens", max_tokens=1e300),
    completion("min_tokens over max_tokens", "must be <= max_tokens (4)", "min_tokens", min_tokens=5, max_tokens=4),
    completion("1000 stops", "at most 128", "stop", stop=["a"] * 1000),
    completion("a very long stop", "at most 4096 characters", "stop", stop=["a" * 4000, "b" * 97]),
    completion("stop_token_ids negative", "must be an integer >= 0, got -1", "stop_token_ids", stop_token_ids=[-1]),
    by_engine("stop_token_ids outside", "vocabulary", "stop_token_ids", stop_token_ids=[OUTSIDE]),
    completion("an empty bad word", "must not be empty", "bad_words", bad_words=["a", ""]),
    by_engine("a bad word of spaces", "has no tokens", "bad_words", bad_words=["a", "  "]),
    completion("no allowed_token_ids", "must not be empty", "allowed_token_ids", allowed_token_ids=[]),
    by_engine("allowed_token_ids outside", "vocabulary", "allowed_token_ids", allowed_token_ids=[OUTSIDE]),
    completion("logit_bias by text", "a key must be a token id", "logit_bias", logit_bias={"AI": 1}),
    completion("logit_bias by a negative", "a key must be a token id", "logit_bias", logit_bias={"-1": 1}),
    completion("logit_bias by 5000 digits", "a key must be a token id", "logit_bias", logit_bias={"9" * 5000: 1}),
    completion("logit_bias 101", "between -100 and 100, got 101", "logit_bias", logit_bias={"5": 101}),
    by_engine("logit_bias outside", "vocabulary", "logit_bias", logit_bias={str(OUTSIDE): 1}),
    chat("top_logprobs alone", "only allowed with 'logprobs': true", "top_logprobs", top_logprobs=2),
    completion("prompt_logprobs streamed", "not available", "prompt_logprobs", prompt_logprobs=1, stream=True),
    completion("stream_options alone", "only allowed", "stream_options", stream_options={"include_usage": True}),
    completion("empty stream_options alone", "only allowed", "stream_options", stream_options={}, stream=False),
    chat("unknown effort", "'none' or 'xhigh', got 'vast'", "reasoning_effort", reasoning_effort="vast"),
    completion("include_usage as text", "true or false", "stream_options", stream=True, stream_options={"x": "y"}),
    # Messages.
    BadRequest("no messages", CHAT, {}, "Missing required parameter: 'messages'", "messages"),
    chat("messages empty", "at least one message", "messages", messages=[]),
    chat("a message as text", "must be an object, got a string", "messages", messages=["Hi"]),
    chat("no role", "'messages[0].role'", "messages", messages=[{"content": "Hi"}]),
    chat("unknown role", "'tool' or 'user', got 'root'", "messages", messages=[{"role": "root", "content": "Hi"}]),
    chat("content a number", "'messages[0].content'", "messages", messages=[{"role": "user", "content": 5}]),
    chat("only an empty answer", "with a content", "messages", messages=[{"role": "assistant", "content": None}]),
    chat("a part without type", "content[0].type", "messages", messages=[{"role": "user", "content": [{}]}]),
    chat(
        "an image",
        "Invalid 'messages[0].content[0]': the model 'org/demo' reads text alone, no images.",
        "messages",
        messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}],
    ),
    chat(
        "an image of the system",
        "images and sounds are in messages of users and in results of tools",
        "messages",
        messages=[{"role": "system", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}],
    ),
    chat(
        "a video",
        "this server reads text, images and sounds, no video and no other files",
        "messages",
        messages=[{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "data:"}}]}],
    ),
    chat(
        "a text part without text",
        "'messages[0].content[0].text'",
        "messages",
        messages=[{"role": "user", "content": [{"type": "text"}]}],
    ),
    chat(
        "continue and begin",
        "must not be true together",
        "continue_final_message",
        continue_final_message=True,
        add_generation_prompt=True,
    ),
    # Known, not built.
    unsupported("tools", [{"type": "function", "function": {"name": "f"}}], COMPLETIONS),
    unsupported("tool_choice", "auto", COMPLETIONS),
    completion("no tokens for a gap", "no tokens for filling in the middle", "suffix", suffix="end"),
    unsupported("audio", {"voice": "x"}),
    unsupported("modalities", ["text", "audio"]),
    unsupported("use_beam_search", True, COMPLETIONS),
    unsupported("logits_processors", ["x"], COMPLETIONS),
    unsupported("chat_template", "{{ messages }}"),
    unsupported("truncate_prompt_tokens", 5, COMPLETIONS),
    # The tokenizer's routes.
    BadRequest("nothing to tokenize", "/tokenize", {}, "either 'prompt' or 'messages'", "prompt"),
    BadRequest("both to tokenize", "/tokenize", {"prompt": "Hi", "messages": HI}, "either 'prompt' or", "prompt"),
    BadRequest("no tokens given", "/detokenize", {}, "Missing required parameter: 'tokens'", "tokens"),
    BadRequest("negative token to text", "/detokenize", {"tokens": [-5]}, "must be an integer >= 0", "tokens"),
    BadRequest("outside token to text", "/detokenize", {"tokens": [OUTSIDE]}, "a token id must be <", "tokens"),
]  # fmt: skip


def test_of_tools_and_the_choice_among_them_the_tools_are_refused(served: Served) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    response = served.complete(tool_choice="auto", tools=tools)
    assert response.json()["error"]["param"] == "tools"


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("/chat/completions", "POST /v1/chat/completions"),
        ("/v1/chat/completion", "POST /v1/chat/completions"),
        ("/v1/v1/completions", "POST /v1/completions"),
        ("/v1/model", "GET /v1/models"),
        ("/token", "POST /tokenize"),
    ],
)
def test_an_unknown_route_is_answered_with_the_nearest_one(served: Served, path: str, nearest: str) -> None:
    message = served.post(path).json()["error"]["message"]
    assert f"Did you mean {nearest}?" in message
    assert message.endswith(" lists all routes.")


@pytest.mark.parametrize(
    ("path", "whose", "ours"),
    [
        ("/completion", "llama.cpp", "POST /v1/completions"),
        ("/generate_stream", "Text Generation Inference", "POST /v1/completions"),
        ("/v1beta/models/gemini-2.5-pro:streamGenerateContent", "Gemini", "POST /v1/chat/completions"),
        ("/openai/deployments/gpt-4o/chat/completions", "Azure", "POST /v1/chat/completions"),
    ],
)
def test_path_of_another_server_is_answered_with_ours_for_the_same_task(
    served: Served, path: str, whose: str, ours: str
) -> None:
    message = served.post(path).json()["error"]["message"]
    assert f"That is a path of {whose}. Did you mean {ours}? " in message


@pytest.mark.parametrize(
    ("path", "ours"),
    [
        ("/api/chat", "/v1/chat/completions"),
        ("/api/generate", "/v1/completions"),
        ("/api/tags", "/v1/models"),
    ],
)
def test_path_of_ollama_is_answered_with_ours_without_its_plug_in(path: str, ours: str) -> None:
    assert ours_for(path, {ours}) == ("Ollama", ours)


def test_path_of_a_probe_elsewhere_is_answered_with_ours(served: Served) -> None:
    assert "on this server. Did you mean GET /ready? " in served.http.get("/readyz").json()["error"]["message"]


@pytest.mark.parametrize("prefix", ["/api/v1", "/api/v0", "/openai/v1", "/openai"])
def test_base_url_of_another_service_is_answered_with_ours(served: Served, prefix: str) -> None:
    message = served.post(f"{prefix}/chat/completions").json()["error"]["message"]
    assert f"There is no POST {prefix}/chat/completions on this server. Did you mean POST /v1/chat/" in message


@pytest.mark.parametrize(
    "path", ["/v1", "/v1/moderations", "/v1/images/generations", "/api/blobs", "/" + "v1/completions" * 100]
)
def test_unknown_route_without_a_similar_one_names_the_list_of_routes(served: Served, path: str) -> None:
    message = served.post(path).json()["error"]["message"]
    listed = re.fullmatch(rf"There is no POST {path[:100]} on this server. GET (/\S+) lists all routes.", message)
    assert listed is not None
    assert served.http.get(listed[1]).status_code == 200


def test_a_route_for_models_of_another_kind_is_not_suggested(served: Served) -> None:
    assert "Did you mean" not in served.post("/v1/embedding").json()["error"]["message"]
    assert "Did you mean" not in served.post("/embedding").json()["error"]["message"]


def test_a_byte_order_mark_before_the_body_is_no_part_of_it(served: Served) -> None:
    headers = {"content-type": "application/json"}
    content = b'\xef\xbb\xbf{"prompt": "Hi"}'
    assert served.http.post("/v1/completions", content=content, headers=headers).status_code == 200


def check_refused(bad: BadRequest, response: httpx.Response) -> None:
    """Check the status, OpenAI's four keys and our two ids, the parameter, and the words of the message."""
    assert response.status_code == bad.status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code", "request_id", "trace_id"}
    assert error["request_id"] == response.headers["x-request-id"]
    assert error["trace_id"] == response.headers["traceresponse"].split("-")[1]
    assert error["type"] == "invalid_request_error"
    assert bad.says in error["message"]
    assert len(error["message"]) < 600
    assert error["param"] == bad.param
    assert error["code"] == bad.code
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]


@pytest.mark.parametrize("bad", [bad for bad in BAD_REQUESTS if is_served(bad.path)], ids=lambda bad: bad.name)
def test_a_malformed_request_is_refused_with_the_error_object(served: Served, bad: BadRequest) -> None:
    check_refused(bad, bad.send(served.http))
    assert served.engine.submitted.qsize() == (bad.by == "engine")
