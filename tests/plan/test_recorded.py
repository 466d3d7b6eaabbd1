"""Recorded loads are read from each of their forms, and files of no form are refused by name."""

import random
from pathlib import Path

import pytest

from oaiserve.errors import StartupError
from oaiserve.explain.step_cost import StepCost
from oaiserve.plan.recorded import Arrival, Cost, RecordedLoad, RecordedServer, busiest, read, repeated, waiting_clients
from tests.plan.recordings import COST, row, written


def test_a_recording_has_prompts_alike_as_far_as_their_blocks_are(tmp_path: Path) -> None:
    a, b, c = ("0" * 9 + letter for letter in "abc")
    head = {"recording": 1, "block_tokens": 64, "server": {"kv_blocks": 9, "policy": "fcfs", "model": "demo"}}
    refused = {"timestamp": 3.0, "outcome": "rejected", "output_length": 0, "phases_ns": {}}
    rows = [row(7.5, 130, 4, (a, b)), row(5.0, 70, 3, (a,)), row(6.0, 128, 2, (a, c)), refused]
    load = read(written(tmp_path / "load", head, *rows, {"step_cost": COST}))
    assert [(one.seconds, len(one.prompt), one.answer_tokens) for one in load.arrivals] == [
        (0.0, 70, 3),
        (1.0, 128, 2),
        (2.5, 130, 4),
    ]
    first, second, third = (one.prompt for one in load.arrivals)
    assert first[:64] == second[:64] == third[:64]
    assert not set(second[64:]) & set(third[64:])
    assert not set(first[64:]) & set(second + third)
    assert (load.server.kv_blocks, load.server.policy, load.num_left_out) == (9, "fcfs", 1)
    step = StepCost(tuple(COST["rows_ns"]), draw_ns=5.0)  # type: ignore[arg-type]
    assert load.cost == Cost(step, host_seconds=0.002, before_queue_seconds=0.003, delivery_seconds=0.001)
    assert load.tpot_seconds == pytest.approx((0.001 / 3 + 0.001 / 2 + 0.001) / 3)


def test_the_busiest_time_of_a_load_is_a_load() -> None:
    arrivals = [Arrival(seconds, [1], 1) for seconds in (0.0, 5.0, 6.0, 6.5, 20.0)]
    part = busiest(RecordedLoad(arrivals, RecordedServer()), 3)
    assert [one.seconds for one in part.arrivals] == [0, 1, 1.5]
    assert busiest(RecordedLoad(arrivals, RecordedServer()), 9).arrivals == arrivals


def test_accounts_and_traces_have_arrivals_and_lengths(tmp_path: Path) -> None:
    answers = ((12, 3), (10, 2), (11, 0))
    accounts = [{"received_unix_ns": at * 10**9, "prompt_tokens": 5, "completion_tokens": n} for at, n in answers]
    debug = written(tmp_path / "debug", {"requests": accounts})
    trace = written(tmp_path / "trace", *({"timestamp": at, "input_length": 5, "output_length": 2} for at in (4, 6)))
    ended = [{"logger": "oaiserve", "ts": f"2026-11-22T03:00:{at}+00:00", "duration_ms": 1e3} for at in (15, 17)]
    tokens = {"prompt_tokens": 5, "completion_tokens": 2}
    log = written(tmp_path / "log", {"logger": "uvicorn.error", "ts": "", "message": ""}, *(e | tokens for e in ended))
    sent = [{"run": "1", "intended_ns": at * 10**9} | tokens for at in (7, 9)]
    samples = written(tmp_path / "samples", *sent)
    for path, last, num_left_out in ((debug, 3, 1), (trace, 2, 0), (log, 2, 0), (samples, 2, 0)):
        load = read(path)
        assert [(one.seconds, one.answer_tokens) for one in load.arrivals] == [(0, 2), (2, last)]
        assert (load.cost, load.num_left_out, load.rate) == (None, num_left_out, 0.5)


def test_clients_that_wait_have_nearly_as_many_requests_open_as_ever() -> None:
    rng = random.Random(7)
    free, ended, by_themselves, at = [0.0] * 8, [], [], 0.0
    for _ in range(200):  # eight clients, each of which asks 5 ms after its answer
        begin = min(free)
        end = begin + rng.uniform(0.5, 2)
        free[free.index(begin)] = end + 0.005
        ended.append((begin, end - begin))
        at += rng.expovariate(6)  # the same number on average, by themselves
        by_themselves.append((at, rng.uniform(0.5, 2)))
    assert waiting_clients(ended) == 8
    assert waiting_clients(by_themselves) == 0
    overloaded = [(index / 10, index / 10) for index in range(200)]
    assert waiting_clients(overloaded) == 0
    assert waiting_clients([(0.0, 1.0)] * 9) == 0
    assert waiting_clients([]) == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has 0 requests"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 2}\n', "has 1 requests"),
        ('{"a": 1}\n{"b": 2}\n', "must be a recording"),
        ("no json", "must be a recording"),
        ("[1]", "must be a recording"),
        ('{"recording": 1}\n{"timestamp": 1}\n', "must be a recording"),
    ],
)
def test_other_files_are_refused(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "load"
    path.write_text(content)
    with pytest.raises(StartupError, match=message):
        read(path)
    with pytest.raises(StartupError, match="No such file"):
        read(tmp_path / "missing")


def test_a_load_at_another_rate_keeps_its_gaps_and_fills_the_time(tmp_path: Path) -> None:
    rows = [{"timestamp": at, "input_length": 1, "output_length": 1} for at in (0, 1, 4)]
    load = read(written(tmp_path / "load", *rows))  # two gaps in four seconds
    assert [at for at, _, _ in repeated(load, 1.0, 0)] == [0, 0.5, 2]
    times = [(at, copy) for at, copy, _ in repeated(load, 1.0, 8)]
    assert times == [(at + 3 * copy, copy) for copy in range(3) for at in (0, 0.5, 2)]
