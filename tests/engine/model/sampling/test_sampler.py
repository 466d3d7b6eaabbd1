"""The batched sampler equals a plain sampler that computes one row at a time with Python floats."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oaiserve.engine.model.sampling import logit_edits, numpy_sampling
from oaiserve.engine.model.sampling.logit_edits import apply_masks_in_torch, apply_masks_on_cpu, edit_logits
from oaiserve.engine.model.sampling.sampled_ids import SampledIds, SampleIds
from oaiserve.engine.model.sampling.sampler import Sampled
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.sequences.draw_columns import DrawRow
from oaiserve.engine.sequences.noise import noise, noise_seed
from oaiserve.engine.sequences.sequence import Sequence
from tests.engine.grammars.plain import OneOf, constraint
from tests.engine.model.operations import Operations
from tests.engine.model.sampling import plain_sampling
from tests.engine.model.sampling.sampling import last_chunks, masks_of, plain_distribution, sample

VOCAB = 24
EPSILON = 1e-5  # edits are in float32: scores that are so close may be in either order, and so with thresholds


def sequence(
    params: SamplingParams | None = None,
    prompt: tuple[int, ...] = (2, 7),
    generated: tuple[int, ...] = (),
    bad_words: tuple[tuple[int, ...], ...] = (),
    key: int = 0,
    mask: tuple[int, ...] | None = None,
) -> Sequence:
    """Return a sequence. With `mask`, these ids are what its grammar lets come next, and id 0 is its end."""
    params = params or SamplingParams()
    limits = {"min_tokens": params.min_tokens, "stop_token_ids": (3,)}
    one = Sequence(
        "r",
        0,
        list(prompt),
        params,
        max_len=99,
        stop_ids=frozenset([0, 3]),
        draw_key=key,
        bad_words=[list(word) for word in bad_words],
        constraint=None
        if mask is None
        else constraint(OneOf(*([i] for i in mask if i), *[[]] * (0 in mask)), **limits),
    )
    one.token_ids += generated
    one.num_tokens += len(generated)
    return one


# -- the plain sampler: one row, one token after the other, by the rules of the API


def plain_edits(logits: list[float], row: Sequence) -> list[float]:
    p = row.params
    scores = list(logits)
    answer = row.generated_ids
    for i in range(len(scores)):
        if p.allowed_token_ids is not None and i not in p.allowed_token_ids:
            scores[i] = -math.inf
        for word in row.bad_words:
            if word[-1] == i and [*answer, i][-len(word) :] == word:
                scores[i] = -math.inf
        if len(answer) < p.min_tokens and i in row.stop_ids and row.constraint is None:
            scores[i] = -math.inf
        scores[i] += p.logit_bias.get(i, 0.0)
        if i in row.token_ids:
            scores[i] = scores[i] / p.repetition_penalty if scores[i] > 0 else scores[i] * p.repetition_penalty
        scores[i] -= p.frequency_penalty * answer.count(i) + p.presence_penalty * (i in answer)
    masks = masks_of([row], len(scores))
    if masks is not None:
        words = [int(word) for word in masks.words[0]]
        scores = [score if words[i // 32] >> i % 32 & 1 else -math.inf for i, score in enumerate(scores)]
    return scores


def plain_draws(distribution: dict[int, float], seed: int) -> set[int]:
    """Return the id whose noise and logarithm of its probability add up to the most, and those that are as good."""
    scores = {i: math.log(probability) + noise(seed, i) for i, probability in distribution.items()}
    return {i for i, score in scores.items() if score >= max(scores.values()) - EPSILON}


def plain_answers(logits: list[float], row: Sequence) -> set[int]:
    """Return the id to be drawn, or several if rounding decides between them, or none if the logits are not finite."""
    scores = plain_edits(logits, row)
    p = row.params
    if not math.isfinite(max(scores)):
        return set()
    seed = noise_seed(row.draw_key, len(row.token_ids))
    either = (-EPSILON, 0.0, EPSILON)
    top_ps = [p.top_p + by for by in either] if p.top_p < 1.0 else [p.top_p]
    min_ps = [min(1.0, p.min_p + by) for by in either] if p.min_p else [p.min_p]
    distributions = [plain_distribution(scores, p, top_p, min_p) for top_p in top_ps for min_p in min_ps]
    return {token_id for distribution in distributions for token_id in plain_draws(distribution, seed)}


def plain_logprobs(logits: list[float]) -> list[float]:
    norm = math.log(math.fsum(math.exp(x - max(logits)) for x in logits)) + max(logits)
    return [x - norm for x in logits]


# -- batches

some_ids = st.integers(0, VOCAB - 1)
few_ids = st.integers(1, 3)  # so that an answer often ends with the beginning of a bad word, and repeats itself
params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([0.0, 0.4, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 3, VOCAB, 50]),
    min_p=st.sampled_from([0.0, 0.2, 1.0]),
    presence_penalty=st.sampled_from([-1.0, 0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.75]),
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.7]),
    logit_bias=st.dictionaries(some_ids, st.sampled_from([-100.0, -1.0, 5.0]), max_size=2),
    allowed_token_ids=st.sampled_from([None, None, (1, 4, 5, 11), (3,), (2, 2, 9)]),
    min_tokens=st.sampled_from([0, 2]),
    logprobs=st.sampled_from([None, 0, 3, 20]),
)
row_strategy = st.builds(
    sequence,
    params=params_strategy | st.just(SamplingParams(temperature=0.0)),
    prompt=st.lists(some_ids, min_size=1, max_size=4).map(tuple),
    generated=st.lists(few_ids | some_ids, max_size=5).map(tuple),
    bad_words=st.lists(st.lists(few_ids, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    key=st.integers(0, 2**64 - 1),
    mask=st.none() | st.lists(some_ids, min_size=1, max_size=5).map(tuple),
)
rows_strategy = st.lists(row_strategy, min_size=1, max_size=6)


@st.composite
def batches(draw: Callable[..., Any]) -> tuple[torch.Tensor, list[Sequence]]:
    rows = draw(rows_strategy)
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(draw(st.integers(0, 2**16)))) * 3
    return logits.round() if draw(st.booleans()) else logits, rows  # rounded logits have many ties


@pytest.mark.parametrize("edit", ["_edit_on_cpu", "_edit_on_device"])
@settings(max_examples=300)
@given(batch=batches())
def test_every_row_is_edited_as_its_request_asks(batch: tuple[torch.Tensor, list[Sequence]], edit: str) -> None:
    logits, rows = batch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logit_edits, "_edit_on_cpu", getattr(logit_edits, edit))
        edited = edit_logits(logits.clone(), last_chunks(rows), masks_of(rows, VOCAB))
    for i, row in enumerate(rows):
        assert edited[i].tolist() == pytest.approx(plain_edits(logits[i].tolist(), row), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("sample_ids", [numpy_sampling.sample_ids, plain_sampling.sample_ids], ids=["numpy", "torch"])
@settings(max_examples=200)
@given(batch=batches())
def test_every_row_gets_the_plain_samplers_token_and_logprobs(
    sample_ids: SampleIds, batch: tuple[torch.Tensor, list[Sequence]]
) -> None:
    logits, rows = batch
    sampled = sample(logits.clone(), rows, sample_ids=sample_ids)
    for i, row in enumerate(rows):
        answers = plain_answers(logits[i].tolist(), row)
        assert sampled.are_finite[i] == bool(answers)
        if not answers:
            continue
        assert sampled.token_ids[i] in answers
        num_top = row.params.logprobs
        actual = sampled.logprobs[i]
        assert (actual is None) == (num_top is None)
        if actual is not None:
            expected = plain_logprobs(logits[i].tolist())
            assert actual.token_id == sampled.token_ids[i]
            assert actual.logprob == pytest.approx(expected[actual.token_id], abs=1e-5)
            assert len(set(actual.top_ids)) == num_top
            in_order = sorted(range(num_top), key=lambda j: (-actual.top_logprobs[j], actual.top_ids[j]))
            assert in_order == list(range(num_top))
            assert actual.top_logprobs == pytest.approx([expected[j] for j in actual.top_ids], abs=1e-5)
            assert actual.top_logprobs == pytest.approx(sorted(expected)[::-1][:num_top], abs=1e-5)


@settings(max_examples=100)
@given(data=st.data(), vocab=st.integers(1, 150))
def test_masks_are_applied_on_a_cpu_as_in_plain_torch_and_in_python(data: st.DataObject, vocab: int) -> None:
    rows = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=5, unique=True))
    width = -(-vocab // 32)
    words = np.array(data.draw(st.lists(some_words(width), min_size=len(rows), max_size=len(rows))), dtype=np.uint32)
    logits = torch.arange(5.0 * vocab).view(5, vocab)
    expected = logits.tolist()
    for row, mask in zip(rows, words.tolist(), strict=True):
        expected[row] = [x if mask[i // 32] >> i % 32 & 1 else -math.inf for i, x in enumerate(expected[row])]
    for apply in (apply_masks_in_torch, apply_masks_on_cpu):
        masked = logits.clone()
        apply(masked, rows, words)
        assert masked.tolist() == expected


def some_words(width: int) -> st.SearchStrategy[list[int]]:
    word = st.sampled_from([0, 2**32 - 1, 1, 2**31]) | st.integers(0, 2**32 - 1)
    return st.lists(word, min_size=width, max_size=width)


def test_penalties_follow_an_answer_as_it_grows() -> None:
    """The counts of tokens are kept with the sequence from step to step."""
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(6))
    rows = [
        sequence(SamplingParams(repetition_penalty=1.5, frequency_penalty=0.4, min_tokens=3), (5, 6, 5)),
        sequence(SamplingParams(presence_penalty=0.7), (5, 6, 5), bad_words=((9, 9, 6), (9, 7))),
    ]
    for token_id in (9, 9, 6, 5, 9, 23, 9):
        edited = edit_logits(logits.clone(), last_chunks(rows))
        for i, row in enumerate(rows):
            assert edited[i].tolist() == pytest.approx(plain_edits(logits[i].tolist(), row), rel=1e-5)
            row.token_ids.append(token_id)
            row.num_tokens += 1


@pytest.mark.parametrize("min_tokens", [1, 2, 3])
def test_a_token_whose_id_is_not_known_yet_counts_for_min_tokens(min_tokens: int) -> None:
    generator = torch.Generator().manual_seed(4)
    params = SamplingParams(min_tokens=min_tokens)
    known = [sequence(params, generated=(5, 6), key=key) for key in range(99)]
    unknown = [sequence(params, generated=(5,), key=key) for key in range(99)]
    for row in unknown:
        row.num_tokens += 1
    logits = torch.randn(99, VOCAB, generator=generator)
    actual_logits = sample(logits.clone(), unknown)
    expected = sample(logits.clone(), known)
    assert actual_logits == expected
    assert bool({0, 3} & set(actual_logits.token_ids)) == (min_tokens < 3), (
        "ids that end an answer are banned before min_tokens"
    )


# -- special rows


WAYS = [{"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.5, "min_p": 0.1}, {"logit_bias": {1: 2.0}, "logprobs": 2}]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.nan])
def test_a_row_that_is_not_finite_is_marked_and_affects_no_other(way: dict[str, Any], bad: float) -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(2))
    rows = [sequence(SamplingParams(**way), key=i) for i in range(4)]
    good = sample(logits.clone(), rows)
    logits[1, 4] = bad
    logits[2] = -math.inf
    mixed = sample(logits, rows)
    assert (good.are_finite, mixed.are_finite) == ([True] * 4, [True, False, False, True])
    for i in (0, 3):
        assert (mixed.token_ids[i], mixed.logprobs[i]) == (good.token_ids[i], good.logprobs[i])


def test_ids_above_2_to_the_24_are_exact() -> None:
    logits = torch.zeros(1, 2**24 + 2, dtype=torch.bfloat16)
    logits[0, 2**24 + 1] = 1.0
    assert sample(logits, [sequence(SamplingParams(temperature=0.0))]).token_ids == [2**24 + 1]


def test_half_precision_logits_are_edited_and_drawn_in_float32() -> None:
    logits = torch.zeros(2, VOCAB, dtype=torch.bfloat16)
    rows = [sequence(SamplingParams(temperature=0.0, logit_bias={i: 1.0 + i * 1e-4 for i in range(9)}))]
    rows += [sequence(SamplingParams(top_p=0.9, logprobs=0))]
    sampled = sample(logits, rows)
    assert sampled.token_ids[0] == 8
    assert sampled.logprobs[1].logprob == pytest.approx(-math.log(VOCAB), rel=1e-6)


def test_logprobs_are_those_of_the_unmodified_logits_best_first() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]] * 4)
    expected = logits[0].log_softmax(0).tolist()
    biased = SamplingParams(temperature=0.0, logit_bias={0: 50.0}, logprobs=2)
    sampled = sample(logits, [sequence(biased), sequence(SamplingParams(temperature=0.0))], [(0, 2), (1, 0)])
    assert sampled.token_ids == [0, 1]
    assert sampled.logprobs[1] is None
    for each in (sampled.logprobs[0], sampled.known_logprobs[0]):
        assert (each.token_id, each.logprob) == (0, pytest.approx(expected[0]))
        assert each.top_ids == [1, 2]
        assert each.top_logprobs == pytest.approx([expected[1], expected[2]])
    last = sampled.known_logprobs[1]
    assert (last.token_id, last.logprob, last.top_ids) == (1, pytest.approx(expected[1]), [])


@pytest.mark.parametrize("num_top", [0, 3])
def test_ranks_of_known_tokens_count_the_whole_vocabulary(num_top: int) -> None:
    logits = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(5)).round()  # with equal ones
    rows = list(range(VOCAB))
    expected = [logits[i].argsort(descending=True, stable=True).tolist().index(i) + 1 for i in rows]
    sampled = sample(logits, [], [(i, num_top) for i in rows])
    assert [one.rank for one in sampled.known_logprobs] == expected


def test_no_rows_give_empty_results() -> None:
    assert sample(torch.zeros(0, VOCAB), []) == Sampled([], [], [], [])


def test_rows_may_be_several_positions_of_one_sequence() -> None:
    """So it is where a draft is checked: each position has its own noise, in any order and batch."""
    draw_rows: list[DrawRow] = []

    def keep(logits: torch.Tensor, rows: list[DrawRow]) -> SampledIds:
        draw_rows.extend(rows)
        return numpy_sampling.sample_ids(logits, rows)

    one = sequence(SamplingParams(top_p=0.9), key=5)
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, VOCAB, generator=generator)
    one_by_one = []
    for row in logits:
        one_by_one += sample(row[None].clone(), [one], sample_ids=keep).token_ids
        one.token_ids.append(one_by_one[-1])
        one.num_tokens += 1
    together, _ = numpy_sampling.sample_ids(logits.flip(0), draw_rows[::-1])
    assert together.tolist() == one_by_one[::-1]
    assert [row.seed for row in draw_rows] == [noise_seed(5, position) for position in range(2, 8)]


# -- cost


class Device(Operations):
    """The device `meta`, on which an operation raises if the host has to know its result.

    Copies to the host are counted and return zeros.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_read_backs = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.ops.aten._to_copy.default:
            source = args[0]
            target = kwargs.get("device") or args[0].device
            if source.is_meta and target == torch.device("cpu"):
                self.num_read_backs += 1
                return torch.zeros(source.shape, dtype=source.dtype)
            if target.type == "meta" and not source.is_meta:
                assert kwargs.get("non_blocking"), "an upload must not wait for the device"
        if any(isinstance(arg, torch.Tensor) and arg.is_meta for arg in args):
            return super().__torch_dispatch__(function, types, args, kwargs)
        return function(*args, **kwargs)

    def over_the_vocabulary(self) -> list[tuple[str, int]]:
        """The operations that read whole rows of logits, each with its number of rows."""
        over = {"_log_softmax", "topk"}  # The draws of `plain_sampling` are no part of `Sampling`.
        operations = zip(self.names, self.shapes, strict=True)
        return [(name, shapes[0][0]) for name, shapes in operations if name in over and VOCAB in shapes[0]]


