"""A replay is the engine's loop with another clock: what it says of simple loads is what arithmetic says."""

import random
from dataclasses import replace

import pytest

from oaiserve.explain.step_cost import KNOTS, StepCost
from tools.replay import replay
from tools.replay.calibration import busiest, calibrated
from tools.replay.recorded import Arrival, Cost, RecordedLoad, RecordedServer
from tools.replay.replay import LoadReplay, ReplayedLoad

FLAT = StepCost((10e6,) * len(KNOTS))  # 10 ms for any step
LINEAR = StepCost(tuple(1e6 * knot for knot in KNOTS))  # 1 ms for each row


def run(
    *arrivals: Arrival, cost: StepCost = FLAT, server: RecordedServer | None = None, **others: float
) -> ReplayedLoad:
    simulated = LoadReplay(server or RecordedServer(), Cost(cost, **others))
    return simulated.run([(arrival.seconds, 0, arrival) for arrival in arrivals])


def prompt(length: int, first: int = 0) -> list[int]:
    return list(range(first, first + length))


def test_one_request_takes_its_steps() -> None:
    overhead = {"host_seconds": 0.001, "before_queue_seconds": 0.002, "delivery_seconds": 0.003}
    (served,) = run(Arrival(0, prompt(20), 5), **overhead).served
    assert served.ttft == pytest.approx(0.015)
    assert served.gaps == pytest.approx([0.011] * 4)
    assert served.latency == pytest.approx(0.059)


def test_a_long_prompt_takes_several_steps_and_holds_up_its_neighbour() -> None:
    server = RecordedServer(max_step_tokens=64, max_running=8)
    arrivals = Arrival(0, prompt(16), 9), Arrival(0.018, prompt(640, 1000), 1)
    short, long = run(*arrivals, cost=LINEAR, server=server).served
    assert short.ttft == pytest.approx(0.016)
    assert max(short.gaps) == pytest.approx(0.064)
    assert min(short.gaps) == pytest.approx(0.001)
    assert long.ttft > 0.64


def test_what_prompts_share_is_computed_once() -> None:
    alike = [Arrival(k * 1.0, [*prompt(64), 100 + k], 1) for k in range(2)]
    replayed = run(*alike, cost=LINEAR)
    first, second = (served.ttft for served in replayed.served)
    assert (first, second) == (pytest.approx(0.065), pytest.approx(0.001))
    assert replayed.hit_share == pytest.approx(64 / 130)
    without = run(*alike, cost=LINEAR, server=RecordedServer(prefix_cache=False))
    assert without.served[1].ttft == pytest.approx(0.065)


def test_choices_and_full_caches() -> None:
    several = run(Arrival(0, prompt(16), 3, num_choices=4)).served
    assert [len(served.gaps) for served in several] == [2]
    tiny = RecordedServer(kv_blocks=6)
    replayed = run(*(Arrival(0, prompt(30, 1000 * k), 40) for k in range(2)), server=tiny)
    assert replayed.num_preemptions > 0
    assert all(served.latency is not None for served in replayed.served)
    assert run(Arrival(0, prompt(200), 1), server=tiny).num_refused == 1


def load_of_one_second(rate: int = 20) -> RecordedLoad:
    rng = random.Random(3)
    arrivals = [Arrival(k / rate, prompt(rng.randint(10, 90), 1000 * k), 20) for k in range(rate + 1)]
    return RecordedLoad(arrivals, RecordedServer(max_running=16, max_step_tokens=128), Cost(LINEAR))


def test_drafts_take_the_steps_that_they_took_and_end_where_they_were_wrong() -> None:
    # A token alone, 20 from drafts, 19 alone. The first drafts are short: the engine learns that they come true.
    arrival = Arrival(0, prompt(20), 40, drafts=[1, 20, 19])
    (drafted,) = run(arrival, server=RecordedServer(drafts=True)).served
    (plain,) = run(arrival).served
    assert (drafted.num_tokens, plain.num_tokens) == (40, 40)
    assert len(plain.gaps) == 39
    assert 19 + 2 <= len(drafted.gaps) <= 19 + 8
    # Drafts have a cost: the rows of those that come true, and of those that do not.
    (slower,) = run(arrival, cost=LINEAR, server=RecordedServer(drafts=True)).served
    assert sum(slower.gaps) >= 0.039


