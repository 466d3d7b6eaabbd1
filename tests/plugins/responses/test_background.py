"""Tests responses that are made in the background: read, followed, cancelled, kept, and ended with the server."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from oaiserve.app import create_app
from oaiserve.config import Config, ServerOptions
from oaiserve.engine.request import FinishReason, TokenChunk, Usage
from oaiserve.errors import APIError, ContextLengthExceeded, InvalidRequest, Overloaded, Unavailable
from oaiserve.facts.record import Outcome
from oaiserve.plugins.responses.background import WAIT_SECONDS
from oaiserve.plugins.shared.store_options import StoreOptions
from tests.engine.doubles import Inbox, ScriptedRunner, SimulatedEngine, make_engine, request
from tests.plugins.responses.asking import LOGPROBS, ask
from tests.plugins.responses.test_stored import BrokenStore
from tests.routes.asking import RESPONSES, answered, refused
from tests.routes.doubles import FakeEngine, FakeTelemetry, fails, finished, says, starts
from tests.serving import Serve, Served
from tests.world.serving import Place, WorldServed, serving

ENDS = {"response.completed", "response.incomplete", "response.failed"}


def begin(served: Served, **body: Any) -> str:
    """Begin a response, and return its id."""
    answer = ask(served, background=True, **body)
    assert (answer["status"], answer["background"], answer["output"], answer["usage"]) == ("queued", True, [], None)
    response_id: str = answer["id"]
    return response_id


def read(served: Served, response_id: str) -> dict[str, Any]:
    return answered(served.http.get(f"{RESPONSES}/{response_id}"))


def data_of(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream. If it ends by itself, its end is [DONE]."""
    for line in lines:
        if line == "data: [DONE]":
            assert not any(lines)
        elif line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


@contextmanager
def following(served: Served, response_id: str, **query: Any) -> Iterator[Iterator[dict[str, Any]]]:
    path = f"{RESPONSES}/{response_id}"
    with served.http.stream("GET", path, params={"stream": "true", **query}) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        yield data_of(response.iter_lines())


def followed(served: Served, response_id: str, **query: Any) -> list[dict[str, Any]]:
    """Follow a response to its end, and return the events."""
    with following(served, response_id, **query) as events:
        return list(events)


def go_on(served: Served, text: str) -> None:
    """Let the engine write the end of the open answer."""
    (request_id,) = served.engine.open
    chunk = TokenChunk(request_id, 0, text, [6], None, FinishReason.STOP)
    served.engine.deliver([chunk, finished(request_id, Usage(3, 2, 2))])


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ContextLengthExceeded(8, 9, param="input"), "invalid_prompt"),
        (InvalidRequest("The schema is empty."), "invalid_prompt"),
        (Overloaded("Too much."), "rate_limit_exceeded"),
        (Unavailable("Later."), "server_error"),
    ],
)
def test_code_of_a_failed_response_says_whose_fault_it_is(served: Served, error: APIError, code: str) -> None:
    served.engine.script = fails(error)
    response_id = begin(served)
    followed(served, response_id)
    response = read(served, response_id)
    assert (response["status"], response["error"]["code"]) == ("failed", code)


@pytest.mark.parametrize("logprobs", [False, True])
def test_a_response_is_made_while_its_client_does_something_else(served: Served, logprobs: bool) -> None:
    response_id = begin(served, **({"include": LOGPROBS} if logprobs else {}))
    events = followed(served, response_id)
    types = [event["type"] for event in events]
    assert types[:3] == ["response.created", "response.queued", "response.in_progress"]
    assert [event["response"]["status"] for event in events[:3]] == ["queued", "queued", "in_progress"]
    assert types[-1] == "response.completed"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    answer = read(served, response_id)
    assert (answer["status"], answer["background"]) == ("completed", True)
    assert answer["output"][0]["content"][0]["text"] == "Hello world"
    record = served.telemetry.next_record()
    assert (record.outcome, record.http_status, record.response_id) == (Outcome.FINISHED, 200, response_id)
    assert ask(served, previous_response_id=response_id)["previous_response_id"] == response_id


def test_a_running_response_is_read_and_followed(served: Served) -> None:
    served.engine.script = starts()
    response_id = begin(served)
    assert read(served, response_id)["status"] == "queued"
    assert served.http.get(f"{RESPONSES}/{response_id}/input_items").json()["data"][0]["content"][0]["text"] == "Hi"
    refused(served.post(RESPONSES, input="Hi", previous_response_id=response_id), "previous_response_id")
    served.engine.abort(response_id)  # as the engine does when it stops
    assert followed(served, response_id)[-1]["type"] == "response.failed"

    served.engine.script = starts("Hel")
    response_id = begin(served)
    with following(served, response_id) as events:
        assert next(event for event in events if event["type"] == "response.output_text.delta")["delta"] == "Hel"
        assert read(served, response_id)["status"] == "in_progress"
        go_on(served, "lo")
        rest = list(events)
    assert rest[0]["delta"] == "lo"
    assert rest[-1]["response"] == read(served, response_id)


