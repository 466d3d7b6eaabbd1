"""Tests the requests of /api/chat, /api/generate and /api/embed: prompts and parameters that are those of OpenAI's
routes, and refusals."""

import json
from datetime import datetime
from typing import Any

import numpy as np
import pytest

from oaiserve.engine.request import ChatPrompt, Request, TextPrompt
from oaiserve.engine.types.pooling import Pooling
from oaiserve.routes.adaptations import HEADER
from tests.plugins.ollama.asking import BODIES, CHAT, GENERATE, ask
from tests.routes.asking import HI, HYBRID, PARAMETERS, answered, chatted
from tests.routes.asking import submitted as submitted_to
from tests.routes.doubles import pools
from tests.serving import Serve, Served

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
TOOLS = [{"type": "function", "function": {"name": "get_time", "parameters": PARAMETERS}}]
CALLS = [{"function": {"name": name, "arguments": {"at": at}}} for at, name in enumerate(("get_time", "stop"))]


def submitted(served: Served, path: str = CHAT, **body: Any) -> tuple[Request, ChatPrompt]:
    ask(served, path, **body)
    return submitted_to(served)


def test_a_request_is_that_of_chat(serve: Serve) -> None:
    served = serve(template=HYBRID)
    same = {"temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "seed": 3, "presence_penalty": 0.1}
    options = {**same, "num_predict": 9, "repeat_penalty": 1.2, "stop": ["END"]}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Wait.", "thinking": "Hm.", "tool_calls": CALLS},
        {"role": "tool", "content": "stopped", "tool_name": "stop"},
        {"role": "tool", "content": "12:00"},
    ]
    ours, our_prompt = submitted(served, messages=messages, tools=TOOLS, options=options)
    ids = ("call_2_0", "call_2_1")
    functions = [{"name": "get_time", "arguments": '{"at":0}'}, {"name": "stop", "arguments": '{"at":1}'}]
    calls = [{"id": id_, "type": "function", "function": each} for id_, each in zip(ids, functions, strict=True)]
    chats, prompt = chatted(
        served,
        **same,
        max_tokens=9,
        repetition_penalty=1.2,
        stop=["END"],
        tools=TOOLS,
        messages=[
            *messages[:2],
            {"role": "assistant", "content": "Wait.", "reasoning": "Hm.", "tool_calls": calls},
            {"role": "tool", "content": "12:00", "tool_call_id": "call_2_0"},
            {"role": "tool", "content": "stopped", "tool_call_id": "call_2_1"},
        ],
    )
    assert (our_prompt, ours.params) == (prompt, chats.params)


def test_results_with_ids_belong_to_their_calls(served: Served) -> None:
    calls = [{**call, "id": f"call_{at}"} for at, call in enumerate(CALLS)]
    results = [{"role": "tool", "content": str(at), "tool_call_id": f"call_{at}"} for at in (1, 0)]
    _, prompt = submitted(served, messages=[*HI, {"role": "assistant", "tool_calls": calls}, *results])
    assert [each["content"] for each in prompt.messages if each["role"] == "tool"] == ["0", "1"]


def test_a_prompt_is_that_of_a_chat(served: Served) -> None:
    _, prompt = submitted(served, GENERATE, system="Be brief.", prompt="Why?")
    assert [(each["role"], each["content"]) for each in prompt.messages] == [("system", "Be brief."), ("user", "Why?")]


def test_raw_prompts_and_gaps_reach_the_engine_as_they_are(served: Served) -> None:
    ask(served, GENERATE, prompt="Once", raw=True, options={"num_predict": 3})
    request = served.engine.submitted.get_nowait()
    assert isinstance(request.prompts[0], TextPrompt)
    assert (request.prompts[0].text, request.params.max_tokens) == ("Once", 3)
    refused = served.post(GENERATE, model="org/demo", prompt="def", suffix="return")
    assert (refused.status_code, "filling in the middle" in refused.json()["error"]) == (400, True)


