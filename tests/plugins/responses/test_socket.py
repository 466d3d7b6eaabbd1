"""Tests responses on a WebSocket: that each is a request like any, steering, and clients that break the protocol."""

import json
from typing import Any

import pytest
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming
from openai.types.responses.responses_client_event_param import ResponseCreate
from typing_extensions import get_type_hints

from oaiserve.app import create_app
from oaiserve.config import Config, ServerOptions
from oaiserve.errors import InternalError, Overloaded
from oaiserve.facts.record import Outcome
from oaiserve.http.refusals import REFUSAL_NS, Refusals
from oaiserve.plugins.responses import socket as sockets
from oaiserve.plugins.responses import socket_lanes, socket_messages
from oaiserve.plugins.responses.socket_frames import CloseCode, Opcode
from tests.plugins.responses.asking import TIME, WITH_CALLS, streamed
from tests.plugins.responses.web_socket import WebSocket, masked
from tests.routes import asking
from tests.routes.asking import CALL
from tests.routes.doubles import FakeEngine, FakeTelemetry, fails, says, starts
from tests.serving import Serve, Served
from tests.world.serving import Place


def texts(response: dict[str, Any]) -> list[str]:
    return [item["content"][0]["text"] for item in response["output"] if item["type"] == "message"]


def asked(served: Served) -> list[dict[str, Any]]:
    """Return the messages of the next submitted prompt."""
    _, prompt = asking.submitted(served)
    return list(prompt.messages)


def test_a_response_has_the_events_of_a_stream_and_a_record(served: Served) -> None:
    with WebSocket(served) as client:
        client.create(metadata={"a": "b"})
        events = client.until("response.completed")
    assert events[0]["headers"]["x-request-id"].startswith("req-")
    over_http = streamed(served, metadata={"a": "b"})
    assert [event["type"] for event in events] == [event["type"] for event in over_http]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert texts(events[-1]["response"]) == texts(over_http[-1]["response"]) == ["Hello world"]
    record = served.telemetry.next_record()
    assert (record.operation, record.http_route, record.outcome) == ("responses", "/v1/responses", Outcome.FINISHED)
    assert (record.http_status, record.stream) == (200, True)


def test_a_message_of_openais_client_has_three_parameters_more_than_a_request() -> None:
    over_http = get_type_hints(ResponseCreateParamsNonStreaming)
    assert get_type_hints(ResponseCreate).keys() - over_http.keys() == {"type", "stream_id", "generate"}


def test_responses_follow_one_another_with_only_the_new_items(served: Served) -> None:
    with WebSocket(served) as client:
        client.create()
        first = client.response()
        client.create(input="More", previous_response_id=first["id"])
        second = client.response()
    asked(served)
    assert [message["content"] for message in asked(served)] == ["Hi", "Hello world", "More"]
    assert second["previous_response_id"] == first["id"]


def test_a_response_that_is_not_stored_can_be_continued_on_its_socket_only(served: Served) -> None:
    with WebSocket(served) as client:
        client.create(store=False)
        first = client.response()["id"]
        client.create(store=False, input="More", previous_response_id=first)
        second = client.response()
        client.create(input=[{"role": "user", "content": "On"}], previous_response_id=second["id"])
        third = client.response()
        with WebSocket(served) as other:
            other.create(previous_response_id=first)
            assert other.event()["error"]["code"] == "previous_response_not_found"
    assert (second["previous_response_id"], third["previous_response_id"]) == (first, second["id"])
    prompts = [[message["content"] for message in asked(served)] for _ in range(3)]
    assert prompts[2] == ["Hi", "Hello world", "More", "Hello world", "On"]


def test_a_response_without_output_prepares_the_next_one(served: Served) -> None:
    served.engine.script = says("")
    with WebSocket(served) as client:
        client.create(generate=False)
        warm = client.response()
        request, _ = asking.submitted(served)
        client.create(input="More", previous_response_id=warm["id"])
        client.response()
    assert (request.params.max_tokens, warm["status"], warm["output"]) == (0, "completed", [])
    assert [message["content"] for message in asked(served)] == ["Hi", "More"]


def test_lanes_run_side_by_side_and_a_lane_in_order(served: Served) -> None:
    served.engine.script = starts("One")
    with WebSocket(served) as client:
        for lane in ("a", "b"):
            client.create(stream_id=lane)
        seen = set()
        while len(seen) < 2:
            event = client.event()
            if event["type"] == "response.output_text.delta":
                seen.add(event["stream_id"])
        served.engine.script = says("Two")
        client.create(stream_id="a", input="Next")
        client.create(stream_id="c")
        (*_, last) = client.until("response.completed")
        assert last["stream_id"] == "c"
    assert {served.engine.aborted.get() for _ in range(2)}  # The client has left.


