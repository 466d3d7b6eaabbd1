"""Tests which answers are charged to whom, and what an answer that is held back still holds."""

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from oaiserve.config import Config, ServerOptions
from oaiserve.errors import InvalidRequest, Overloaded
from oaiserve.facts.record import Cause
from oaiserve.http.fair_turns import CpuTime
from oaiserve.http.refusals import RECORDED_NS, STORED_BYTE_NS, STORED_NS, UNREAD_NS, Refusals
from oaiserve.routes.intake import receive as body
from oaiserve.routes.intake import turns
from tests.routes.asking import CHAT, COMPLETIONS, bearer
from tests.routes.doubles import fails
from tests.serving import Served
from tests.world.serving import Place, serving

DELAY_NS = 300_000_000
LEAST_NS = DELAY_NS - 2_000_000  # a timer of uvloop may be a millisecond early
LOCAL = b"127.0.0.1"
KEY = "a-key-of-the-tests"
OTHER_KEY = "another-key-of-the-tests"


class Charges(list[tuple[bytes, float]]):
    """The charges to clients, each of which gives the delay, once `meanwhile` has been called."""

    delay_ns = 0
    meanwhile: Callable[[], object] = staticmethod(lambda: None)

    def charge(self, client: bytes, cpu_ns: float = 0) -> int:
        self.append((client, cpu_ns))
        self.meanwhile()
        return self.delay_ns


@pytest.fixture
def charges(monkeypatch: pytest.MonkeyPatch) -> Charges:
    charges = Charges()
    monkeypatch.setattr(Refusals, "charge", lambda _, *given: charges.charge(*given))
    return charges


