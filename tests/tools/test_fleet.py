"""Simulated fleets: the model of a replica, the policies, and what happens when parts fail."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from tools import charts
from tools.fleet import scale
from tools.fleet.coarse import CoarseReplica, Size
from tools.fleet.figures import Figures, Histogram
from tools.fleet.fleet import Fleet, Plan
from tools.fleet.policies import Ours, Policy, RoundRobin
from tools.fleet.setups import GPU, POLICIES
from tools.fleet.traffic import TOKENS_PER_KEY, Call, Mix, Traffic


def simulate(policy: Policy, number: int, rate: float = 60, **plan: object) -> Figures:
    size = Size(200_000)
    fleet = Fleet("", policy, number, size, GPU)
    return fleet.run(Traffic(rate, Mix()), Plan(**{"seconds": 4, "warm_up": 1, **plan}))  # type: ignore[arg-type]


def test_the_cache_of_the_model_loses_the_ends_of_what_was_not_used_first() -> None:
    replica = CoarseReplica(Size(cache_tokens=1000), GPU)
    for arrival, stream, tokens in ((0.0, 1, 600), (1.0, 2, 600), (2.0, 1, 600)):
        replica.push(call := Call(arrival, "", ((stream << 20, tokens),), tokens, 1, None))
        replica.advance(arrival + 0.9)
    assert call.hit_tokens == 400
    assert replica.finished[-1] is call


def test_requests_do_not_depend_on_the_policy_and_keys_are_equal_where_tokens_are() -> None:
    traffics = [Traffic(100, Mix(), seed=3) for _ in range(2)]
    one, other = ([c for tick in range(200) for c in t.until(tick / 100, (tick + 1) / 100)] for t in traffics)
    assert [(c.arrival, c.path, c.answer) for c in one] == [(c.arrival, c.path, c.answer) for c in other]
    assert len(one) == pytest.approx(200, abs=20)
    assert {call.kind for call in one} == {"chat", "agent", "document", "single"}
    tokens_of: dict[int, tuple[int, ...]] = {}
    for call in one[:60]:
        tokens = [stream + position for stream, number in call.path for position in range(number)]
        keys = call.find_keys(most=10**6)
        assert len(keys) == len(tokens) // TOKENS_PER_KEY
        for depth, key in enumerate(keys, 1):
            beginning = tuple(tokens[: depth * TOKENS_PER_KEY])
            assert tokens_of.setdefault(key, beginning) == beginning
    assert len({*tokens_of.values()}) == len(tokens_of)


def test_four_replicas_hit_nearly_as_often_as_one_and_share_the_work() -> None:
    one = simulate(RoundRobin(1), 1, rate=100, seconds=8, warm_up=3)
    four = simulate(Ours(4), 4, rate=100, seconds=8, warm_up=3)
    assert four.hit_rate >= 0.95 * one.hit_rate
    assert four.imbalance <= 1.3
    scattered = simulate(RoundRobin(4), 4, rate=100, seconds=8, warm_up=3)
    assert scattered.hit_rate < 0.8 * four.hit_rate


@pytest.mark.parametrize("name", POLICIES)
def test_no_policy_uses_a_zone_that_failed_or_a_replica_that_drains(name: str) -> None:
    policy = POLICIES[name](8)
    chosen: list[tuple[float, int]] = []
    choose = policy.choose

    def recorded(call: Call, num_open: object, now: float) -> int:
        chosen.append((now, choose(call, num_open, now)))  # type: ignore[arg-type]
        return chosen[-1][1]

    policy.choose = recorded  # type: ignore[method-assign]
    figures = simulate(policy, 8, rate=200, seconds=12, fails=(2.0, 3.0, range(6, 8)), rolls=(4.0, 8.0, 8))
    during = Counter(index for now, index in chosen if 2 < now < 3)
    assert {*during} <= {*range(6)}
    assert {index for now, index in chosen if now > 3} == {*range(8)}
    assert 0 < figures.num_lost < 200
    for index in range(8):  # they are drained one after the other, half a second apart
        start = 4.0 + 0.5 * index
        assert not [at for at, chose in chosen if chose == index and start + 0.02 < at < start + 2.9]


def test_percentiles_of_a_histogram_are_right_to_three_percent() -> None:
    histogram = Histogram()
    for value in range(1, 1001):
        histogram.add(value / 1000, 2)
    assert histogram.percentile(0.5) == pytest.approx(0.5, rel=0.03)
    assert histogram.percentile(0.99) == pytest.approx(0.99, rel=0.03)


def test_requests_that_were_never_computed_count_only_with_their_wait() -> None:
    figures = Figures("")
    figures.count(Call(1.0, "", ((1, 100),), 100, 10, None, hit_tokens=50, ttft=0.5))
    figures.count_waiting(Call(2.0, "", ((2, 900),), 900, 10, None), now=5.0)
    assert figures.hit_rate == 0.5
    assert [*figures.ttfts] == [0.5, 3.0]
    assert figures.num_unfinished == 1


def test_the_plots_of_the_fleet_are_those_of_its_results() -> None:
    results = json.loads((charts.DOCS / "benchmarks" / "fleet-scale.json").read_text())
    for name, drawing in scale.plots(results).items():
        assert (charts.DOCS / "images" / name).read_text() == drawing