def test_the_disturbance_is_found_with_which_a_load_was_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "DISTURBANCE_SECONDS", 1e-4)  # else so short a load has few of them
    load = load_of_one_second(40)
    disturbed = run(*load.arrivals, cost=LINEAR, server=load.server, disturbance_share=0.1)
    tpots = [one.tpot for one in disturbed.served if one.tpot is not None]
    calibration = calibrated(replace(load, tpot_seconds=sum(tpots) / len(tpots))).cost
    assert calibration.disturbance_share == pytest.approx(0.1, rel=0.3)
    assert calibrated(load) == load


def test_the_busiest_time_of_a_load_is_a_load() -> None:
    arrivals = [Arrival(seconds, [1], 1) for seconds in (0.0, 5.0, 6.0, 6.5, 20.0)]
    part = busiest(RecordedLoad(arrivals, RecordedServer()), 3)
    assert [one.seconds for one in part.arrivals] == [0, 1, 1.5]
    assert busiest(RecordedLoad(arrivals, RecordedServer()), 9).arrivals == arrivals


def test_late_prompts_are_computed_ended_or_refused() -> None:
    """One place, and each prompt takes 0.1 s: of twenty that come at once with half a second, five are in time."""
    server = RecordedServer(max_running=1, policy="deadline", prefix_cache=False)
    arrivals = [(0.0, index, Arrival(0, prompt(8, 100 * index), 10, deadline_seconds=0.501)) for index in range(20)]
    replayed = {use: LoadReplay(server, Cost(FLAT), use).run(arrivals) for use in ("ignored", "ended", "kept")}
    assert [sum(one.is_in_time for one in outcome.served) for outcome in replayed.values()] == [5] * 3
    assert [one.latency is not None for one in replayed["ignored"].served] == [True] * 20
    assert [one.latency is not None for one in replayed["ended"].served] == [True] * 5 + [False] * 15
    assert (replayed["ignored"].num_late, replayed["ended"].num_late) == (0, 15)
    assert replayed["kept"].num_refused_late == 0, "no forecast is calibrated"


def test_a_calibrated_forecast_refuses_what_would_be_late() -> None:
    server = RecordedServer(max_running=1, policy="fcfs", prefix_cache=False)
    calm = [(index * 0.2, index, Arrival(0, prompt(8, 100 * index), 10, deadline_seconds=9)) for index in range(250)]
    crowd = [(60.0, index, Arrival(0, prompt(8, 100 * index), 10, deadline_seconds=0.45)) for index in range(250, 270)]
    ended, refusing = (LoadReplay(server, Cost(FLAT), use).run([*calm, *crowd]) for use in ("ended", "kept"))
    assert (ended.num_late, refusing.num_late) == (16, 0)
    assert sum(one.is_in_time for one in refusing.served) == sum(one.is_in_time for one in ended.served) == 254
    assert refusing.num_refused_late == 16


def test_the_more_requests_there_are_the_more_are_within_their_deadlines_though_most_cannot_be() -> None:
    """If all began at their latest start, the second load would let more of them be late than the first one."""
    cost = Cost(StepCost(tuple(1e6 * (5 + 0.3 * rows) for rows in KNOTS)))
    server = RecordedServer(max_running=64, policy="deadline", prefix_cache=False, kv_blocks=4096)

    def num_in_time(rate: float) -> int:
        rng = random.Random(0)
        at = 0.0
        load = []
        while at < 60:
            at += rng.expovariate(rate)
            length = min(1000, int(rng.lognormvariate(5, 0.9)) + 8)
            answer = min(300, 2 + int(rng.lognormvariate(4, 0.8)))
            own = {"deadline_seconds": rng.choice((10.0, 60.0)), "most_tokens": 1000}
            load.append((at, 0, Arrival(at, prompt(length, rng.randrange(2**60)), answer, **own)))
        return sum(one.is_in_time for one in LoadReplay(server, cost, "ended").run(load).served if one.arrived > 30)

    assert num_in_time(40) > num_in_time(20) > 300
