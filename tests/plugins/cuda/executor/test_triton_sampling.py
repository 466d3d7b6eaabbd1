"""Sampling with Triton, in its interpreter, draws the same tokens as sampling in plain torch."""

import math
import random

import pytest
import torch

from oaiserve.engine.sequences.noise import noise
from oaiserve.engine.sequences.sequence import Sequence

pytest.importorskip("triton", reason="Triton has no wheels for this system")

from oaiserve.engine.model.sampling.logit_edits import edit_logits
from oaiserve.engine.model.sampling.sampled_ids import MOST_COUNT
from oaiserve.engine.sequences.step import Masks, Step
from oaiserve.plugins.cuda.executor import triton_sampling
from oaiserve.plugins.cuda.executor.block_tables import BlockTables
from oaiserve.plugins.cuda.executor.token_counts import DeviceCounts
from tests.engine.model.sampling import plain_sampling
from tests.engine.model.sampling.sampling import last_chunks, next_rows
from tests.engine.model.steps import CPU, sequence_of

# Rows that are not finite are computed as the others are, and then marked.
pytestmark = [pytest.mark.kernels, pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")]


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make chunks so small that a small vocabulary has several."""
    monkeypatch.setattr(triton_sampling, "CHUNK", 64)
    monkeypatch.setattr(triton_sampling, "TILE", 64)


def check(logits: torch.Tensor, sequences: list[Sequence]) -> None:
    token_ids, are_finite = triton_sampling.sample_ids(logits, next_rows(sequences))
    want_ids, want_finite = plain_sampling.sample_ids(logits, next_rows(sequences))
    assert are_finite.tolist() == want_finite.tolist()
    assert token_ids[are_finite].tolist() == want_ids[want_finite].tolist()


@pytest.mark.parametrize(("dtype", "spread"), [(torch.float32, 0.1), (torch.bfloat16, 6.0)], ids=str)
@pytest.mark.parametrize("cuts", [{}, {"top_k": 7}, {"top_p": 0.8}, {"top_k": 60, "top_p": 0.5}], ids=str)
def test_it_draws_the_same_tokens_as_plain_torch(cuts: dict[str, float], spread: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(4, 150) * spread).to(dtype)
    logits[2:] = (logits[2:] * 2).round() / 2  # rounded, so that many are equal
    logits[3, torch.rand(150) < 0.5] = -math.inf
    check(logits, [sequence_of([1, 2, 3], draw_key=key, temperature=0.7, **cuts) for key in range(4)])


def test_rows_of_all_kinds_are_sampled_together() -> None:
    chance = random.Random(5)
    torch.manual_seed(1)
    sequences = [
        sequence_of(
            [1, 2, 3],
            draw_key=key,
            temperature=chance.choice([0.0, 0.3, 1.0, 2.0]),
            top_k=chance.choice([0, 0, 1, 5, 149, 150, 1000]),
            top_p=chance.choice([1.0, 0.95, 0.2, 1e-6, 0.0]),
            min_p=chance.choice([0.0, 0.02, 1.0]),
        )
        for key in range(12)
    ]
    check(torch.randn(12, 150) * 3, sequences)


def shapes_of_rows(vocab: int) -> torch.Tensor:
    """Return logits of rows whose weights are near each other, equal, of few values, or far below the likeliest."""
    generator = torch.Generator().manual_seed(8)
    noise = torch.randn(vocab, generator=generator)
    tail = noise * 0.3 - 14.0  # below most floors
    tail[50] = 0.0
    two = torch.where(noise > 0.2, 1.0, 0.0)
    most = torch.where(noise > 1.5, -math.inf, noise * 0.05)  # fewer than some values of top_k
    rising = torch.linspace(-1.0, 0.0, vocab)
    return torch.stack([noise * 0.02, noise * 0.5, torch.zeros(vocab), two, tail, most, rising, noise * 3])


CUTS = [(0, 0.0), (0, 0.9), (0, 0.99999), (2, 1.0), (40, 0.9), (130, 1.0), (130, 0.3)]  # top_k and top_p


def test_rows_of_all_shapes_are_cut_as_in_plain_torch() -> None:
    """Each of `CUTS` is tried with some shapes."""
    shapes = shapes_of_rows(150)
    rows = [(cuts, (number + 3 * i) % len(shapes)) for number, cuts in enumerate(CUTS) for i in range(3)]
    sequences = [
        sequence_of([1, 2, 3], draw_key=key, temperature=1.0, top_k=top_k, top_p=top_p)
        for key, ((top_k, top_p), _) in enumerate(rows)
    ]
    check(shapes[[shape for _, shape in rows]], sequences)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_greedy_takes_the_lowest_id_of_equal_logits(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    logits = (torch.randn(6, 200) * 4).round().to(dtype)
    logits[0] = -0.0
    logits[0, 70] = 0.0  # equal
    logits[1] = -logits[1].abs() - 1
    check(logits, [sequence_of([1, 2, 3], temperature=0.0)] * 6)


def test_the_noise_is_that_of_its_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise alone decides where logits are equal. The ids have 1 to 17 bits."""
    vocab = 2**17
    num_rows = 30
    monkeypatch.setattr(triton_sampling, "CHUNK", vocab)
    sequences = [sequence_of([1, 2, 3], draw_key=key) for key in range(num_rows)]
    rows = next_rows(sequences)
    ids = [2**bit + offset for bit in range(17) for offset in (-1, 0, 1)]
    logits = torch.full((num_rows, vocab), -math.inf)
    logits[:, ids] = 0.0
    token_ids, _ = triton_sampling.sample_ids(logits, rows)
    assert token_ids.tolist() == [max(ids, key=lambda i: noise(row.seed, i)) for row in rows]


PENALTIES = [
    {"repetition_penalty": 1.3, "temperature": 0.0},
    {"repetition_penalty": 0.7, "frequency_penalty": 0.4, "presence_penalty": -0.6, "top_k": 9},
    {"presence_penalty": 1.5, "temperature": 0.7, "top_p": 0.8},
    {"frequency_penalty": 1.1, "temperature": 0.0},
    {"temperature": 0.0},
    {"repetition_penalty": 1.1, "frequency_penalty": 0.1, "temperature": 0.0},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_counted_rows_and_masks_draw_the_same_tokens_as_edits_on_the_host(dtype: torch.dtype) -> None:
    """The second step follows draws that the device has counted. A token before the third one was forced."""
    vocab = 150
    torch.manual_seed(6)
    prompts = [[(7 * i + 3 * j) % 20 for j in range(12)] for i in range(len(PENALTIES))]
    counted, plain = (
        [
            sequence_of(prompt, range(8), draw_key=place, device_counts=is_counted, **params)
            for place, (prompt, params) in enumerate(zip(prompts, PENALTIES, strict=True))
        ]
        for is_counted in (True, False)
    )
    tables = BlockTables(8, 8, 4, CPU)
    counts = DeviceCounts(tables, vocab)
    words = torch.randint(-(2**31), 2**31, (2, 5)).numpy().astype("int32").view("uint32")
    for number in range(4):
        logits = (torch.randn(len(prompts), vocab) * 2).to(dtype)
        logits[:, :20] += 2
        chunks = last_chunks(counted)
        tables.update(Step(chunks))
        masks = Masks({counted[4]: 0, counted[5]: 1}, words) if number % 2 else None
        found, _ = triton_sampling.sample_ids(logits, next_rows(counted), counts.edits_of(chunks, masks))
        of_plain = None if masks is None else Masks({plain[4]: 0, plain[5]: 1}, words)
        for sequence in (plain[4], plain[5]):
            sequence.has_edits = True  # as with a grammar
        edited = edit_logits(logits.clone(), last_chunks(plain), of_plain)
        assert found.tolist() == triton_sampling.sample_ids(edited, next_rows(plain))[0].tolist()
        for sequences in (counted, plain):
            for sequence, token_id in zip(sequences, found.tolist(), strict=True):
                sequence.token_ids += [token_id, 5] if number == 1 else [token_id]
                sequence.num_tokens = len(sequence.token_ids)


def test_a_count_stays_at_its_limit() -> None:
    tables = BlockTables(4, 4, 4, CPU)
    counts = DeviceCounts(tables, 100)
    one = sequence_of([3, 4], [0], device_counts=True, temperature=0.0, repetition_penalty=1.5)
    tables.update(Step(last_chunks([one])))
    logits = torch.zeros(1, 100)
    logits[0, 7] = 9.0
    edits = counts.edits_of(last_chunks([one]), None)
    row = edits.penalties.counts[tables.row_of(one)]
    assert row[[3, 4, 7]].tolist() == [1, 1, 0]
    row[7] = MOST_COUNT - 1
    for _ in range(2):
        assert triton_sampling.sample_ids(logits, next_rows([one]), edits)[0].tolist() == [7]
        assert row[[3, 4, 7]].tolist() == [1, 1, MOST_COUNT]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_k", [0, 3])
def test_rows_that_are_not_finite_are_marked(temperature: float, top_k: int) -> None:
    torch.manual_seed(3)
    logits = torch.randn(6, 130)
    logits[0, 100] = math.nan
    logits[1, 3] = -math.nan
    logits[2, 5] = math.inf
    logits[3] = -math.inf
    logits[4, 1:] = -math.inf
    check(logits, [sequence_of([1, 2, 3], temperature=temperature, top_k=top_k)] * 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_may_have_any_strides_and_nothing_between_their_rows_is_drawn(dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    logits = torch.full((3, 500), math.inf, dtype=dtype)[:, 100:300]
    logits.copy_(torch.randn(3, 200) * 4)
    for params in ({"temperature": 0.0}, {}, {"min_p": 0.05}, {"top_k": 205}, {"top_k": 7}, {"top_p": 0.9}):
        sequence = sequence_of([1, 2, 3], **params)
        check(logits, [sequence] * 3)
        check(logits.contiguous().T.contiguous().T, [sequence] * 3)
