"""Sends the same hostile bodies by every way in: each is refused or counted, and nothing of it stays.

Memory is that of Python's allocator, and nothing collects reference cycles meanwhile.
"""

import gc
import json
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from http.client import HTTPConnection
from typing import Any

import httpx
import pytest

from oaiserve.app import create_app
from oaiserve.config import Config, ServerOptions
from oaiserve.plugins.batches.store import BatchStore
from oaiserve.plugins.responses.socket_frames import Opcode
from oaiserve.routes.intake.bodies import Bodies
from oaiserve.routes.serving import MOST_RECEIVED_BYTES
from tests.plugins.gateway.doubles import BEHIND_A_GATEWAY, ROUTE, Fleet, quick
from tests.plugins.responses.web_socket import WebSocket, masked
from tests.routes.doubles import FakeEngine, FakeTelemetry, says, starts
from tests.world.client import WorldSocket
from tests.world.loop import on_one_thread
from tests.world.serving import Place

LIMIT_BYTES = 2 * 2**20
HOSTILE_BYTES = 2**20 + 2**17
MOST_TIMES = 12  # Python's memory while a body is read, as a multiple of the body
MOST_TIMES_OF_TWO = 18
MOST_TIMES_AS_TEXT = 24  # the same for text of a prompt, of which the double of the tokenizer makes a list of numbers
MOST_LEFT_BYTES = HOSTILE_BYTES // 4  # what connections, caches and logs may keep of anything
MESSAGES = [{"role": "user", "content": "Hi"}]
INPUT = [{"type": "message", "role": "user", "content": "Hi"}]


