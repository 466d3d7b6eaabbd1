"""Samples for sequences without a step, for the tests of samplers."""

import math
from collections.abc import Sequence as Sequenced

import torch

from oaiserve.engine.model.sampling.sampled_ids import SampleIds
from oaiserve.engine.model.sampling.sampler import Sampled, Sampling
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.sequences.draw_columns import GREEDY_BELOW, DrawRow
from oaiserve.engine.sequences.draw_rows import draw_row
from oaiserve.engine.sequences.masks import fill_masks
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.sequences.step import Chunk, Masks


def last_chunks(sequences: list[Sequence]) -> list[Chunk]:
    """Return the chunk of each sequence that draws its next token."""
    return [Chunk(sequence, sequence.num_tokens - 1, 1) for sequence in sequences]


def next_rows(sequences: list[Sequence]) -> list[DrawRow]:
    """Return the row of each sequence that draws its next token."""
    return [draw_row(sequence, sequence.num_tokens) for sequence in sequences]


def sample(
    logits: torch.Tensor,
    sequences: list[Sequence],
    known: Sequenced[tuple[int, int]] = (),
    sample_ids: SampleIds | None = None,
) -> Sampled:
    """Return the results of `Sampling` for the next token of each sequence."""
    chunks = last_chunks(sequences)
    masks = masks_of(sequences, logits.shape[1])
    return Sampling(logits, chunks, known, sample_ids, masks=masks).wait()


def masks_of(sequences: list[Sequence], vocab: int) -> Masks | None:
    """Return the masks of those sequences that a grammar constrains."""
    masks, failed = fill_masks([c for c in last_chunks(sequences) if c.sequence.constraint is not None], vocab)
    assert not failed
    return masks


def plain_distribution(
    scores: list[float], p: SamplingParams | DrawRow, top_p: float | None = None, min_p: float | None = None
) -> dict[int, float]:
    """Return the probabilities of the ids that stay."""
    top_p = p.top_p if top_p is None else top_p
    min_p = p.min_p if min_p is None else min_p
    ids = list(range(len(scores)))
    if p.temperature < GREEDY_BELOW:
        return {scores.index(max(scores)): 1.0}
    weights = [math.exp((score - max(scores)) / p.temperature) for score in scores]
    weights = [w if w >= min_p * max(weights) else 0.0 for w in weights]
    if 0 < p.top_k < len(scores) or top_p < 1.0:
        ids = sorted(ids, key=lambda i: (-weights[i], i))[: int(p.top_k) or None]
        num_kept = 0
        mass = 0.0
        total = sum(weights[i] for i in ids)
        while num_kept == 0 or (num_kept < len(ids) and mass < top_p * total):
            mass += weights[ids[num_kept]]
            num_kept += 1
        ids = ids[:num_kept]
    total = sum(weights[i] for i in ids)
    return {i: weights[i] / total for i in ids if weights[i]}
