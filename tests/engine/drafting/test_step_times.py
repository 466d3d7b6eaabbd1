"""Ratios of step times, and that drafts chosen by them pay on a busy machine, too."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oaiserve.engine.drafting.step_times import ASSUMED, MOST_STEP_TOKENS, StepTimes
from tests.engine.drafting.decoding import Decoding, with_copies


def ratio(times: StepTimes, number: int, to: int) -> float:
    expected = times.expected()
    return expected[number] / expected[to]


def test_a_ratio_is_the_mean_of_steps_whatever_the_speed_of_the_machine() -> None:
    times = StepTimes()
    rng = random.Random(1)
    for index in range(2000):
        number = rng.choice([8, 12])
        speed = 1 + index // 200 % 3
        times.observe(number, int({8: 1000, 12: 1500}[number] * speed * rng.lognormvariate(0, 0.1)))
    assert ratio(times, 12, to=8) == pytest.approx(1.5, rel=0.05)
    assert ratio(times, 10, to=8) == pytest.approx(1.25, rel=0.05), "between two numbers, there is a line"
    assert ratio(times, 24, to=12) == pytest.approx(ASSUMED[24] / ASSUMED[12]), "larger numbers are not known"


def test_one_lucky_step_makes_no_other_number_look_cheap() -> None:
    times = StepTimes()
    for _ in range(100):
        for number in (8, 12, 16):
            times.observe(number, 100 * number)
    before = times.expected()
    times.observe(16, 400)
    assert times.expected() == pytest.approx(before, rel=0.01)


@given(st.lists(st.tuples(st.integers(1, MOST_STEP_TOKENS + 5), st.integers(0, 10**9)), min_size=1))
def test_expected_times_never_fall_with_the_number_of_tokens(measured: list[tuple[int, int]]) -> None:
    times = StepTimes()
    for num_tokens, ns in measured:
        times.observe(num_tokens, ns)
    expected = times.expected()
    assert expected == sorted(expected)
    assert expected[1] > 0


# Times of steps by their number of tokens: of Qwen2.5 0.5B on two busy cores, of a machine that mostly reads weights,
# and of one where each token costs nearly the same.
NUMBERS = range(MOST_STEP_TOKENS + 1)
BUSY = np.interp(
    NUMBERS, [0, 1, 2, 4, 6, 8, 9, 10, 12, 16, 20, 24, 32], [9, 10, 10, 11, 12, 15, 17, 18, 21, 27, 31, 35, 46]
)
READS = np.interp(NUMBERS, [0, 1, 8, 32], [9, 10, 12, 20])
COMPUTES = np.array([2.0 + number for number in NUMBERS])


def speed(decoding: Decoding, curve: np.ndarray, noise: float, num_steps: int = 1200) -> float:
    """Return the tokens per second with drafts in relation to those without."""
    rng = random.Random(2)
    before = decoding.num_tokens
    clients = len(decoding.running)
    sizes = decoding.run(num_steps, (1e6 * curve).tolist(), lambda: rng.lognormvariate(0, noise))
    return float((decoding.num_tokens - before) / sum(curve[sizes]) / (clients / curve[clients]))


def clients(number: int, copied: float) -> Decoding:
    return Decoding([with_copies(seed, copied) for seed in range(number)])


@pytest.mark.parametrize("noise", [0.0, 0.3, 0.6])
@pytest.mark.parametrize("copied", [0.1, 0.4, 0.7])
@pytest.mark.parametrize("curve", [BUSY, COMPUTES], ids=["busy", "computes"])
def test_drafts_cost_nothing_at_eight_clients_whatever_the_noise(
    curve: np.ndarray, copied: float, noise: float
) -> None:
    assert speed(clients(8, copied), curve, noise) >= 0.98


@pytest.mark.parametrize("curve", [BUSY, READS], ids=["busy", "reads"])
def test_noise_takes_nearly_nothing_of_the_gain_at_one_client(curve: np.ndarray) -> None:
    gain = speed(clients(1, 0.7), curve, 0.0) - 1
    assert gain > 0.5
    for noise in (0.3, 0.6):
        assert speed(clients(1, 0.7), curve, noise) - 1 >= 0.95 * gain


@pytest.mark.parametrize(("before", "after", "least"), [(BUSY, READS, 1.15), (READS, BUSY, 0.98)], ids=["idle", "busy"])
def test_drafts_adapt_when_the_machine_becomes(before: np.ndarray, after: np.ndarray, least: float) -> None:
    decoding = clients(8, 0.7)
    speed(decoding, before, 0.3)
    speed(decoding, after, 0.3, 600)
    assert speed(decoding, after, 0.3, 600) >= least
