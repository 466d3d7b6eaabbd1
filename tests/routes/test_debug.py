"""Tests /debug/requests: its filters, the account of one request, its page of text; and /debug/report."""

from __future__ import annotations

import base64
import struct
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oaiserve.facts.record import Cause, EngineAccount, EventKind, Outcome, RequestRecord, ToolCallOutcome, WaitReason
from oaiserve.facts.times import PHASES
from oaiserve.routes.debug import prefers
from oaiserve.routes.waterfall import COLUMNS, page
from oaiserve.telemetry.recent import RecentRequests
from tests.records import MS, record_at, record_of
from tests.routes.asking import refused
from tests.routes.conftest import Served


def full_record() -> RequestRecord:
    account = EngineAccount(
        waits_ns={WaitReason.BATCH_FULL: 90 * MS, WaitReason.STEP_UNDER_WAY: 10 * MS},
        num_preemptions=1,
        stalled_ns=25 * MS,
        first_step=5,
        num_steps=10,
        model_ns=180 * MS,
        num_step_sequences=25,
        num_step_tokens=70,
        num_events_dropped=2,
        grammar_kind="json_schema",
        grammar_compile_ns=3 * MS,
        grammar_cache="miss",
        num_masked_draws=3,
        num_forced_tokens=1,
        num_draft_tokens=7,
        num_accepted_tokens=2,
        num_prefill_steps=3,
        prefill_causes_ns={Cause.ALONE: 30 * MS, Cause.HOST: 20 * MS},
        decode_causes_ns={Cause.ALONE: 40 * MS, Cause.NEIGHBOUR_PROMPTS: 100 * MS, Cause.MACHINE: 10 * MS},
    )
    account.note(EventKind.GRAMMAR_COMPILED, 1005 * MS, None, compile_ns=3 * MS, cache="miss", kind="json_schema")
    account.note(EventKind.PREFIX_CACHE_HIT, 1110 * MS, 0, tokens=2)
    account.note(EventKind.FIRST_TOKEN, 1160 * MS, 0)
    tokens = {"prompt_tokens": 4, "cached_tokens": 2, "completion_tokens": 4, "finish_reasons": ("stop",)}
    calls = {ToolCallOutcome.CALLED: 1, ToolCallOutcome.UNPARSED: 2}
    events = {"event_tokens": array("q", [1, 1, 2, 6]), "event_gaps_ns": array("q", [20 * MS, 30 * MS, 50 * MS])}
    stamps = (0, 1, 2, 10, 110, 160, 310, 400)
    return record_at(*stamps, account=account, stream=True, tool_calls=calls, **events, **tokens)


@pytest.fixture
def some(served: Served) -> Served:
    """Return a server that remembers three requests."""
    recent = served.telemetry.recent
    recent._ring.clear()
    recent.add(full_record())
    recent.add(record_at(0, 1, 2, 4, 900, 1000, request_id="job-2", outcome=Outcome.CANCELLED))
    shared = EngineAccount(
        first_step=14, num_steps=3, num_prefill_steps=2, prefill_causes_ns={Cause.ALONE: MS}, decode_causes_ns={}
    )
    recent.add(record_at(0, 1, 2, 3, 4, 5, 6, 7, request_id="req-3", account=shared, prompt_tokens=7))
    return served


def ids(served: Served, query: str = "") -> list[str]:
    response = served.http.get(f"/debug/requests{query}")
    assert response.status_code == 200, response.text
    return [entry["request_id"] for entry in response.json()["requests"]]


def test_the_list_can_be_filtered_sorted_and_cut(some: Served) -> None:
    assert ids(some) == ["req-3", "job-2", "req-1"]
    assert ids(some, "?slowest=queue") == ["job-2", "req-1", "req-3"]
    assert ids(some, "?slowest=decode") == ["req-1", "req-3"]
    assert ids(some, "?outcome=cancelled") == ["job-2"]
    assert ids(some, "?id=req") == ["req-3", "req-1"]
    assert ids(some, "?id=req&slowest=queue&limit=1&outcome=finished") == ["req-1"]


@pytest.mark.parametrize(
    ("path", "param", "says"),
    [
        ("?slowest=lunch", "slowest", f"must be one of {', '.join(PHASES)}, got 'lunch'"),
        ("?outcome=", "outcome", "must be one of finished, cancelled, rejected, failed, got ''"),
        ("?limit=0", "limit", "must be an integer >= 1, got '0'"),
        ("?limit=1.5", "limit", "must be an integer >= 1"),
        ("?limit=-1", "limit", "must be an integer >= 1"),
        ("?limit=" + "9" * 5000, "limit", "must be an integer >= 1"),
        ("?outcom=failed", "outcom", "this route takes slowest, outcome, id, limit, model"),
        ("/req-1?format=html", "format", "must be one of json, text, got 'html'"),
        ("/req-1?limit=1", "limit", "this route takes format"),
    ],
)  # fmt: skip
def test_a_malformed_query_is_refused(some: Served, path: str, param: str, says: str) -> None:
    response = some.http.get(f"/debug/requests{path}")
    refused(response, param, says)
    assert len(response.json()["error"]["message"]) < 300


