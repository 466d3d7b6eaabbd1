"""The HTTP target on a scripted network. The test chooses the time of each read, so stamps are exact."""

import asyncio
import json
import math
from typing import Any
from unittest.mock import Mock

import httpcore
import pytest

from loadtest.errors import UsageError
from loadtest.http_target import HttpOptions, HttpTarget
from loadtest.prompts import Call, Turn, Workload
from loadtest.sample import Sample
from loadtest.transport import StampedStream
from tests.loadtest.samples import START_NS, ns

Read = tuple[float, bytes]  # milliseconds after the start, and the bytes that arrive then
NEVER: Read = (math.inf, b"")
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(text: str = " a", **more: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "text": text}]} | more).encode() + b"\n\n"


def delta(**fields: Any) -> bytes:
    return chunk(b"data: " + json.dumps({"choices": [{"index": 0, "delta": fields}]}).encode() + b"\n\n")


def call_delta(name: str | None = None, arguments: str = "") -> bytes:
    return delta(tool_calls=[{"index": 0, "function": {"name": name, "arguments": arguments}}])


def usage(tokens: int, **more: Any) -> bytes:
    counts = {"prompt_tokens": 7, "completion_tokens": tokens, "prompt_tokens_details": {"cached_tokens": 4}}
    return b"data: " + json.dumps({"choices": [], "usage": counts} | more).encode() + b"\n\n"


END = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Network(httpcore.AsyncNetworkBackend):
    """A network that answers each request with the next script. Its clock shows the time of the last read."""

    def __init__(self, *scripts: list[Read], connects: bool = True) -> None:
        self.now_ns = START_NS
        self.requests: list[bytes] = []
        self._scripts = list(scripts)
        self._connects = connects

    async def connect_tcp(self, *args: Any, **kwargs: Any) -> httpcore.AsyncNetworkStream:
        if not self._connects:
            raise httpcore.ConnectError("refused")
        return ScriptedStream(self)

    def next_script(self, request: bytes) -> list[Read]:
        self.requests.append(request)
        return self._scripts.pop(0)


class ScriptedStream(StampedStream):
    def __init__(self, network: Network) -> None:
        super().__init__(lambda: network.now_ns)
        self._network = network
        self._script: list[Read] = []
        self._written = b""

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109
        self._written += buffer
        head, _, body = self._written.partition(b"\r\n\r\n")
        if len(body) == int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0) > 0:
            self._script = self._network.next_script(self._written)
            self._written = b""

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109
        if not self._unread:
            if not self._script:
                self.connection_lost(None)
            else:
                at_ms, data = self._script.pop(0)
                if at_ms == math.inf:
                    await asyncio.get_running_loop().create_future()
                self._network.now_ns = ns(at_ms)
                self.data_received(data)
        return await super().read(max_bytes, timeout)


def ask(
    network: Network, call: Call | None = None, *, stop_on_eos: bool = True, ask_timings: bool = False, **options: Any
) -> list[Sample]:
    async def run() -> list[Sample]:
        http = HttpOptions(**({"url": "http://test", "model": "m"} | options))
        workload = Workload(stop_on_eos=stop_on_eos)
        target = HttpTarget(http, workload, ask_timings=ask_timings, clock_ns=lambda: network.now_ns, backend=network)
        samples = await target.run(target.prepare(3, call or Call([1, 2], 5)), ns(-10))
        await target.close()
        return samples

    return asyncio.run(run())


def body_of(request: bytes) -> Any:
    return json.loads(request.partition(b"\r\n\r\n")[2])


def test_an_event_has_the_stamp_of_the_read_that_completed_it() -> None:
    first = event(" a")
    second = event(" b")
    network = Network(
        [
            (20, HEAD + b"\r\n"),
            (50, chunk(first[:30])),  # an event in two reads
            (60, chunk(first[30:])),
            (80, chunk(second) + chunk(second + second)),  # three events in one
            (95, chunk(event("")) + chunk(usage(9))),
            (96, END),
        ]
    )
    (sample,) = ask(network)
    assert (sample.intended_ns, sample.sent_ns, sample.headers_ns) == (ns(-10), ns(0), ns(20))
    assert sample.event_ns == [ns(60), ns(80), ns(80), ns(80)]
    assert sample.end_ns == ns(96)
    assert (sample.prompt_tokens, sample.cached_tokens, sample.completion_tokens) == (7, 4, 9)
    assert sample.is_ok
    assert sample.ttft_ns == 70_000_000
    assert sample.tpot_ns == pytest.approx(20_000_000 / (9 - 9 / 4))  # a quarter of the text is in the first event


