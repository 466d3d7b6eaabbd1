"""Log lines as text and as JSON."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.trace import TraceState

from oaiserve.facts.record import EngineAccount, Outcome, ToolCallOutcome, WaitReason
from oaiserve.facts.times import PHASES
from oaiserve.telemetry import logs

TOUCHED = ("", "opentelemetry.trace.span", "uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi")


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    """Restore the loggers of the process after each test."""
    loggers = [logging.getLogger(name) for name in TOUCHED]
    before = [(list(x.handlers), x.level, x.propagate, x.disabled) for x in loggers]
    for handler in before[0][0]:  # so that `force` does not close handlers of pytest
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


HOSTILE = "a\r\n2026-11-20 08:14:02.123 INFO     forged \x1b[2J\x9b31m\u202e\u2028\x00\x7f"


def test_a_clients_text_can_neither_end_a_console_line_nor_reach_the_terminal(stream: io.StringIO) -> None:
    logs.configure(stream=stream)
    logging.getLogger("oaiserve").info("got %s", HOSTILE)
    (line,) = stream.getvalue().splitlines()
    assert "got a\\r\\n2026-11-20" in line
    assert line.isprintable()


def test_a_clients_text_in_a_traceback_looks_like_no_line_of_the_log(stream: io.StringIO) -> None:
    logs.configure(stream=stream)
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logging.getLogger("oaiserve").exception("failed")
    first, *others = stream.getvalue().splitlines()
    assert first.endswith("ERROR    oaiserve  failed")
    assert [line for line in others if not line.startswith("  ") or not line.isprintable()] == []
    assert any("forged" in line for line in others)


def test_a_clients_text_in_json_is_escaped(stream: io.StringIO) -> None:
    logs.configure(form="json", stream=stream)
    logging.getLogger("oaiserve").info("got %s", HOSTILE, extra={"x": HOSTILE})
    (line,) = stream.getvalue().splitlines()
    assert line.isprintable()
    assert json.loads(line)["x"] == HOSTILE


def test_messages_below_the_level_are_not_logged(stream: io.StringIO) -> None:
    logs.configure("warning", stream=stream)
    logging.getLogger("oaiserve").info("chatter")
    assert stream.getvalue() == ""


def test_uvicorns_messages_are_logged_once_and_in_the_same_format(stream: io.StringIO) -> None:
    logging.getLogger("uvicorn").addHandler(logging.StreamHandler(stream))
    logging.getLogger("uvicorn").propagate = False
    logs.configure(form="json", stream=stream)
    logging.getLogger("uvicorn.error").info("Started server process")
    logging.getLogger("uvicorn.error").warning("Failed", extra={"color_message": "\x1b[36mFailed"})
    assert json.loads(stream.getvalue())["message"] == "Failed"
    assert "color_message" not in stream.getvalue()


def test_uvicorns_access_log_is_off(stream: io.StringIO) -> None:
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
    wrong = {"http_status": 400, "error_type": "InvalidRequest", "error_param": "top_p"}
    logs.log_request(make_record(1, outcome=Outcome.REJECTED, **wrong))
    assert "chat demo rejected InvalidRequest (top_p) 400 464.0 ms" in stream.getvalue()


@pytest.mark.parametrize(("outcome", "level"), [(Outcome.FINISHED, "INFO"), (Outcome.FAILED, "WARNING")])
def test_a_failed_request_is_a_warning(outcome: Outcome, level: str, stream: io.StringIO, make_record) -> None:
    logs.configure(form="json", stream=stream)
    logs.log_request(make_record(outcome=outcome))
    assert json.loads(stream.getvalue())["level"] == level


def test_the_line_has_the_name_of_the_key(stream: io.StringIO, make_record) -> None:
    logs.configure(stream=stream)
    logs.log_request(make_record(client="alice"))
    logs.log_request(make_record())
    named, other = stream.getvalue().splitlines()
    assert ", client alice, request req-1" in named
    assert "client" not in other


def test_a_line_has_the_wait_reasons_and_the_steps(stream, make_record, account) -> None:
    logs.configure(form="json", stream=stream)
    account.waits_ns[WaitReason.NO_BLOCKS] = 0
    logs.log_request(make_record(account=account))
    fields = json.loads(stream.getvalue())
    assert (fields["queue_batch_full_ms"], fields["queue_step_under_way_ms"]) == (10.0, 0.0)
    assert "queue_no_blocks_ms" not in fields
    assert (fields["num_steps"], fields["mean_batch"]) == (8, 2.5)
    assert (fields["itl_p50_ms"], fields["itl_p99_ms"], fields["itl_max_ms"]) == (100.0, 110.0, 110.0)
    assert (fields["num_preemptions"], fields["stalled_ms"]) == (1, 50.0)


def test_a_line_tells_of_the_grammar_and_of_the_tool_calls(stream: io.StringIO, make_record, constrained) -> None:
    logs.configure(form="json", stream=stream)
    calls = {ToolCallOutcome.CALLED: 2, ToolCallOutcome.UNPARSED: 1}
    logs.log_request(make_record(account=constrained, tool_calls=calls))
    logs.log_request(make_record())
    fields, other = map(json.loads, stream.getvalue().splitlines())
    expected = {
        "grammar_kind": "json_schema",
        "grammar_compile_ms": 2.0,
        "grammar_cache": "miss",
        "num_masked_draws": 3,
        "num_forced_tokens": 2,
        "tool_calls_called": 2,
        "tool_calls_unparsed": 1,
    }
    assert expected.items() <= fields.items()
    assert not expected.keys() & other.keys()
    assert (
        ", grammar json_schema: compiled in 2.0 ms (miss), masked draws 3, forced tokens 2, "
        "tool calls: called 2 unparsed 1, request req-1"
    ) in fields["message"]


def test_a_line_tells_of_drafts(stream: io.StringIO, make_record) -> None:
    logs.configure(form="json", stream=stream)
    logs.log_request(make_record(account=EngineAccount(num_draft_tokens=9, num_accepted_tokens=4)))
    fields = json.loads(stream.getvalue())
    assert (fields["num_draft_tokens"], fields["num_accepted_tokens"]) == (9, 4)
    assert ", draft tokens 9, accepted 4, " in fields["message"]


def test_a_line_omits_steps_and_token_times_of_a_request_without_them(stream: io.StringIO, make_record) -> None:
    logs.configure(form="json", stream=stream)
    logs.log_request(make_record())
    assert not {"num_steps", "mean_batch", "itl_p50_ms"} & json.loads(stream.getvalue()).keys()


def test_the_console_line_stays_one_line(stream: io.StringIO, make_record, account) -> None:
    logs.configure(stream=stream)
    logs.log_request(make_record(account=account))
    (line,) = stream.getvalue().splitlines()
    assert line.endswith(
        "tokens: 4 prompt, 2 cached, 5 generated, waited: step_under_way 0.0 batch_full 10.0, 8 steps of 2.5, "
        f"itl 100.0 p50 110.0 p99, request req-1, trace {0xABC:032x}"
    )


def test_the_prompt_is_never_logged(stream: io.StringIO, make_record) -> None:
    logs.configure(form="json", stream=stream)
    logs.log_request(make_record(prompt_text="a secret"))
    assert "secret" not in stream.getvalue()


def test_the_fields_of_the_line_are_documented(stream: io.StringIO, make_record, account) -> None:
    logs.configure(form="json", stream=stream)
    account.waits_ns = dict.fromkeys(WaitReason, 1)
    account.grammar_kind, account.grammar_compile_ns = "json_schema", 1
    logs.log_request(make_record(account=account, tool_calls=dict.fromkeys(ToolCallOutcome, 1)))
    page = (Path(__file__).parents[2] / "docs" / "telemetry.md").read_text()
    named = set(re.findall(r"`([a-zA-Z_0-9]+)`", page.split("\n## Log\n")[1].split("\n## ")[0]))
    phases = {f"{phase}_ms" for phase in PHASES}
    waits = {f"queue_{reason}_ms" for reason in WaitReason}
    calls = {f"tool_calls_{outcome}" for outcome in ToolCallOutcome}
    assert {"PHASE_ms", "queue_REASON_ms", "tool_calls_OUTCOME"} <= named
    assert json.loads(stream.getvalue()).keys() - phases - waits - calls <= named
