"""Draws on a CPU have the distribution that was asked for, and depend on nothing but their own row."""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from oaiserve.engine.model.sampling import numpy_sampling
from oaiserve.engine.model.sampling.sampler import Sampling
from oaiserve.engine.sequences.draw_columns import GREEDY, DrawRow
from oaiserve.engine.sequences.noise import draw_key, noise, noise_seed
from tests.engine.model.sampling import plain_sampling
from tests.engine.model.sampling.sampling import last_chunks, plain_distribution
from tests.engine.model.steps import sequence_of

ODD_SIZES = [1, 2, 97, 1001, 4099]


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


def draw_row(seed: int = 0, **asked: float) -> DrawRow:
    return DrawRow(**{name: float(np.float32(number)) for name, number in asked.items()}, seed=seed)


def random_logits(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


rows_strategy = st.lists(
    st.just(GREEDY)
    | st.builds(
        draw_row,
        seed=st.integers(0, 2**64 - 1),
        temperature=st.sampled_from([0.01, 0.3, 1.0, 2.0, 50.0]),
        min_p=st.sampled_from([0.0, 0.0, 0.001, 0.3, 1.0]),
        top_k=st.sampled_from([0, 0, 1, 7, 50, 1000]),
        top_p=st.sampled_from([1.0, 1.0, 0.0, 0.5, 0.9, 0.999999]),
    ),
    min_size=1,
    max_size=7,
)


@settings(max_examples=100)
@given(
    rows=rows_strategy,
    num_threads=st.sampled_from([1, 2]),
    vocab=st.sampled_from(ODD_SIZES),
    spread=st.sampled_from([0.01, 0.5, 3.0, 30.0]),
    step=st.sampled_from([0.0, 0.25]),
    banned=st.sampled_from([0.0, 0.9]),
    seed=st.integers(0, 2**16),
)
def test_a_row_gets_the_same_id_alone_and_anywhere_in_a_batch(
    rows: list[DrawRow], num_threads: int, vocab: int, spread: float, step: float, banned: float, seed: int
) -> None:
    logits = random_logits(len(rows), vocab, seed=seed) * spread
    if step:
        logits = (logits / step).round() * step  # so that many are equal
    logits[random_logits(len(rows), vocab, seed=seed + 1).sigmoid() < banned] = -math.inf
    with torch_threads(num_threads):
        together, are_finite = numpy_sampling.sample_ids(logits, rows)
    for index, row in enumerate(rows):
        for offset in (0, 1, 7):  # the row begins at another address within a cache line
            alone = torch.empty(vocab + offset)[offset:].copy_(logits[index])[None]
            assert numpy_sampling.sample_ids(alone, [row]) == (together[index], are_finite[index])
    backwards, _ = numpy_sampling.sample_ids(logits.flip(0), rows[::-1])
    assert backwards.tolist() == together.tolist()[::-1]
    plain, plain_finite = plain_sampling.sample_ids(logits, rows)
    assert plain_finite.tolist() == are_finite.tolist()
    assert plain[plain_finite].tolist() == together[are_finite].tolist()


def test_a_row_of_a_large_vocabulary_gets_the_same_id_alone() -> None:
    logits = random_logits(8, 49_153, seed=2) * 3
    ways: list[dict[str, float]] = [{}, {"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.05}]
    rows = [draw_row(noise_seed(1, i), **ways[i % 4]) for i in range(8)]
    together, _ = numpy_sampling.sample_ids(logits, rows)
    assert together.tolist() == [int(numpy_sampling.sample_ids(logits[[i]], [rows[i]])[0]) for i in range(8)]
    assert together.tolist() == plain_sampling.sample_ids(logits, rows)[0].tolist()


@settings(max_examples=60)
@given(
    num_threads=st.sampled_from([1, 2]),
    vocab=st.sampled_from([*ODD_SIZES, 49_153]),
    num_rows=st.integers(1, 5),
    seed=st.integers(0, 2**16),
)
def test_log_probabilities_have_the_same_bytes_alone_and_anywhere_in_a_batch(
    num_threads: int, vocab: int, num_rows: int, seed: int
) -> None:
    logits = random_logits(num_rows, vocab, seed=seed) * 4
    sequences = [sequence_of([1], logprobs=min(i, vocab), draw_key=seed + i) for i in range(num_rows)]
    known = [(i % vocab, min(2, vocab)) for i in range(num_rows)]
    with torch_threads(num_threads):
        together = Sampling(torch.cat([logits, logits]), last_chunks(sequences), known).wait()
    for index, sequence in enumerate(sequences):
        both = logits[[index, index]]
        alone = Sampling(both, last_chunks([sequence]), [known[index]]).wait()
        # Floats are compared, of which only 0.0 and -0.0 are equal with other bytes.
        assert alone.token_ids == [together.token_ids[index]]
        assert alone.logprobs == [together.logprobs[index]]
        assert alone.known_logprobs == [together.known_logprobs[index]]


@settings(max_examples=60)
@given(size=st.integers(1, 300), start=st.integers(0, 40), seed=st.integers(0, 2**16))
def test_a_weight_has_the_same_bytes_wherever_it_is_in_a_row(size: int, start: int, seed: int) -> None:
    """NumPy computes several at a time, and those at the end of a row by themselves."""
    scaled = -np.abs(random_logits(start + size, seed=seed).numpy() * 20)
    assert np.exp(scaled)[start:].tobytes() == np.exp(scaled[start:].copy()).tobytes()
    assert np.exp(scaled[-1:]).tobytes() == np.exp(scaled)[-1:].tobytes()


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**64 - 1),
    vocab=st.sampled_from([1, 2, 97, 1001]),
    spread=st.sampled_from([0.0, 1e-6, 0.5, 10.0, 1e6]),
    temperature=st.sampled_from([0.01, 1.0, 50.0]),
)
def test_the_id_has_the_highest_score_of_all(seed: int, vocab: int, spread: float, temperature: float) -> None:
    """No id is left out that wins, also where the noise decides alone, or the logits do."""
    row = draw_row(seed, temperature=temperature)
    logits = random_logits(1, vocab, seed=seed % 2**32) * spread
    drawn, _ = numpy_sampling.sample_ids(logits, [row])
    values = logits[0].tolist()
    assert int(drawn) == max(range(vocab), key=lambda i: (values[i] - max(values)) / row.temperature + noise(seed, i))


def test_the_noise_of_few_ids_is_computed_exactly_and_the_highest_is_among_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exact = Mock(wraps=noise)
    monkeypatch.setattr(numpy_sampling, "noise", exact)
    for position in range(10):
        row = draw_row(noise_seed(1, position))
        exact.reset_mock()
        drawn, _ = numpy_sampling.sample_ids(torch.zeros(1, 20_000), [row])
        assert exact.call_count < 8
        assert int(drawn) == max(range(20_000), key=lambda i, row=row: noise(row.seed, i))


# -- the distribution

VOCAB = 24
WAYS: list[dict[str, float]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 0.7, "min_p": 0.05},
    {"temperature": 1.5, "min_p": 0.02, "top_k": 12, "top_p": 0.9},
]


