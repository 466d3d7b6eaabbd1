"""Lets requests, events and records of scripted engines cross as bytes: make test ARGS="-p tests.crossing tests/routes"

With an engine in a process of its own, requests and events are messages, and with several front processes, records are,
too. Tests of routes and plug-ins serve a scripted engine within one process. With this plug-in of pytest they do so
past both kinds of messages, and past the front's record of an open answer, which joins the parts of a whole one.
"""

from __future__ import annotations

import pytest

from oaiserve.engine.request import Deliver, Event, Request
from oaiserve.facts.record import RequestRecord
from oaiserve.fronts.messages import Record
from oaiserve.process.messages import Step, Submit
from oaiserve.process.open_answer import OpenAnswer
from oaiserve.process.plain_data import decoder, encode
from tests.routes.doubles import FakeEngine, FakeTelemetry

read_submit = decoder(Submit)
read_step = decoder(Step)
read_record = decoder(Record)
submit_here = FakeEngine.submit
record_here = FakeTelemetry.record


def submit(engine: FakeEngine, request: Request, deliver: Deliver) -> None:
    answer = OpenAnswer.of(request, deliver, engine._runtime.clock_ns)

    def deliver_crossed(events: list[Event]) -> None:
        crossed = read_step(encode(Step.of(events))).events()
        if passed := [event for each in crossed if (event := answer.take(each)) is not None]:
            deliver(passed)

    submit_here(engine, read_submit(encode(Submit.of(request, answer.submitted_ns))).request(), deliver_crossed)


def record(telemetry: FakeTelemetry, of_request: RequestRecord) -> None:
    record_here(telemetry, read_record(encode(Record.of(of_request))).record())


def pytest_configure(config: pytest.Config) -> None:
    FakeEngine.submit = submit  # type: ignore[method-assign]
    FakeTelemetry.record = record  # type: ignore[method-assign]
