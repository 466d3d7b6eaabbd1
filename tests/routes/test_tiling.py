"""Tests that the phases of a request touch, do not overlap, and add up exactly, however the request ends.

The routes are real. The stages behind them follow a random schedule, on a clock that nothing else moves.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import Message

from oaiserve.app import create_app
from oaiserve.config import Config
from oaiserve.engine.request import Deliver, FinishReason, Request, TokenChunk, Usage
from oaiserve.errors import InternalError, Unavailable
from oaiserve.facts.record import Outcome, RequestRecord
from oaiserve.facts.times import PHASES, STAMPS, Phase, RequestTimes
from tests.clocks import put_on_clock
from tests.engine.doubles import Clock
from tests.routes.doubles import FakeEngine, FakeTelemetry, failed, finished, prompts_done

ROUTE = "/v1/completions"
BODIES = {False: b'{"prompt": "Hi"}', True: b'{"prompt": "Hi", "stream": true}'}
DECODE, RESPOND = PHASES.index("decode") + 1, PHASES.index("respond") + 1  # as numbers of phases


@dataclass(frozen=True)
class Schedule:
    lasting_ns: tuple[int, ...]  # how long each phase lasts; the request ends in the last of them
    outcome: Outcome
    stream: bool

    @property
    def num_phases(self) -> int:
        return len(self.lasting_ns)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    num_phases, stream = draw(st.integers(1, len(PHASES))), draw(st.booleans())
    outcomes = {*Outcome} - {Outcome.REJECTED if num_phases == RESPOND else Outcome.FINISHED}
    if num_phases == DECODE and stream:
        outcomes -= {Outcome.REJECTED}  # its status has been sent
    lasting_ns = draw(st.lists(st.integers(0, 10**15), min_size=num_phases, max_size=num_phases))
    return Schedule(tuple(lasting_ns), draw(st.sampled_from(sorted(outcomes))), stream)


class Stages(FakeEngine):
    """The tokenize worker, the engine, and the client's side of the connection. They keep each stamp that they write
    until the request has ended."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__()
        self._schedule = schedule
        self._has_left = asyncio.Event()
        self._parts = iter([b"", BODIES[schedule.stream]])
        self._times = RequestTimes()
        self.clock = Clock()
        self.stamped_ns: list[int] = []
        self.ended_ns: int | None = None
        self.sent: list[Message] = []

    # -- the client ---------------------------------------------------------------------------------------------------

    async def receive(self) -> Message:
        part = next(self._parts, None)
        if part is None:
            await self._has_left.wait()
        elif part:
            self._pass(1)
            if not self._ends_in(1, Outcome.CANCELLED):
                return {"type": "http.request", "body": part, "more_body": False}
        else:
            self.stamped_ns.append(self.clock())
            return {"type": "http.request", "body": part, "more_body": True}
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)
        if self._schedule.num_phases < RESPOND or message["type"] == "http.response.start" or message["more_body"]:
            return
        self._pass(RESPOND)
        if self._schedule.outcome is Outcome.FAILED:
            raise RuntimeError("the connection broke")
        if self._schedule.outcome is Outcome.CANCELLED:
            self._has_left.set()
            await asyncio.sleep(0)  # the route receives the disconnect

    # -- the stages ---------------------------------------------------------------------------------------------------

    def submit(self, request: Request, deliver: Deliver) -> None:
        if self._ends_in(1, Outcome.FAILED):
            raise RuntimeError("a bug")
        if self._ends_in(1, Outcome.REJECTED):
            raise Unavailable("The server is not ready.")
        self.open[request.request_id] = deliver
        self._times = self.times[request.request_id] = RequestTimes(request.received_ns)
        for number in range(1, self._schedule.num_phases):
            self._stamp(number)
            if STAMPS[number] == "first_token":
                chunk = TokenChunk(request.request_id, 0, "Hello", [1], None, FinishReason.LENGTH)
                self.deliver([*prompts_done(request), chunk])
            if number + 1 < RESPOND:
                self._pass(number + 1)
        usage = Usage(1, 0, 1)
        if self._schedule.num_phases == RESPOND:
            self.deliver([finished(request.request_id, usage)])
        elif self._schedule.outcome is Outcome.REJECTED:
            self.deliver([failed(request.request_id, Unavailable("It waited for too long."), usage)])
        elif self._schedule.outcome is Outcome.FAILED:
            self.deliver([failed(request.request_id, InternalError("The step failed."), usage)])
        else:
            self._has_left.set()

    def at_the_end(self) -> int:
        """Return the time at which the record is made."""
        self.ended_ns = self.clock()
        return self.ended_ns

    def _stamp(self, number: int) -> None:
        setattr(self._times, STAMPS[number], self.clock())
        self.stamped_ns.append(self.clock())

    def _pass(self, num_phases: int) -> None:
        self.clock.now_ns += self._schedule.lasting_ns[num_phases - 1]

    def _ends_in(self, num_phases: int, outcome: Outcome) -> bool:
        return (self._schedule.num_phases, self._schedule.outcome) == (num_phases, outcome)


async def serve(schedule: Schedule, patch: pytest.MonkeyPatch) -> tuple[Stages, RequestRecord]:
    stages, telemetry = Stages(schedule), FakeTelemetry()
    put_on_clock(patch, stages.clock)
    patch.setattr(RequestTimes.ended, "__defaults__", (stages.at_the_end,))
    app = create_app(Config("demo"), stages, telemetry)  # type: ignore[arg-type]
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": ROUTE,
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
    }
    async with app.router.lifespan_context(app):
        try:
            await app(scope, stages.receive, stages.send)
        except RuntimeError:
            assert (schedule.num_phases, schedule.outcome) == (RESPOND, Outcome.FAILED)
    (record,) = telemetry.records.queue
    return stages, record


@settings(max_examples=150)
@given(schedules())
def test_phases_tile_however_a_request_ends_and_the_header_has_those_that_are_over(schedule: Schedule) -> None:
    with pytest.MonkeyPatch.context() as patch:
        stages, record = asyncio.run(serve(schedule, patch))
    assert record.outcome is schedule.outcome

    phases = record.times.phases()
    assert stages.ended_ns is not None
    assert phases == [
        Phase(*row) for row in zip(PHASES, stages.stamped_ns, [*stages.stamped_ns[1:], stages.ended_ns], strict=False)
    ]
    assert all(left.end_ns == right.start_ns for left, right in pairwise(phases))
    assert all(phase.duration_ns >= 0 for phase in phases)
    assert sum(phase.duration_ns for phase in phases) == record.times.duration_ns
    assert record.times.duration_ns == stages.ended_ns - stages.stamped_ns[0]
    if schedule.num_phases >= DECODE:
        assert record.times.time_to_first_token_ns == sum(schedule.lasting_ns[:5])
    else:
        assert record.times.time_to_first_token_ns is None

    heads = [dict(message["headers"]) for message in stages.sent if message.get("status") == 200]
    assert heads or schedule.num_phases < RESPOND
    over = [f"{phase.name};dur={phase.duration_ns / 1e6:.3f}" for phase in phases[:-1]]
    assert all(head[b"server-timing"].decode() == ", ".join(over) for head in heads)