def is_plausible(counts: list[int], expected: list[float]) -> bool:
    """Return whether 999 of 1,000 samples have no higher chi-square (Wilson and Hilferty)."""
    cells = [(count, mean) for count, mean in zip(counts, expected, strict=True) if mean > 0]
    assert sum(count for count, _ in cells) == sum(counts), "nothing is drawn that cannot be"
    degrees = len(cells) - 1
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    return statistic <= degrees * (1 - 2 / (9 * degrees) + 3.09 * math.sqrt(2 / (9 * degrees))) ** 3


@pytest.mark.parametrize(
    ("way", "along"), [*((way, "positions") for way in WAYS), (WAYS[0], "choices"), (WAYS[0], "seeds")], ids=str
)
def test_draws_follow_the_distribution(way: dict[str, float], along: str) -> None:
    count = 4000
    logits = random_logits(1, VOCAB, seed=5) * 1.5
    seed_of = {
        "positions": lambda i: noise_seed(draw_key(3, 0), i),
        "choices": lambda i: noise_seed(draw_key(3, i), 9),
        "seeds": lambda i: noise_seed(draw_key(i, 0), 9),
    }[along]
    rows = [draw_row(seed_of(i), **way) for i in range(count)]
    drawn, _ = numpy_sampling.sample_ids(logits.repeat(count, 1), rows)
    counts = Counter(drawn.tolist())
    probabilities = plain_distribution(logits[0].tolist(), rows[0])
    expected = [count * probabilities.get(i, 0.0) for i in range(VOCAB)]
    assert is_plausible([counts[i] for i in range(VOCAB)], expected)


