"""Log lines as text and as JSON."""

import fcntl
import io
import json
import logging
import os
import re
import struct
import termios
from array import array
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any, Literal

import pytest
from opentelemetry.trace import TraceState

from oaiserve.facts.record import Outcome, RequestRecord, ToolCallOutcome, WaitReason
from oaiserve.facts.times import PHASES
from oaiserve.screen import Screen
from oaiserve.telemetry import logs
from oaiserve.telemetry.log_lines import ShortFormatter


@pytest.fixture(autouse=True)
def without_handlers(restored_logging: None) -> None:
    """Remove pytest's handlers during a test, so that `configure` doesn't close them."""
    logging.getLogger().handlers.clear()


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


def log_error(text: str) -> None:
    try:
        raise ValueError(text)
    except ValueError:
        logging.getLogger("oaiserve").exception("failed")


def test_json_is_one_object_per_line_with_the_extra_fields(stream: io.StringIO) -> None:
    logs.configure(form="json", stream=stream)
    logging.getLogger("oaiserve.app").info("ready on\nport %d", 8000, extra={"port": 8000})
    (line,) = stream.getvalue().splitlines()
    fields = json.loads(line)
    assert fields.pop("ts").endswith("+00:00")
    assert fields == {"level": "INFO", "logger": "oaiserve.app", "message": "ready on\nport 8000", "port": 8000}


def test_json_carries_the_traceback(stream: io.StringIO) -> None:
    logs.configure(form="json", stream=stream)
    log_error("broken")
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
    log_error(HOSTILE)
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


def test_uvicorns_messages_are_logged_once_and_in_the_same_format(stream: io.StringIO) -> None:
    logging.getLogger("uvicorn").addHandler(logging.StreamHandler(stream))
    logging.getLogger("uvicorn").propagate = False
    logs.configure(form="json", stream=stream)
    logging.getLogger("uvicorn.error").info("Started server process")
    logging.getLogger("uvicorn.error").warning("Failed", extra={"color_message": "\x1b[36mFailed"})
    assert json.loads(stream.getvalue())["message"] == "Failed"
    assert "color_message" not in stream.getvalue()


@pytest.mark.parametrize(
    ("level", "write"),
    [
        ("warning", lambda: logging.getLogger("oaiserve").info("chatter")),
        ("info", lambda: logging.getLogger("uvicorn.access").info("GET /metrics")),
        ("info", lambda: TraceState.from_header(["garbage==,="])),  # A client could fill the log with this.
    ],
    ids=["below the level", "uvicorn's access log", "a malformed tracestate"],
)
def test_what_is_not_to_be_logged_is_not(stream: io.StringIO, level: str, write: Callable[[], object]) -> None:
    logs.configure(level, stream=stream)
    write()
    assert stream.getvalue() == ""


def lines_of(stream: io.StringIO, *records: RequestRecord, form: Literal["console", "json"] = "json") -> list[Any]:
    """Return the lines of ended requests: text, or objects."""
    logs.configure(form=form, stream=stream)
    for record in records:
        logs.log_request(record)
    lines = stream.getvalue().splitlines()
    assert len(lines) == len(records)
    return lines if form == "console" else [json.loads(line) for line in lines]


