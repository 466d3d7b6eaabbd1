"""Tests that every report shows a delay in one stage in the phase of that stage, to the nanosecond, and in no other.

The whole server runs in this process: real routes, engine thread, tokenize worker and telemetry around a scripted
model. Its clock moves only by the delays.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from oaiserve.app import create_app
from oaiserve.config import Config
from oaiserve.engine.engine import Engine
from oaiserve.engine.loop import EngineLoop
from oaiserve.engine.request import ChatPrompt, Prompt, Request, SamplingParams, TextPrompt, TokenPrompt
from oaiserve.engine.step import Step
from oaiserve.engine.tokenize import Tokenized, TokenizeStage
from oaiserve.facts.record import RequestRecord, WaitReason
from oaiserve.facts.times import PHASES
from oaiserve.telemetry import Measured, Telemetry, names
from tests.clocks import put_on_clock
from tests.engine.doubles import (
    TIMEOUT_SECONDS,
    TOKENIZER,
    BlockedTokenizer,
    Clock,
    Inbox,
    ScriptedRunner,
    make_engine,
)
from tests.telemetry.collector import Collector, running_collector
from tests.telemetry.log_lines import json_log

DELAY_NS = 100_000_000
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PROMPT = "The quick brown fox"  # 18 tokens, and 37 in the template of the chat
NUM_TOKENS = 4
OTHER = "other"  # the prefix of all request ids except that of the measured request


@dataclass(frozen=True)
class Queueing:
    """A situation in which the measured request waits. The first of the other requests is in the engine's first step
    when it arrives, and the rest wait before it."""

    others: tuple[tuple[int, int], ...]  # (prompt tokens, completion tokens)
    slow_step: int  # of the engine, counted from 0; the delay is in it
    options: Mapping[str, int] = field(default_factory=dict)
    twin: bool = False  # one more request, the last before it, has the same prompt


QUEUEING = {
    WaitReason.STEP_UNDER_WAY: Queueing(((4, 1),), 0),
    WaitReason.BATCH_FULL: Queueing(((4, 2),), 1, {"max_running": 1}),
    WaitReason.TOKEN_BUDGET: Queueing(((128, 1),), 1),
    WaitReason.NO_BLOCKS: Queueing(((60, 2),), 1, {"kv_blocks": 16}),
    WaitReason.BEHIND_OTHERS: Queueing(((60, 2), (60, 2)), 1, {"kv_blocks": 16, "lookahead": 0}),
    WaitReason.SAME_PREFIX: Queueing(((4, 1),), 1, twin=True),
}


@dataclass(frozen=True)
class Case:
    route: str
    stream: bool
    delays_ns: Mapping[str, int]  # by phase
    wait_reason: WaitReason | None = None

    def __str__(self) -> str:
        where = "everywhere" if len(self.delays_ns) > 1 else self.wait_reason or next(iter(self.delays_ns))
        return f"{where}-{'chat' if self.route == CHAT else 'text'}-{'stream' if self.stream else 'whole'}"

    @property
    def phases_ns(self) -> dict[str, int]:
        return dict.fromkeys(PHASES, 0) | self.delays_ns

    @property
    def waits_ns(self) -> dict[str, int]:
        return {} if self.wait_reason is None else {self.wait_reason: self.delays_ns["queue"]}

    @property
    def prompt(self) -> Prompt:
        return ChatPrompt([{"role": "user", "content": PROMPT}]) if self.route == CHAT else TextPrompt(PROMPT)

    @property
    def body(self) -> bytes:
        prompt = {"messages": [{"role": "user", "content": PROMPT}]} if self.route == CHAT else {"prompt": PROMPT}
        streamed = {"stream": True, "stream_options": {"include_timings": True}} if self.stream else {}
        return json.dumps({**prompt, **streamed, "max_tokens": NUM_TOKENS}).encode()


# The log has whole microseconds.
EVERYWHERE_NS = {phase: 1_001_000 * number for number, phase in enumerate(PHASES, start=1)}
CASES = [
    Case(route, stream, delays_ns, reason)
    for route, stream in itertools.product((CHAT, TEXT), (False, True))
    for delays_ns, reason in [
        *(({phase: DELAY_NS}, None) for phase in PHASES if phase != "queue"),
        *(({"queue": DELAY_NS}, reason) for reason in WaitReason),
        (EVERYWHERE_NS, WaitReason.STEP_UNDER_WAY),
    ]
]


class Delays:
    """The delays of the phases. Each one moves the clock once."""

    def __init__(self, delays_ns: Mapping[str, int]) -> None:
        self.clock = Clock()
        self._left_ns = dict(delays_ns)

    def apply(self, phase: str) -> None:
        """Move the clock by the delay of the phase, if that has not happened yet."""
        self.clock.now_ns += self._left_ns.pop(phase, 0)


class SlowTokenizer(BlockedTokenizer):
    """A tokenizer that applies the delay of `tokenize` to one prompt."""

    def __init__(self, delays: Delays, slow_prompt: Prompt) -> None:
        super().__init__()
        self._delays, self._slow_prompt = delays, slow_prompt

    def encode(self, prompt: Prompt) -> list[int]:
        token_ids = super().encode(prompt)
        if prompt == self._slow_prompt:
            self._delays.apply("tokenize")
        return token_ids


def slow_runner(delays: Delays, slow_step: int | None) -> ScriptedRunner:
    """A runner that applies the delays of `prefill` and `decode` to the measured request, and that of `queue` to one
    step before it."""
    numbers = count()

    def computing(step: Step) -> None:
        number = next(numbers)
        measured = [chunk.sequence for chunk in step.chunks if not is_other(chunk.sequence.request_id)]
        if measured:
            delays.apply("decode" if measured[0].num_generated else "prefill")
        elif number == slow_step:
            delays.apply("queue")

    return ScriptedRunner(gated=True, computing=computing)


def is_other(request_id: str) -> bool:
    return request_id.startswith(OTHER)


def others(case: Case, queueing: Queueing) -> list[Request]:
    """Make the requests that the measured one waits for. Only a twin shares tokens with another request."""
    rows = [([1 + index] * prompt_len, max_tokens) for index, (prompt_len, max_tokens) in enumerate(queueing.others)]
    if queueing.twin:
        rows.append((TOKENIZER.encode(case.prompt), 1))
    return [
        Request(
            f"{OTHER}-{index}",
            (TokenPrompt(token_ids),),
            SamplingParams(max_tokens=max_tokens, temperature=0),
            client="127.0.0.1",  # that of the measured request: another client would take turns with it
        )
        for index, (token_ids, max_tokens) in enumerate(rows)
    ]


def hook_after(patch: pytest.MonkeyPatch, kind: type, name: str, hook: Callable[[Any], None]) -> None:
    """Call `hook` with the first argument of this method each time it has returned, on the same thread."""
    method = getattr(kind, name)

    def hooked(self: object, argument: object, *others: object) -> object:
        result = method(self, argument, *others)
        hook(argument)
        return result

    patch.setattr(kind, name, hooked)


@dataclass
class Reports:
    """Everything that was reported about the measured request."""

    case: Case
    answer: httpx.Response
    record: RequestRecord
    metrics: dict[tuple[str, str], float]  # (sample, its phase or reason, if any) to value
    log_line: dict[str, Any]
    debug: dict[str, Any]
    spans: dict[str, Span]  # by name

    @property
    def phases_ns(self) -> dict[str, dict[str, int]]:
        """Return the phases by the report that shows them."""
        spans = [self.spans[phase] for phase in PHASES]
        return {
            "record": {phase.name: phase.duration_ns for phase in self.record.times.phases()},
            "metrics": {phase: self.metric_ns(names.PHASE_SECONDS, "_sum", phase) for phase in PHASES},
            "log": {phase: round(self.log_line[f"{phase}_ms"] * 1e6) for phase in PHASES},
            "debug": {phase["name"]: phase["duration_ns"] for phase in self.debug["phases"]},
            "spans": {span.name: span.end_time_unix_nano - span.start_time_unix_nano for span in spans},
            "attributes of spans": {span.name: attributes(span)[names.DURATION_NS] for span in spans},
        }

    @property
    def waits_ns(self) -> dict[str, dict[str, int]]:
        """Return the reasons for waiting in the queue phase, by the report that shows them."""
        queue, prefix = attributes(self.spans["queue"]), "queue_"
        on_page = {reason: self.metric_ns(names.QUEUE_WAIT_SECONDS, "", reason) for reason in WaitReason}
        return {
            "record": {reason.value: wait_ns for reason, wait_ns in self.record.account.waits_ns.items()},
            "metrics": {reason.value: wait_ns for reason, wait_ns in on_page.items() if wait_ns},
            "log": {
                name.removeprefix(prefix).removesuffix("_ms"): round(value * 1e6)
                for name, value in self.log_line.items()
                if name.startswith(prefix) and name != "queue_ms"
            },
            "debug": self.debug["queue_waits_ns"],
            "attributes of spans": {
                reason.value: queue[name] for reason, name in names.QUEUE_WAITS_NS.items() if name in queue
            },
        }

    def metric_ns(self, metric: names.Metric, suffix: str, label: str = "") -> int:
        return round(self.metrics[metric.name + suffix, label] * 1e9)


def attributes(span: Span) -> dict[str, Any]:
    return {pair.key: pair.value.int_value for pair in span.attributes if pair.value.HasField("int_value")}


def measure(case: Case, collector: Collector) -> Reports:
    with pytest.MonkeyPatch.context() as patch, json_log() as log:
        patch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{collector.url}/v1/traces")
        patch.setenv("NO_PROXY", "127.0.0.1")
        return asyncio.run(serve_one(case, patch, collector, log))


async def serve_one(case: Case, patch: pytest.MonkeyPatch, collector: Collector, log: io.StringIO) -> Reports:
    delays = Delays(case.delays_ns)
    put_on_clock(patch, delays.clock)
    queueing = QUEUEING.get(case.wait_reason)
    options = {"max_step_tokens": 64, "tokenize_workers": 1, **(queueing.options if queueing else {})}
    tokenizer = SlowTokenizer(delays, case.prompt)
    runner = slow_runner(delays, queueing.slow_step if queueing else None)

    def when_queued_for_the_tokenizer(request: Request) -> None:
        if not is_other(request.request_id):
            delays.apply("tokenize_wait")
            tokenizer.release.set()

    def when_in_the_inbox(command: object) -> None:
        if isinstance(command, Tokenized) and not is_other(command.request.request_id):
            runner.permit(10_000)

    records: list[RequestRecord] = []
    hook_after(patch, TokenizeStage, "submit", when_queued_for_the_tokenizer)
    hook_after(patch, EngineLoop, "post", when_in_the_inbox)
    hook_after(patch, Telemetry, "record", records.append)

    engine = make_engine(runner, tokenizer, clock_ns=delays.clock, **options)  # type: ignore[arg-type]
    telemetry = Telemetry(Measured("demo", "1", engine.snapshot, take_steps=engine.take_steps), recent_requests=4)

    async def body() -> AsyncIterator[bytes]:
        yield case.body[:10]
        delays.apply("receive")
        yield case.body[10:]

    app = create_app(Config("demo"), engine, telemetry)
    transport = httpx.ASGITransport(app=slow_to_read(app, case.route, delays))  # type: ignore[arg-type]
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http,
    ):
        occupy(engine, runner, tokenizer, others(case, queueing) if queueing else [])
        headers = {"content-type": "application/json", "x-request-id": "slow"}
        try:
            answer = await http.post(case.route, content=body(), headers=headers)
        finally:  # so that the test fails, and does not hang, if the request never came so far
            tokenizer.release.set()
            runner.permit(10_000)
        assert await asyncio.to_thread(telemetry.flush, TIMEOUT_SECONDS)
        page = (await http.get("/metrics")).text
        debug = (await http.get("/debug/requests/slow")).json()
    # The server has stopped, so all spans have been exported.
    (record,) = records
    trace_id = record.trace.trace_id.to_bytes(16)
    spans = {span.name: span for span in collector.spans if span.trace_id == trace_id}
    (line,) = log.getvalue().splitlines()
    return Reports(case, answer, record, samples(page), json.loads(line), debug, spans)


def occupy(engine: Engine, runner: ScriptedRunner, tokenizer: BlockedTokenizer, requests: list[Request]) -> None:
    """Keep the engine in a step of the first request, and the only tokenize worker in the prompt of an aborted one."""
    inbox = Inbox()
    for request in requests:
        engine.submit(request, inbox)
        if request is requests[0]:
            runner.started.get(timeout=TIMEOUT_SECONDS)
    engine.submit(Request(f"{OTHER}-blocked", (TextPrompt("blocked"),)), inbox)
    assert tokenizer.entered.wait(TIMEOUT_SECONDS)
    engine.abort(f"{OTHER}-blocked")


def slow_to_read(app: ASGIApp, path: str, delays: Delays) -> ASGIApp:
    """Return the app with the delay of `respond` at the last bytes of an answer, as if its client read slowly."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        async def slow_send(message: Message) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                delays.apply("respond")
            await send(message)

        await app(scope, receive, slow_send if scope["path"] == path else send)

    return wrapped


