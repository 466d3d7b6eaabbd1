"""Compares draws, and the masks of grammars, with those in plain torch."""

from __future__ import annotations

import numpy as np
import torch

from oaiserve.engine.model.sampling import plain_sampling
from oaiserve.engine.model.sampling.draw_rows import GREEDY, DrawRow, SampleIds
from oaiserve.engine.model.sampling.logit_edits import ApplyMasks, apply_masks_in_torch
from oaiserve.engine.model.spec import LoadedModel

_DRAWS = [
    GREEDY,
    DrawRow(1.0, 0.0, 0.0, 1.0, 11),
    DrawRow(0.7, 0.05, 0.0, 1.0, 12),
    DrawRow(0.7, 0.0, 40.0, 0.9, 13),
    DrawRow(3.0, 0.0, 0.0, 0.9, 15),  # so flat that several programs search
    DrawRow(1.0, 0.0, 0.0, 1.0, 14),  # from logits that are not finite
]


@torch.inference_mode()
def sampling_problem(loaded: LoadedModel, sample_ids: SampleIds, apply_masks: ApplyMasks) -> str | None:
    """Compare draws and masks with those in plain torch; return the difference as text, or None."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(len(_DRAWS), loaded.vocab_size, generator=generator) * 3
    logits = numbers.to(loaded.device, loaded.dtype)
    logits[-1] = torch.inf
    for rows in (_DRAWS[:1], _DRAWS[:3], _DRAWS):  # each has kernels of its own
        some = logits[: len(rows)]
        got_ids, got_finite = sample_ids(some, rows)
        want_ids, want_finite = plain_sampling.sample_ids(some, rows)
        are_equal = (got_ids == want_ids) | ~want_finite.bool()
        if not bool((got_finite.bool() == want_finite.bool()).all()) or not bool(are_equal.all()):
            return f"of {len(rows)} draws, {int((~are_equal).sum())} would be others"
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, (2, -(-loaded.vocab_size // 32)), dtype=np.uint32)
    masked, expected = (logits[:3].to(torch.float32, copy=True) for _ in range(2))
    apply_masks(masked, [0, 2], words)
    apply_masks_in_torch(expected, [0, 2], words)
    return None if torch.equal(masked, expected) else "masks of grammars would let other tokens come"