PAGE = """\
chat demo, streamed: finished 200 stop
request     req-1
trace       00000000000000000000000000000abc
received    1970-01-01 00:00:01.000 UTC
duration    400.000 ms, first token after 160.000 ms
tokens      4 prompt (2 cached), 4 generated
drafts      7 tokens: 2 accepted, 5 rejected
grammar     json_schema, compiled in 3.000 ms (miss)
            masked draws 3, forced tokens 1
tool calls  1 called, 2 unparsed

receive             1.000 ms   0.2%  |#                                       |
tokenize wait       1.000 ms   0.2%  |#                                       |
tokenize            8.000 ms   2.0%  |#                                       |
queue             100.000 ms  25.0%  | ##########                             |
prefill            50.000 ms  12.5%  |           #####                        |
decode            150.000 ms  37.5%  |                ###############         |
respond            90.000 ms  22.5%  |                               #########|

decode took 150 ms; alone it would have taken 40 ms; 100 ms came from one
    neighbour (100 ms prompts), req-3 and its prompt of 7 tokens; for 10 ms the
    machine was busy elsewhere.
queue took 100 ms; 90 ms for batch full; 10 ms for step under way.
respond took 90 ms.
prefill took 50 ms; alone it would have taken 30 ms; for 20 ms no step ran.

waited for  batch full 90.000 ms, step under way 10.000 ms
preemptions 1, stalled for 25.000 ms
event gaps  p50 30.000 ms, p99 50.000 ms, max 50.000 ms
            2.5 tokens in an event on average
steps       5 to 14, 2.5 sequences and 7.0 tokens each
            in the model 180.000 ms, between them 20.000 ms

events, since it was received
       5.000 ms  grammar compiled  compile 3.000 ms cache miss kind json_schema
     110.000 ms  prefix cache hit  choice 0  tokens 2
     160.000 ms  first token       choice 0
                 and 2 more

shared steps with 1 of the last requests
     1 steps  chat, 7 + 0 tokens, req-3
"""


def test_the_account_comes_as_text_if_the_query_or_the_header_asks_for_it(some: Served) -> None:
    by_query = some.http.get("/debug/requests/req-1?format=text")
    assert by_query.headers["content-type"] == "text/plain; charset=utf-8"
    assert by_query.text == PAGE
    by_header = some.http.get("/debug/requests/req-1", headers={"accept": "text/plain"})
    assert by_header.text == PAGE
    explicit = some.http.get("/debug/requests/req-1?format=json", headers={"accept": "text/plain"})
    assert explicit.json()["request_id"] == "req-1"


def test_an_unknown_id_is_a_404_in_json(some: Served) -> None:
    refused(some.http.get("/debug/requests/nobody?format=text"), None, status=404)


@pytest.mark.parametrize(
    ("accept", "is_text"),
    [
        ("", False),
        ("*/*", False),
        ("text/plain", True),
        ("text/*", True),
        ("text/plain, */*;q=0.5", True),
        ("application/json, text/plain", False),
        ("application/json;q=0.5, text/plain;q=0.9", True),
        ("application/json, text/plain;q=0.9", False),
        ("text/html,application/xhtml+xml,*/*;q=0.8", False),
        ("TEXT/PLAIN; Q=1", True),
        ("text/plain;q=high", False),
        ("text/plain;q=0, */*", False),
        (",;,", False),
    ],
)
def test_the_accept_header_decides_between_text_and_json(accept: str, is_text: bool) -> None:
    assert prefers("text/plain", accept) == is_text


TIMES = st.lists(st.integers(0, 10**10), min_size=2, max_size=8).map(sorted)


@given(
    TIMES,
    st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=128),
    st.sampled_from(Outcome),
    st.builds(
        EngineAccount,
        waits_ns=st.dictionaries(st.sampled_from(WaitReason), st.integers(0, 10**13)),
        num_preemptions=st.integers(0, 10**6),
        first_step=st.none() | st.integers(0, 10**12),
        num_steps=st.integers(0, 10**9),
        num_step_tokens=st.integers(0, 10**12),
        grammar_kind=st.none() | st.just("lark_with_schemas"),
        grammar_compile_ns=st.none() | st.integers(0, 10**13),
        num_masked_draws=st.integers(0, 10**12),
        num_draft_tokens=st.integers(0, 10**12),
    ),
    st.lists(st.integers(0, 10**13), max_size=4),
)
def test_no_line_is_too_long_and_every_phase_has_its_bar(
    stamps: list[int], name: str, outcome: Outcome, account: EngineAccount, gaps: list[int]
) -> None:
    account.note(EventKind.RESUMED, stamps[-1], 10**6, cached_tokens=10**9, stalled_ns=10**15)
    events = {"event_tokens": array("q", [1, *gaps]), "event_gaps_ns": array("q", gaps)}
    record = record_of(*stamps, request_id=name, outcome=outcome, model=name, account=account, **events)
    recent = RecentRequests(2, 0)
    recent.add(record)
    recent.add(record_at(0, 0, request_id="x" * 128, account=account))
    text = page(recent.get(name) or {})
    assert max(map(len, text.splitlines())) <= COLUMNS
    bars = [line for line in text.splitlines() if line.endswith("|")]
    assert [bar[:13].rstrip() for bar in bars] == [name.replace("_", " ") for name in PHASES[: len(stamps) - 1]]
    assert all("#" in bar for bar in bars)


def test_the_report_has_its_keys_in_64_bits_each(served: Served) -> None:
    got = served.http.get("/debug/report")
    assert got.status_code == 200
    report = got.json()
    assert [*struct.unpack("<2Q", base64.b64decode(report.pop("keys")))] == [1, 2**64 - 1]
    assert report == {
        "incarnation": "fake",
        "number": 3,
        "num_open": 1.5,
        "waiting_tokens": 20.0,
        "num_running": 2,
        "num_waiting": 1,
        "kv_use": 0.25,
        "is_ready": True,
        "step_seconds": 0.0,
        "pace": [0.0, 0.0],
        "is_hung": False,
        "models": ["org/demo"],
    }