def run_on_device(rows: list[Sequence], known: list[tuple[int, int]] | None = None) -> Device:
    logits = torch.empty(len(rows) + len(known or []), VOCAB, device="meta")
    with Device() as device:
        sample(logits, rows, known or [], plain_sampling.sample_ids)
    return device


def one_of_everything(key: int = 0) -> list[Sequence]:
    everything: dict[str, Any] = {
        "allowed_token_ids": (1, 4, 5),
        "min_tokens": 4,
        "logit_bias": {4: 1.0},
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.2,
        "logprobs": 5,
    }
    ways = [{"temperature": 0.0}, {}, {"top_k": 5, "top_p": 0.5}, {"min_p": 0.2}]
    return [
        sequence(SamplingParams(**way, **everything), generated=(1,), bad_words=((1, 2), (3,)), key=key + i)
        for i, way in enumerate(ways)
    ]


def test_a_step_waits_for_the_device_once_whatever_is_asked() -> None:
    assert run_on_device(one_of_everything(), [(1, 3), (2, 0)]).num_read_backs == 1


def test_more_rows_take_no_more_operations() -> None:
    few, many = ([row for i in range(count) for row in one_of_everything(i)] for count in (2, 20))
    few_names, many_names = (run_on_device(rows).names for rows in (few, many))
    assert few_names == many_names


def test_only_rows_that_ask_for_logprobs_cost_a_log_softmax() -> None:
    params = SamplingParams(temperature=0.0)
    rows = [sequence(params) for _ in range(5)] + [sequence(SamplingParams(temperature=0.0, logprobs=2))]
    assert run_on_device(rows).over_the_vocabulary() == [("_log_softmax", 1), ("topk", 1)]