def test_a_response_is_followed_from_any_of_its_events(served: Served) -> None:
    response_id = begin(served)
    events = followed(served, response_id)
    for after in (0, 3, len(events) - 1):
        assert followed(served, response_id, starting_after=after) == events[after + 1 :]
    for wrong in ("-1", "x"):
        response = served.http.get(f"{RESPONSES}/{response_id}", params={"stream": "true", "starting_after": wrong})
        refused(response, "starting_after")


def test_a_client_that_streams_and_leaves_finds_the_response_later(served: Served) -> None:
    served.engine.script = starts("Hel")
    body = {"input": "Hi", "background": True, "stream": True}
    with served.http.stream("POST", RESPONSES, json=body) as response:
        events = data_of(response.iter_lines())
        first = next(events)
        next(event for event in events if event["type"] == "response.output_text.delta")
    go_on(served, "lo")
    last = followed(served, first["response"]["id"])[-1]
    assert last["response"]["output"][0]["content"][0]["text"] == "Hello"
    assert served.engine.aborted.empty()
    assert served.telemetry.next_record().outcome == Outcome.FINISHED


def test_a_streamed_response_has_the_events_that_are_read_later(served: Served) -> None:
    response = served.post(RESPONSES, input="Hi", background=True, stream=True)
    events = list(data_of(iter(response.text.split("\n"))))
    assert followed(served, events[0]["response"]["id"]) == events


@pytest.mark.parametrize("texts", [(), ("Hel",)])
def test_a_response_is_cancelled_with_what_it_has(served: Served, texts: tuple[str, ...]) -> None:
    served.engine.script = starts(*texts)
    response_id = begin(served)
    with following(served, response_id) as events:
        if texts:
            next(event for event in events if event["type"] == "response.output_text.delta")
        answer = served.post(f"{RESPONSES}/{response_id}/cancel").json()
        assert not ENDS & {event["type"] for event in events}  # the stream ends nevertheless
    assert answer["status"] == "cancelled"
    assert [part["text"] for item in answer["output"] for part in item["content"]] == list(texts)
    assert read(served, response_id) == answer
    assert served.post(f"{RESPONSES}/{response_id}/cancel").json() == answer
    assert served.engine.aborted.get() == response_id
    assert served.telemetry.next_record().outcome == Outcome.CANCELLED
    refused(served.post(RESPONSES, input="Hi", previous_response_id=response_id), "previous_response_id")


def test_a_response_that_is_complete_stays_so(served: Served) -> None:
    response_id = begin(served)
    last = followed(served, response_id)[-1]["response"]
    assert served.post(f"{RESPONSES}/{response_id}/cancel").json() == last


def test_a_response_that_fails_says_so(served: Served) -> None:
    for script in (fails(Overloaded("Too much.")), fails(Overloaded("Too much."), "Hel")):
        served.engine.script = script
        response_id = begin(served)
        last = followed(served, response_id)[-1]
        assert (last["type"], last["response"]["error"]["message"]) == ("response.failed", "Too much.")
        assert read(served, response_id) == last["response"]
        assert served.telemetry.next_record().error_type == "Overloaded"


def test_what_the_engine_refuses_is_refused_at_once(served: Served) -> None:
    served.engine.submit_error = Unavailable("Not now.")
    response = served.post(RESPONSES, input="Hi", background=True)
    refused(response, None, "Not now.", status=503)
    assert served.telemetry.next_record().outcome == Outcome.REJECTED


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_has_to_be_stored(serve: Serve, stream: bool) -> None:
    refused(serve().post(RESPONSES, input="Hi", background=True, store=False, stream=stream), "background", "stored")
    keeps_none = serve(of_plugins=(StoreOptions(response_store_number=0),))
    refused(keeps_none.post(RESPONSES, input="Hi", background=True, stream=stream), "background", "stored")


def test_a_deleted_response_is_gone_whether_it_runs_or_not(served: Served) -> None:
    for script in (starts("Hel"), says("Hello")):
        served.engine.script = script
        response_id = begin(served)
        assert served.http.delete(f"{RESPONSES}/{response_id}").json()["deleted"] is True
        for query in ({}, {"stream": "true"}):
            refused(served.http.get(f"{RESPONSES}/{response_id}", params=query), "response_id", status=404)
    assert served.engine.aborted.qsize() == 1


def test_events_are_kept_for_as_many_responses_as_are_stored(serve: Serve) -> None:
    served = serve(of_plugins=(StoreOptions(response_store_number=2),))
    ids = []
    for _ in range(3):
        ids.append(begin(served))
        followed(served, ids[-1])
    assert [served.http.get(f"{RESPONSES}/{each}").status_code for each in ids] == [404, 200, 200]
    served.engine.script = fails(Overloaded("Too much."))
    for _ in range(2):  # these are in no store
        ids.append(begin(served))
        followed(served, ids[-1])
    refused(served.http.get(f"{RESPONSES}/{ids[1]}", params={"stream": "true"}), "stream", "not kept")
    assert [read(served, each)["status"] for each in ids[1:]] == ["completed", "completed", "failed", "failed"]


