"""A delay in one stage shows in the phase of that stage, to the nanosecond, and in no other; whoever tells it.

The whole server in this process, on a clock that stands still but for the delays: real routes, engine thread, tokenize
worker and telemetry, around a scripted model.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
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
from oaiserve.engine.step import ChunkResult, Step
from oaiserve.engine.tokenize import Tokenized, TokenizeStage
from oaiserve.record import RequestRecord, WaitReason
from oaiserve.telemetry import Telemetry, names
from oaiserve.times import PHASES
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
OTHER = "other"  # how the ids of all requests begin but that of the one that is looked at


@dataclass(frozen=True)
class Queueing:
    """What makes the request wait. The first of the others, (prompt tokens, answer tokens), is in the engine's first
    step when the request comes; the rest waits before it."""

    others: tuple[tuple[int, int], ...]
    slow_step: int  # of the engine, counted from 0
    options: Mapping[str, int] = field(default_factory=dict)
    twin: bool = False  # the last of the others has the same prompt


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


# Whole microseconds, since the log has no more.
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
    """Moves the clock: the first time that a stage asks, by the delay of its phase."""

    def __init__(self, delays_ns: Mapping[str, int]) -> None:
        self.clock = Clock()
        self._left_ns = dict(delays_ns)

    def pass_in(self, phase: str) -> None:
        self.clock.now_ns += self._left_ns.pop(phase, 0)


class SlowTokenizer(BlockedTokenizer):
    def __init__(self, delays: Delays, slow_prompt: Prompt) -> None:
        super().__init__()
        self._delays, self._slow_prompt = delays, slow_prompt

    def encode(self, prompt: Prompt) -> list[int]:
        token_ids = super().encode(prompt)
        if prompt == self._slow_prompt:
            self._delays.pass_in("tokenize")
        return token_ids


class SlowRunner(ScriptedRunner):
    def __init__(self, delays: Delays, slow_step: int | None) -> None:
        super().__init__(gated=True)
        self._delays, self._slow_step = delays, slow_step

    def run(self, step: Step) -> list[ChunkResult]:
        number = len(self.steps)
        results = super().run(step)
        mine = [chunk.sequence for chunk in step.chunks if not is_other(chunk.sequence.request_id)]
        if mine:
            self._delays.pass_in("decode" if mine[0].num_generated else "prefill")
        elif number == self._slow_step:
            self._delays.pass_in("queue")
        return results


def is_other(request_id: str) -> bool:
    return request_id.startswith(OTHER)


def others(case: Case, queueing: Queueing) -> list[Request]:
    """No two have tokens in common, but a twin with the request of the case."""
    rows = [([1 + index] * prompt_len, max_tokens) for index, (prompt_len, max_tokens) in enumerate(queueing.others)]
    if queueing.twin:
        rows.append((TOKENIZER.encode(case.prompt), 1))
    return [
        Request(f"{OTHER}-{index}", (TokenPrompt(token_ids),), SamplingParams(max_tokens=max_tokens, temperature=0))
        for index, (token_ids, max_tokens) in enumerate(rows)
    ]


def after(patch: pytest.MonkeyPatch, kind: type, name: str, hook: Callable[[Any], None]) -> None:
    """Each time this method of one argument has returned, the hook is called with the argument, on the same thread."""
    method = getattr(kind, name)

    def hooked(self: object, argument: object) -> object:
        result = method(self, argument)
        hook(argument)
        return result

    patch.setattr(kind, name, hooked)


@dataclass
class Told:
    """What everybody told about the one request."""

    case: Case
    answer: httpx.Response
    record: RequestRecord
    metrics: dict[tuple[str, str], float]  # (sample, its phase or reason, if any) to value
    log_line: dict[str, Any]
    debug: dict[str, Any]
    spans: dict[str, Span]  # by name

    @property
    def phases_ns(self) -> dict[str, dict[str, int]]:
        """By who tells them."""
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
        """What it waited for in its queue phase, by who tells it."""
        queue, prefix = attributes(self.spans["queue"]), "queue_"
        told = {reason: self.metric_ns(names.QUEUE_WAIT_SECONDS, "", reason) for reason in WaitReason}
        return {
            "record": {reason.value: wait_ns for reason, wait_ns in self.record.account.waits_ns.items()},
            "metrics": {reason.value: wait_ns for reason, wait_ns in told.items() if wait_ns},
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


def ask(case: Case, collector: Collector) -> Told:
    with pytest.MonkeyPatch.context() as patch, json_log() as log:
        patch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{collector.url}/v1/traces")
        patch.setenv("NO_PROXY", "127.0.0.1")
        return asyncio.run(serve_one(case, patch, collector, log))


async def serve_one(case: Case, patch: pytest.MonkeyPatch, collector: Collector, log: io.StringIO) -> Told:
    delays = Delays(case.delays_ns)
    put_on_clock(patch, delays.clock)
    queueing = QUEUEING.get(case.wait_reason)
    options = {"max_step_tokens": 64, "tokenize_workers": 1, **(queueing.options if queueing else {})}
    tokenizer = SlowTokenizer(delays, case.prompt)
    runner = SlowRunner(delays, queueing.slow_step if queueing else None)

    def in_the_tokenizers_queue(request: Request) -> None:
        if not is_other(request.request_id):
            delays.pass_in("tokenize_wait")
            tokenizer.release.set()

    def in_the_engines_inbox(command: object) -> None:
        if isinstance(command, Tokenized) and not is_other(command.request.request_id):
            runner.permit(10_000)

    records: list[RequestRecord] = []
    after(patch, TokenizeStage, "submit", in_the_tokenizers_queue)
    after(patch, EngineLoop, "post", in_the_engines_inbox)
    after(patch, Telemetry, "record", records.append)

    engine = make_engine(runner, tokenizer, clock_ns=delays.clock, **options)  # type: ignore[arg-type]
    telemetry = Telemetry(
        snapshot=engine.snapshot, take_steps=engine.take_steps, model="demo", version="1", recent_requests=4
    )

    async def body() -> AsyncIterator[bytes]:
        yield case.body[:10]
        delays.pass_in("receive")
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
        finally:  # so that a request which never got that far fails the test and does not hang it
            tokenizer.release.set()
            runner.permit(10_000)
        assert await asyncio.to_thread(telemetry.flush, TIMEOUT_SECONDS)
        page = (await http.get("/metrics")).text
        debug = (await http.get("/debug/requests/slow")).json()
    # The server has stopped, and with it the export is complete.
    (record,) = records
    trace_id = record.trace.trace_id.to_bytes(16)
    spans = {span.name: span for span in collector.spans if span.trace_id == trace_id}
    (line,) = log.getvalue().splitlines()
    return Told(case, answer, record, samples(page), json.loads(line), debug, spans)


def occupy(engine: Engine, runner: ScriptedRunner, tokenizer: BlockedTokenizer, requests: list[Request]) -> None:
    """The engine is in a step of the first request, the only tokenize worker in the prompt of a client that left."""
    inbox = Inbox()
    for request in requests:
        engine.submit(request, inbox)
        if request is requests[0]:
            runner.started.get(timeout=TIMEOUT_SECONDS)
    engine.submit(Request(f"{OTHER}-blocked", (TextPrompt("blocked"),)), inbox)
    assert tokenizer.entered.wait(TIMEOUT_SECONDS)
    engine.abort(f"{OTHER}-blocked")


def slow_to_read(app: ASGIApp, path: str, delays: Delays) -> ASGIApp:
    """As if the client took its time with the last bytes of the answer."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        async def slow_send(message: Message) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                delays.pass_in("respond")
            await send(message)

        await app(scope, receive, slow_send if scope["path"] == path else send)

    return wrapped


