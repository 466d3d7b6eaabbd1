"""A request is judged by the time it would have taken alone on its machine, or by the operator's targets."""

from dataclasses import replace

import pytest

from oaiserve.facts.record import Cause, EngineAccount, Outcome, RequestRecord
from oaiserve.telemetry.targets import Judged, Targets
from tests.records import MS, record_at


def record(
    ttft_ms: int, tpot_ms: int, alone_ms: tuple[int, int], tokens: int = 11, receive_ms: int = 0
) -> RequestRecord:
    """Return a request whose prompt and later tokens would each have taken this long alone."""
    causes = {"prefill_causes_ns": {Cause.ALONE: alone_ms[0] * MS}}
    causes["decode_causes_ns"] = {Cause.ALONE: (tokens - 1) * alone_ms[1] * MS}
    end_ms = ttft_ms + (tokens - 1) * tpot_ms
    stamps = 2, 3, 4, ttft_ms, end_ms, end_ms + 1
    return record_at(-receive_ms, 0, *stamps, completion_tokens=tokens, account=EngineAccount(num_choices=1, **causes))


@pytest.mark.parametrize(
    ("took_ms", "alone_ms", "is_met"),
    [
        ((990, 190), (5, 5), (True, True)),  # a GPU
        ((1010, 210), (5, 5), (False, False)),  # a GPU that is overloaded
        ((2900, 210), (500, 40), (True, True)),  # a CPU that four users share
        ((3100, 250), (500, 40), (False, False)),  # a CPU that is really slow
        ((29_000, 100), (5000, 20), (True, True)),  # a long prompt
    ],
)
def test_target_is_a_multiple_of_the_time_alone_with_a_minimum(
    took_ms: tuple[int, int], alone_ms: tuple[int, int], is_met: tuple[bool, bool]
) -> None:
    judged = [*Targets().judge(record(*took_ms, alone_ms))]
    assert [(one.slo, one.is_met) for one in judged] == [("ttft", is_met[0]), ("tpot", is_met[1])]


def test_the_operators_target_is_the_same_for_all_requests() -> None:
    targets = Targets.parse("ttft:300ms")
    assert [*targets.judge(record(400, 10, (5000, 20)))] == [
        Judged("ttft", 400 * MS, 300 * MS),
        Judged("tpot", 10 * MS, 200 * MS),
    ]
    assert [*targets.judge(record(200, 10, (0, 0)))] == [Judged("ttft", 200 * MS, 300 * MS)]


def test_only_finished_foreground_requests_with_a_known_time_alone_are_judged() -> None:
    slow = record(9000, 900, (5, 5))
    assert [one.is_met for one in Targets().judge(slow)] == [False, False]
    others = [{"outcome": Outcome.CANCELLED}, {"background": True}, {"operation": "embeddings"}]
    assert not any(list(Targets().judge(replace(slow, **other))) for other in others)
    assert not list(Targets().judge(record(9000, 900, (0, 0))))
    (ttft, _) = Targets().judge(record(1000, 900, (5, 5), receive_ms=8000))  # a slow client, or a load of its model
    assert (ttft.took_ns, ttft.is_met) == (1000 * MS, True)
    assert [one.slo for one in Targets().judge(record(9000, 0, (5, 0), tokens=1))] == ["ttft"]
