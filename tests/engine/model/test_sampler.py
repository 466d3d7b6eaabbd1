"""The batched sampler against a plain one that does one row at a time, in Python floats."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oaiserve.engine.draws import draw_key, uniform
from oaiserve.engine.model.sampler import GREEDY_BELOW, logprobs_of, sample
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.sequence import Sequence

VOCAB = 12


def sequence(params: SamplingParams, prompt: list[int], generated: list[int], key: int = 0) -> Sequence:
    made = Sequence("r", 0, prompt, params, max_len=99, stop_ids=frozenset([0, 3]), draw_key=key)
    made.token_ids += generated
    return made


def plain_distribution(logits: list[float], row: Sequence) -> list[float]:
    """The probabilities to draw from, by the rules of the API, one token at a time."""
    p, scores = row.params, list(logits)
    counts = Counter(row.generated_ids)
    for i in range(VOCAB):
        if p.allowed_token_ids is not None and i not in p.allowed_token_ids:
            scores[i] = -math.inf
        if row.num_generated < p.min_tokens and i in row.stop_ids:
            scores[i] = -math.inf
        scores[i] += p.logit_bias.get(i, 0.0)
        if i in row.token_ids:
            scores[i] = scores[i] / p.repetition_penalty if scores[i] > 0 else scores[i] * p.repetition_penalty
        scores[i] -= p.frequency_penalty * counts[i] + p.presence_penalty * (counts[i] > 0)
    if p.temperature < GREEDY_BELOW:
        best = scores.index(max(scores))
        return [float(i == best) for i in range(VOCAB)]
    scaled = [score / p.temperature for score in scores]
    weights = [math.exp(score - max(scaled)) for score in scaled]
    weights = [w if w >= p.min_p * max(weights) else 0.0 for w in weights]
    order = sorted(range(VOCAB), key=lambda i: -weights[i])
    if p.top_k > 0:
        order = order[: p.top_k]
    total, mass, kept = sum(weights[i] for i in order), 0.0, []
    for i in order:
        if kept and mass >= p.top_p * total:
            break
        kept.append(i)
        mass += weights[i]
    return [weights[i] / mass if i in kept else 0.0 for i in range(VOCAB)]


params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([0.0, 0.4, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 3, VOCAB, 50]),
    min_p=st.sampled_from([0.0, 0.2]),
    presence_penalty=st.sampled_from([-1.0, 0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.7]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -1.0, 5.0]), max_size=2),
    allowed_token_ids=st.none() | st.just((1, 4, 5, 11)),
    min_tokens=st.sampled_from([0, 2]),
)
rows_strategy = st.lists(
    st.tuples(params_strategy, st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4), st.integers(0, 2**64 - 1)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=300, deadline=None)
@given(rows=rows_strategy, seed=st.integers(0, 2**16))
def test_every_row_draws_what_the_plain_sampler_allows_whoever_is_beside_it(
    rows: list[tuple[SamplingParams, list[int], int]], seed: int
) -> None:
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    sequences = [sequence(params, [2, 7], generated, key) for params, generated, key in rows]
    token_ids, are_finite = sample(logits, sequences)
    assert all(are_finite)
    for i, row in enumerate(sequences):
        distribution = plain_distribution(logits[i].tolist(), row)
        assert distribution[token_ids[i]] > 0
        assert sample(logits[i : i + 1], [row])[0] == [token_ids[i]], "alone it draws the same"


@pytest.mark.parametrize(
    "params",
    [SamplingParams(), SamplingParams(temperature=0.5, top_k=5, top_p=0.8), SamplingParams(min_p=0.1)],
    ids=["plain", "top_k and top_p", "min_p"],
)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(5)).expand(4000, -1)
    rows = [sequence(params, [2, 7], [1], draw_key(3, i)) for i in range(4000)]
    counts = Counter(sample(logits, rows)[0])
    expected = plain_distribution(logits[0].tolist(), rows[0])
    for token_id, probability in enumerate(expected):
        deviation = math.sqrt(4000 * probability * (1 - probability))
        assert abs(counts[token_id] - 4000 * probability) <= 4 * deviation


def test_sampling_does_not_change_the_logits() -> None:
    logits = torch.zeros(1, VOCAB)
    sample(logits, [sequence(SamplingParams(logit_bias={1: 5.0}), [2], [])])
    assert logits.abs().sum() == 0


def test_rows_that_are_no_numbers_are_told_apart() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[1, 4] = math.nan
    logits[2] = -math.inf
    rows = [sequence(SamplingParams(temperature=t), [2], []) for t in (0.0, 1.0, 0.0)]
    assert sample(logits, rows)[1] == [True, False, False]


def test_ties_go_to_the_lowest_id() -> None:
    assert sample(torch.zeros(1, VOCAB), [sequence(SamplingParams(temperature=0.0), [2], [])])[0] == [0]


def test_logprobs_are_those_of_the_unmodified_logits_best_first() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [0.0, 2.0, 1.0]])
    expected = logits[0].log_softmax(0).tolist()
    first, second = logprobs_of(logits, [0, 1], [2, 0])
    assert (first.token_id, first.logprob) == (0, pytest.approx(expected[0]))
    assert first.top_ids == [1, 2]
    assert first.top_logprobs == pytest.approx([expected[1], expected[2]])
    assert (second.top_ids, second.top_logprobs) == ([], [])


def test_uniforms_are_spread_evenly_and_independent_between_keys() -> None:
    values = [uniform(draw_key(9, 0), position) for position in range(2000)]
    others = [uniform(draw_key(9, 1), position) for position in range(2000)]
    assert 0.0 <= min(values) <= max(values) < 1.0
    assert sum(values) / 2000 == pytest.approx(0.5, abs=0.03)
    correlation = sum((a - 0.5) * (b - 0.5) for a, b in zip(values, others, strict=True)) / 2000 * 12
    assert abs(correlation) < 0.1