def test_images_are_those_of_chat(served: Served) -> None:
    served.engine.media = frozenset({"image"})
    for path, body in ((CHAT, {"messages": [{**HI[0], "images": [PNG]}]}), (GENERATE, {"images": [PNG]})):
        request, prompt = submitted(served, path, **body)
        assert [each["type"] for each in prompt.messages[0]["content"]] == ["image", "text"]
        assert len(prompt.media) == 1, request


@pytest.mark.parametrize(
    ("sent", "kind", "text"),
    [("json", "json_object", ""), (PARAMETERS, "json_schema", json.dumps(PARAMETERS, separators=(",", ":")))],
)
@pytest.mark.parametrize("path", [CHAT, GENERATE])
def test_a_format_is_a_grammar(served: Served, path: str, sent: object, kind: str, text: str) -> None:
    request, _ = submitted(served, path, format=sent)
    assert request.params.grammar is not None
    assert (request.params.grammar.kind, request.params.grammar.text) == (kind, text)
    request, _ = submitted(served, path, format="")
    assert request.params.grammar is None


@pytest.mark.parametrize(
    ("think", "kwargs"),
    [
        (True, {"enable_thinking": True}),
        (False, {"enable_thinking": False}),
        ("low", {"reasoning_effort": "low"}),
        (None, {}),
    ],
)
def test_thinking_is_the_switch_of_the_template(serve: Serve, think: object, kwargs: dict[str, Any]) -> None:
    _, prompt = submitted(serve(template=HYBRID), think=think)
    assert kwargs.items() <= prompt.template_kwargs.items()
    assert bool(prompt.template_kwargs) == bool(kwargs)


@pytest.mark.parametrize("num_predict", [-2, -1, 0, None])
def test_no_limit_is_sent_as_a_number_that_is_not_positive(served: Served, num_predict: int | None) -> None:
    request, _ = submitted(served, options={"num_predict": num_predict})
    assert request.params.max_tokens is None


