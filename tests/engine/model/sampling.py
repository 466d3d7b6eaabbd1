"""Samples for sequences without a step, for the tests of samplers."""

from __future__ import annotations

from collections.abc import Sequence as Sequenced

import torch

from oaiserve.engine.model.sampler import Sampled, SampleIds, Sampling
from oaiserve.engine.sequence import Sequence
from oaiserve.engine.step import Chunk


def last_chunks(sequences: list[Sequence]) -> list[Chunk]:
    """Return the chunk of each sequence that draws its next token."""
    return [Chunk(sequence, sequence.num_tokens - 1, 1) for sequence in sequences]


def sample(
    logits: torch.Tensor,
    sequences: list[Sequence],
    known: Sequenced[tuple[int, int]] = (),
    sample_ids: SampleIds | None = None,
) -> Sampled:
    """Return the results of `Sampling` for the next token of each sequence."""
    return Sampling(logits, last_chunks(sequences), known, sample_ids).wait()