def test_the_request_has_the_body_and_headers_of_the_options() -> None:
    network = Network([(1, HEAD + b"\r\n" + chunk(event()) + END)])
    options: dict[str, Any] = {"api_key": "secret", "header": ("X-Tenant: a",), "extra_body": '{"top_k": 3}'}
    (sample,) = ask(network, stop_on_eos=False, ask_timings=True, **options)
    assert body_of(network.requests[0]) == {
        "model": "m",
        "max_tokens": 5,
        "temperature": 0.0,
        "prompt": [1, 2],
        "stream": True,
        "stream_options": {"include_usage": True, "include_timings": True},
        "ignore_eos": True,
        "top_k": 3,
    }
    head = network.requests[0].lower()
    assert b"post /v1/completions http/1.1" in head
    assert b"authorization: bearer secret" in head
    assert b"x-tenant: a" in head
    assert b"accept-encoding: identity" in head
    assert f"traceparent: 00-{sample.trace_id}-".encode() in head


def test_the_sampled_flag_is_set_for_a_share_of_the_requests() -> None:
    def flags(share: float, count: int) -> list[str]:
        target = HttpTarget(HttpOptions(model="m", trace_share=share), Workload())
        prepared = [target.prepare(0, Call([1], 1)) for _ in range(count)]
        trace_flags = [p.request.headers["traceparent"].rpartition("-")[2] for p in prepared]
        assert [flag == "01" for flag in trace_flags] == [p.is_traced for p in prepared]
        return trace_flags

    assert set(flags(0, 50)) == {"00"}
    assert set(flags(1, 50)) == {"01"}
    assert 350 < flags(0.5, 1000).count("01") < 650  # outside this range less than once in 10 ** 20 runs


def test_phases_come_from_the_header_and_the_last_chunk() -> None:
    timings = {"phases_ns": {"queue": 3_000_001, "decode": 9}, "trace_id": "x"}
    head = HEAD + b"server-timing: receive;dur=0.5, queue;dur=3.000\r\n\r\n"
    (sample,) = ask(Network([(1, head + chunk(event()) + chunk(usage(1, timings=timings)) + END)]))
    assert sample.phases_ns == {"receive": 500_000, "queue": 3_000_001, "decode": 9}
    (other,) = ask(Network([(1, HEAD + b"\r\n" + chunk(event()) + chunk(usage(1, timings=[1])) + END)]))
    assert other.phases_ns == {}


def whole(status: int, content: Any) -> bytes:
    body = json.dumps(content).encode()
    return b"HTTP/1.1 %d -\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(body)) + body


@pytest.mark.parametrize(
    ("script", "kind", "phase"),
    [
        ([(5, whole(503, {"error": {}}))], "http_503", "before_first_token"),
        ([(5, whole(200, {"choices": []}))], "not_a_stream", "before_first_token"),
        ([], "disconnected", "before_first_token"),
        ([(5, HEAD + b"\r\n" + chunk(event()))], "disconnected", "mid_stream"),
        ([(5, HEAD + b"\r\n" + chunk(event()) + b"0\r\n\r\n")], "truncated", "mid_stream"),
        (
            [(5, HEAD + b"\r\n" + chunk(event()) + chunk(b'data: {"error": {"message": "x"}}\n\n') + END)],
            "error_event",
            "mid_stream",
        ),
        ([(5, HEAD + b"\r\n" + chunk(b"data: {nonsense\n\n") + END)], "malformed", "before_first_token"),
        ([(5, HEAD + b"\r\n" + END)], "no_answer", "before_first_token"),
    ],
)
def test_errors_have_a_kind_and_a_phase(script: list[Read], kind: str, phase: str) -> None:
    (sample,) = ask(Network(script))
    assert (sample.error, sample.failed_phase) == (kind, phase)
    assert not sample.is_ok
    assert sample.end_ns >= sample.sent_ns


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"error": {"message": "too\n long", "code": 400}}, "too long"),
        ({"message": "flat"}, "flat"),
        ({"error": "plain"}, "plain"),
        ({"error": {}}, ""),
        (["other"], "['other']"),
        ("x" * 300, "x" * 200 + "..."),
    ],
)
def test_an_error_keeps_the_message_of_the_server(content: Any, message: str) -> None:
    (sample,) = ask(Network([(5, whole(400, content))]))
    assert (sample.error, sample.error_message) == ("http_400", message)