def test_what_is_left_out_is_named_in_ollamas_words(served: Served) -> None:
    options = {"num_ctx": 8192, "mirostat": 0, "mirostat_tau": 1.0, "made_up": 1, "repeat_last_n": -1}
    response = served.post(
        CHAT, model="org/demo", **BODIES[CHAT], options=options, keep_alive="5m", format={"not": {"type": "string"}}
    )
    assert response.headers[HEADER].split("; ") == [
        "keep_alive: is left out: the model stays loaded",
        "options.num_ctx: is left out: --max-model-len of the server decides",
        "options.mirostat_tau: is left out: the sampler has no such rule",
        "options: one that is unknown is left out",
        "format: 'not' is not enforced",
    ]
    assert HEADER not in served.post(CHAT, model="org/demo", **BODIES[CHAT], keep_alive=-1).headers


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (CHAT, {"format": "yaml"}, "Invalid 'format': must be 'json' or a JSON Schema, got 'yaml'"),
        (CHAT, {"options": {"repeat_penalty": 1000}}, "Invalid 'repeat_penalty': must be <= 100"),
        (CHAT, {"options": {"num_predict": 1.5}}, "Invalid 'num_predict': must be an integer"),
        (CHAT, {"options": {"temperature": 3}}, "Invalid 'temperature': must be <= 2"),
        (CHAT, {"options": {"stop": 3}}, "'stop'"),
        (CHAT, {"think": "enormous"}, "'think'"),
        (CHAT, {"model": "other"}, "The model 'other' does not exist. This server serves 'org/demo'"),
        (CHAT, {"model": None}, "'model'"),
        (CHAT, {"messages": [{"role": "user", "content": "Hi", "images": [PNG]}]}, "reads text alone, no images"),
        (CHAT, {"messages": [{"role": "made up", "content": "Hi"}]}, "messages[0].role"),
        (CHAT, {"messages": [], "keep_alive": 0}, "keeps its models loaded"),
        (GENERATE, {"prompt": "", "keep_alive": "0s"}, "keeps its models loaded"),
        (GENERATE, {"template": "{{ .Prompt }}"}, "'template' is not supported here"),
        (GENERATE, {"context": [1, 2]}, "send the messages so far to /api/chat"),
        (GENERATE, {"width": 512}, "models of this server generate text"),
        (GENERATE, {"raw": True, "images": [PNG]}, "only allowed without 'raw'"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_refused(served: Served, path: str, body: dict[str, Any], words: str, stream: bool) -> None:
    response = served.post(path, **{"model": "org/demo", "stream": stream, **BODIES[path], **body})
    assert (response.status_code in (400, 404), words in response.json()["error"]) == (True, True), response.text


@pytest.mark.parametrize("path", [CHAT, GENERATE])
@pytest.mark.parametrize("stream", [False, True])
def test_without_anything_to_answer_the_model_is_loaded(served: Served, path: str, stream: bool) -> None:
    response = served.post(path, model="org/demo", stream=stream)
    answer = answered(response)
    assert (answer["done"], answer["done_reason"], response.text.count("\n")) == (True, "load", int(stream))
    assert served.post(path, model="other").status_code == 404


def test_json_that_curl_sends_as_a_form_is_read_except_from_web_pages(serve: Serve) -> None:
    served = serve(cors_origin=("http://page.example",))
    form = {"content-type": "application/x-www-form-urlencoded"}
    body = json.dumps({"model": "org/demo", **BODIES[CHAT]})
    assert served.http.post(CHAT, headers=form, content=body).status_code == 200
    refused = served.http.post(CHAT, headers=form | {"origin": "http://page.example"}, content=body)
    assert (refused.status_code, "content type" in refused.json()["error"]) == (400, True)


@pytest.mark.parametrize("name", ["org/demo", "org/demo:latest"])
def test_a_name_may_have_the_tag_latest(served: Served, name: str) -> None:
    assert ask(served, model=name)["model"] == name


def test_a_model_may_really_be_called_latest(serve: Serve) -> None:
    served = serve(served_model_name=("llama3.2:latest",))
    assert ask(served, model="llama3.2:latest")["message"]["content"] == "Hello world"


# The requests of programs, by their sources: Home Assistant's integration `ollama`, which sends them by the official
# package, and Open WebUI's `routers/ollama.py` with `utils/payload.py`.
CALLED = {"name": "HassTurnOn", "arguments": {"name": "lamp"}}
OF_HASS = {"type": "function", "function": {"name": "HassTurnOn", "parameters": {"type": "object", "properties": {}}}}
PROGRAMS: dict[str, dict[str, Any]] = {
    "Home Assistant": {
        "messages": [
            {"role": "system", "content": "You are a voice assistant."},
            {"role": "user", "content": "Turn on the lamp"},
            {"role": "assistant", "content": None, "tool_calls": [{"function": CALLED}]},
            {"role": "tool", "content": '{"data": {"success": []}, "error": null}'},
        ],
        "tools": [OF_HASS],
        "stream": True,
        "keep_alive": -1,
        "options": {"num_ctx": 8192},
        "think": False,
    },
    "Home Assistant, a task with an image": {
        "messages": [
            {"role": "system", "content": "You are a Home Assistant expert."},
            {"role": "user", "content": "Is the gate open?", "images": [PNG]},
        ],
        "tools": [],
        "stream": True,
        "keep_alive": "3600s",
        "options": {"num_ctx": 8192},
        "think": False,
        "format": {
            "type": "object",
            "properties": {
                "open": {"type": "boolean", "description": "Whether it is open"},
                "from": {"type": "string", "enum": ["left", "right"]},
            },
            "required": ["open"],
        },
    },
    "Open WebUI, with an image": {
        "messages": [{"role": "user", "content": "What is this?", "images": [PNG]}],
        "stream": False,
        "options": {"temperature": 0.8, "top_p": 0.9, "seed": 42, "num_ctx": 4096, "num_gpu": 1, "use_mmap": True},
    },
    "Open WebUI": {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "", "tool_calls": [{"index": 0, "id": "call_1", "function": CALLED}]},
            {"role": "tool", "tool_call_id": "call_1", "content": "done"},
        ],
        "stream": True,
        "options": {"temperature": 0.8, "stop": ["END"], "num_predict": 128, "new_topic_penalty": 0.0},
        "keep_alive": "10m",
        "format": {"type": "object", "properties": {"tags": {"type": "array", "items": {"type": "string"}}}},
    },
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_requests_of_programs_are_answered(serve: Serve, program: str) -> None:
    sent = PROGRAMS[program]
    served = serve(template=HYBRID)
    served.engine.media = frozenset({"image"})
    (model,) = answered(served.http.get("/api/tags"))["models"]
    response = served.post(CHAT, model=model["model"], **sent)
    assert response.status_code == 200, response.text
    request, prompt = submitted_to(served)
    assert [each["role"] for each in prompt.messages] == [each["role"] for each in sent["messages"]]
    assert [each.get("tool_calls", [{}])[0].get("function", {}).get("name") for each in prompt.messages] == [
        "HassTurnOn" if "tool_calls" in each else None for each in sent["messages"]
    ]
    assert len(prompt.media) == sum(len(each.get("images", [])) for each in sent["messages"])
    assert (request.params.grammar is not None) == ("format" in sent)


