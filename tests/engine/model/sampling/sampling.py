"""Samples for sequences without a step, for the tests of samplers."""

from __future__ import annotations

from collections.abc import Sequence as Sequenced

import torch

from oaiserve.engine.grammars.masks import fill_masks
from oaiserve.engine.model.sampling.draw_rows import DrawRow, SampleIds, draw_row
from oaiserve.engine.model.sampling.logit_edits import ApplyMasks
from oaiserve.engine.model.sampling.sampler import Sampled, Sampling
from oaiserve.engine.sequence import Sequence
from oaiserve.engine.step import Chunk, Masks


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
    apply_masks: ApplyMasks | None = None,
) -> Sampled:
    """Return the results of `Sampling` for the next token of each sequence."""
    chunks, masks = last_chunks(sequences), masks_of(sequences, logits.shape[1])
    return Sampling(logits, chunks, known, sample_ids, masks=masks, apply_masks=apply_masks).wait()


def masks_of(sequences: list[Sequence], vocab: int) -> Masks | None:
    """Return the masks of those sequences that a grammar constrains."""
    masks, failed = fill_masks([c for c in last_chunks(sequences) if c.sequence.constraint is not None], vocab)
    assert not failed
    return masks
