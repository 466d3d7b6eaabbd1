"""Tests /v1/responses/compact: what it sends back, what the model is asked for it, and how a conversation goes on."""

from base64 import b64decode
from typing import Any

import pytest

from oaiserve.engine.request import FinishReason
from tests.plugins.responses.asking import TOOLS, ask, streamed
from tests.plugins.responses.test_route import USAGE
from tests.routes.asking import CALL, CHATML, OPEN, RESPONSES, THOUGHT, answered, refused
from tests.routes.asking import submitted as last_request
from tests.routes.doubles import says
from tests.serving import Serve, Served

COMPACT = f"{RESPONSES}/compact"
USER = {"role": "user", "content": "Hi"}
SYSTEM = {"role": "developer", "content": "Obey."}
CALLED = {"type": "function_call", "call_id": "call_1", "name": "get_time", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "12:00"}
TRIGGER = {"type": "compaction_trigger"}


def compacted(served: Served, **body: Any) -> dict[str, Any]:
    return answered(served.post(COMPACT, **body))


def summary_in(item: dict[str, Any]) -> bytes:
    return b64decode(item["encrypted_content"].removeprefix("oaiserve:"))


def texts(messages: Any) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in messages]


def test_a_summary_stands_for_all_but_the_messages_of_the_user_and_of_the_system(serve: Serve) -> None:
    served = serve(template=CHATML, script=says(" It is", " noon.\n"))
    answer = compacted(served, input=[SYSTEM, USER, CALLED, RESULT, {"role": "assistant", "content": "Noon."}])
    *staying, item = answer["output"]
    shown = [(each["type"], each["role"], each["content"][0]["text"]) for each in staying]
    assert shown == [("message", "developer", "Obey."), ("message", "user", "Hi")]
    assert item.pop("id") == f"cmp_{answer['id'].removeprefix('resp_')}_0"
    assert summary_in(item) == b"It is noon."
    assert item == {"type": "compaction", "encrypted_content": item["encrypted_content"]}
    assert answer["object"] == "response.compaction"
    assert answer["usage"].keys() == USAGE.keys()
    assert answer["usage"]["output_tokens"] == 2
    record = served.telemetry.next_record()
    assert (record.http_route, record.operation, record.response_id) == (COMPACT, "responses", answer["id"])


def test_a_conversation_goes_on_from_its_summary_and_is_made_shorter_again(served: Served) -> None:
    first = compacted(served, input="One")
    last_request(served)
    ask(served, input=[*first["output"], USER])
    user = ("user", "One"), ("user", "This is a summary of the conversation so far:\n\nHello world")
    assert texts(last_request(served)[1].messages) == [*user, ("user", "Hi")]
    second = compacted(served, input=[*first["output"], USER])
    assert texts(last_request(served)[1].messages)[:-1] == [*user, ("user", "Hi")]
    assert [item["type"] for item in second["output"]] == ["message", "message", "compaction"]


def test_the_wish_for_a_summary_comes_behind_the_prompt_of_the_conversation(serve: Serve) -> None:
    served = serve(template=CHATML)
    body = {"input": [USER, CALLED, RESULT], "instructions": "Be brief.", "tools": TOOLS}
    ask(served, **body)
    _, before = last_request(served)
    compacted(served, **body)
    request, prompt = last_request(served)
    assert prompt.messages[:-1] == before.messages
    assert prompt.tools == before.tools
    assert texts(prompt.messages[-1:])[0][1].startswith("Write a summary")
    assert request.params.max_tokens == 1024
    assert request.params.temperature == 0


def test_a_stored_response_is_made_shorter_with_its_conversation(served: Served) -> None:
    first = ask(served, input="One")
    last_request(served)
    answer = compacted(served, previous_response_id=first["id"])
    assert texts(last_request(served)[1].messages)[:-1] == [("user", "One"), ("assistant", "Hello world")]
    assert [item["type"] for item in answer["output"]] == ["message", "compaction"]
    gone = served.post(RESPONSES, input="Hi", previous_response_id=answer["id"])
    refused(gone, "previous_response_id", code="previous_response_not_found")  # nothing of it is stored