def samples(page: str) -> dict[tuple[str, str], float]:
    """Parse the page of a server that had one request, so that phase and reason are the only labels that differ."""
    return {
        (sample.name, sample.labels.get("phase", sample.labels.get("reason", ""))): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with running_collector() as collector:
        yield collector


@pytest.fixture(scope="module", params=CASES, ids=str)
def reports(request: pytest.FixtureRequest, collector: Collector) -> Reports:
    reports = measure(request.param, collector)
    assert reports.answer.status_code == 200
    assert reports.record.completion_tokens == NUM_TOKENS
    return reports


def test_every_report_shows_the_delay_in_its_phase_and_in_no_other(reports: Reports) -> None:
    assert reports.phases_ns == dict.fromkeys(reports.phases_ns, reports.case.phases_ns)


def test_the_header_shows_the_phases_that_are_over_when_it_is_sent(reports: Reports) -> None:
    parts = [part.split(";dur=") for part in reports.answer.headers["server-timing"].split(", ")]
    in_header = {phase: round(float(duration_ms) * 1e6) for phase, duration_ms in parts}
    # The headers of a stream are sent with its first token, while the engine goes on.
    assert len(in_header) == 6 or (reports.case.stream and len(in_header) == 5)
    assert list(in_header.items()) == list(reports.case.phases_ns.items())[: len(in_header)]


def test_the_end_of_a_stream_shows_all_phases_except_respond(reports: Reports) -> None:
    if reports.case.stream:
        events = reports.answer.text.removesuffix("\n\n").split("\n\n")
        timings = json.loads(events[-2].removeprefix("data: "))["timings"]
        assert list(timings["phases_ns"].items()) == list(reports.case.phases_ns.items())[:-1]
        assert timings["queue_waits_ns"] == reports.case.waits_ns
    else:
        assert "timings" not in reports.answer.json()


def test_every_report_shows_the_delay_of_the_queue_under_its_reason_and_no_other(reports: Reports) -> None:
    assert reports.waits_ns == dict.fromkeys(reports.waits_ns, reports.case.waits_ns)


def test_the_delay_of_a_decode_step_is_one_gap_between_tokens(reports: Reports) -> None:
    delay_ns = reports.case.phases_ns["decode"]
    gaps_ns = sorted(reports.record.account.inter_token_ns)
    assert gaps_ns == [*[0] * (NUM_TOKENS - 2), delay_ns]
    assert reports.debug["token_gaps"]["max_ns"] == delay_ns
    assert reports.metric_ns(names.INTER_TOKEN_LATENCY_SECONDS, "_sum") == delay_ns


def test_duration_and_time_to_first_token_are_sums_of_phases(reports: Reports) -> None:
    phases_ns = list(reports.case.phases_ns.values())
    assert reports.record.times.duration_ns == sum(phases_ns)
    assert reports.metric_ns(names.DURATION_SECONDS, "_sum") == sum(phases_ns)
    assert reports.record.times.time_to_first_token_ns == sum(phases_ns[:5])
    assert reports.metric_ns(names.TIME_TO_FIRST_TOKEN_SECONDS, "_sum") == sum(phases_ns[:5])


def test_the_time_in_steps_is_the_sum_of_prefill_and_decode(reports: Reports) -> None:
    phases_ns = reports.case.phases_ns
    assert reports.record.account.model_ns == phases_ns["prefill"] + phases_ns["decode"]
