"""The noise of draws is uniform bits turned into the standard Gumbel distribution, unrelated between any two draws."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oaiserve.engine.sequences.noise import (
    FACTOR_1,
    FACTOR_2,
    NOISE_BITS,
    draw_key,
    mix32,
    noise,
    noise_bits,
    noise_seed,
)

SIZE = 2**32
seeds = st.integers(0, 2**64 - 1)
token_ids = st.integers(0, 2**18)


def seed_of(bits: int, token_id: int) -> int:
    """Return the seed that gives an id these bits, by undoing each operation of `noise_bits`."""
    high = bits >> 32
    low = bits & SIZE - 1
    mixed = mix32(token_id)
    second = unmix32(low) ^ (high + mixed) % SIZE
    first = (unshift(high, 16) * pow(FACTOR_2, -1, SIZE) - second) % SIZE
    first = unshift(first, 15) * pow(FACTOR_1, -1, SIZE) % SIZE ^ mixed
    return first << 32 | second


def unmix32(x: int) -> int:
    x = unshift(x, 16) * pow(FACTOR_2, -1, SIZE) % SIZE
    return unshift(unshift(x, 15) * pow(FACTOR_1, -1, SIZE) % SIZE, 16)


def unshift(x: int, by: int) -> int:
    """Return the number that gives `x` by `x ^ x >> by`."""
    return x ^ x >> by ^ x >> 2 * by


@given(seed=seeds, token_id=token_ids)
def test_for_each_id_the_bits_are_a_permutation_of_the_seeds(seed: int, token_id: int) -> None:
    assert seed_of(noise_bits(seed, token_id), token_id) == seed
    assert unmix32(mix32(token_id)) == token_id


@pytest.mark.parametrize("token_id", [0, 1, 151_935])
def test_the_smallest_and_the_largest_noise_are_finite(token_id: int) -> None:
    """24 bits would end at 17.3, and ids with a probability below 1e-7 would never be drawn from among many."""
    largest = (NOISE_BITS + 1) * math.log(2)
    assert noise(seed_of(0, token_id), token_id) == pytest.approx(largest)
    assert noise(seed_of(2**64 - 1, token_id), token_id) == pytest.approx(-math.log(largest))


def values(kind: str, count: int) -> list[float]:
    """Return the noise of neighbouring ids, positions, choices or seeds."""
    seed = noise_seed(draw_key(7, 0), 3)
    return {
        "ids": lambda: [noise(seed, i) for i in range(count)],
        "positions": lambda: [noise(noise_seed(draw_key(7, 0), i), 5) for i in range(count)],
        "choices": lambda: [noise(noise_seed(draw_key(7, i), 3), 5) for i in range(count)],
        "seeds": lambda: [noise(noise_seed(draw_key(i, 0), 3), 5) for i in range(count)],
    }[kind]()


KINDS = ["ids", "positions", "choices", "seeds"]


@pytest.mark.parametrize("kind", KINDS)
def test_noise_has_the_gumbel_distribution(kind: str) -> None:
    """The largest distance from the distribution function is one that 999 of 1,000 samples keep (Kolmogorov)."""
    count = 20_000
    expected = [math.exp(-math.exp(-x)) for x in sorted(values(kind, count))]
    assert max(abs(place / count - probability) for place, probability in enumerate(expected)) < 1.95 / math.sqrt(count)


@pytest.mark.parametrize("kind", KINDS)
def test_neighbouring_noise_is_unrelated(kind: str) -> None:
    uniforms = [math.exp(-math.exp(-x)) - 0.5 for x in values(kind, 20_000)]
    for distance in (1, 2, 16, 64):
        products = [a * b for a, b in zip(uniforms, uniforms[distance:], strict=False)]
        assert abs(12 * sum(products) / len(products)) < 4 / math.sqrt(len(products))


def test_the_noise_of_an_id_is_unrelated_to_that_of_all_ids_in_other_draws() -> None:
    """Were the noise of one draw that of another with its ids moved, two draws would have the same likely pairs."""
    draws = [[noise(noise_seed(draw_key(1, 0), position), i) for i in range(4000)] for position in range(5)]
    for first, second in pairwise(draws):
        uniforms = [[math.exp(-math.exp(-x)) - 0.5 for x in draw] for draw in (first, second)]
        for move in (0, 1, 5, 256):
            products = [a * b for a, b in zip(uniforms[0], uniforms[1][move:], strict=False)]
            assert abs(12 * sum(products) / len(products)) < 4 / math.sqrt(len(products))


@pytest.mark.parametrize("changed", [0, 1, 2], ids=["key", "position", "id"])
def test_a_changed_bit_changes_each_bit_of_the_noise_half_of_the_time(changed: int) -> None:
    count = 300
    for bit in range((64, 20, 18)[changed]):
        times = [0] * 64
        for i in range(count):
            before = [draw_key(i, 0), 5 * i, 7 * i]
            after = [x ^ 1 << bit if place == changed else x for place, x in enumerate(before)]
            first, second = (noise_bits(noise_seed(key, position), i) for key, position, i in (before, after))
            for place in range(64):
                times[place] += (first ^ second) >> place & 1
        assert all(abs(n - count / 2) < 5 * math.sqrt(count / 4) for n in times)