def filled(start: bytes, part: bytes, end: bytes = b"") -> bytes:
    return start + part * ((HOSTILE_BYTES - len(start)) // len(part)) + end


# What stands before the other fields of a body.
HOSTILE: dict[str, bytes] = {
    "many keys": b",".join(b'"%x":1' % number for number in range(HOSTILE_BYTES // 9)),
    "the same key again and again": filled(b'"x":1', b',"x":1'),
    "deep nesting": b'"x":%b%b' % (b"[" * (HOSTILE_BYTES // 2), b"]" * (HOSTILE_BYTES // 2)),
    "nested objects": b'"x":%b1%b' % (b'{"x":' * (HOSTILE_BYTES // 6), b"}" * (HOSTILE_BYTES // 6)),
    "padding": filled(b" ", b" ", b'"x":1'),
    "a huge string": filled(b'"x":"', b"x", b'"'),
    "a huge string of escapes": filled(b'"x":"', rb"\u00e9", b'"'),
    "a huge number": filled(b'"x":', b"9"),
    "many numbers": filled(b'"x":[1', b",1.5", b"]"),
    "a number out of range": filled(b'"top_p":1e400,"x":"', b"x", b'"'),
    "halves of surrogate pairs": filled(b'"x":"', rb"\ud83d" + b"x" * 1000, b'"'),
    "half a character": filled(b'"x":"', b"\xc3", b'"'),
}


@dataclass
class Target:
    """A server, or a gateway in front of one, and what bodies it holds."""

    place: Place
    url: str
    bodies: Bodies
    http: httpx.Client
    engine: FakeEngine | None  # None behind a gateway, whose engine computes real steps

    def connect(self) -> WorldSocket:
        return self.place.connect(self.url)

    @contextmanager
    def http_connection(self) -> Iterator[HTTPConnection]:
        """Connect a client that keeps nothing."""
        with closing(HTTPConnection("127.0.0.1")) as connection:
            connection.sock = self.connect()
            yield connection

    def is_holding(self) -> bool:
        """Let everything that is under way end, and return whether bodies are still counted then."""
        self.place.world.settle(1)
        return self.bodies.received.total > 0

    def post(self, path: str, body: bytes) -> int:
        """Send a body on a connection of its own."""
        with self.http_connection() as connection:
            connection.request("POST", path, body, {"content-type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            return answer.status

    def upload(self, content: bytes, purpose: str) -> str:
        """Store a file, and return its id."""
        with self.http_connection() as connection:
            form = b'--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n%b\r\n' % purpose.encode()
            form += b'--B\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n%b\r\n--B--\r\n' % content
            connection.request("POST", "/v1/files", form, {"content-type": "multipart/form-data; boundary=B"})
            file_id: str = json.loads(connection.getresponse().read())["id"]
            return file_id


def with_fields(hostile: bytes, **fields: Any) -> bytes:
    return b"{%b,%b" % (hostile, json.dumps(fields).encode()[1:])


def over_http(path: str, **fields: Any) -> Callable[[Target, bytes], object]:
    return lambda target, hostile: target.post(path, with_fields(hostile, **fields))


@contextmanager
def a_socket(target: Target) -> Iterator[WebSocket]:
    with WebSocket(target) as client:
        yield client
    assert not target.is_holding()


def last_event(client: WebSocket) -> dict[str, Any]:
    ends = ("response.completed", "response.incomplete", "response.failed", "error", "response.steer.failed")
    return client.until(*ends)[-1]


def by_socket(target: Target, hostile: bytes) -> object:
    """Let the socket keep the response, and continue it."""
    with a_socket(target) as client:
        fields = {"type": "response.create", "input": INPUT, "store": False, "max_output_tokens": 16}
        client.send_raw(masked(Opcode.TEXT, with_fields(hostile, **fields), mask=bytes(4)))
        event = last_event(client)
        if event["type"] == "error":
            return event["status"]
        client.create(previous_response_id=event["response"]["id"], max_output_tokens=16)
        assert "response" in last_event(client)
        assert target.bodies.received.total < MOST_LEFT_BYTES
        return 200


def by_waiting_in_a_lane(target: Target, hostile: bytes) -> object:
    assert target.engine is not None
    target.engine.script = starts("One")
    with a_socket(target) as client:
        client.create()
        client.until("response.output_text.delta")
        message = with_fields(hostile, type="response.create", input=INPUT)
        client.send_raw(masked(Opcode.TEXT, message, mask=bytes(4)) + masked(Opcode.PING, b"now"))
        opcode, data = client.frame()
        if opcode == Opcode.PONG:  # It waits.
            assert len(message) <= target.bodies.received.total < len(message) + MOST_LEFT_BYTES
            return 200
        return json.loads(data)["status"]


def by_steering(target: Target, hostile: bytes) -> object:
    assert target.engine is not None
    target.engine.script = starts("One")
    with a_socket(target) as client:
        client.create()
        running = client.until("response.output_text.delta")[0]["response"]["id"]
        message = with_fields(hostile[: HOSTILE_BYTES // 2], type="response.steer", previous_response_id=running)
        client.send_raw(masked(Opcode.TEXT, message, mask=bytes(4)))
        event = client.until("error", "response.steer.failed", "response.steer.accepted")[-1]
        return 400 if event["type"] != "response.steer.accepted" else 200


def by_a_steer_that_is_accepted(target: Target, hostile: bytes) -> object:
    """Let a text that holds the hostile JSON wait for the end of the response that it steers."""
    assert target.engine is not None
    target.engine.script = starts('<tool_call>\n{"name": "f"')
    text = hostile[: 2**17].decode("latin-1")
    with a_socket(target) as client:
        client.create()
        running = client.until("response.created")[0]["response"]["id"]
        client.send(type="response.steer", previous_response_id=running, input=text)
        event = client.until("error", "response.steer.failed", "response.steer.accepted")[-1]
        assert event["type"] == "response.steer.accepted"
        return 200


def in_a_batch(target: Target, hostile: bytes) -> object:
    body = with_fields(hostile, messages=MESSAGES, max_tokens=4)
    line = b'{"custom_id":"a","url":"/v1/chat/completions","body":%b}\n' % body
    begin = {"input_file_id": target.upload(line, "batch"), "completion_window": "24h"}
    del line, body
    batch = target.http.post("/v1/batches", json={**begin, "endpoint": "/v1/chat/completions"}).json()
    path = f"/v1/batches/{batch['id']}"
    target.place.world.settle(5)
    ended = target.http.get(path).json()
    assert ended["status"] in ("completed", "failed")
    return 200 if ended["request_counts"]["completed"] else 400


def in_a_batch_of_messages(target: Target, hostile: bytes) -> object:
    params = with_fields(hostile, messages=MESSAGES, max_tokens=4)
    status = target.post("/v1/messages/batches", b'{"requests":[{"custom_id":"a","params":%b}]}' % params)
    target.place.world.settle(5)
    batches = target.http.get("/v1/messages/batches").json()["data"]
    assert all(batch["processing_status"] == "ended" for batch in batches)
    return status


def in_the_background(target: Target, hostile: bytes) -> object:
    return target.post("/v1/responses", with_fields(hostile, input="Hi", background=True))


def in_a_file(target: Target, hostile: bytes) -> object:
    return target.post("/v1/responses", naming(target.upload(b"{%b}" % hostile, "user_data")))


def naming(file_id: str) -> bytes:
    """Return a body whose prompt is a file."""
    part = {"type": "input_file", "file_id": file_id}
    return json.dumps({"input": [{"role": "user", "content": [part]}], "store": False}).encode()


def in_a_result(target: Target, hostile: bytes) -> object:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "OUTPUT"}
    body = json.dumps({"input": [*INPUT, call, result], "store": False}).encode()
    return target.post("/v1/responses", body.replace(b'"OUTPUT"', b"[{%b}]" % hostile))


ON_A_SERVER: dict[str, Callable[[Target, bytes], object]] = {
    "completions": over_http("/v1/completions", prompt="Hi", max_tokens=4),
    "chat": over_http("/v1/chat/completions", messages=MESSAGES, max_tokens=4),
    "responses": over_http("/v1/responses", input="Hi", store=False),
    "messages": over_http("/v1/messages", messages=MESSAGES, max_tokens=4),
    "conversations": over_http("/v1/conversations", metadata={}),
    "tokenize": over_http("/tokenize", prompt="Hi"),
    "socket": by_socket,
    "lane of a socket": by_waiting_in_a_lane,
    "steer": by_steering,
    "accepted steer": by_a_steer_that_is_accepted,
    "batch": in_a_batch,
    "batch of messages": in_a_batch_of_messages,
    "background": in_the_background,
    "file": in_a_file,
    "result of a tool": in_a_result,
}
THROUGH_A_GATEWAY = {name: ON_A_SERVER[name] for name in ("completions", "socket")}


@pytest.fixture(scope="module")
def running(place_session: Place) -> Iterator[Target]:
    world = place_session.world
    engine = FakeEngine(runtime=world)
    options = ServerOptions(drain_timeout_seconds=0, body_limit=LIMIT_BYTES)
    app = create_app(Config("org/demo", options), engine, FakeTelemetry(world), runtime=world)
    with place_session.running(app, options) as url, place_session.plain(url) as http:
        yield Target(place_session, url, app.state.bodies, http, engine)


@pytest.fixture
def server(place: Place, running: Target) -> Target:
    """The server, whose engine answers at once, whatever the test before has it do."""
    assert running.engine is not None
    running.engine.script = says("Hello")
    return running


@pytest.fixture(scope="module")
def fleet_session(place_session: Place) -> Iterator[Target]:
    with ExitStack() as stack:
        fleet = Fleet(stack, place_session, server=replace(BEHIND_A_GATEWAY, body_limit=LIMIT_BYTES))
        # Each report leaves garbage that only the collector finds, so none comes while memory is compared.
        pace = quick(report_seconds=1e6, resolve_seconds=1e6)
        with on_one_thread(place_session.world):
            fleet.add(kv_blocks=512, max_step_tokens=64)
            fleet.begin(replace(ROUTE, body_limit=LIMIT_BYTES), pace)
        yield Target(place_session, fleet.url, fleet.app.state.bodies, fleet.http, None)


@pytest.fixture
def gateway(place: Place, fleet_session: Target) -> Target:
    return fleet_session


@pytest.fixture(scope="module", autouse=True)
def _measured() -> Iterator[None]:
    """Count Python's memory, without a collector of garbage."""
    tracemalloc.start()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        tracemalloc.stop()


def check(target: Target, way: Callable[[Target, bytes], object], hostile: bytes) -> None:
    way(target, b'"x":1')  # What the first request of a kind makes stays.
    forget(target)
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    outcome = way(target, hostile)
    peak = tracemalloc.get_traced_memory()[1]
    assert outcome in (200, 400)
    most_times = MOST_TIMES_AS_TEXT if way in (in_a_file, in_a_result) else MOST_TIMES
    if target.engine is None:  # The server behind the gateway is in this process, too.
        most_times = MOST_TIMES_OF_TWO
    assert peak - before < most_times * len(hostile)
    assert not target.is_holding()
    forget(target)
    assert tracemalloc.get_traced_memory()[0] - before < MOST_LEFT_BYTES


def forget(target: Target) -> None:
    """Drop what the double of the engine keeps of requests."""
    if target.engine is not None:
        target.engine.submitted.queue.clear()
        target.engine.times.clear()
        target.engine.open.clear()


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.parametrize("way", ON_A_SERVER.values(), ids=ON_A_SERVER.keys())
def test_hostile_body_is_refused_or_counted_and_leaves_nothing(
    server: Target, way: Callable[[Target, bytes], object], hostile: bytes
) -> None:
    check(server, way, hostile)


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.parametrize("way", THROUGH_A_GATEWAY.values(), ids=THROUGH_A_GATEWAY.keys())
def test_hostile_body_is_refused_or_counted_by_a_gateway_and_leaves_nothing(
    gateway: Target, way: Callable[[Target, bytes], object], hostile: bytes
) -> None:
    check(gateway, way, hostile)


@pytest.mark.parametrize("fields", [{"stream": True}, {"background": True}], ids=["stored", "background"])
def test_open_response_holds_no_body(server: Target, fields: dict[str, bool]) -> None:
    engine = server.engine
    assert engine is not None
    in_the_background(server, b'"x":1')  # What the first request of a kind makes stays.
    server.place.world.wait_for(lambda: not engine.open)
    engine.script = starts("One")
    forget(server)
    before = tracemalloc.get_traced_memory()[0]
    with server.http_connection() as connection:
        body = with_fields(HOSTILE["padding"], input="Hi", **fields)
        connection.request("POST", "/v1/responses", body, {"content-type": "application/json"})
        del body
        answer = connection.getresponse()
        assert answer.status == 200
        assert answer.read1(1)
        server.place.world.settle(1)
        engine.submitted.queue.clear()
        assert tracemalloc.get_traced_memory()[0] - before < MOST_LEFT_BYTES
        (response_id,) = engine.open
    if "background" in fields:
        server.http.post(f"/v1/responses/{response_id}/cancel")
    server.place.world.settle(1)
    assert not engine.open


def test_file_that_a_prompt_names_counts_like_a_body_while_it_is_read(
    server: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = BatchStore.content
    held_bytes = []

    def noted(store: BatchStore, file: int) -> AsyncIterator[bytes]:
        held_bytes.append(server.bodies.received.total)
        return content(store, file)

    monkeypatch.setattr(BatchStore, "content", noted)
    assert in_a_file(server, b'"x":1' + b" " * HOSTILE_BYTES) == 200
    assert held_bytes == [HOSTILE_BYTES + len(b'{"x":1}')]
    assert not server.is_holding()


def test_file_that_a_prompt_names_finds_no_room_beside_the_bodies_of_others(server: Target) -> None:
    """The share of one client is too small for the file then, but large enough for the body that names it."""
    body = naming(server.upload(b" " * HOSTILE_BYTES, "user_data"))
    others = {f"other {number}": MOST_RECEIVED_BYTES // 256 for number in range(256)}
    assert len(body) < MOST_RECEIVED_BYTES // 257 < HOSTILE_BYTES
    for client, num_bytes in others.items():
        server.bodies.received.add(client, num_bytes)
    try:
        assert server.post("/v1/responses", body) == 429
    finally:
        for client, num_bytes in others.items():
            server.bodies.received.give_back(client, num_bytes)
    assert server.post("/v1/responses", body) == 200