def test_errors_are_events_and_nothing_is_lost(serve: Serve) -> None:
    served = serve(api_key=("secret",))
    with WebSocket(served) as nobody:
        assert nobody.status == 401
    with WebSocket(served, authorization="Bearer secret") as client:
        for event, param in (
            ({"type": "response.nope"}, "type"),
            ({"input": "Hi"}, "type"),
            ({"type": "response.create", "input": "Hi", "top_p": 7}, "top_p"),
            ({"type": "response.create", "input": "Hi", "background": True}, "background"),
            ({"type": "response.create", "input": "Hi", "stream_id": "?"}, "stream_id"),
            ({"type": "response.create", "previous_response_id": 7}, "previous_response_id"),
            ({"type": "response.create", "generate": False, "prompt_cache_options": 7}, "prompt_cache_options"),
            ({"type": "response.create"}, None),
        ):
            client.send(**event)
            error = client.event()
            assert (error["type"], error["status"]) == ("error", 400)
            assert param is None or error["error"]["param"] == param
        client.send_raw(masked(Opcode.TEXT, b"[1]"))
        assert client.event()["error"]["param"] == "type"
        client.send_raw(masked(Opcode.PING, b"now"))
        assert client.frame() == (Opcode.PONG, b"now")
        served.engine.submit_error = Overloaded("It is full.", retry_after_seconds=3)
        client.create()
        full = client.event()
        assert (full["status"], full["error"]["headers"]) == (429, {"retry-after": "3"})
        served.engine.submit_error = None
        client.create()
        assert client.response()["status"] == "completed"
        client.send_raw(masked(Opcode.CLOSE, b"\x03\xe8"))
        assert client.closed()[0] == CloseCode.NORMAL


def test_steering_ends_a_response_and_keeps_what_was_written(served: Served) -> None:
    served.engine.script = starts("One", " two")
    with WebSocket(served) as client:
        client.create(input="Count.", max_output_tokens=9)
        running = client.until("response.output_text.delta")[0]["response"]["id"]
        served.engine.script = says("Bye")
        client.send(type="response.steer", previous_response_id=running, input="Say bye.")
        accepted = client.until("response.steer.accepted")[-1]
        assert accepted["steer"]["previous_response_id"] == running
        steered = client.response()
        after = client.response()
        client.create(input="And?", previous_response_id=after["id"])
        client.response()
    assert (steered["id"], steered["status"]) == (running, "incomplete")
    assert steered["incomplete_details"] == {"reason": "steered"}
    assert texts(steered) == ["One two"]
    assert (after["previous_response_id"], after["max_output_tokens"], texts(after)) == (running, 9, ["Bye"])
    asked(served)
    assert [message["content"] for message in asked(served)] == ["Count.", "One two", "Say bye."]
    assert [message["content"] for message in asked(served)] == ["Count.", "One two", "Say bye.", "Bye", "And?"]
    assert served.telemetry.next_record().outcome is Outcome.CANCELLED


def test_steering_waits_for_the_results_of_calls(serve: Serve) -> None:
    pieces = [CALL[:60], CALL[60:]]
    served = serve(**WITH_CALLS, script=starts(pieces[0]))
    with WebSocket(served) as client:
        client.create(tools=[TIME])
        running = client.until("response.output_item.added")[0]["response"]["id"]
        client.send(type="response.steer", previous_response_id=running, input="In UTC.")
        client.until("response.steer.accepted")
        request, _ = asking.submitted(served)
        for events in says(pieces[1])(request):
            served.engine.deliver(events[-1:])
        called = client.response()
        pending = client.until("response.steer.pending")[-1]
        assert pending["required_input"] == [
            {"type": "function_call_output", "call_id": called["output"][0]["call_id"]}
        ]
        served.engine.script = says("12:00")
        result = {**pending["required_input"][0], "output": "12"}
        client.create(input=[result], previous_response_id=called["id"], top_p=7)
        assert client.event()["status"] == 400  # The input goes on waiting.
        client.create(input=[result], previous_response_id=called["id"])
        client.response()
    assert called["status"] == "completed"
    assert [message["content"] for message in asked(served)][-2:] == [
        "<tool_response>\n12\n</tool_response>",
        "In UTC.",
    ]


def test_accepted_input_is_given_back_if_its_response_fails(serve: Serve) -> None:
    served = serve(**WITH_CALLS, script=starts(CALL[:60]))
    with WebSocket(served) as client:
        client.create(tools=[TIME])
        running = client.until("response.output_item.added")[0]["response"]["id"]
        client.send(type="response.steer", previous_response_id=running, input="In UTC.")
        accepted = client.until("response.steer.accepted")[-1]["steer"]
        request, _ = asking.submitted(served)
        for events in fails(InternalError("bug"))(request):
            served.engine.deliver(events)
        assert client.response()["status"] == "failed"
        given_back = client.event()
    message = {"type": "message", "role": "user", "content": "In UTC."}
    assert given_back["steer"] == {**accepted, "input": [message]}
    assert given_back["error"]["code"] == "successor_creation_failed"