@pytest.fixture
def start(place: Place, charges: Charges) -> Iterator[Callable[..., Served]]:
    """Return a function that starts a server with these ServerOptions, whose connections charge to `charges`."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(serving(place, Config("org/demo", ServerOptions(**options))))


def test_mistakes_are_charged_to_the_key_or_else_to_the_address(start: Callable[..., Served], charges: Charges) -> None:
    served = start(api_key=(KEY,))
    assert served.http.get("/nothing", headers=bearer("wrong")).status_code == 401
    assert served.http.get("/nothing", headers=bearer(KEY)).status_code == 404
    assert served.http.post(COMPLETIONS, json={"prompt": 7}, headers=bearer(KEY)).status_code == 400
    by_address, *by_key = (client for client, _ in charges)
    assert by_address == LOCAL
    assert len({*by_key}) == 1
    assert by_key[0] != LOCAL


def test_answers_and_what_a_full_server_refuses_are_not_charged(start: Callable[..., Served], charges: Charges) -> None:
    served = start()
    assert served.complete().status_code == 200
    served.engine.submit_error = Overloaded("full", retry_after_seconds=1)
    assert served.complete().status_code == 429
    assert charges == []


def test_what_a_proxy_says_counts_only_from_a_trusted_one(start: Callable[..., Served], charges: Charges) -> None:
    for options in {}, {"trusted_proxy": ("127.0.0.1",)}:
        start(**options).http.get("/nothing", headers={"x-forwarded-for": "192.0.2.7"})
    assert [client for client, _ in charges] == [LOCAL, b"192.0.2.7"]


def test_work_in_other_threads_is_charged(
    start: Callable[..., Served], charges: Charges, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of(self: CpuTime, work: Any) -> Any:
        self.ns += 1000
        return work

    monkeypatch.setattr(CpuTime, "of", of)
    served = start()
    served.http.get("/nothing")
    served.complete(prompt=7)
    served.complete(prompt=7, user="x" * turns.MOST_LOOP_BYTES)
    assert [cpu_ns for _, cpu_ns in charges] == [0, RECORDED_NS + 1000, RECORDED_NS + 1000]


def test_the_engine_work_for_a_refused_request_is_charged(start: Callable[..., Served], charges: Charges) -> None:
    served = start()
    error = InvalidRequest("No such grammar.")
    error.worker_ns = 5_000_000
    served.engine.script = fails(error)
    assert served.complete().status_code == 400
    ((_, cpu_ns),) = charges
    assert cpu_ns >= RECORDED_NS + error.worker_ns


def test_a_body_that_is_not_read_is_charged_by_its_length(start: Callable[..., Served], charges: Charges) -> None:
    served = start()
    length = 2**40
    with served.connect() as client:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n\r\n"
        client.sendall(head.encode())
        assert client.recv(12).endswith(b"413")
    assert charges == [(LOCAL, RECORDED_NS + int(UNREAD_NS * length))]


@pytest.mark.plugin("batches")
def test_uploads_are_charged_while_other_clients_have_open_requests(
    start: Callable[..., Served], charges: Charges, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuTime, "of", lambda self, work: work)
    served = start(api_key=(KEY, OTHER_KEY))
    served.engine.script = lambda _: []  # it never ends
    body = b'{"prompt": "Hi"}'
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEY}\r\n"

    def upload(key: str) -> None:
        form: dict[str, Any] = {"data": {"purpose": "user_data"}, "files": {"file": ("a", b"x" * 100)}}
        assert served.http.post("/v1/files", headers=bearer(key), **form).status_code == 200

    upload(OTHER_KEY)
    with served.connect() as client:
        client.sendall(f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        served.engine.submitted.get()
        upload(KEY)
        assert charges == []
        upload(OTHER_KEY)
    assert [cpu_ns for _, cpu_ns in charges] == [STORED_NS + 100 * STORED_BYTE_NS]


# -- while an answer is held back --------------------------------------------------------------------------------------


def test_the_delay_of_a_refusal_is_a_cause_of_its_last_phase(start: Callable[..., Served], charges: Charges) -> None:
    charges.delay_ns = DELAY_NS
    served = start()
    for given in {"prompt": 7}, {"prompt": "Hi", "temperature": -1}:
        assert served.complete(**given).status_code == 400
        record = served.telemetry.next_record()
        assert record.refusal_delay_ns >= LEAST_NS
        last = record.times.phases()[-1]
        causes_ns = record.causes_ns[last.name]
        assert causes_ns[Cause.REFUSAL_DELAY] == record.refusal_delay_ns
        assert sum(causes_ns.values()) == last.duration_ns
        assert min(causes_ns.values()) >= 0


def test_a_refusal_before_the_body_has_an_account_that_adds_up(start: Callable[..., Served], charges: Charges) -> None:
    charges.delay_ns = DELAY_NS
    served = start()
    answer = served.http.post(CHAT, content=b"", headers={"content-encoding": "br"})
    assert answer.status_code == 415
    record = served.telemetry.next_record()
    assert record.times.duration_ns >= record.refusal_delay_ns >= LEAST_NS


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_a_refusal_that_is_held_back_holds_no_body(
    path: str, start: Callable[..., Served], charges: Charges, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies: list[weakref.ref[bytearray]] = []

    class Body(bytearray):
        def __init__(self) -> None:
            bodies.append(weakref.ref(self))

    held: list[int] = []
    monkeypatch.setattr(body, "bytearray", Body, raising=False)
    charges.meanwhile = lambda: held.append(sum(each() is not None for each in bodies))
    served = start()
    for content in b'{"prompt": ' + b"[" * 100_000, b'{"prompt": {}, "x": "' + b"x" * 10**6 + b'"}', b"[]":
        assert served.http.post(path, content=content).status_code == 400
    assert len(bodies) == 3
    assert held == [0, 0, 0]


def test_the_answer_to_broken_http_is_held_back_too(charges: Charges, served_on_a_port: Served) -> None:
    charges.delay_ns = DELAY_NS
    with served_on_a_port.connect() as client:
        began = time.monotonic()
        client.sendall(b"nothing\r\n\r\n")
        assert client.recv(12).endswith(b"400")
        assert time.monotonic() - began >= LEAST_NS / 1e9
    ((client_charged, parsing_ns),) = charges
    assert client_charged == LOCAL
    assert parsing_ns > 0


def test_a_refusal_is_held_back_alone_and_only_until_the_server_ends(place: Place, charges: Charges) -> None:
    charges.delay_ns = 3600 * 10**9
    begun: list[bool] = []
    charges.meanwhile = lambda: begun.append(True)
    with place.threads() as threads:
        with serving(place, Config("org/demo", ServerOptions(drain_timeout_seconds=0))) as served:
            asking = threads.submit(served.client().get, "/nothing")
            place.world.wait_for(lambda: begun)
            assert served.complete().status_code == 200
            assert not asking.done()
        assert asking.result().status_code == 404
