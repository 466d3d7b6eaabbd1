"""The interface of functions that draw ids from rows of logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from oaiserve.engine.sequences.draw_columns import DrawRow

MOST_COUNT = (1 << 15) - 1  # Counts stop at this number.

SampledIds = tuple[torch.Tensor, torch.Tensor]  # ids, int64 [R], and whether the logits were finite, bool [R]


class Penalties(NamedTuple):
    """Penalties that draws apply from counts on the device. Draws add their ids to these counts."""

    counts: torch.Tensor  # int16 [N, vocab]: 2 for each time that the answer has an id, plus 1 if the prompt has it
    factors: torch.Tensor  # float32 [N, 3]: the penalties for repetition, frequency and presence
    rows: torch.Tensor  # int64 [R]: the row of each draw in both tensors, or -1 for none


class BitMasks(NamedTuple):
    """The ids that may be drawn. Bit i % 32 of word i // 32 of a mask says whether id i may."""

    words: torch.Tensor  # int32 [M, ceil(vocab / 32)]
    rows: torch.Tensor  # int64 [R]: the mask of each draw, or -1 for none


class DeviceEdits(NamedTuple):
    """Edits that draws on a device apply when they read the logits, in this order."""

    penalties: Penalties
    masks: BitMasks | None = None


# A function that draws one id from each row of the logits [R, vocab], without changing them.
SampleIds = Callable[[torch.Tensor, list[DrawRow]], SampledIds]
