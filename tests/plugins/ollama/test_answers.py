"""Tests the answers of /api/chat and /api/generate: whole ones, streams of lines that gather to the same, and calls."""

import json
from collections.abc import Iterable
from typing import Any

import pytest

from oaiserve.engine.request import ChatPrompt, Event, FinishReason, Request, TextPrompt, Usage
from oaiserve.errors import InternalError, InvalidRequest, Overloaded
from oaiserve.facts.record import Outcome
from tests.plugins.ollama.asking import BODIES, CHAT, GENERATE, ask, gathered, lines_of, streamed
from tests.routes.asking import CALL, CHATML, HYBRID, PARAMETERS, PIECES, bearer
from tests.routes.doubles import fails, finished, says, starts
from tests.routes.test_progress import progress, tokens
from tests.serving import Serve, Served

TOOLS = [{"type": "function", "function": {"name": "get_time", "description": "The time.", "parameters": PARAMETERS}}]
END = {"done": True, "done_reason": "stop", "prompt_eval_count": 3}


def call_of(message: dict[str, Any]) -> dict[str, Any]:
    (call,) = message["tool_calls"]
    assert call.pop("id").startswith("call_")
    return call


def test_a_whole_answer_has_the_documented_shape(served: Served) -> None:
    message = {"role": "assistant", "content": "Hello world"}
    assert ask(served) == {"model": "org/demo", **END, "eval_count": 2, "message": message}
    record = served.telemetry.next_record()
    assert (record.operation, record.outcome) == ("chat", Outcome.FINISHED)
    assert ask(served, GENERATE) == {"model": "org/demo", **END, "eval_count": 2, "response": "Hello world"}


def test_a_stream_has_exactly_these_lines(serve: Serve) -> None:
    served = serve(template=HYBRID, script=says("<think>", "Hm", "</think>", "Well. ", *PIECES))
    thought, text, called, end = streamed(served, tools=TOOLS)
    assert thought["message"] == {"role": "assistant", "content": "", "thinking": "Hm"}
    assert text == {"model": "org/demo", "message": {"role": "assistant", "content": "Well. "}}
    call = {"index": 0, "name": "get_time", "arguments": {"zone": "utc"}}
    assert call_of(called["message"]) == {"function": call}
    assert end == {"model": "org/demo", **END, "eval_count": 10, "message": {"role": "assistant", "content": ""}}


@pytest.mark.parametrize("path", [CHAT, GENERATE])
@pytest.mark.parametrize("text", ["", "Hello there", "<think>I think.</think>\n\nYes\u2028, \x85 I do."])
def test_a_stream_gathers_to_the_whole_answer(serve: Serve, path: str, text: str) -> None:
    served = serve(template=HYBRID)
    for pieces in (list(text) or [""], [text]):
        served.engine.script = says(*pieces)
        assert gathered(streamed(served, path)) == ask(served, path)


@pytest.mark.parametrize(
    ("text", "finish", "reason", "content"),
    [
        ("Hello", FinishReason.LENGTH, "length", "Hello"),
        ("Hello", FinishReason.REPETITION, "stop", "Hello"),
    ],
)
def test_the_reason_why_it_ends(serve: Serve, text: str, finish: FinishReason, reason: str, content: str) -> None:
    served = serve(template=HYBRID, script=says(text, finish=finish))
    for answer in (ask(served), streamed(served)[-1]):
        assert answer["done_reason"] == reason


def test_a_call_that_is_cut_is_text_and_never_run(serve: Serve) -> None:
    cut = CALL[: CALL.index("utc")]
    served = serve(template=HYBRID, script=says(*cut, finish=FinishReason.LENGTH))
    for answer in (ask(served, tools=TOOLS), gathered(streamed(served, tools=TOOLS))):
        assert "tool_calls" not in answer["message"]
        assert '"get_time"' in answer["message"]["content"]
        assert answer["done_reason"] == "length"


def test_several_calls_come_in_their_order(serve: Serve) -> None:
    served = serve(template=HYBRID, script=says(*f"{CALL}\n{CALL}"))
    for answer in (ask(served, tools=TOOLS), gathered(streamed(served, tools=TOOLS))):
        calls = answer["message"]["tool_calls"]
        assert [call["function"]["index"] for call in calls] == [0, 1]
        assert len({call["id"] for call in calls}) == 2


def test_reasoning_is_left_out_if_it_is_off(serve: Serve) -> None:
    served = serve(template=HYBRID, script=says("<think>Hm</think>Yes."))
    assert ask(served, think=False)["message"] == {"role": "assistant", "content": "Yes."}
    assert ask(served, GENERATE)["thinking"] == "Hm"