def test_a_response_that_cannot_be_stored_has_failed(place: Place) -> None:
    with serving(place, Config("org/demo")) as served:
        app = served.app
        http = served.http
        app.state.responses = replace(app.state.responses, store=BrokenStore(has_room=True))
        response = http.post(RESPONSES, json={"input": "Hi", "background": True, "stream": True})
        last = list(data_of(iter(response.text.split("\n"))))[-1]
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        assert http.get(f"{RESPONSES}/{last['response']['id']}").json() == last["response"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_for_which_the_store_has_no_room_is_refused_at_once(place: Place, stream: bool) -> None:
    with serving(place, Config("org/demo")) as served:
        app = served.app
        http = served.http
        app.state.responses = replace(app.state.responses, store=BrokenStore())
        response = http.post(RESPONSES, json={"input": "Hi", "background": True, "stream": stream})
        refused(response, None, "The store of responses does not work.", status=503)


def test_a_shutdown_waits_for_a_response_or_ends_it(place: Place) -> None:
    for timeout_seconds, outcome in ((60, Outcome.FINISHED), (0, Outcome.FAILED)):
        engine = FakeEngine(runtime=place.world)
        telemetry = FakeTelemetry(place.world)
        engine.script = starts("Hel")
        options = ServerOptions(drain_timeout_seconds=timeout_seconds)
        app = create_app(Config("org/demo", options), engine, telemetry, runtime=place.world)
        with place.server(app, options) as server, place.plain(server.url) as http:
            served = Served(server.url, engine, telemetry, http)
            response_id = begin(served)
            run = app.state.responses.runs.get("", response_id)
            with following(served, response_id) as events:
                next(event for event in events if event["type"] == "response.output_text.delta")
                server.should_exit = True
                place.world.settle(1.0)  # A server looks once a second whether it should end.
                if outcome == Outcome.FINISHED:
                    go_on(served, "lo")
                list(events)  # clients that follow it see its end
            server.wait_for_end()
        assert telemetry.next_record().outcome == outcome
        assert run.is_over.is_set()
        assert (b"response.completed" if outcome == Outcome.FINISHED else b"response.failed") in run.events[-1]


def test_openais_client_polls_streams_and_cancels(served: Served) -> None:
    with served.sdk() as client:
        response = client.responses.create(model="org/demo", input="Hi", background=True)
        assert response.status == "queued"
        with client.responses.retrieve(response.id, stream=True, starting_after=1) as stream:
            types = [event.type for event in stream]
        assert (types[0], types[-1]) == ("response.in_progress", "response.completed")
        assert client.responses.retrieve(response.id).output_text == "Hello world"
        served.engine.script = starts("Hel")
        running = client.responses.create(model="org/demo", input="Hi", background=True, stream=True)
        first = next(iter(running))
        assert first.type == "response.created"
        assert client.responses.cancel(first.response.id).status == "cancelled"


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        (None, 30),
        ({"completion_window": "soonest"}, 30),
        ({"completion_window": "2h"}, 60 * 60),
        ({"completion_window": "8h"}, 4 * 60 * 60),
    ],
)
def test_it_waits_for_other_work_as_long_as_its_completion_window_allows(
    served: Served, options: dict[str, str] | None, seconds: int
) -> None:
    begin(served, background_options=options)
    assert served.engine.submitted.get().background_wait_ns == seconds * 10**9


def test_a_completion_window_needs_a_response_in_the_background(served: Served) -> None:
    body = {"input": "Hi", "background_options": {"completion_window": "2h"}}
    refused(served.post(RESPONSES, **body), "background_options.completion_window", "'background': true")


def test_it_has_its_turn_within_half_a_minute_on_a_busy_server(place: Place) -> None:
    world = place.world
    runner = ScriptedRunner(gated=True, launching=lambda _: world.sleep(0.2))
    first, *others = (request(name, max_tokens=WAIT_SECONDS["soonest"] + 500) for name in ("first", "second", "third"))
    engine = make_engine(runner, kind=SimulatedEngine, max_running=1, runtime=world)
    inbox = Inbox()
    config = Config("org/demo", ServerOptions(drain_timeout_seconds=0))
    telemetry = FakeTelemetry(world)
    app = create_app(config, engine, telemetry, runtime=world)
    with place.running(app, config.server) as url, place.client_of(url) as http:
        engine.submit(first, inbox)
        runner.started.get()
        served = WorldServed(url, engine, telemetry, http, place=place)
        response_id = begin(served, max_output_tokens=3)
        runner.permit()
        runner.started.get()
        assert any(row.phase == "queue" for row in engine.open_requests(0).values())
        for other in others:
            engine.submit(other, inbox)
        runner.permit(10_000)
        assert followed(served, response_id)[-1]["type"] in ENDS
        inbox.wait_terminal("first", "second", "third")
    turns = dict.fromkeys(one[0] for step in runner.steps for one in step)
    before, mine, *after = turns
    assert before == "first"
    assert response_id in mine
    assert {*after} == {"second", "third"}  # in the order in which the tokenize threads are done with them
