"""The attack tool: a verdict fails when it should, answers and gaps are read right, and generated requests repeat."""

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings

from tests.published import published
from tools.attack import schema
from tools.attack.attack import Attack, Harmless, Strike, of_same_size, outcomes, post
from tools.attack.families import ATTACKS, grammars
from tools.attack.families.generated import generate
from tools.attack.measure import Result, Span, gaps, measure
from tools.attack.neighbour import Event, running_neighbour
from tools.attack.server import KINDS, Server
from tools.attack.verdict import failures, growth
from tools.attack.wire import Answer, Connection
from tools.reference import bodies_of_routes
from tools.server_process import free_port, running_process

ERROR = json.dumps({"error": {"message": "No.", "type": "invalid_request_error", "param": None, "code": None}}).encode()


async def nothing(strike: Strike) -> None: ...


ATTACK = Attack(
    name="test", family="tests", of_class="tests", sends="nothing", run=nothing, outcomes=outcomes(200, 400, 503)
)
GOOD = Result(
    num_sent=2,
    answers=[Answer("200"), Answer("400", body=ERROR)],
    rss_before_mib=500,
    rss_peak_mib=600,
    rss_after_mib=510,
    itl_quiet=[0.02] * 100,
    itl_attack=[0.03] * 100,
    neighbour_outcomes={"200": 3},
    health_outcomes={"200": 3},
    health_seconds=0.1,
)


def test_a_verdict_holds_where_all_limits_are_kept() -> None:
    assert failures(ATTACK, GOOD) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"itl_attack": [0.02] * 98 + [0.041] * 2}, "ITL p99 grew by 2.0"),
        ({"itl_attack": []}, "no tokens to measure"),
        ({"rss_after_mib": 601.0}, "101 MiB stayed"),
        ({"rss_peak_mib": 1525.0}, "it took 1025 MiB more for a while"),
        ({"num_sent": 3}, "1 of 3 requests without an answer"),
        ({"state": "hangs (ReadTimeout)"}, "the server hangs"),
        ({"health_outcomes": {"200": 3, "ReadTimeout": 1}}, "/health answered"),
        ({"health_seconds": 2.5}, "/health took 2.5 s"),
        ({"neighbour_outcomes": {"200": 3, "ReadError": 1}}, "the neighbour got ReadError x 1"),
        ({"ttft_attack": [0.1, 11.0]}, "the prober's first token took 11.0 s"),
        ({"log_bytes": 10**6}, "1,000,000 bytes of log"),
        ({"problems": ["the hidden request was run"]}, "the hidden request was run"),
    ],
)
def test_a_verdict_fails_for_each_limit(changes: dict[str, Any], says: str) -> None:
    (failure,) = failures(ATTACK, replace(GOOD, **changes))
    assert says in failure


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rss_after_mib": 550.0}, "40 more MiB of memory"),
        ({"num_files": 50}, "20 more open files"),
        ({"num_threads": 25}, "5 more threads"),
    ],
)
def test_a_server_that_holds_more_from_round_to_round_fails(changes: dict[str, Any], says: str) -> None:
    first = replace(GOOD, num_files=30, num_threads=20)
    (failure,) = growth([first] * 6 + [replace(first, **changes)] * 3)
    assert says in failure


def test_a_server_may_fill_what_it_keeps_within_bounds() -> None:
    assert growth([replace(GOOD, rss_after_mib=300)] * 2 + [GOOD] * 4) == []
    assert growth([GOOD]) == []


def test_an_attack_may_cost_little_more_than_the_same_requests_without_what_is_hostile() -> None:
    attack = replace(ATTACK, harmless=of_same_size)
    slow_once = replace(GOOD, ratios_to_harmless=[1.1, 5.0, 1.0])  # one round met other work of the machine
    assert failures(attack, slow_once) == []
    assert "1.30 times that beside harmless" in failures(attack, replace(GOOD, ratios_to_harmless=[1.3, 1.1, 1.4]))[0]
    assert "no tokens beside harmless" in failures(attack, GOOD)[0]
    sent = post("/", {"a": {"b": 1}})
    assert len(of_same_size(sent)) == len(sent)
    assert of_same_size(sent).endswith(b"\r\n\r\n" + b"x" * len(b'{"a": {"b": 1}}'))


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (Answer("500", body=ERROR, sent=b"POST /"), "and had asked b'POST /'"),
        (Answer("200", body=b'data: {"error": {"code": "internal_error"}}'), "got 200: data: "),
        (Answer("404", body=ERROR), "got 404"),
        (Answer("503", body=ERROR), "503 without retry-after"),
        (Answer("400", body=b"Invalid HTTP request received."), "400 without OpenAI's error object"),
        (Answer("400", body=b'{"error": {"message": "No."}}'), "400 without OpenAI's error object"),
        (Answer("400", body=ERROR.replace(b"No.", b"x" * 2000)), "message of 2000 characters"),
        (Answer("timeout"), "no answer within 30 s"),
        (Answer("closed"), "got closed"),
    ],
)
def test_a_verdict_fails_for_a_wrong_answer(answer: Answer, says: str) -> None:
    (failure,) = failures(ATTACK, replace(GOOD, answers=[Answer("200"), answer]))
    assert says in failure


