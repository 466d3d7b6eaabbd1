"""`diagnostics` says which part of a prompt differs from that of an earlier message."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.routes.asking import PARAMETERS
from tests.serving import Served
from tests.world.serving import Place, reading

TURNS = [
    {"role": "user", "content": "What is the capital of France, and how many people live there?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "And of Spain?"},
]
FIRST = {"model": "org/demo", "max_tokens": 1, "system": "Answer in one sentence, as short as you can."}


@pytest.fixture
def server(place: Place) -> Iterator[Served]:
    with reading(place) as served:
        yield served


def ask(served: Served, **body: Any) -> dict[str, Any]:
    answer = served.http.post("/v1/messages", json=FIRST | {"messages": TURNS} | body)
    assert answer.status_code == 200, answer.text
    served.telemetry.next_record()
    return answer.json()


CHANGES = {
    "system_changed": {"system": "Answer in two sentences, and tell me what you know."},
    "tools_changed": {"tools": [{"name": "search", "description": "Search.", "input_schema": PARAMETERS}]},
    "messages_changed": {"messages": [{"role": "user", "content": "What is the capital of Norway?"}, *TURNS[1:]]},
}


@pytest.mark.parametrize("kind", CHANGES)
def test_the_first_changed_part_is_named(server: Served, kind: str) -> None:
    before = ask(server)
    answer = ask(server, diagnostics={"previous_message_id": before["id"]}, **CHANGES[kind])
    reason = answer["diagnostics"]["cache_miss_reason"]
    assert reason["type"] == kind
    assert (
        0
        < reason["cache_missed_input_tokens"]
        <= sum(answer["usage"][name] for name in ("input_tokens", "cache_creation_input_tokens"))
    )


def test_a_conversation_that_goes_on_has_no_reason(server: Served) -> None:
    before = ask(server, messages=TURNS[:1])
    assert ask(server, diagnostics={"previous_message_id": before["id"]})["diagnostics"] is None


@pytest.mark.parametrize("diagnostics", [None, {"previous_message_id": None}])
def test_a_client_that_compares_with_nothing_gets_null(server: Served, diagnostics: dict[str, Any] | None) -> None:
    assert ask(server, diagnostics=diagnostics)["diagnostics"] is None


def test_an_unknown_message_is_said(server: Served) -> None:
    answer = ask(server, diagnostics={"previous_message_id": "msg_unknown"})
    assert answer["diagnostics"] == {"cache_miss_reason": {"type": "previous_message_not_found"}}


def test_an_evicted_prompt_is_unavailable(place: Place) -> None:
    with reading(place, kv_blocks=80) as served:
        before = ask(served)
        ask(served, system="x" * 220, messages=TURNS[2:])
        answer = ask(served, diagnostics={"previous_message_id": before["id"]})
    assert answer["diagnostics"] == {"cache_miss_reason": {"type": "unavailable"}}


def test_a_stream_says_it_at_its_beginning(server: Served) -> None:
    before = ask(server)
    body = FIRST | {"system": "Stream in many sentences, please.", "messages": TURNS, "stream": True}
    body["diagnostics"] = {"previous_message_id": before["id"]}
    answer = server.http.post("/v1/messages", json=body)
    assert '"diagnostics":{"cache_miss_reason":{"type":"system_changed"' in answer.text
    server.telemetry.next_record()


def test_written_tokens_are_counted(server: Served) -> None:
    first = ask(server, system="Written: this system message was never seen before.")["usage"]
    again = ask(server, system="Written: this system message was never seen before.")["usage"]
    for usage in (first, again):
        assert usage["cache_creation_input_tokens"] % 4 == 0
        assert usage["input_tokens"] in range(1, 9)
    assert first["cache_read_input_tokens"] < again["cache_read_input_tokens"]
    assert first["cache_creation_input_tokens"] > again["cache_creation_input_tokens"] == 0
