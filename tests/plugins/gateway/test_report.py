"""Reports of replicas: bounded, and the keys that were used again first."""

from array import array
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from oaiserve.wire.report import MOST_KEYS, HeldPrefixes, ReplicaReport
from oaiserve.wire.router import MOST_HOLDERS, Holders


def everything(_: object) -> bool:
    return True


def held(*prompts: list[int], most_keys: int = 4) -> HeldPrefixes[int]:
    prefixes: HeldPrefixes[int] = HeldPrefixes(most_keys)
    for prompt in prompts:
        prefixes.note((key, key) for key in prompt)
    return prefixes


def test_what_was_used_again_comes_first_and_the_latest_of_it_before_the_rest() -> None:
    assert [*held([1, 2], [1, 3]).keys(everything)] == [1, 3, 2]
    assert [*held([1, 2], [3], [1], [2]).keys(everything)] == [2, 1, 3]


def test_what_is_no_longer_cached_is_not_reported_and_forgotten() -> None:
    prefixes = held([1, 2, 3])
    assert [*prefixes.keys(lambda place: place != 2)] == [3, 1]
    assert [*prefixes.keys(everything)] == [3, 1]


def test_what_many_prompts_use_outlives_any_number_of_prompts_used_once() -> None:
    assert [*held([9], [9], *([number] for number in range(10, 100))).keys(everything)] == [9, 99, 98, 97]


@given(st.lists(st.lists(st.integers(0, 50), max_size=8, unique=True), max_size=30))
def test_a_report_is_bounded_and_names_each_key_once(prompts: list[list[int]]) -> None:
    keys = held(*prompts).keys(everything)
    assert len(keys) <= 4
    assert len({*keys}) == len(keys)
    assert {*keys} <= {key for prompt in prompts for key in prompt}


def test_a_full_report_has_8_kib_of_keys() -> None:
    report = ReplicaReport("a", "1", 0, 3, 0, array("Q", range(MOST_KEYS)))
    assert report.is_full
    assert len(report.keys.tobytes()) == 8192


def test_the_least_recently_used_keys_are_forgotten_first() -> None:
    holders: Any = Holders(2)
    for key in (1, 2, 1, 3):
        holders.add(key, "a")
    assert [holders.find(key) for key in (1, 2, 3)] == [("a",), (), ("a",)]
    assert len(holders) == 2


def test_holders_of_a_key_are_bounded_and_the_newest_stay() -> None:
    holders: Any = Holders(2)
    for number in range(MOST_HOLDERS + 5):
        holders.add(1, number)
        holders.add(1, number)
    assert holders.find(1) == (*range(5, MOST_HOLDERS + 5),)
    for number in range(MOST_HOLDERS + 5):
        holders.discard(1, number)
    assert len(holders) == 0