GRAMMAR = {"grammar_kind": "json_schema", "grammar_compile_ms": 2.0, "grammar_cache": "miss"}
GRAMMAR |= {"num_masked_draws": 3, "num_forced_tokens": 2}
CALLS = {ToolCallOutcome.CALLED: 2, ToolCallOutcome.UNPARSED: 1}
STEPS = {"num_steps": 8, "mean_batch": 2.5, "itl_p50_ms": 100.0, "itl_p99_ms": 110.0, "itl_max_ms": 110.0}
STEPS |= {"mean_event_tokens": 1.33}
EVENTS = {
    "event_tokens": array("q", [1, 1, 1, 1, 1, 3]),
    "event_gaps_ns": array("q", [90_000_001, 110_000_001, 100_000_008, 100_000_008]),
}
WAITS = {"queue_batch_full_ms": 10.0, "queue_step_under_way_ms": 0.0}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"outcome": Outcome.REJECTED, "http_status": 429, "error_type": "Overloaded"},
            "chat demo rejected Overloaded 429 464 ms (receive 464 ms), tokens: 4 prompt",
        ),
        (
            {"outcome": Outcome.REJECTED, "http_status": 400, "error_type": "InvalidRequest", "error_param": "top_p"},
            "chat demo rejected InvalidRequest (top_p) 400 464 ms",
        ),
        ({"client": "alice"}, ", client alice, request req-1"),
        ({"adapted": ("tools: left out",)}, " generated, adapted: tools: left out, request req-1"),
        ({"adapted": ("tools: left out", "b", "c")}, ", adapted: tools: left out and 2 more, request req-1"),
        ({}, " generated, request req-1, trace "),
    ],
)
def test_the_console_line_of_a_request_reads_as_a_sentence(
    changes: dict[str, Any], text: str, stream: io.StringIO, make_record
) -> None:
    (line,) = lines_of(stream, make_record(1, **changes), form="console")
    assert text in line


def test_a_json_line_has_the_address_of_the_page_of_its_request(stream: io.StringIO, make_record) -> None:
    logs.configure(form="json", stream=stream, address_of="http://127.0.0.1:8000/requests/{}".format)
    logs.log_request(make_record())
    logging.getLogger("oaiserve").info("chatter")
    line, other = map(json.loads, stream.getvalue().splitlines())
    assert line["request_url"] == "http://127.0.0.1:8000/requests/req-1"
    assert "request_url" not in other


def short_line(record: RequestRecord, columns: int | None = None, *, url: str | None = None, **shows: bool) -> str:
    """Return the line of a request on a terminal, without its time."""
    stream = io.StringIO()
    logs.configure(stream=stream)
    address_of = None if url is None else lambda request_id: f"{url}/{request_id}"
    screen = Screen(lambda: columns, **shows)
    logging.getLogger().handlers[0].setFormatter(ShortFormatter(screen, address_of=address_of))
    logs.log_request(record)
    clock, _, line = stream.getvalue().rstrip("\n").partition(" ")
    assert re.fullmatch(r"\d\d:\d\d:\d\d", re.sub(r"\x1b\[\d*m", "", clock))
    return line


LONG_ID = f"req-{'0123456789abcdef' * 2}"
REJECTED = {"outcome": Outcome.REJECTED, "http_status": 429, "error_type": "Overloaded"}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "chat 200 464 ms 4→5 tok  prefill 50 ms  decode 400 ms  2 cached  req-1"),
        (
            {"client": "alice", "cached_tokens": 0},
            "chat 200 464 ms 4→5 tok  prefill 50 ms  decode 400 ms  alice  req-1",
        ),
        (
            REJECTED | {"prompt_tokens": 0, "cached_tokens": 0},
            "chat 429 464 ms  Overloaded  prefill 50 ms  decode 400 ms  req-1",
        ),
        (
            {"outcome": Outcome.CANCELLED, "cached_tokens": 0},
            "chat cancelled 464 ms 4→5 tok  prefill 50 ms  decode 400 ms  req-1",
        ),
        (
            {"outcome": Outcome.FAILED, "error_type": "InternalError", "error_param": "a\x1b[2J"},
            "chat failed 464 ms 4→5 tok  InternalError: a\\x1b[2J  prefill 50 ms  decode 400 ms  2 cached  req-1",
        ),
    ],
)
def test_short_line_of_a_request_has_its_outcome_and_its_longest_phases(
    changes: dict[str, Any], line: str, make_record
) -> None:
    assert short_line(make_record(**changes)) == line


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (160, f"chat 200 464 ms 4→5 tok  prefill 50 ms  decode 400 ms  2 cached  http://h/requests/{LONG_ID}"),
        (111, f"chat 200 464 ms 4→5 tok  prefill 50 ms  decode 400 ms  2 cached  {LONG_ID}"),
        (90, "chat 200 464 ms 4→5 tok  prefill 50 ms  decode 400 ms  2 cached  req-01234567…"),
        (63, "chat 200 464 ms 4→5 tok  prefill 50 ms  req-01234567…"),
        (48, "chat 200 464 ms 4→5 tok  req-01234567…"),
        (20, "chat 200 464 ms 4→5 tok"),
    ],
)
def test_the_short_line_fits_the_terminal(columns: int, line: str, make_record) -> None:
    assert short_line(make_record(request_id=LONG_ID), columns, url="http://h/requests") == line


