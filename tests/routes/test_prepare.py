"""Tests that a new generation route needs only `prepare` and a shape: named events, no [DONE], its own error events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx
import msgspec
import pytest
from starlette.middleware import Middleware
from starlette.requests import Request as HTTPRequest
from starlette.routing import Route

from oaiserve.app import create_app
from oaiserve.config import Config
from oaiserve.engine.request import PromptDone, SamplingParams, TextPrompt, TokenChunk, Usage
from oaiserve.errors import InternalError
from oaiserve.facts.record import Outcome
from oaiserve.routes import sse
from oaiserve.routes.bodies import SamplingBody
from oaiserve.routes.exchange import Accounting
from oaiserve.routes.prepare import Intake, prepare
from oaiserve.routes.respond import Answer, Timings
from tests.routes.asking import refused
from tests.routes.conftest import Served, run_server
from tests.routes.doubles import FakeEngine, FakeTelemetry, fails

encode = msgspec.json.encode


class SpeechBody(SamplingBody, kw_only=True):
    input: str
    max_output_tokens: int | None = None


class SpeechShape:
    """Renders an answer as the text so far, in named events."""

    def __init__(self, answer_id: str) -> None:
        self._id = answer_id

    def prompt(self, event: PromptDone) -> Iterator[bytes]:
        yield sse.event(encode({"id": self._id, "input_tokens": len(event.token_ids)}), "speech.created")

    def delta(self, chunk: TokenChunk) -> bytes:
        return sse.event(encode(chunk.text), "speech.delta")

    def finished(self, usage: Usage, timings: Timings) -> Iterator[bytes]:
        yield sse.event(encode({"output_tokens": usage.completion_tokens}), "speech.completed")

    def failed(self, error: Mapping[str, Any]) -> bytes:
        return sse.event(encode(error["error"]["message"]), "speech.failed")

    def whole(self, prompts: Sequence[PromptDone], choices: Sequence[TokenChunk], usage: Usage) -> Iterator[bytes]:
        yield encode({"id": self._id, "text": choices[0].text})


async def speech(http: HTTPRequest) -> Answer:
    return await prepare(http, msgspec.json.Decoder(SpeechBody), speech_answer, id_prefix="speech_")


def speech_answer(intake: Intake[SpeechBody]) -> Answer:
    params, _ = intake.checked(SamplingParams(max_tokens=intake.body.max_output_tokens))
    return intake.answer(params, (TextPrompt(intake.body.input),), SpeechShape(intake.head.id))


@pytest.fixture(scope="module")
def speaking() -> Iterator[Served]:
    engine, telemetry = FakeEngine(), FakeTelemetry()
    app = create_app(Config("org/demo"), engine, telemetry)
    accounting = Middleware(Accounting, operation="speech", http_route="/v1/speech")
    app.router.routes.append(Route("/v1/speech", speech, methods=["POST"], middleware=[accounting]))
    with run_server(app) as url, httpx.Client(base_url=url, timeout=60) as http:
        yield Served(url, engine, telemetry, http)


def events_of(response: httpx.Response) -> list[tuple[str, Any]]:
    blocks = [block.split("\n") for block in response.text.removesuffix("\n\n").split("\n\n")]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in blocks]


def test_a_new_route_has_events_of_its_own(speaking: Served) -> None:
    response = speaking.post("/v1/speech", input="Hi", stream=True)
    record = speaking.telemetry.next_record()
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert record.response_id is not None
    assert record.response_id.startswith("speech_")
    assert events_of(response) == [
        ("speech.created", {"id": record.response_id, "input_tokens": 3}),
        ("speech.delta", "Hello world"),
        ("speech.completed", {"output_tokens": 2}),
    ]
    assert (record.operation, record.outcome, record.stream) == ("speech", Outcome.FINISHED, True)


def test_a_new_route_has_error_events_of_its_own(speaking: Served) -> None:
    speaking.engine.script = fails(InternalError("The step failed."), "Hel")
    events = events_of(speaking.post("/v1/speech", input="Hi", stream=True))
    speaking.engine.reset()
    assert events[1:] == [("speech.delta", "Hel"), ("speech.failed", "The step failed.")]
    assert speaking.telemetry.next_record().outcome == Outcome.FAILED


def test_a_new_route_has_a_whole_answer_of_its_own(speaking: Served) -> None:
    response = speaking.post("/v1/speech", input="Hi", max_output_tokens=7, temperature=0)
    assert response.headers["content-type"] == "application/json"
    assert response.json()["text"] == "Hello world"
    request = speaking.engine.submitted.queue[-1]
    assert request.prompts == (TextPrompt("Hi"),)
    assert request.params == SamplingParams(max_tokens=7, temperature=0)
    assert speaking.telemetry.next_record().params == {"max_tokens": 7, "temperature": 0}


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [({}, 400, "input"), ({"model": "other"}, 404, "model"), ({"temperature": 3}, 400, "temperature")],
)
def test_a_new_route_refuses_what_the_others_refuse(
    speaking: Served, body: dict[str, Any], status: int, param: str
) -> None:
    body = body and {"input": "Hi", **body}
    refused(speaking.post("/v1/speech", **body), param, status=status)
    assert speaking.telemetry.next_record().outcome == Outcome.REJECTED
