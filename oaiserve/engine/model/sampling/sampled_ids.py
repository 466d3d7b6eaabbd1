"""What a function returns that draws ids from rows of logits."""

from __future__ import annotations

from collections.abc import Callable

import torch

from oaiserve.engine.sequences.draw_columns import DrawRow

SampledIds = tuple[torch.Tensor, torch.Tensor]  # ids, int64 [R], and whether the logits were finite, bool [R]

# A function that draws one id from each row of the logits [R, vocab], and leaves these unchanged.
SampleIds = Callable[[torch.Tensor, list[DrawRow]], SampledIds]
