"""Tests what /v1/responses keeps: conversations that go on, who finds what, and the routes that read and delete."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import httpx
import pytest

from oaiserve.app import create_app
from oaiserve.config import Config
from oaiserve.engine.request import ChatPrompt
from oaiserve.errors import Unavailable
from oaiserve.facts.record import Outcome
from oaiserve.plugins.shared.store_options import StoreOptions
from oaiserve.routes.adaptations import HEADER
from tests.plugins.responses.asking import TOOLS, ask, events_of, streamed
from tests.routes.asking import CALL, HYBRID, RESPONSES, ZONE, answered, refused
from tests.routes.doubles import FakeEngine, FakeTelemetry, says
from tests.serving import Serve, Served
from tests.world.serving import Place


def messages_of(served: Served) -> list[Mapping[str, Any]]:
    """Return the messages of the last request."""
    (prompt,) = served.engine.submitted.queue[-1].prompts
    assert isinstance(prompt, ChatPrompt)
    return list(prompt.messages)


def stored(served: Served, response_id: str, path: str = "", **query: Any) -> httpx.Response:
    return served.http.get(f"{RESPONSES}/{response_id}{path}", params=query)


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_goes_on_from_the_turns_before_it(served: Served, stream: bool) -> None:
    first = ask(served, input="One", instructions="Be brief.")
    second = ask(served, input=[{"role": "user", "content": "Two"}], previous_response_id=first["id"])
    response = served.post(RESPONSES, input="Three", previous_response_id=second["id"], stream=stream)
    assert response.status_code == 200
    user, assistant = ({"role": role} for role in ("user", "assistant"))
    assert messages_of(served) == [  # instructions are of their own turn only
        {**user, "content": "One"},
        {**assistant, "content": "Hello world"},
        {**user, "content": "Two"},
        {**assistant, "content": "Hello world"},
        {**user, "content": "Three"},
    ]
    records = [served.telemetry.next_record() for _ in range(3)]
    assert [record.conversation_id for record in records] == [first["id"]] * 3
    third = events_of(response)[-1]["response"] if stream else response.json()
    assert third["previous_response_id"] == second["id"]


def test_a_call_is_answered_in_the_next_turn(serve: Serve) -> None:
    served = serve(template=HYBRID, script=says(CALL))
    first = ask(served, tools=TOOLS)
    (call,) = first["output"]
    served.engine.script = says("Noon.")
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "12:00"}
    ask(served, input=[output], previous_response_id=first["id"], tools=TOOLS)
    _, assistant, result = messages_of(served)
    function = {"name": "get_time", "arguments": ZONE}
    assert assistant["tool_calls"] == [{"id": call["call_id"], "type": "function", "function": function}]
    assert result == {"role": "tool", "content": "12:00", "tool_call_id": call["call_id"]}


@pytest.mark.parametrize("sends_ids", [True, False], ids=["with-ids", "without-ids"])
def test_only_text_that_a_client_writes_after_a_call_is_noted(serve: Serve, sends_ids: bool) -> None:
    served = serve(template=HYBRID, script=says(f"Let me see.{CALL}Done."))
    first = ask(served, tools=TOOLS)
    assert [item["type"] for item in first["output"]] == ["message", "function_call", "message"]
    output = [{name: value for name, value in item.items() if sends_ids or name != "id"} for item in first["output"]]
    result = {"type": "function_call_output", "call_id": output[1]["call_id"], "output": "12:00"}
    for again in (
        {"input": [result], "previous_response_id": first["id"]},
        {"input": [{"role": "user", "content": "Hi"}, *output, result]},
    ):
        response = served.post(RESPONSES, tools=TOOLS, **again)
        assert HEADER not in response.headers
        assert messages_of(served)[1]["content"] == "Let me see.\n\nDone."
    of_client = [{**output[1], "call_id": "c1"}, output[2], {**result, "call_id": "c1"}]
    response = served.post(RESPONSES, tools=TOOLS, input=of_client)
    assert response.headers[HEADER] == "input[1]: text after a call is shown before it"


def test_items_of_stored_responses_can_be_referred_to(served: Served) -> None:
    first = ask(served)
    references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    ask(served, input=[{"role": "user", "content": "Hi"}, *references, {"role": "user", "content": "More"}])
    assert [message["content"] for message in messages_of(served)] == ["Hi", "Hello world", "More"]
    (own,) = stored(served, first["id"], "/input_items").json()["data"]
    ask(served, input=[{"type": "item_reference", "id": own["id"]}])
    assert [message["content"] for message in messages_of(served)] == ["Hi"]
    served.http.delete(f"{RESPONSES}/{first['id']}")
    refused(served.post(RESPONSES, input=references), "input", "Please send the item itself")
    later = served.post(RESPONSES, input=[*references, {"role": "user", "content": "More"}])
    assert answered(later)["status"] == "completed"
    assert [message["content"] for message in messages_of(served)] == ["More"]
    assert later.headers[HEADER] == "input[0]: item_reference is left out"
    refused(served.post(RESPONSES, input=references, previous_response_id=later.json()["id"]), "input", "Please send")


def test_items_of_more_responses_than_allowed_cannot_be_referred_to(served: Served) -> None:
    references = [{"type": "item_reference", "id": f"msg_{number}_0"} for number in range(129)]
    refused(served.post(RESPONSES, input=references), "input", "at most 128")


def test_what_is_not_stored_cannot_be_read_or_continued(served: Served) -> None:
    answer = ask(served, store=False)
    assert answer["store"] is False
    assert served.telemetry.next_record().conversation_id is None
    for response_id in (answer["id"], "resp_unknown"):
        refused(stored(served, response_id), "response_id", status=404)
        refused(stored(served, response_id, "/input_items"), "response_id", status=404)
        refused(served.post(f"{RESPONSES}/{response_id}/cancel"), "response_id", status=404)
        refused(served.http.delete(f"{RESPONSES}/{response_id}"), "response_id", status=404)
        response = served.post(RESPONSES, input="Hi", previous_response_id=response_id)
        refused(response, "previous_response_id", code="previous_response_not_found")


def test_a_deleted_response_ends_the_conversations_that_pass_through_it(served: Served) -> None:
    first = ask(served)
    second = ask(served, previous_response_id=first["id"])
    deleted = served.http.delete(f"{RESPONSES}/{first['id']}")
    assert deleted.json() == {"id": first["id"], "object": "response", "deleted": True}
    refused(stored(served, first["id"]), "response_id", status=404)
    assert stored(served, second["id"]).status_code == 200
    response = served.post(RESPONSES, input="Hi", previous_response_id=second["id"])
    refused(response, "previous_response_id", code="previous_response_not_found")


def test_a_stored_response_is_read_as_it_was_answered(served: Served) -> None:
    whole = ask(served, metadata={"a": "b"})
    assert stored(served, whole["id"]).json() == whole
    last = streamed(served)[-1]["response"]
    response = stored(served, last["id"])
    assert response.json() == last
    assert response.headers["content-type"] == "application/json"
    refused(stored(served, last["id"], stream="true"), "stream", "not kept")


def test_input_items_are_listed_in_pages(served: Served) -> None:
    texts = ["a", "b", "c"]
    first = ask(served)
    answer = ask(served, input=[{"role": "user", "content": text} for text in texts], previous_response_id=first["id"])

    def listed(**query: Any) -> tuple[list[str], dict[str, Any]]:
        page = stored(served, answer["id"], "/input_items", **query).json()
        return [item["content"][0]["text"] for item in page["data"]], page

    listed_texts, page = listed()
    ids = [item["id"] for item in page["data"]]
    assert listed_texts == texts[::-1]
    assert (page["object"], page["first_id"], page["last_id"], page["has_more"]) == ("list", ids[0], ids[-1], False)
    assert all(id_.startswith("msg_") for id_ in ids)
    assert listed(order="asc")[0] == texts
    listed_texts, page = listed(order="asc", limit=2)
    assert (listed_texts, page["has_more"]) == (["a", "b"], True)
    listed_texts, page = listed(order="asc", limit=2, after=page["last_id"])
    assert (listed_texts, page["has_more"]) == (["c"], False)
    for query in ({"order": "up"}, {"limit": "0"}, {"limit": "101"}, {"limit": "x"}, {"after": "msg_0"}):
        refused(stored(served, answer["id"], "/input_items", **query), next(iter(query)))


def test_only_what_is_made_in_the_background_can_be_cancelled(served: Served) -> None:
    refused(served.post(f"{RESPONSES}/{ask(served)['id']}/cancel"), None, "background")


def test_a_server_that_shall_store_nothing_says_so(serve: Serve) -> None:
    served = serve(of_plugins=(StoreOptions(response_store_number=0),))
    answer = ask(served, store=True)
    assert answer["store"] is False
    refused(stored(served, answer["id"]), "response_id", status=404)


def test_a_conversation_may_not_be_larger_than_a_body(serve: Serve) -> None:
    served = serve(body_limit=2000)
    first = ask(served)
    assert served.post(RESPONSES, input="Hi", previous_response_id=first["id"]).status_code == 200
    second = ask(served, input="Hi", previous_response_id=first["id"])
    third = served.post(RESPONSES, input="Hi", previous_response_id=second["id"])
    refused(third, "previous_response_id", "more than 2000 bytes")


class BrokenStore:
    """A store whose disk is full."""

    def __init__(self, *, has_room: bool = False) -> None:
        self._has_room = has_room  # when it is checked

    async def put(self, owner: str, stored: object) -> None:
        raise Unavailable("The store of responses does not work.")

    async def check_room(self, owner: str, stored: object) -> None:
        if not self._has_room:
            raise Unavailable("The store of responses does not work.")


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_cannot_be_stored_is_no_answer(place: Place, stream: bool) -> None:
    telemetry = FakeTelemetry(place.world)
    app = create_app(Config("org/demo"), FakeEngine(runtime=place.world), telemetry, runtime=place.world)
    with place.running(app) as url, place.client_of(url) as http:
        app.state.responses = replace(app.state.responses, store=BrokenStore())
        response = http.post(RESPONSES, json={"input": "Hi", "stream": stream})
        if stream:
            last = events_of(response)[-1]
            assert last["type"] == "response.failed"
            assert last["response"]["error"]["message"] == "The store of responses does not work."
        else:
            assert response.status_code == 503
        assert telemetry.next_record().outcome in (Outcome.REJECTED, Outcome.FAILED)
        assert http.post(RESPONSES, json={"input": "Hi", "stream": stream, "store": False}).status_code == 200


def test_a_large_body_is_read_in_turns_before_and_after_the_store_is_asked(served: Served) -> None:
    first = ask(served)
    body = json.dumps({"input": "x" * 100_000, "previous_response_id": first["id"]})
    # The double's context is smaller than that, so the engine refuses it; what is looked at comes before.
    served.engine.turns.queue.clear()
    served.http.post(RESPONSES, content=body, headers={"content-type": "application/json"})
    turns = [served.engine.turns.get_nowait() for _ in range(2)]
    assert turns[0][1] == len(body)
    assert turns[1][1] > len(body)