def test_log_probabilities_are_in_the_lines_of_their_tokens(serve: Serve) -> None:
    served = serve(template=CHATML)
    whole = ask(served, logprobs=True, top_logprobs=1)
    lines = streamed(served, logprobs=True, top_logprobs=1)
    assert [one for line in lines for one in line.get("logprobs", [])] == whole["logprobs"]
    assert [one["token"] for one in whole["logprobs"]] == ["Hello", " world"]
    assert all(len(one["top_logprobs"]) == 1 for one in whole["logprobs"])


def test_raw_prompts_and_gaps_are_completions(served: Served) -> None:
    assert ask(served, GENERATE, raw=True)["response"] == "Hello world"
    assert served.telemetry.next_record().operation == "text_completion"
    assert gathered(streamed(served, GENERATE, raw=True)) == ask(served, GENERATE, raw=True)


def test_a_prompt_for_a_model_without_a_template_is_continued(served: Served) -> None:
    has_no_template = InvalidRequest("The model has no chat template.", code="no_chat_template")

    def script(request: Request) -> Iterable[list[Event]]:
        is_chat = isinstance(request.prompts[0], ChatPrompt)
        return (fails(has_no_template) if is_chat else says("It is", " Paris"))(request)

    served.engine.script = script
    assert ask(served, GENERATE, system="Be brief.", prompt="Where?")["response"] == "It is Paris"
    assert gathered(streamed(served, GENERATE, prompt="Where?"))["response"] == "It is Paris"
    prompts = [served.engine.submitted.get_nowait().prompts[0] for _ in range(4)]
    assert [prompt.text for prompt in prompts if isinstance(prompt, TextPrompt)] == ["Be brief.\n\nWhere?", "Where?"]
    refused = served.post(CHAT, model="org/demo", **BODIES[CHAT])
    assert refused.json() == {"error": "The model has no chat template."}


@pytest.mark.parametrize("path", [CHAT, GENERATE])
def test_errors_have_ollamas_form(served: Served, path: str) -> None:
    body = {"model": "org/demo", **BODIES[path]}
    served.engine.script = fails(Overloaded("full", retry_after_seconds=1))
    response = served.post(path, **body)
    assert (response.status_code, response.json(), response.headers["retry-after"]) == (429, {"error": "full"}, "1")
    served.engine.script = fails(InternalError("bug"), "a")
    assert lines_of(served.post(path, **body))[-1] == {"error": "bug"}


def test_errors_from_outside_the_routes_have_it_too(serve: Serve) -> None:
    served = serve(api_key=("one",), body_limit=1000)
    key = bearer("one")
    for response, status in (
        (served.post(CHAT), 401),
        (served.http.post(CHAT, headers=key | {"origin": "http://evil.example"}), 403),
        (served.http.get(CHAT, headers=key), 405),
        (served.http.post("/api/copy", headers=key, json={}), 404),
        (served.http.post(CHAT, headers=key, content=b" " * 1001), 413),
        (served.http.post(CHAT, headers=key, content=b"{"), 400),
    ):
        assert (response.status_code, [*response.json()]) == (status, ["error"])
        assert isinstance(response.json()["error"], str)
    assert served.http.post(CHAT, headers=key, json={"model": "org/demo", **BODIES[CHAT]}).status_code == 200


def test_a_client_that_leaves_ends_its_request(served: Served) -> None:
    served.engine.script = starts("a")
    with served.http.stream("POST", CHAT, json={"model": "org/demo", **BODIES[CHAT]}) as response:
        next(response.iter_bytes())
    assert served.telemetry.next_record().outcome == Outcome.CANCELLED


def test_a_prompt_that_takes_long_gets_empty_lines(serve: Serve) -> None:
    served = serve(progress_after_seconds=1e-6, script=lambda request: [[progress(request, 20)]])
    asked = served.http.build_request("POST", CHAT, json={"model": "org/demo", **BODIES[CHAT]})
    answer = served.http.send(asked, stream=True)
    lines = answer.iter_lines()
    assert json.loads(next(lines))["message"] == {"role": "assistant", "content": ""}
    request = served.engine.submitted.get_nowait()
    served.engine.deliver([*tokens(request), finished(request.request_id, Usage(100, 20, 1))])
    said = [json.loads(line) for line in lines]
    assert "".join(line["message"]["content"] for line in said) == "Hello"
    assert (said[-1]["done"], said[-1]["prompt_eval_count"]) == (True, 100)