def test_an_answer_without_a_choice_is_an_error_with_the_servers_message() -> None:
    chunks = chunk(b'data: {"object": "error", "message": "boom", "code": 500}\n\n')
    (sample,) = ask(Network([(5, HEAD + b"\r\n" + chunks + END)]))
    assert (sample.error, sample.error_message) == ("no_answer", "boom")


def test_an_answer_in_a_broken_encoding_is_an_error_of_its_own_request() -> None:
    head = b"HTTP/1.1 502 -\r\ncontent-encoding: gzip\r\ncontent-length: 5\r\n\r\n"
    (sample,) = ask(Network([(5, head + b"plain")]))
    assert (sample.error, sample.error_message) == ("http_502", "plain")


@pytest.mark.parametrize("header", ["db;dur=1.2.3", "db;dur=.", 'cache;desc="x";dur=', "db;dur=1e3"])
def test_a_server_timing_of_another_form_ends_no_run(header: str) -> None:
    head = HEAD + b"server-timing: " + header.encode() + b", queue;dur=2\r\n\r\n"
    timings = {"phases_ns": {"prefill": "soon", "decode": None}}
    (sample,) = ask(Network([(1, head + chunk(event()) + chunk(usage(1, timings=timings)) + END)]))
    assert (sample.error, sample.phases_ns["queue"]) == (None, 2_000_000)
    assert not {"prefill", "decode"} & sample.phases_ns.keys()


def test_other_servers_chunks_may_have_null_and_lists_of_parts() -> None:
    thinking = {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}]}
    script = HEAD + b"\r\n" + chunk(b'data: {"choices": null, "usage": null}\n\n') + delta(**thinking)
    script += chunk(b'data: {"choices": [{"index": null, "delta": {"content": " a"}}]}\n\n')
    (sample,) = ask(Network([(1, script + chunk(usage(2)) + END)]), endpoint="chat")
    assert (sample.error, len(sample.event_ns), sample.num_tokens, sample.is_parsed) == (None, 2, 2, True)


def test_events_are_recorded_for_each_choice() -> None:
    def of(index: int, **more: Any) -> bytes:
        return chunk(b"data: " + json.dumps({"choices": [{"index": index, "text": "a"} | more]}).encode() + b"\n\n")

    reads = [(10, HEAD + b"\r\n" + of(0) + of(1)), (20, of(1)), (30, of(0, finish_reason="length"))]
    script: list[Read] = [*reads, (40, of(1, finish_reason="length")), (50, b"0\r\n\r\n")]
    (sample,) = ask(Network(script), extra_body='{"n": 2}')
    assert sample.is_ok
    assert (sample.num_choices, sample.event_choices) == (2, [0, 1, 1, 0, 1])
    assert sample.streams == [[ns(10), ns(30)], [ns(10), ns(20), ns(40)]]
    (cut,) = ask(Network([*reads, (50, b"0\r\n\r\n")]), extra_body='{"n": 2}')
    assert cut.error == "truncated"  # one of the two choices never ended
    (three,) = ask(Network([*reads, (50, END)]), Call("", 5, body={"prompt": ["a", "b", "c"], "n": 2}))
    assert three.num_choices == 6


def test_a_refused_connection_is_a_connect_error() -> None:
    (sample,) = ask(Network(connects=False))
    assert (sample.error, sample.failed_phase) == ("connect", "connect")


def test_a_request_that_takes_too_long_is_a_timeout() -> None:
    (sample,) = ask(Network([NEVER]), timeout_seconds=0.01)
    assert (sample.error, sample.failed_phase) == ("timeout", "before_first_token")


def test_a_client_that_leaves_on_purpose_is_not_an_error() -> None:
    script = [(1.0, HEAD + b"\r\n")] + [(2.0 + i, chunk(event())) for i in range(9)]
    (sample,) = ask(Network(script), Call([1], 9, leave_after=4))
    assert sample.is_abandoned
    assert sample.error is None
    assert len(sample.event_ns) == 4


def test_an_answer_without_streaming_has_its_ttft_at_the_end() -> None:
    choice = {"message": {"content": "hello"}, "finish_reason": "stop"}
    answer = {"choices": [choice], "usage": {"completion_tokens": 2}}
    network = Network([(30, whole(200, answer))])
    (sample,) = ask(network, Call("hi", 5), stream=False, endpoint="chat")
    assert sample.is_ok
    assert (sample.ttft_ns, sample.completion_tokens, sample.tpot_ns) == (40_000_000, 2, None)
    assert "stream_options" not in body_of(network.requests[0])