def test_gaps_lie_within_a_stream_and_a_stall_counts_before_it_is_over() -> None:
    events = [
        *(Event("asked", 0.0), Event("token", 1.0), Event("token", 1.5), Event("ended", 1.6)),
        *(Event("asked", 1.7), Event("token", 9.0), Event("probe", 9.5, 0.1), Event("token", 10.0)),
    ]
    assert gaps(events, until=60.0) == [Span(1.0, 1.5), Span(9.0, 10.0), Span(10.0, 60.0)]
    broken = [*events, Event("ended", 15.0, outcome="ReadError")]
    assert gaps(broken, until=60.0)[-1] == Span(10.0, 15.0)
    spans = (Span(1.0, 1.5), Span(1.5, 7.0), Span(7.0, 7.5))
    assert [gap.meets(Span(2.0, 6.0)) for gap in spans] == [False, True, False]


# -- answers ----------------------------------------------------------------------------------------------------------

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n"


@pytest.mark.parametrize(
    ("sent", "found"),
    [
        (HEAD + b"\r\nhello", ("200", b"hello")),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"\r\nhello", ("200", b"hello")),
        (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2;x\r\nde\r\n0\r\n\r\n",
            ("200", b"abcde"),
        ),
        (b"HTTP/1.1 200 OK\r\nx: y\r\n\r\nuntil the end", ("200", b"until the end")),
        (b"HTTP/1.1 204 No Content\r\nx: y\r\n\r\n", ("204", b"")),
        (HEAD + b"\r\nhe", ("cut", b"he")),
        (b"", ("closed", b"")),
        (b"hello\r\n\r\n", ("not HTTP", b"illegal status line: bytearray(b'hello')")),
    ],
)
async def test_answers_are_read_however_they_end(sent: bytes, found: tuple[str, bytes]) -> None:
    connection = received(sent)
    connection.reader.feed_eof()
    answer = await connection.answer(5.0)
    assert (answer.outcome, answer.body) == found


@pytest.mark.parametrize(("sent", "outcome"), [(b"", "timeout"), (HEAD + b"\r\nhe", "endless")])
async def test_an_answer_that_does_not_come_in_time_is_no_answer(sent: bytes, outcome: str) -> None:
    assert (await received(sent).answer(0.05)).outcome == outcome


def received(sent: bytes) -> Connection:
    """Return a connection on which these bytes have come."""
    connection = Connection(asyncio.StreamReader(), None)  # type: ignore[arg-type]
    connection.reader.feed_data(sent)
    return connection


# -- a whole run ------------------------------------------------------------------------------------------------------

# Streams tokens for the neighbour. A POST of "stall" stops all streams for a while, one of "bug" is answered with 500.
SERVE = r"""
import asyncio, sys
import uvicorn
from starlette.applications import Starlette
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

free = asyncio.Event()
free.set()

async def answer(request):
    body = await request.body()
    if b"stream" in body:
        return StreamingResponse(tokens())
    if b"stall" in body:
        free.clear()
        await asyncio.sleep(1)
        free.set()
    return Response("{}", 500 if b"bug" in body else 200)

async def tokens():
    for _ in range(100):
        await free.wait()
        await asyncio.sleep(0.01)
        yield b"data: {}\n\n"
    yield b"data: [DONE]\n\n"

routes = [Route("/{path:path}", answer, methods=["GET", "POST"])]
uvicorn.run(Starlette(routes=routes), port=int(sys.argv[-1]), log_level="critical")
"""


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[str]]]:
    """Return a function that sends a body to the small server next to a real neighbour, and returns the verdict."""
    port = free_port()
    log_file = Path(tmp_path_factory.mktemp("attack")) / "log"
    command = [sys.executable, "-c", SERVE, str(port)]
    with (
        running_process(command, port, log_file=log_file, stop_limit_seconds=0) as process,
        running_neighbour(process.url) as neighbour,
    ):
        server = Server("keys", process)

        def attack_with(body: bytes, harmless: Harmless | None = None) -> list[str]:
            async def send(strike: Strike) -> None:
                await strike.ask_all([post("/", body)] * 4, 2)

            attack = replace(ATTACK, run=send, harmless=harmless)
            return failures(attack, measure(attack, server, neighbour, quiet_seconds=1, quick=True))

        yield attack_with


@pytest.mark.parametrize(("body", "says"), [(b"stall", "ITL p99 grew"), (b"bug", "times: got 500: {}")])
def test_an_attack_that_harms_fails(attacked: Callable[..., list[str]], body: bytes, says: str) -> None:
    assert any(says in sentence for sentence in attacked(body))


def test_an_attack_that_harms_more_than_its_bytes_fails(attacked: Callable[..., list[str]]) -> None:
    assert any("beside harmless ones" in sentence for sentence in attacked(b"stall", of_same_size))


# -- the attacks, and generated requests ------------------------------------------------------------------------------


def test_attacks_have_names_of_their_own_and_servers_that_exist() -> None:
    names = [attack.name for attack in ATTACKS]
    assert len(set(names)) == len(names)
    assert {attack.server for attack in ATTACKS} <= {*KINDS}
    assert not any(attack.outcomes & {"500", "timeout"} for attack in ATTACKS)


def test_no_schema_is_sent_twice_so_that_none_is_answered_from_what_was_kept() -> None:
    one = grammars.schema({"type": "string"})
    other = grammars.schema({"type": "string"})
    assert one != other


def test_generated_requests_are_a_function_of_the_seed() -> None:
    assert generate(1, 50) == generate(1, 50)
    assert generate(1, 50) != generate(2, 50)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/detokenize", "/v1/messages", "/v1/responses", "/tokenize"])
def test_fitting_values_are_accepted_by_the_type_that_they_are_made_for(path: str) -> None:
    kind = bodies_of_routes()[path]
    decoder = msgspec.json.Decoder(kind)

    @settings(max_examples=50)
    @given(schema.fitting(published(), kind.__name__))
    def check(value: object) -> None:
        decoder.decode(json.dumps(value).encode())

    check()
