from typing import Any

import pytest

from loadtest.errors import UsageError
from loadtest.measure import measure, oversaturation, parse_slos, series, steady_state
from loadtest.sample import Sample
from tests.loadtest.samples import sample


def test_the_times_of_one_request() -> None:
    one = sample([100, 110, 130, 160], at=5, lag=20)
    values = series([one])
    assert values["send_lag"] == [0.020]
    assert values["ttft"] == [0.100]
    assert values["ttft_from_send"] == [0.080]
    assert values["tpot"] == [pytest.approx(0.060 / 3)]
    assert values["itl"] == [0.010, 0.020, 0.030]
    assert values["latency"] == [0.160]
    assert values["latency_from_send"] == [0.140]


def test_tokens_are_counted_by_usage_if_an_event_has_several() -> None:
    one = sample([100, 140, 180], completion_tokens=9)
    metrics = measure([one])
    assert metrics["distributions"]["tpot"]["p50"] == pytest.approx(0.080 / 6)
    assert metrics["distributions"]["itl"]["p50"] == pytest.approx(0.040)
    assert metrics["tokens_per_event"] == 3
    assert metrics["completion_tokens_per_second"] == pytest.approx(9 / 0.180)
    assert metrics["token_counts_from"] == "usage"
    assert measure([sample([100, 140], completion_tokens=None)])["token_counts_from"] == "events"


@pytest.mark.parametrize(
    ("events_ms", "fields"),
    [
        ([80 * number for number in range(1, 26)], {"completion_tokens": 100}),  # four tokens in each event
        ([20, *(20 + 80 * number for number in range(1, 25))], {"completion_tokens": 97, "first_tokens": 1}),
        (
            [20, *(20 + 80 * number for number in range(1, 25))],
            {"completion_tokens": 97, "num_characters": 970, "first_characters": 10},
        ),
        (
            [80, 80, 160, 160],
            {"completion_tokens": 16, "num_choices": 2, "event_choices": [0, 1, 0, 1]},
        ),
        ([20, 40, 60], {"completion_tokens": 3, "num_characters": 30, "first_characters": 28}),
    ],
)
def test_the_time_per_token_is_that_after_the_first_event_by_its_tokens_or_text(
    events_ms: list[float], fields: dict[str, Any]
) -> None:
    """A server that makes a token every 20 ms has that time per token, however many it puts into an event."""
    assert sample(events_ms, **fields).tpot_ns == pytest.approx(20e6, rel=1e-9)


def test_gaps_between_tokens_are_measured_within_each_choice() -> None:
    """One choice has a token every 10 ms from 100 ms on, the other one every 30 ms from 105 ms on."""
    both = sample([100, 105, 110, 120, 135, 165], event_choices=[0, 1, 0, 0, 1, 1], num_choices=2, requested_tokens=3)
    both.must_fill = True
    values = series([both])
    assert (values["ttft"], values["latency"]) == ([0.100], [0.165])
    assert sorted(values["itl"]) == [pytest.approx(ms / 1e3) for ms in (10, 10, 30, 30)]
    assert values["tpot"] == [pytest.approx((0.020 + 0.060) / 4)]
    metrics = measure([both])
    assert (metrics["completion_tokens"], metrics["num_wrong_length"], metrics["events_per_read"]) == (6, 0, 1)
    step = sample([100, 100, 110, 110], event_choices=[0, 1, 0, 1], num_choices=2)
    assert measure([step])["events_per_read"] == 1, "each read has an event of both, which is no bunch"


def test_events_of_one_read_share_a_stamp_and_raise_events_per_read() -> None:
    metrics = measure([sample([100, 100, 100, 200])])
    assert metrics["events_per_read"] == 2
    assert metrics["distributions"]["itl"]["max"] == pytest.approx(0.100)
    assert metrics["distributions"]["itl"]["p50"] == 0


def test_one_token_has_no_time_per_output_token_and_without_streaming_the_first_token_is_the_whole_answer() -> None:
    assert measure([sample([100])])["distributions"]["tpot"] is None
    values = series([sample([300], completion_tokens=5, is_stream=False)])
    assert (values["ttft"], values["tpot"], values["latency"]) == ([0.3], [], [0.3])


def test_events_after_the_last_output_do_not_extend_the_latency() -> None:
    late_usage = sample([100, 200], end_ns=10**9 + 900_000_000)
    assert series([late_usage])["latency"] == [0.2]
    assert measure([late_usage])["window_seconds"] == pytest.approx(0.9)


def test_a_client_that_is_late_does_not_make_the_server_look_faster() -> None:
    """There is no coordinated omission: the delay of a blocked client counts as latency."""
    stuck = [sample([1000 - 100 * i + 10], at=100 * i, lag=1000 - 100 * i) for i in range(10)]
    metrics = measure(stuck)
    assert metrics["distributions"]["ttft"]["max"] == pytest.approx(1.010)
    assert metrics["distributions"]["ttft_from_send"]["max"] == pytest.approx(0.010)