@pytest.mark.parametrize(
    ("steer", "code"),
    [
        ({"previous_response_id": "resp_nope", "input": "Hi"}, "response_not_found"),
        ({"previous_response_id": "RUNNING", "input": []}, "invalid_input"),
        ({"previous_response_id": "RUNNING", "input": [{"role": "system", "content": "Hi"}]}, "invalid_input"),
        ({"previous_response_id": "RUNNING", "input": "Hi", "stream_id": "a"}, "invalid_input"),
        ({"previous_response_id": "ENDED", "input": "Hi"}, "response_already_completed"),
    ],
)
def test_input_that_steers_nothing_is_given_back(served: Served, steer: dict[str, Any], code: str) -> None:
    with WebSocket(served) as client:
        client.create()
        ended = client.response()["id"]
        served.engine.script = starts("One")
        client.create()
        running = client.until("response.output_text.delta")[0]["response"]["id"]
        given = json.loads(json.dumps(steer).replace("RUNNING", running).replace("ENDED", ended))
        client.send(type="response.steer", **given)
        failed = client.event()
    assert (failed["type"], failed["error"]["code"]) == ("response.steer.failed", code)
    assert failed["steer"] == {name: given[name] for name in ("previous_response_id", "input")}


def test_half_of_a_surrogate_pair_in_a_message_is_read_as_in_a_body(served: Served) -> None:
    with WebSocket(served) as client:
        client.create(input=[{"role": "user", "name": "\ud83d", "content": "Hi"}])
        events = client.until("response.completed")
        client.create(user="\ud83d")
        assert "half of a surrogate pair" in client.event()["error"]["message"]
    assert "halves of surrogate pairs" in events[0]["headers"]["x-oaiserve-adapted"]


def test_a_client_of_http_1_0_gets_no_socket(served: Served) -> None:
    with WebSocket(served, version="1.0") as old:
        assert old.status == 405