def test_open_webui_reads_when_a_model_is_unloaded(served: Served) -> None:
    (running,) = answered(served.http.get("/api/ps"))["models"]
    (model,) = answered(served.http.get("/api/tags"))["models"]
    assert running["name"] == model["name"]
    assert datetime.fromisoformat(running["expires_at"]).timestamp() > 2e9


# Vectors.


@pytest.fixture
def embedder(served: Served) -> Served:
    served.engine.pooling = Pooling("embed", 4, prompts={"query": "Q: "}, dimensions=())
    served.engine.script = pools([3.0, 0.0, 4.0, 0.0], [0.0, 0.0, 0.0, 2.0])
    return served


@pytest.mark.plugin("pooling")
def test_vectors_are_those_of_v1_embeddings(embedder: Served) -> None:
    answer = answered(embedder.post("/api/embed", model="org/demo", input=["a", "b"]))
    assert np.allclose(answer.pop("embeddings"), [[0.6, 0, 0.8, 0], [0, 0, 0, 1]])
    assert answer.pop("total_duration") >= 0
    assert answer == {"model": "org/demo", "load_duration": 0, "prompt_eval_count": 6}
    answer = answered(embedder.post("/api/embed", model="org/demo", input="a", dimensions=2))
    assert np.allclose(answer["embeddings"], [[1, 0]])
    assert embedder.post("/api/embed", model="org/demo", input=[]).status_code == 400


@pytest.mark.plugin("pooling")
def test_the_older_vectors_keep_their_length(embedder: Served) -> None:
    assert answered(embedder.post("/api/embeddings", model="org/demo", prompt="a")) == {"embedding": [3, 0, 4, 0]}
    assert embedder.post("/api/embeddings", model="org/demo", prompt="").status_code == 400


@pytest.mark.plugin("pooling")
@pytest.mark.parametrize(("truncate", "limit"), [({}, 4096), ({"truncate": True}, 4096), ({"truncate": False}, None)])
def test_texts_are_cut_unless_that_is_off(embedder: Served, truncate: dict[str, bool], limit: int | None) -> None:
    embedder.post("/api/embed", model="org/demo", input="a", **truncate)
    (prompt,) = embedder.engine.submitted.get_nowait().prompts
    assert isinstance(prompt, TextPrompt)
    assert prompt.most_tokens == limit
