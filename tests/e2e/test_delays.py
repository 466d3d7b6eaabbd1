"""Tests that a delay in one stage is in the phase of that stage, to the nanosecond, and in no other.

The whole server runs in this process: real routes, engine thread, tokenize worker and telemetry around a scripted
model. Its clock moves only by the delays. `tests/telemetry/test_agreement.py` tests that all reports of a record agree.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import httpx
import pytest
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
from oaiserve.telemetry import Measured, Telemetry
from tests.clocks import put_on_clock
from tests.engine.doubles import TIMEOUT_SECONDS, TOKENIZER, BlockedTokenizer, Clock, Inbox, ScriptedRunner, make_engine

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
    for route, stream in ((CHAT, True), (TEXT, False))
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
    """The answer, the record and the account of the measured request."""

    case: Case
    answer: httpx.Response
    record: RequestRecord
    debug: dict[str, Any]


async def serve_one(case: Case, patch: pytest.MonkeyPatch) -> Reports:
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

    engine = make_engine(runner, tokenizer=tokenizer, clock_ns=delays.clock, **options)
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
        debug = (await http.get("/debug/requests/slow")).json()
    (record,) = records
    return Reports(case, answer, record, debug)


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


@pytest.fixture(scope="module", params=CASES, ids=str)
def reports(request: pytest.FixtureRequest) -> Reports:
    with pytest.MonkeyPatch.context() as patch:
        reports = asyncio.run(serve_one(request.param, patch))
    assert reports.answer.status_code == 200
    assert reports.record.completion_tokens == NUM_TOKENS
    return reports


def test_the_delay_is_in_its_phase_and_in_no_other(reports: Reports) -> None:
    phases_ns = reports.case.phases_ns
    assert {phase.name: phase.duration_ns for phase in reports.record.times.phases()} == phases_ns
    assert {phase["name"]: phase["duration_ns"] for phase in reports.debug["phases"]} == phases_ns
    assert reports.record.account.waits_ns == reports.debug["queue_waits_ns"] == reports.case.waits_ns
    assert reports.record.account.model_ns == phases_ns["prefill"] + phases_ns["decode"]


def test_the_delay_of_a_decode_step_is_one_gap_between_tokens(reports: Reports) -> None:
    delay_ns = reports.case.phases_ns["decode"]
    gaps_ns = sorted(reports.record.account.inter_token_ns)
    assert gaps_ns == [*[0] * (NUM_TOKENS - 2), delay_ns]
    assert reports.debug["token_gaps"]["max_ns"] == delay_ns
