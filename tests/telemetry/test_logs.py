"""The lines of the log, for people and for machines."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
from opentelemetry.trace import TraceState

from oaiserve.telemetry import logs
from oaiserve.times import Outcome

TOUCHED = ("", "opentelemetry.trace.span", "uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi")


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    """Gives the process its own loggers back."""
    loggers = [logging.getLogger(name) for name in TOUCHED]
    before = [(list(x.handlers), x.level, x.propagate, x.disabled) for x in loggers]
    for handler in before[0][0]:  # so that `force` does not close what pytest goes on using
        loggers[0].removeHandler(handler)
    yield
    for x, (handlers, level, propagate, disabled) in zip(loggers, before, strict=True):
        x.handlers[:], x.level, x.propagate, x.disabled = handlers, level, propagate, disabled
        x.setLevel(level)


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


def test_json_is_one_object_per_line_with_the_extra_fields(stream: io.StringIO) -> None:
    logs.configure(form="json", stream=stream)
    logging.getLogger("oaiserve.app").info("ready on\nport %d", 8000, extra={"port": 8000})
    (line,) = stream.getvalue().splitlines()
    fields = json.loads(line)
    assert fields.pop("ts").endswith("+00:00")
    assert fields == {"level": "INFO", "logger": "oaiserve.app", "message": "ready on\nport 8000", "port": 8000}


def test_json_carries_the_traceback(stream: io.StringIO) -> None:
    logs.configure(form="json", stream=stream)
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("oaiserve").exception("failed")
    assert "ValueError: broken" in json.loads(stream.getvalue())["exception"]


def test_console_is_a_line_with_level_and_logger(stream: io.StringIO) -> None:
    logs.configure(stream=stream)
    logging.getLogger("oaiserve.app").warning("nearly full")
    assert "WARNING  oaiserve.app  nearly full\n" in stream.getvalue()


def test_the_level_counts(stream: io.StringIO) -> None:
    logs.configure("warning", stream=stream)
    logging.getLogger("oaiserve").info("chatter")
    assert stream.getvalue() == ""


def test_uvicorns_lines_come_once_and_in_the_same_form(stream: io.StringIO) -> None:
    logging.getLogger("uvicorn").addHandler(logging.StreamHandler(stream))
    logging.getLogger("uvicorn").propagate = False
    logs.configure(form="json", stream=stream)
    logging.getLogger("uvicorn.error").info("Started", extra={"color_message": "\x1b[36mStarted"})
    assert json.loads(stream.getvalue())["message"] == "Started"
    assert "color_message" not in stream.getvalue()


def test_uvicorns_access_lines_are_off(stream: io.StringIO) -> None:
    logs.configure(stream=stream)
    logging.getLogger("uvicorn.access").info("GET /metrics")
    assert stream.getvalue() == ""


def test_a_client_cannot_fill_the_log_with_a_malformed_tracestate(stream: io.StringIO) -> None:
    logs.configure(stream=stream)
    TraceState.from_header(["garbage==,="])
    assert stream.getvalue() == ""


def test_a_request_is_one_line_with_ids_tokens_and_phases(stream: io.StringIO, make_record) -> None:
    logs.configure(form="json", stream=stream)
    logs.log_request(make_record())
    fields = json.loads(stream.getvalue())
    assert fields["request_id"] == "req-1"
    assert fields["trace_id"] == f"{0xABC:032x}"
    assert (fields["prompt_tokens"], fields["completion_tokens"], fields["status"]) == (4, 5, 200)
    assert (fields["tokenize_ms"], fields["decode_ms"]) == (3.0, 400.0)


def test_a_request_that_never_decoded_has_no_decode_time(stream: io.StringIO, make_record) -> None:
    logs.configure(form="json", stream=stream)
    logs.log_request(make_record(2, outcome=Outcome.CANCELLED, http_status=None))
    fields = json.loads(stream.getvalue())
    assert "tokenize_wait_ms" in fields
    assert "decode_ms" not in fields


def test_the_console_line_of_a_request_reads_as_a_sentence(stream: io.StringIO, make_record) -> None:
    logs.configure(stream=stream)
    logs.log_request(make_record(1, outcome=Outcome.REJECTED, http_status=429, error_type="Overloaded"))
    assert "chat demo rejected Overloaded 429 464.0 ms (receive 464.0), tokens: 4 prompt" in stream.getvalue()


@pytest.mark.parametrize(("outcome", "level"), [(Outcome.FINISHED, "INFO"), (Outcome.FAILED, "WARNING")])
def test_a_failed_request_is_a_warning(outcome: Outcome, level: str, stream: io.StringIO, make_record) -> None:
    logs.configure(form="json", stream=stream)
    logs.log_request(make_record(outcome=outcome))
    assert json.loads(stream.getvalue())["level"] == level