SECOND = Turn([{"role": "user", "content": "two"}], 7, pause_seconds=0.004)


def test_a_conversation_sends_the_earlier_answers_with_each_question() -> None:
    role = delta(role="assistant", content="")
    network = Network(
        [(10, HEAD + b"\r\n" + role), (20, delta(content="Hel")), (30, delta(content="lo") + END)],
        [(50, HEAD + b"\r\n" + role), (70, delta(content="Bye") + END)],
    )
    first, second = ask(network, Call("one", 5, (SECOND,)), endpoint="chat")
    assert first.event_ns == [ns(20), ns(30)]  # an event with only a role is not an output
    assert body_of(network.requests[1])["messages"] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "two"},
    ]
    assert (second.turn, second.intended_ns, second.event_ns) == (1, ns(34), [ns(70)])
    assert [body_of(request)["max_tokens"] for request in network.requests] == [5, 7]
    assert first.trace_id != second.trace_id


@pytest.mark.parametrize(
    "outputs",
    [
        [delta(reasoning="a", reasoning_content="a"), delta(reasoning="b"), delta(content="c")],
        [delta(reasoning_content="a"), delta(reasoning_content="b"), call_delta("f")],
        [call_delta("f"), call_delta(arguments='{"a":'), call_delta(arguments="1}")],
    ],
)
def test_reasoning_and_calls_are_outputs_and_their_empty_chunks_are_not(outputs: list[bytes]) -> None:
    empty = [delta(role="assistant", content=None), delta(tool_calls=[]), call_delta(), delta(reasoning="")]
    network = Network(
        [(10, HEAD + b"\r\n" + b"".join(empty)), *zip((20, 30, 45), outputs, strict=True), (50, empty[2] + END)]
    )
    (sample,) = ask(network, endpoint="chat")
    assert sample.event_ns == [ns(20), ns(30), ns(45)]
    assert sample.ttft_ns == 30_000_000
    assert sample.is_parsed


def test_an_answer_of_text_alone_is_not_parsed() -> None:
    (sample,) = ask(Network([(10, HEAD + b"\r\n" + delta(content="a", reasoning=None) + END)]), endpoint="chat")
    assert (sample.event_ns, sample.is_parsed) == ([ns(10)], False)


def test_a_whole_answer_may_be_a_call() -> None:
    message = {"content": None, "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]}
    answer = {"choices": [{"message": message, "finish_reason": "tool_calls"}], "usage": {"completion_tokens": 9}}
    (sample,) = ask(Network([(30, whole(200, answer))]), stream=False, endpoint="chat")
    assert (sample.is_ok, sample.event_ns, sample.num_tokens) == (True, [ns(30)], 9)


def test_a_conversation_goes_on_without_the_reasoning_of_its_answers() -> None:
    head = HEAD + b"\r\n" + delta(reasoning="Hm.")
    network = Network([(10, head), (20, delta(content="Yes.") + END)], [(30, head + END)])
    ask(network, Call("one", 5, (SECOND,)), endpoint="chat")
    assert body_of(network.requests[1])["messages"][1] == {"role": "assistant", "content": "Yes."}


def test_a_request_from_a_file_keeps_its_own_fields() -> None:
    network = Network([(1, HEAD + b"\r\n" + chunk(event()) + END)])
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    own = {"messages": messages, "top_p": 0.5, "tools": [{"type": "function", "function": {"name": "f"}}]}
    ask(network, Call("", 5, body=own), endpoint="chat", extra_body='{"tool_choice": "required"}')
    assert body_of(network.requests[0]).items() >= (own | {"tool_choice": "required"}).items()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"url": "localhost:8000"}, "--url is 'localhost:8000'"),
        ({"processes": 0}, "--processes is 0"),
        ({"header": ("x",)}, "--header is 'x'"),
        ({"extra_body": "[]"}, "--extra-body"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        HttpOptions(**options)


async def test_a_stream_with_too_many_unread_reads_pauses_and_resumes() -> None:
    stream = StampedStream(lambda: 0)
    transport = Mock(asyncio.Transport)
    stream.connection_made(transport)
    for _ in range(100):
        stream.data_received(b"x")
    transport.pause_reading.assert_called_once()
    for _ in range(100):
        assert await stream.read(1) == b"x"
    asyncio.get_running_loop().call_soon(stream.data_received, b"y")
    assert await stream.read(1) == b"y"
    transport.resume_reading.assert_called_once()
