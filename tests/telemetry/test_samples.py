"""The samples of the last minutes add up to what was observed, and are about a second apart."""

from hypothesis import given
from hypothesis import strategies as st

from oaiserve.facts.engine_numbers import EngineNumbers
from oaiserve.facts.record import EngineAccount, Outcome
from oaiserve.facts.step_record import StepKind, StepRecord
from oaiserve.telemetry.request_series import RequestSeries
from oaiserve.telemetry.samples import INTERVAL_NS, MOST_SAMPLES, LiveSamples
from tests.engine.doubles import Clock

NOW = EngineNumbers(num_running=2, num_waiting=1, num_tokenizing=0, blocks_used=5, blocks_reusable=2, blocks_total=10)


def make_samples() -> tuple[LiveSamples, RequestSeries, Clock]:
    series = RequestSeries("demo", epoch_offset_ns=lambda: 0)
    clock = Clock()
    return LiveSamples(series, epoch_offset_ns=lambda: 7_000_000, clock_ns=clock), series, clock


@given(st.lists(st.lists(st.sampled_from(Outcome), max_size=4), max_size=8))
def test_samples_add_up_to_what_was_observed(make_record, seconds: list[list[Outcome]]) -> None:
    samples, series, clock = make_samples()
    for outcomes in seconds:
        for outcome in outcomes:
            series.observe(make_record(outcome=outcome, completion_tokens=3))
            series.observe_step(StepRecord(StepKind.DECODE, 0, 5, 0, 2, 11))
        clock.now_ns += INTERVAL_NS
        samples.add(lambda: NOW)
    made = samples.after(0)
    assert [sample["number"] for sample in made] == list(range(1, len(seconds) + 1))
    for sample, outcomes in zip(made, seconds, strict=True):
        assert sample["requests"] == {outcome: outcomes.count(outcome) for outcome in set(outcomes)}
        assert sample["generation_tokens"] == 3 * len(outcomes)
        assert sample["computed_tokens"] == 11 * len(outcomes)
        assert sum(number for _, number in sample["time_to_first_token"]) == len(outcomes)
        assert sum(number for _, number in sample["duration"]) == outcomes.count(Outcome.FINISHED)


def test_a_sample_has_the_engine_s_numbers_and_values_in_their_buckets(make_record) -> None:
    samples, series, clock = make_samples()
    series.observe(make_record())
    clock.move(2)
    samples.add(lambda: NOW)
    (sample,) = samples.after(0)
    assert (sample["running"], sample["waiting"], sample["kv_usage"], sample["kv_cached"]) == (2, 1, 0.5, 0.2)
    assert (sample["at_unix_ms"], sample["seconds"]) == (3007, 2.0)
    ((bucket, number),) = sample["time_to_first_token"]
    bounds = samples.boundaries_seconds["time_to_first_token"]
    assert number == 1
    assert bounds[bucket - 1] < make_record().times.time_to_first_token_ns / 1e9 <= bounds[bucket]


def test_samples_are_a_second_apart_and_the_oldest_are_dropped() -> None:
    samples, _, clock = make_samples()
    for _ in range(2 * MOST_SAMPLES + 2):
        clock.now_ns += INTERVAL_NS // 2 + 1
        samples.add(lambda: NOW)
    numbers = [sample["number"] for sample in samples.after(0)]
    assert numbers == list(range(2, MOST_SAMPLES + 2))
    assert samples.after(MOST_SAMPLES) == samples.after(0)[-1:]


def test_the_costs_are_those_of_ended_requests_by_client_the_largest_first(make_record) -> None:
    samples, series, clock = make_samples()
    for client, machine_ns in (("ada", 5), (None, 30), ("ada", 7)):
        account = EngineAccount(core_ns=2 * machine_ns, machine_ns=machine_ns, alone_ns=100, price=0.25)
        series.observe(make_record(client=client, account=account))
    assert samples.costs() == []
    clock.move(2)
    samples.add(lambda: NOW)
    assert samples.costs() == [("", 30, 60, 100, 0.25), ("ada", 12, 24, 200, 0.5)]