def test_the_id_links_to_the_request_and_a_failure_stands_out(make_record) -> None:
    record = make_record(outcome=Outcome.FAILED, error_type="InternalError", http_status=500)
    line = short_line(record, 80, url="http://h/requests", has_colours=True, has_links=True)
    assert "\x1b[31;1m500\x1b[0m" in line
    assert "\x1b]8;;http://h/requests/req-1\x1b\\" in line


def test_the_width_is_that_of_the_terminal_now(make_record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    master, slave = os.openpty()
    with open(slave, "w") as terminal:
        logs.configure(form="short", stream=terminal, address_of=lambda request_id: f"http://h/requests/{request_id}")
        lines = []
        for columns in (60, 160):
            fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
            logs.log_request(make_record(request_id=LONG_ID))
            lines.append(re.sub(r"\x1b(\[[0-9;]*m|\]8;[^\x1b]*\x1b\\)|\r\n", "", os.read(master, 4096).decode()))
    os.close(master)
    assert [len(line) <= columns for line, columns in zip(lines, (60, 160), strict=True)] == [True, True]
    assert lines[0].endswith("  req-01234567…")
    assert lines[1].endswith(f"  http://h/requests/{LONG_ID}")


def test_short_lines_name_the_level_only_from_warning_on(stream: io.StringIO) -> None:
    logs.configure(form="short", stream=stream)
    logging.getLogger("oaiserve.app").info("ready")
    logging.getLogger("oaiserve.app").warning("nearly %s", HOSTILE)
    ready, warning = stream.getvalue().splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d ready", ready)
    assert warning[8:].startswith(" warning: nearly a\\r\\n")


@pytest.mark.parametrize(
    ("is_terminal", "environment", "codes"),
    [
        (False, {"TERM": "xterm"}, ("{", None)),
        (True, {"TERM": "xterm"}, ("\x1b[2m", "\x1b[33m")),
        (True, {"TERM": "xterm", "NO_COLOR": "1"}, ("", None)),
        (True, {"TERM": "dumb"}, ("", None)),
    ],
)
def test_lines_are_short_and_coloured_on_a_terminal_and_json_elsewhere(
    is_terminal: bool,
    environment: dict[str, str],
    codes: tuple[str, str | None],
    stream: io.StringIO,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    logs.configure(form="auto", stream=stream)
    logging.getLogger("oaiserve").warning("nearly full")
    first, warning = codes
    assert stream.getvalue().startswith(first)
    assert ("\x1b" in stream.getvalue()) == (warning is not None)
    assert warning is None or f"{warning}warning: nearly full" in stream.getvalue()


@pytest.mark.parametrize(("outcome", "level"), [(Outcome.FINISHED, "INFO"), (Outcome.FAILED, "WARNING")])
def test_a_failed_request_is_a_warning(outcome: Outcome, level: str, stream: io.StringIO, make_record) -> None:
    assert lines_of(stream, make_record(outcome=outcome))[0]["level"] == level


def test_a_line_has_the_wait_reasons_and_the_steps(stream: io.StringIO, make_record, account) -> None:
    account.waits_ns[WaitReason.NO_BLOCKS] = 0
    (fields,) = lines_of(stream, make_record(account=account, **EVENTS))
    assert (STEPS | WAITS | {"num_preemptions": 1, "stalled_ms": 50.0}).items() <= fields.items()
    assert "queue_no_blocks_ms" not in fields
    assert fields["message"].endswith(
        "tokens: 4 prompt, 2 cached, 5 generated, waited: step under way 0.014 µs batch full 10 ms, 8 steps of 2.5, "
        f"itl 100 ms p50 110 ms p99, 1.33 tokens per event, request req-1, trace {0xABC:032x}"
    )


def test_a_line_tells_of_the_grammar_of_drafts_and_of_the_tool_calls(
    stream: io.StringIO, make_record, constrained
) -> None:
    constrained.num_draft_tokens = 9
    constrained.num_accepted_tokens = 4
    (fields,) = lines_of(stream, make_record(account=constrained, tool_calls=CALLS))
    drafts = {"num_draft_tokens": 9, "num_accepted_tokens": 4}
    assert (GRAMMAR | drafts | {"tool_calls_called": 2, "tool_calls_unparsed": 1}).items() <= fields.items()
    assert (
        ", grammar json_schema: compiled in 2 ms (miss), masked draws 3, forced tokens 2, "
        "draft tokens 9, accepted 4, tool calls: called 2 unparsed 1, request req-1"
    ) in fields["message"]


def test_the_log_is_limited_but_for_information_and_the_lines_of_requests(stream: io.StringIO, make_record) -> None:
    limit = logs.configure(stream=stream)
    for _ in range(20):
        logging.getLogger("oaiserve.routes.door.access").warning("Refused: %s", "x")
    assert len(stream.getvalue().splitlines()) == 5
    assert limit.counts()["warning", "left_out"] == 15
    for _ in range(50):
        logging.getLogger("oaiserve").info("chatter")
        logs.log_request(make_record(outcome=Outcome.FAILED))  # each is an account of its own
    assert len(stream.getvalue().splitlines()) == 105
    assert limit.counts()["info", "written"] == 50


def test_a_log_that_nobody_reads_loses_lines_and_stops_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs._Handler, "STALL_MS", 10)
    reader, writer = os.pipe()
    size = fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    with open(reader, "rb") as end, open(writer, "w", buffering=1) as stream:
        os.write(writer, b"." * size)
        logs.configure(form="json", stream=stream)
        thread = Thread(target=lambda: [logging.getLogger("oaiserve").warning("Unread") for _ in range(3)])
        thread.start()
        thread.join(60)
        is_stopped = thread.is_alive()
        end.read(size)
        thread.join()
        assert not is_stopped
        logging.getLogger("oaiserve").warning("Read")
        lines = [json.loads(end.readline()) for _ in range(2)]
    assert [line["message"] for line in lines] == [
        "3 lines of the log are missing here, because it was not read",
        "Read",
    ]


def test_the_fields_of_the_line_are_documented(stream: io.StringIO, make_record, account) -> None:
    account.waits_ns = dict.fromkeys(WaitReason, 1)
    account.grammar_kind = "json_schema"
    account.grammar_compile_ns = 1
    record = make_record(account=account, tool_calls=dict.fromkeys(ToolCallOutcome, 1), **EVENTS)
    (fields,) = lines_of(stream, record)
    docs = Path(__file__).parents[2] / "docs"
    parts = ("telemetry.md", "Log"), ("reference/spans.md", "Fields of a log line")
    sections = [(docs / page).read_text().split(f"\n## {title}\n")[1].split("\n## ")[0] for page, title in parts]
    named = set(re.findall(r"`([a-zA-Z_0-9]+)`", " ".join(sections)))
    phases = {f"{phase}_ms" for phase in PHASES}
    waits = {f"queue_{reason}_ms" for reason in WaitReason}
    calls = {f"tool_calls_{outcome}" for outcome in ToolCallOutcome}
    assert {"PHASE_ms", "queue_REASON_ms", "tool_calls_OUTCOME"} <= named
    assert fields.keys() - phases - waits - calls <= named
