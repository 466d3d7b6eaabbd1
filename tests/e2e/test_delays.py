"""Tests that a delay in one stage is in the phase of that stage, to the nanosecond, and in no other.

The whole server runs in this process: real routes, engine thread, tokenize worker and telemetry around a scripted
model. Its clock moves only by the delays. `tests/telemetry/test_agreement.py` tests that all reports of a record agree.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from oaiserve.app import create_app
from oaiserve.config import Config
from oaiserve.engine.engine import Engine
from oaiserve.engine.loop import EngineLoop
from oaiserve.engine.request import ChatPrompt, Prompt, Request, SamplingParams, TextPrompt, TokenPrompt
from oaiserve.engine.sequences.step import Step
from oaiserve.engine.tokenize import Tokenized, TokenizeStage
from oaiserve.facts.record import RequestRecord, WaitReason
from oaiserve.facts.times import TEXT_PHASES
from oaiserve.runtime import THREADS, Threads
from oaiserve.telemetry import Measured, Telemetry
from tests.engine.doubles import BlockedTokenizer, Clock, Inbox, ScriptedRunner, make_engine
from tests.waiting import wait_until

DELAY_NS = 100_000_000
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
PROMPT = "The quick brown fox"  # 18 tokens, and 37 in the template of the chat
NUM_TOKENS = 4
OTHER = "other"  # the prefix of all request ids except that of the measured request


@dataclass(frozen=True)
class Case:
    route: str
    stream: bool
    delays_ns: Mapping[str, int]  # by phase

    def __str__(self) -> str:
        where = "everywhere" if len(self.delays_ns) > 1 else next(iter(self.delays_ns))
        return f"{where}-{'chat' if self.route == CHAT else 'text'}-{'stream' if self.stream else 'whole'}"

    @property
    def phases_ns(self) -> dict[str, int]:
        return dict.fromkeys(TEXT_PHASES, 0) | self.delays_ns

    @property
    def waits_ns(self) -> dict[str, int]:
        return {WaitReason.STEP_UNDER_WAY: self.delays_ns["queue"]} if "queue" in self.delays_ns else {}

    @property
    def prompt(self) -> Prompt:
        return ChatPrompt([{"role": "user", "content": PROMPT}]) if self.route == CHAT else TextPrompt(PROMPT)

    @property
    def body(self) -> bytes:
        prompt = {"messages": [{"role": "user", "content": PROMPT}]} if self.route == CHAT else {"prompt": PROMPT}
        return json.dumps({**prompt, "stream": self.stream, "max_tokens": NUM_TOKENS}).encode()


CASES = [
    Case(route, stream, delays_ns)
    for route, stream in ((CHAT, True), (TEXT, False))
    for delays_ns in (
        *({phase: DELAY_NS} for phase in TEXT_PHASES),
        {phase: DELAY_NS * number for number, phase in enumerate(TEXT_PHASES, start=1)},
    )
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
        self._delays = delays
        self._slow_prompt = slow_prompt
        self.special_ids: frozenset[int] = frozenset()

    def encode(self, prompt: Prompt) -> list[int]:
        token_ids = super().encode(prompt)
        if prompt == self._slow_prompt:
            self._delays.apply("tokenize")
        return token_ids


def slow_runner(delays: Delays) -> ScriptedRunner:
    """A runner that applies the delays of `prefill` and `decode` to the measured request, and that of `queue` to the
    step before it."""

    def computing(step: Step) -> None:
        measured = [chunk.sequence for chunk in step.chunks if not is_other(chunk.sequence.request_id)]
        if measured:
            delays.apply("decode" if measured[0].num_generated else "prefill")
        else:
            delays.apply("queue")

    return ScriptedRunner(gated=True, computing=computing)


def is_other(request_id: str) -> bool:
    return request_id.startswith(OTHER)


def hook_after(patch: pytest.MonkeyPatch, kind: type, name: str, hook: Callable[[Any], None]) -> None:
    """Call `hook` with the first argument of this method each time it has returned, on the same thread."""
    method = getattr(kind, name)

    def hooked(self: object, argument: object, *others: object) -> object:
        result = method(self, argument, *others)
        hook(argument)
        return result

    patch.setattr(kind, name, hooked)


async def serve_one(case: Case, patch: pytest.MonkeyPatch) -> tuple[httpx.Response, RequestRecord, dict[str, Any]]:
    """Return the answer, the record and the account of the measured request."""
    delays = Delays(case.delays_ns)
    tokenizer = SlowTokenizer(delays, case.prompt)
    runner = slow_runner(delays)

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

    options = {"max_step_tokens": 64, "tokenize_workers": 1}
    runtime = Threads(delays.clock)
    engine = make_engine(runner, tokenizer=tokenizer, runtime=runtime, **options)
    measured = Measured("demo", "1", engine.snapshot, take_steps=engine.take_steps)
    telemetry = Telemetry(measured, recent_requests=4, runtime=THREADS)

    async def body() -> AsyncIterator[bytes]:
        yield case.body[:10]
        delays.apply("receive")
        yield case.body[10:]

    app = create_app(Config("demo"), engine, telemetry, runtime=runtime)
    transport = httpx.ASGITransport(app=slow_to_read(app, case.route, delays))  # type: ignore[arg-type]
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http,
    ):
        occupy(engine, runner, tokenizer, with_a_step="queue" in case.delays_ns)
        headers = {"content-type": "application/json", "x-request-id": "slow"}
        try:
            answer = await http.post(case.route, content=body(), headers=headers)
        finally:  # so that the test fails, and does not hang, if the request never came so far
            tokenizer.release.set()
            runner.permit(10_000)
        await asyncio.to_thread(wait_until, lambda: bool(records) and telemetry.recent.get("slow") is not None)
        debug = (await http.get("/debug/requests/slow")).json()
    (record,) = records
    return answer, record, debug


def occupy(engine: Engine, runner: ScriptedRunner, tokenizer: BlockedTokenizer, *, with_a_step: bool) -> None:
    """Keep the only tokenize worker in the prompt of an aborted request, and the engine in the step of another."""
    inbox = Inbox()
    if with_a_step:
        engine.submit(Request(f"{OTHER}-0", (TokenPrompt([1] * 4),), SamplingParams(max_tokens=1)), inbox)
        runner.started.get()
    engine.submit(Request(f"{OTHER}-blocked", (TextPrompt("blocked"),)), inbox)
    tokenizer.entered.wait()
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


@pytest.mark.parametrize("case", CASES, ids=str)
async def test_the_delay_is_in_its_phase_and_in_no_other(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    answer, record, debug = await serve_one(case, monkeypatch)
    assert (answer.status_code, record.completion_tokens) == (200, NUM_TOKENS)
    assert {phase.name: phase.duration_ns for phase in record.times.phases()} == case.phases_ns
    assert {phase["name"]: phase["duration_ns"] for phase in debug["phases"]} == case.phases_ns
    assert record.account.waits_ns == debug["queue_waits_ns"] == case.waits_ns
    assert record.account.model_ns == case.phases_ns["prefill"] + case.phases_ns["decode"]
    # The delay of a decode step is one gap between tokens.
    assert sorted(record.account.inter_token_ns) == [*[0] * (NUM_TOKENS - 2), case.phases_ns["decode"]]
