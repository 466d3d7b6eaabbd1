"""The ring of recent requests."""

import weakref
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oaiserve.facts.record import EngineAccount, ReadAgain
from oaiserve.facts.times import RequestTimes
from oaiserve.facts.turn import Turn, TurnPrompt
from oaiserve.telemetry.recent import MOST_NEIGHBOURS, RecentRequests


def ids(entries: list[dict[str, object]]) -> list[object]:
    return [entry["request_id"] for entry in entries]


def test_the_last_n_are_listed_newest_first_and_found_by_id(make_record) -> None:
    recent = RecentRequests(2, lambda: 0)
    for number, request_id in enumerate(("a", "b", "c")):
        recent.add(make_record(request_id=request_id, prompt_tokens=number))
    assert ids(recent.list()) == ["c", "b"]
    assert recent.get("b")["prompt_tokens"] == 1
    assert recent.get("a") is None
    nothing = RecentRequests(0, lambda: 0)
    nothing.add(make_record())
    assert nothing.list() == []


def test_phases_have_shares_and_milliseconds_and_the_request_its_wall_clock_time(make_record) -> None:
    record = make_record()
    recent = RecentRequests(1, epoch_offset_ns=lambda: 5_000)
    recent.add(record)
    (entry,) = recent.list()
    assert entry["phases"][3]["duration_ms"] == record.times.phases()[3].duration_ns / 1e6
    assert sum(phase["share"] for phase in entry["phases"]) == pytest.approx(1)
    assert entry["received_unix_ns"] == record.times.received + 5_000


def test_a_request_keeps_its_time_of_day_when_the_clock_is_set_later(make_record) -> None:
    offsets_ns = [5_000, 900_000]
    recent = RecentRequests(2, epoch_offset_ns=lambda: offsets_ns.pop(0))
    record = make_record()
    recent.add(record)
    recent.add(record)
    for rows in (False, True):
        times = [entry["received_unix_ns"] - record.times.received for entry in recent.list(rows=rows)]
        assert times == [900_000, 5_000]


def test_the_gaps_between_tokens_are_not_kept(make_record) -> None:
    recent = RecentRequests(1, lambda: 0)
    gaps = array("q", [5, 1, 2])
    tokens = array("q", [1, 4])
    between = array("q", [7])
    references = [weakref.ref(each) for each in (gaps, tokens, between)]
    account = EngineAccount(inter_token_ns=between)
    recent.add(make_record(account=account, event_gaps_ns=gaps, event_tokens=tokens))
    del gaps, tokens, between, account
    assert [reference() for reference in references] == [None] * 3
    assert recent.list()[0]["token_gaps"] == {"number": 3, "p50_ns": 2, "p99_ns": 5, "max_ns": 5}
    assert recent.list()[0]["mean_event_tokens"] == 2.5


def test_the_id_of_a_run_is_kept_without_its_prompt(make_record) -> None:
    recent = RecentRequests(1, lambda: 0)
    turn = Turn("run_1", True, "", 0, lambda: TurnPrompt("", False, "", (), {}))
    prompt = weakref.ref(turn.prompt)
    recent.add(make_record(turn=turn))
    del turn
    assert (recent.list()[0]["run_id"], prompt()) == ("run_1", None)


@given(st.lists(st.tuples(st.none() | st.integers(0, 30), st.integers(0, 8)), min_size=1, max_size=40))
def test_neighbours_are_the_requests_with_shared_steps(make_record, ranges: list[tuple[int | None, int]]) -> None:
    recent = RecentRequests(100, lambda: 0)
    for index, (first, number) in enumerate(ranges):
        recent.add(make_record(request_id=str(index), account=EngineAccount(first_step=first, num_steps=number)))
    steps = [set() if first is None else set(range(first, first + number)) for first, number in ranges]
    expected = {str(index): len(steps[0] & steps[index]) for index in range(1, len(ranges)) if steps[0] & steps[index]}
    entry = recent.get("0")
    shares = {other["request_id"]: other["num_shared_steps"] for other in entry["neighbours"]}
    assert entry["num_neighbours"] == len(expected)
    assert len(shares) == min(len(expected), MOST_NEIGHBOURS)
    assert shares.items() <= expected.items()
    assert list(shares.values()) == sorted(expected.values(), reverse=True)[:MOST_NEIGHBOURS]


def test_a_neighbour_of_the_same_id_is_another_request(make_record) -> None:
    recent = RecentRequests(2, lambda: 0)
    for _ in range(2):
        recent.add(make_record(account=EngineAccount(first_step=1, num_steps=1)))
    assert ids(recent.get("req-1")["neighbours"]) == ["req-1"]


def test_the_requests_that_an_explanation_names_are_listed(make_record) -> None:
    recent = RecentRequests(5, lambda: 0)
    again = {"read_again_tokens": 4, "read_again_reason": ReadAgain.EVICTED, "prompt_tokens": 4}
    for record in (
        make_record(request_id="not-named"),
        make_record(request_id="open"),  # It is in the text only as a part of another id.
        make_record(request_id="a", **again, reuse={"evicted_for": "still-open", "evicted_ns": 5}),
    ):
        recent.add(record)
    entry = recent.get("a")
    assert "request still-open took the place" in entry["explanation"][0]
    assert entry["explanation_requests"] == ["still-open"]


def test_phases_of_a_neighbour_are_relative_to_the_requested_one(make_record) -> None:
    recent = RecentRequests(2, lambda: 0)
    account = EngineAccount(first_step=1, num_steps=1)
    recent.add(make_record(request_id="a", account=account, times=RequestTimes(received=1000, responded=1500)))
    recent.add(make_record(request_id="b", account=account, times=RequestTimes(received=900, responded=1200)))
    (other,) = recent.get("a")["neighbours"]
    assert other["phases"] == [{"name": "receive", "start_ns": -100, "duration_ns": 300}]
