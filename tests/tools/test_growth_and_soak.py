"""The verdicts of the growth test and of the soak: what grows, is left over or is wrong fails."""

from collections import Counter
from typing import Any

import pytest

from tools.attack import growth, soak
from tools.attack.growth import Cost, Growth
from tools.attack.soak import Sample


def one(status: str = "400", num_bytes: int = 2**20, cpu_seconds: float = 1.0, mib: float = 100.0) -> Cost:
    return Cost(status, num_bytes, cpu_seconds, mib, 0.01)


def two(
    status: str = "400",
    num_bytes: int = 2**21,
    cpu_seconds: float = 2.1,
    mib: float = 190.0,
    health_seconds: float = 0.02,
) -> Cost:
    return Cost(status, num_bytes, cpu_seconds, mib, health_seconds)


def sample(
    minute: int, rss_mib: float = 500.0, num_fds: int = 30, num_blocks: int = 0, num_requests: int = 0
) -> Sample:
    # In three minutes, the server has read as many prompts as it remembers.
    num_read = minute * soak.MAX_PROMPTS // 3
    return Sample(minute, rss_mib, 600.0, num_fds, 20, num_blocks, num_requests, 10 * minute, minute, num_read)


FLAT = [sample(minute) for minute in range(12)]


def test_a_form_holds_that_costs_twice_as_much() -> None:
    assert growth.failures(one(), two()) == []
    text = growth.markdown([Growth("/v1/responses", "a form", [one(), two()], [])])
    assert "| /v1/responses | a form | 400 | 2,048 | 1.00 | 2.10 | 100 | 190 | 20 | holds |" in text


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"cpu_seconds": 3.9}, "1.00 s of CPU became 3.90"),
        ({"mib": 285.0}, "100.00 MiB became 285.00"),
        ({"health_seconds": 0.15}, "/health took 150 ms"),
        ({"status": "500"}, "answered 500"),
        ({"status": "TimeoutError"}, "answered TimeoutError"),
    ],
)
def test_a_form_fails_that_costs_more(change: dict[str, Any], says: str) -> None:
    (failure,) = growth.failures(one(), two(**change))
    assert says in failure


def test_much_for_few_bytes_fails_even_if_it_grows_with_them() -> None:
    (failure,) = growth.failures(one(cpu_seconds=10.0), two(cpu_seconds=20.0))
    assert failure == "20.00 s of CPU for 2.00 MiB"


def test_work_of_the_model_is_free_only_if_it_answers() -> None:
    def failures(status: str) -> list[str]:
        small = one(status, 1024, 0.25, 0.0), two(status, 1024, 0.53, 0.0)
        return growth.failures(*small, model_cpu_seconds=1.0)

    assert failures("400") == ["0.53 s of CPU for 0.00 MiB"]
    assert failures("200") == []


def test_a_flat_soak_holds() -> None:
    assert soak.failures(FLAT, Counter()) == []
    assert "Verdict: holds" in soak.markdown(FLAT, [])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rss_mib": 540.0}, "memory grew from 500 to 540 MiB"),
        ({"num_fds": 50}, "fds grew from 30 to 50"),
        ({"num_blocks": 3}, "3 blocks are left in use"),
        ({"num_requests": 1}, "1 requests are left in use"),
    ],
)
def test_what_grows_or_is_left_over_fails_a_soak(change: dict[str, Any], says: str) -> None:
    (failure,) = soak.failures([*FLAT[:8], *(sample(minute, **change) for minute in range(8, 12))], Counter())
    assert says in failure


def test_memory_may_grow_until_all_remembered_prompts_are_replaced() -> None:
    assert soak.failures([sample(0, 400.0), sample(1, 440.0), sample(2, 480.0), *FLAT[3:]], Counter()) == []


def test_a_soak_whose_memory_cannot_be_judged_fails() -> None:
    (failure,) = soak.failures(FLAT[:9], Counter())
    assert failure == "only 6 of 9 rounds came after 1,024 prompts: to judge memory, give more --minutes"


def test_a_wrong_answer_fails_a_soak() -> None:
    assert soak.failures(FLAT, Counter({"got 500": 2})) == ["2 times: got 500"]