def test_a_conversation_beyond_the_context_loses_its_first_items_for_the_summary_only(served: Served) -> None:
    for text, staying in (("a" * 3000, [("user", "a" * 3000)]), ("a" * 4000, [])):
        answer = compacted(served, input=[{"role": "user", "content": text}, {"role": "assistant", "content": "b"}])
        assert texts(last_request(served)[1].messages)[:-1] == [*staying, ("assistant", "b")]
        assert answer["output"][0]["content"][0]["text"] == text


def test_a_summary_has_neither_reasoning_nor_calls(serve: Serve) -> None:
    served = serve(template=OPEN, script=says(*THOUGHT[2:]))
    (_, item) = compacted(served, input="Hi", tools=TOOLS)["output"]
    assert summary_in(item) == b"Yes."
    assert last_request(served)[0].params.reasoning.budget == 0


def test_a_model_that_writes_no_summary_is_told(serve: Serve) -> None:
    served = serve(template=CHATML, script=says(CALL))
    refused(served.post(COMPACT, input="Hi", tools=TOOLS), "input", "no summary", code="no_summary")
    last = streamed(served, input=[USER, TRIGGER], tools=TOOLS)[-1]
    assert last["type"] == "response.failed"
    assert "no summary" in last["response"]["error"]["message"]


def test_a_trigger_at_the_end_of_the_input_makes_the_response_a_compaction(serve: Serve) -> None:
    served = serve(template=CHATML)
    compacted(served, input=[SYSTEM, USER, CALLED, RESULT], tools=TOOLS)
    as_asked = last_request(served)
    body = {"input": [SYSTEM, USER, CALLED, RESULT, TRIGGER], "tools": TOOLS, "store": False}
    answer = ask(served, **body, temperature=0.7)
    request, prompt = last_request(served)
    assert (request.params, prompt) == (as_asked[0].params, as_asked[1])
    (item,) = answer["output"]
    assert item["id"] == f"cmp_{answer['id'].removeprefix('resp_')}_0"
    assert summary_in(item) == b"Hello world"
    assert (answer["object"], answer["status"], answer["temperature"]) == ("response", "completed", 0)
    events = streamed(served, **body)
    kinds = ["created", "in_progress", "output_item.added", "output_item.done", "completed"]
    assert [event["type"] for event in events] == [f"response.{kind}" for kind in kinds]
    *_, added, done, last = events
    assert added["item"] == done["item"] == last["response"]["output"][0]
    assert added["item"].keys() == item.keys()


def test_a_summary_that_is_cut_is_complete_for_whoever_waits_for_it(served: Served) -> None:
    served.engine.script = says("It is", finish=FinishReason.LENGTH)
    assert streamed(served, input=[USER, TRIGGER])[-1]["type"] == "response.completed"


def test_a_conversation_goes_on_by_id_without_what_a_trigger_made_shorter(served: Served) -> None:
    first = ask(served, input="One")
    second = ask(served, input=[TRIGGER], previous_response_id=first["id"])
    last_request(served), last_request(served)
    ask(served, input="Two", previous_response_id=second["id"])
    summary = ("user", "This is a summary of the conversation so far:\n\nHello world")
    assert texts(last_request(served)[1].messages) == [("user", "One"), summary, ("user", "Two")]


@pytest.mark.parametrize(
    "body",
    [
        {"input": [TRIGGER]},
        {"input": [TRIGGER, USER]},
        {"input": [USER, TRIGGER], "text": {"format": {"type": "json_object"}}},
        {"input": [USER, TRIGGER], "tools": TOOLS, "tool_choice": "required"},
    ],
)
def test_a_trigger_behind_nothing_before_something_or_with_a_form_is_refused(serve: Serve, body: Any) -> None:
    refused(serve(template=CHATML).post(RESPONSES, **body), "input")


@pytest.mark.parametrize("body", [{}, {"input": []}, {"instructions": "Be brief."}])
def test_there_must_be_something_to_make_shorter(served: Served, body: dict[str, Any]) -> None:
    refused(served.post(COMPACT, **body), "input")


def test_openais_client_makes_a_conversation_shorter(served: Served) -> None:
    with served.sdk() as client:
        compacted = client.responses.compact(model="org/demo", input="One", instructions="Be brief.")
        assert compacted.output[-1].type == "compaction"
        # The client's types know the messages of answers only, and warn of those of users.
        items = compacted.model_dump(warnings=False, exclude_unset=True)["output"]
        response = client.responses.create(model="org/demo", input=items)
    assert response.output_text == "Hello world"