def test_failed_requests_count_as_slo_misses_but_not_in_the_times() -> None:
    good = sample([100, 200])
    cut = sample([100], at=0, error="disconnected", completion_tokens=None)
    refused = sample([], at=0, error="http_503", error_message="full", end_ns=10**9 + 1_000_000_000)
    unconnected = sample([], at=0, error="connect")
    unconnected.headers_ns = None
    left = sample([100], is_abandoned=True)
    metrics = measure([good, cut, refused, unconnected, left], parse_slos("ttft:150ms,latency:1s"))
    assert metrics["errors"] == {
        "disconnected, mid_stream": 1,
        "http_503, before_first_token": 1,
        "connect, connect": 1,
    }
    assert metrics["error_messages"] == {"http_503, before_first_token": "full"}
    assert (metrics["num_ok"], metrics["num_abandoned"], metrics["num_judged"]) == (1, 1, 4)
    assert metrics["window_seconds"] == pytest.approx(1.0)
    assert metrics["slo_attainment"] == {"ttft": 0.25, "latency": 0.25, "all": 0.25}
    assert metrics["goodput_per_second"] == pytest.approx(1.0)
    assert metrics["distributions"]["ttft"]["n"] == 1


def test_a_good_request_meets_all_slos() -> None:
    slow_start = sample([300, 310])
    slow_tokens = sample([100, 200])
    good = sample([100, 110])
    metrics = measure([slow_start, slow_tokens, good], parse_slos("ttft:200ms,tpot:50ms"))
    assert metrics["slo_attainment"] == pytest.approx({"ttft": 2 / 3, "tpot": 2 / 3, "all": 1 / 3})


def test_answers_of_the_wrong_length_are_counted_if_the_length_was_fixed() -> None:
    short = sample([1, 2], must_fill=True, requested_tokens=3)
    assert measure([short])["num_wrong_length"] == 1
    assert measure([sample([1, 2], requested_tokens=3)])["num_wrong_length"] == 0


def test_slos_are_parsed_with_their_units() -> None:
    parsed = parse_slos("ttft:300ms,tpot:0.03s,latency:5000us")
    assert parsed == pytest.approx({"ttft": 0.3, "tpot": 0.03, "latency": 0.005})
    assert parse_slos(None) == {}
    for wrong in ("ttft", "ttft:3", "speed:3ms", "ttft:-1ms", "ttft:xms"):
        with pytest.raises(UsageError, match="--slo"):
            parse_slos(wrong)


def test_only_a_server_that_falls_behind_is_oversaturated() -> None:
    overloaded = [sample([50 + i * 30], at=i * 50) for i in range(100)]  # it answers 12.5 of the 20 requests per second
    assert "requests in flight grew" in (oversaturation(overloaded) or "")
    assert oversaturation([sample([400], at=i * 50) for i in range(100)]) is None
    filling = [sample([6000], at=i * 50) for i in range(100)]  # the first one ends after the last one is sent
    assert oversaturation(filling) is None
    assert oversaturation(overloaded[:10]) is None


def test_the_steady_state_leaves_out_the_beginning_and_the_end() -> None:
    """A request is sent every 0.1 s and takes about 1 s for 20 tokens, so ten are in flight except at the beginning and
    the end."""
    samples = [sample([100 * i + 50 for i in range(10)], at=100 * k, completion_tokens=20) for k in range(50)]
    steady = steady_state(samples)
    assert steady is not None
    assert (steady["from_seconds"], steady["to_seconds"]) == (pytest.approx(0.95), pytest.approx(4.9))
    assert steady["requests_per_second"] == pytest.approx(10, rel=0.03)
    assert steady["completion_tokens_per_second"] == pytest.approx(200, rel=0.03)
    assert measure(samples)["completion_tokens_per_second"] < 180  # the whole run, from empty to empty
    # Those that were sent from 1.0 s on and before 4.0 s, when the first one was sent that still ran at 4.9 s.
    assert steady["num_requests"] == 30
    assert steady["distributions"]["ttft"]["n"] == 30


def test_there_is_no_steady_state_without_enough_answers_in_it() -> None:
    assert steady_state([sample([100]) for _ in range(50)]) is None  # all at once
    assert steady_state([sample([100], at=100 * k) for k in range(9)]) is None
    assert steady_state([sample([], error="connect") for _ in range(50)]) is None


def test_a_session_counts_when_all_its_turns_are_answered() -> None:
    def turn(index: int, number: int, error: str | None = None) -> Sample:
        one = sample([100], at=3000 * number, turn=number, error=error)
        one.index = index
        return one

    turns = [turn(0, 0), turn(0, 1), turn(1, 0), turn(1, 1, "timeout"), turn(2, 0)]
    metrics = measure(turns)
    assert metrics["sessions_per_hour"] == pytest.approx(2 * 3600 / 3.1)
    assert measure([turn(0, 0), turn(1, 0)])["sessions_per_hour"] == 0