@pytest.mark.parametrize(
    ("way", "warpers"),
    [
        ({"temperature": 0.2, "top_p": 0.9}, [TemperatureLogitsWarper(0.2), TopPLogitsWarper(0.9)]),
        ({"temperature": 0.7, "min_p": 0.05}, [TemperatureLogitsWarper(0.7), MinPLogitsWarper(0.05)]),
        (
            {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
            [TemperatureLogitsWarper(0.7), TopKLogitsWarper(20), TopPLogitsWarper(0.8)],
        ),
    ],
    ids=["demo", "fallback", "qwen"],
)
def test_stated_defaults_mean_the_same_as_in_transformers(
    way: dict[str, float], warpers: list[LogitsProcessor]
) -> None:
    for seed in range(50):
        logits = random_logits(1, 997, seed=seed) * 3
        scores = LogitsProcessorList(warpers)(torch.zeros(1, 1, dtype=torch.long), logits.clone())
        expected = {i: p for i, p in enumerate(scores.softmax(-1)[0].tolist()) if p}
        assert plain_distribution(logits[0].tolist(), draw_row(**way)) == pytest.approx(expected, rel=1e-4)


def test_the_tail_of_a_large_vocabulary_is_drawn_as_often_as_it_should() -> None:
    """Each of its ids is so unlikely that noise made of 24 bits, which is at most 16.6, would never let one win."""
    vocab = 151_936
    count = 1500
    gap = 17.0
    logits = torch.full((1, vocab), -gap)
    logits[0, 7] = 0.0
    drawn = [int(numpy_sampling.sample_ids(logits, [draw_row(noise_seed(draw_key(0, 0), i))])[0]) for i in range(count)]
    mass = (vocab - 1) * math.exp(-gap)
    expected = count * mass / (1 + mass)  # 9.4
    from_tail = [token_id for token_id in drawn if token_id != 7]
    assert abs(len(from_tail) - expected) < 3.5 * math.sqrt(expected)
    assert len(set(from_tail)) == len(from_tail)


@pytest.mark.parametrize("way", [{}, {"top_p": 0.9}], ids=str)
def test_logits_that_differ_by_little_draw_other_ids_as_rarely(way: dict[str, float]) -> None:
    """By the sum of probabilities, 13 and 15 of 100 draws would differ, as every border is moved by every logit."""
    logits = random_logits(300, 5000, seed=6) * 3
    rows = [draw_row(noise_seed(1, i), **way) for i in range(300)]
    first, second = (
        numpy_sampling.sample_ids(logits + changes * 0.003, rows)[0] for changes in random_logits(2, 300, 5000)
    )
    assert int((first != second).sum()) <= 3


# -- rows that are special


@pytest.mark.parametrize("way", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}, {"temperature": 0.01}], ids=str)
def test_logits_as_low_as_float32_allows_are_never_drawn(way: dict[str, float]) -> None:
    logits = torch.full((1, 500), torch.finfo(torch.float32).min)
    logits[0, [3, 70]] = torch.tensor([3.0, 3.0])
    drawn = {int(numpy_sampling.sample_ids(logits, [draw_row(i * 2**40 + i, **way)])[0]) for i in range(40)}
    assert drawn == ({3} if way.get("top_p") else {3, 70})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_and_strides_make_no_difference(dtype: torch.dtype) -> None:
    logits = (random_logits(3, 400, seed=1) * 3).to(dtype)
    rows: list[Any] = [draw_row(1), draw_row(2, top_p=0.8), GREEDY]
    expected = numpy_sampling.sample_ids(logits.float(), rows)[0].tolist()
    assert numpy_sampling.sample_ids(logits, rows)[0].tolist() == expected
    assert numpy_sampling.sample_ids(logits.T.contiguous().T, rows)[0].tolist() == expected