class Charged:
    """A server whose refusals are never held back, but noted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cpu_ns: list[float] = []
        monkeypatch.setattr(Refusals, "charge", lambda _, client, cpu_ns=0: self.cpu_ns.append(cpu_ns) or 0)


@pytest.mark.parametrize(
    "event",
    [{}, {"type": "response.steer", "input": "Hi"}, {"type": "response.create", "background": True}, {"type": "nope"}],
)
def test_a_refusal_on_a_socket_is_charged_as_over_http(
    served: Served, monkeypatch: pytest.MonkeyPatch, event: dict[str, Any]
) -> None:
    charged = Charged(monkeypatch)
    with WebSocket(served) as client:
        client.send(**event)
        client.event()
    assert len(charged.cpu_ns) == 1
    assert charged.cpu_ns[0] > 0  # the time of the work on the message


def test_a_refused_request_is_charged_for_the_work_on_its_message_once(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    charged = Charged(monkeypatch)
    with WebSocket(served) as client:
        client.create(top_p=7)
        assert client.event()["status"] == 400
    assert len(charged.cpu_ns) == 1


@pytest.mark.parametrize(
    "frame",
    [
        masked(Opcode.PING, b""),
        masked(Opcode.PONG, b""),
        masked(Opcode.CONTINUATION, b"", is_last=False),
        masked(Opcode.CONTINUATION, b"x", is_last=False),
    ],
)
def test_frames_that_carry_nothing_are_charged(served: Served, monkeypatch: pytest.MonkeyPatch, frame: bytes) -> None:
    charged = Charged(monkeypatch)
    number = 100
    with WebSocket(served) as client:
        client.send_raw(masked(Opcode.TEXT, b"x" * sockets.FRAME_BYTES, is_last=False))
        client.send_raw(frame * number)
        client.send_raw(masked(Opcode.CLOSE, b""))
        while client.frame()[0] != Opcode.CLOSE:
            pass
    paid_ns = sum(REFUSAL_NS + cpu_ns for cpu_ns in charged.cpu_ns)
    assert number * sockets.FRAME_NS - REFUSAL_NS <= paid_ns <= number * sockets.FRAME_NS


def test_a_message_in_large_frames_is_charged_to_nobody(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    charged = Charged(monkeypatch)
    message = json.dumps({"type": "response.create", "input": "Hi"}).encode().ljust(100 * sockets.FRAME_BYTES)
    parts = [message[at : at + sockets.FRAME_BYTES] for at in range(0, len(message), sockets.FRAME_BYTES)]
    with WebSocket(served) as client:
        client.send_raw(masked(Opcode.TEXT, parts[0], is_last=False))
        for part in parts[1:-1]:
            client.send_raw(masked(Opcode.CONTINUATION, part, is_last=False))
        client.send_raw(masked(Opcode.CONTINUATION, parts[-1]))
        assert client.response()["status"] == "completed"
    assert sum(charged.cpu_ns) == 0


def test_a_page_of_another_origin_may_not_open_a_socket(served: Served) -> None:
    with WebSocket(served, origin="https://evil.example") as page:
        assert (page.status, served.telemetry.refused_access[-1]) == (403, "origin")
    with WebSocket(served, host="evil.example") as page:
        assert page.status == 403
    with WebSocket(served, sec_websocket_version="8") as old:
        assert old.status == 400
    with WebSocket(served, upgrade="h2c") as plain:
        assert plain.status == 405


def test_a_client_that_breaks_the_protocol_is_closed_with_the_reason(serve: Serve) -> None:
    with WebSocket(serve(body_limit=1000)) as client:
        client.send_raw(b"\x81\x01a")
        assert client.closed()[0] == CloseCode.PROTOCOL_ERROR


def test_a_message_larger_than_a_body_gets_the_413_of_one_and_the_socket_stays_open(serve: Serve) -> None:
    served = serve(body_limit=1000)
    parts = [masked(Opcode.TEXT, b"x" * 600, is_last=False)]
    parts += [masked(Opcode.CONTINUATION, b"x" * 600, is_last=is_last) for is_last in (False, False, True)]
    with WebSocket(served) as client:
        client.send_raw(b"".join(parts))
        error = client.event()
        over_http = served.http.post("/v1/responses", content=b"x" * 2400, headers={"content-type": "application/json"})
        assert error["status"] == over_http.status_code == 413
        assert error["error"].items() <= over_http.json()["error"].items()
        client.create()
        assert client.response()["status"] == "completed"


def test_a_socket_runs_only_so_many_responses(served: Served) -> None:
    served.engine.script = starts("One")
    with WebSocket(served) as client:
        for number in range(socket_lanes.MOST_CREATES + 1):
            client.create(stream_id=f"{number}")
        assert client.until("error")[-1]["status"] == 429


@pytest.mark.parametrize("steer", [{}, {"previous_response_id": None}, {"previous_response_id": ""}])
def test_input_without_the_id_of_a_response_is_given_back_with_what_is_missing(
    served: Served, steer: dict[str, Any]
) -> None:
    with WebSocket(served) as client:
        client.send(type="response.steer", input="Hi", **steer)
        error = client.event()["error"]
    assert error["code"] == "invalid_input"
    assert "'previous_response_id' is missing" in error["message"]


def test_a_message_of_the_user_that_steers_is_short(served: Served) -> None:
    with WebSocket(served) as client:
        client.send(type="response.steer", previous_response_id="resp_x", input="x" * socket_messages.MOST_STEER_BYTES)
        assert "at most" in client.event()["error"]["message"]


def test_a_client_that_answers_no_ping_is_cut_off(served_on_a_port: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "PING_SECONDS", 0.0)
    with WebSocket(served_on_a_port) as client:
        assert client.rest() == b"\x89\x00" * sockets.MOST_SILENT_PINGS


def test_a_shutdown_waits_for_responses_and_closes_sockets(place: Place) -> None:
    engine = FakeEngine(runtime=place.world)
    engine.script = starts("One")
    options = ServerOptions(drain_timeout_seconds=60)
    app = create_app(Config("org/demo", options), engine, FakeTelemetry(place.world), runtime=place.world)
    with place.server(app, options) as server, WebSocket(server) as idle, WebSocket(server) as busy:
        busy.create()
        busy.until("response.output_text.delta")
        request = engine.submitted.get()
        server.should_exit = True
        assert idle.closed()[0] == CloseCode.GOING_AWAY
        busy.create()
        assert busy.event()["status"] == 503
        for events in says(" two")(request):
            engine.deliver(events[-1:])
        assert texts(busy.response()) == ["One two"]
        assert busy.closed()[0] == CloseCode.GOING_AWAY


def test_a_shutdown_that_cuts_a_response_says_so(place: Place) -> None:
    engine = FakeEngine(runtime=place.world)
    engine.script = starts("One")
    options = ServerOptions(drain_timeout_seconds=0)
    app = create_app(Config("org/demo", options), engine, FakeTelemetry(place.world), runtime=place.world)
    with place.server(app, options) as server, WebSocket(server) as client:
        client.create()
        client.until("response.output_text.delta")
        server.should_exit = True
        assert client.response()["status"] == "failed"
        assert client.closed()[0] == CloseCode.GOING_AWAY
