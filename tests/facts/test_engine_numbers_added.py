"""The numbers of several engines together, and those that stay when one has ended."""

from oaiserve.facts.engine_numbers import EngineNumbers, LoadTotals, added, sums_of
from oaiserve.facts.step_record import HostPart


def numbers(number: int) -> EngineNumbers:
    return EngineNumbers(
        num_running=number,
        drain_rate=number / 2,
        by_adapter={number: (1, 2)},
        adapters={"a": (number, 1)},
        blocks_total=10,
        host_ns={HostPart.LAUNCH: number},
        idle_since_ns=5,
        load=LoadTotals(7, 8),
        num_steps=100 * number,
        drafts_by_accepted=(1,) * number,
    )


def test_numbers_of_two_engines_are_added() -> None:
    both = added([numbers(1), numbers(2)])
    assert (both.num_running, both.drain_rate, both.blocks_total, both.num_steps) == (3, 1.5, 20, 300)
    assert both.adapters == {"a": (3, 2)}
    assert both.by_adapter == {1: (1, 2), 2: (1, 2)}
    assert both.host_ns == {HostPart.LAUNCH: 3}
    assert both.drafts_by_accepted == (2, 1)
    assert both.idle_since_ns is None


def test_only_sums_stay_of_an_engine_that_has_ended() -> None:
    left = sums_of(numbers(2))
    assert (left.num_running, left.drain_rate, left.blocks_total, left.load) == (0, 0.0, 0, LoadTotals())
    assert (left.by_adapter, left.adapters, left.idle_since_ns) == ({}, {}, None)
    assert (left.num_steps, left.host_ns, left.drafts_by_accepted) == (200, {HostPart.LAUNCH: 2}, (1, 1))


def test_every_number_is_current_or_a_sum() -> None:
    """Counters of metrics are sums, and nothing else of metrics is one."""
    from dataclasses import fields

    left = sums_of(EngineNumbers(**{one.name: 3 for one in fields(EngineNumbers) if one.type == "int"}))
    for one in fields(EngineNumbers):
        if one.type == "int" and (metric := one.metadata.get("metric", "")):
            assert getattr(left, one.name) == 3 * metric.endswith("_total"), one.name