def samples(page: str) -> dict[tuple[str, str], float]:
    """Of a server that had one request, so that no other label tells samples apart."""
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
def told(request: pytest.FixtureRequest, collector: Collector) -> Told:
    told = ask(request.param, collector)
    assert told.answer.status_code == 200
    assert told.record.completion_tokens == NUM_TOKENS
    return told


def test_the_delay_is_in_its_phase_and_in_no_other_whoever_tells(told: Told) -> None:
    assert told.phases_ns == dict.fromkeys(told.phases_ns, told.case.phases_ns)


def test_the_header_tells_the_phases_that_are_over_when_it_leaves(told: Told) -> None:
    parts = [part.split(";dur=") for part in told.answer.headers["server-timing"].split(", ")]
    in_header = {phase: round(float(duration_ms) * 1e6) for phase, duration_ms in parts}
    # The headers of a stream leave with its first token, while the engine goes on.
    assert len(in_header) == 6 or (told.case.stream and len(in_header) == 5)
    assert list(in_header.items()) == list(told.case.phases_ns.items())[: len(in_header)]


def test_the_end_of_a_stream_tells_all_phases_but_its_own_last(told: Told) -> None:
    if told.case.stream:
        events = told.answer.text.removesuffix("\n\n").split("\n\n")
        timings = json.loads(events[-2].removeprefix("data: "))["timings"]
        assert list(timings["phases_ns"].items()) == list(told.case.phases_ns.items())[:-1]
        assert timings["queue_waits_ns"] == told.case.waits_ns
    else:
        assert "timings" not in told.answer.json()


def test_the_delay_of_the_queue_has_its_reason_and_no_other_whoever_tells(told: Told) -> None:
    assert told.waits_ns == dict.fromkeys(told.waits_ns, told.case.waits_ns)


def test_the_delay_of_a_decode_step_is_one_gap_between_tokens(told: Told) -> None:
    delay_ns = told.case.phases_ns["decode"]
    gaps_ns = sorted(told.record.account.inter_token_ns)
    assert gaps_ns == [*[0] * (NUM_TOKENS - 2), delay_ns]
    assert told.debug["token_gaps"]["max_ns"] == delay_ns
    assert told.metric_ns(names.INTER_TOKEN_LATENCY_SECONDS, "_sum") == delay_ns


def test_totals_are_the_sums_of_the_phases(told: Told) -> None:
    phases_ns = list(told.case.phases_ns.values())
    assert told.record.times.duration_ns == sum(phases_ns)
    assert told.metric_ns(names.DURATION_SECONDS, "_sum") == sum(phases_ns)
    assert told.record.times.time_to_first_token_ns == sum(phases_ns[:5])
    assert told.metric_ns(names.TIME_TO_FIRST_TOKEN_SECONDS, "_sum") == sum(phases_ns[:5])


def test_the_time_in_steps_is_prefill_and_decode(told: Told) -> None:
    phases_ns = told.case.phases_ns
    assert told.record.account.model_ns == phases_ns["prefill"] + phases_ns["decode"]
