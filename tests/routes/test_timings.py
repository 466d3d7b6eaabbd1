"""Tests `stream_options.include_timings`: the timings at the end of a stream are the integers of the record."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from oaiserve.app import create_app
from oaiserve.config import Config, TelemetryOptions
from oaiserve.engine.request import Event, Finished, Request
from oaiserve.errors import InternalError
from oaiserve.facts.record import EngineAccount, RequestRecord, WaitReason
from oaiserve.facts.times import PHASES
from tests.routes.conftest import Served, run_server
from tests.routes.doubles import FakeEngine, FakeTelemetry, fails, says

ROUTES = {"chat": Served.chat, "completions": Served.complete}


def waited(request: Request) -> Iterable[list[Event]]:
    """Script an answer whose account has waits and a stall."""
    for events in says("Hello", " world")(request):
        if isinstance(events[-1], Finished):
            waits_ns = {WaitReason.NO_BLOCKS: 17, WaitReason.STEP_UNDER_WAY: 4}
            events[-1].account = EngineAccount(waits_ns=waits_ns, stalled_ns=23)
        yield events


def chunks_of(response: httpx.Response) -> list[dict[str, Any]]:
    *events, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def expected_timings(record: RequestRecord) -> dict[str, Any]:
    return {
        "phases_ns": {phase.name: phase.duration_ns for phase in record.times.phases()[:-1]},
        "time_to_first_token_ns": record.times.time_to_first_token_ns,
        "queue_waits_ns": record.account.waits_ns,
        "causes_ns": {},  # the engine's double explains nothing
        "stalled_ns": record.account.stalled_ns,
        "cached_tokens": record.cached_tokens,
        "draft_tokens": record.account.num_draft_tokens,
        "accepted_tokens": record.account.num_accepted_tokens,
        "trace_id": record.trace.trace_id_hex,
    }


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "options", [{}, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]
)
def test_timings_are_the_integers_of_the_record(served: Served, route: str, options: dict[str, bool]) -> None:
    served.engine.script = waited
    response = ROUTES[route](served, stream=True, stream_options={"include_timings": True, **options})
    *others, last = chunks_of(response)
    record = served.telemetry.next_record()
    assert last["timings"] == expected_timings(record)
    assert list(last["timings"]["phases_ns"]) == list(PHASES[:-1])
    assert (record.account.waits_ns, record.account.stalled_ns) == ({"no_blocks": 17, "step_under_way": 4}, 23)
    assert last["choices"] == []
    assert ("usage" in last) == bool(options)
    assert not any("timings" in chunk for chunk in others)
    assert all(chunk["choices"] for chunk in others)


@pytest.mark.parametrize("route", ROUTES)
def test_a_client_that_did_not_ask_gets_no_chunk_with_timings(served: Served, route: str) -> None:
    for options in (None, {}, {"include_timings": False}, {"include_timings": None}):
        chunks = chunks_of(ROUTES[route](served, stream=True, stream_options=options))
        assert all(chunk["choices"] and "timings" not in chunk for chunk in chunks)


def test_a_stream_that_fails_ends_with_its_error(served: Served) -> None:
    served.engine.script = fails(InternalError("The step failed."), "Hel")
    *_, last = chunks_of(served.complete(stream=True, stream_options={"include_timings": True}))
    record = served.telemetry.next_record()
    assert (last["error"]["request_id"], last["error"]["trace_id"]) == (record.request_id, record.trace.trace_id_hex)


def test_timings_without_a_stream_are_refused(served: Served) -> None:
    response = served.complete(stream_options={"include_timings": True})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "stream_options")


@pytest.mark.parametrize("with_usage", [False, True])
def test_the_sdk_reads_a_stream_with_timings(served: Served, with_usage: bool) -> None:
    options: dict[str, Any] = {"include_timings": True, "include_usage": with_usage}
    messages: list[Any] = [{"role": "user", "content": "Hi"}]
    with served.sdk() as client:
        chat = list(
            client.chat.completions.create(model="org/demo", messages=messages, stream=True, stream_options=options)
        )
        completion = list(client.completions.create(model="org/demo", prompt="Hi", stream=True, stream_options=options))
        with client.chat.completions.stream(model="org/demo", messages=messages, stream_options=options) as helper:
            final = helper.get_final_completion()
    for chunks in (chat, completion):
        last = chunks[-1]
        assert last.choices == []
        assert (last.usage is not None) == with_usage
        assert last.timings == expected_timings(served.telemetry.next_record())
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chat if chunk.choices) == "Hello world"
    assert final.choices[0].message.content == "Hello world"


def test_the_sdk_shows_the_ids_of_an_error(served: Served) -> None:
    with served.sdk() as client, pytest.raises(Exception, match="temperature") as raised:
        client.completions.create(model="org/demo", prompt="Hi", temperature=3)
    record = served.telemetry.next_record()
    assert raised.value.body["request_id"] == record.request_id == raised.value.request_id
    assert raised.value.body["trace_id"] == record.trace.trace_id_hex


@contextmanager
def serving(trace_prompt_characters: int) -> Iterator[Served]:
    engine, telemetry = FakeEngine(), FakeTelemetry()
    options = TelemetryOptions(trace_prompt_characters=trace_prompt_characters)
    app = create_app(Config("org/demo", telemetry=options), engine, telemetry)
    with run_server(app) as url, httpx.Client(base_url=url, timeout=60) as http:
        yield Served(url, engine, telemetry, http)


@pytest.mark.parametrize(("limit", "text"), [(0, None), (3, "Hel"), (100, "Hello")])
def test_the_record_has_as_much_of_the_prompt_as_the_operator_allows(limit: int, text: str | None) -> None:
    with serving(limit) as served:
        served.complete(prompt="Hello")
        served.chat(messages=[{"role": "user", "content": "Hello"}])
        expected = json.dumps([{"role": "user", "parts": [{"type": "text", "content": text}]}], separators=(",", ":"))
        for _ in range(2):
            assert served.telemetry.next_record().prompt_text == (None if text is None else expected)
        served.complete(prompt=[1, 2, 3])
        assert served.telemetry.next_record().prompt_text is None


def test_the_record_has_the_id_of_the_answer_and_the_servers_address(served: Served) -> None:
    answer = served.complete().json()
    record = served.telemetry.next_record()
    assert record.response_id == answer["id"]
    assert f"{record.http_scheme}://{record.server_address}:{record.server_port}" == served.url
