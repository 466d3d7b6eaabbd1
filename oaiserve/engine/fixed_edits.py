"""The edits of logits that are the same at every draw of a request, as arrays. No torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from oaiserve.engine.request import SamplingParams


@dataclass(frozen=True, slots=True)
class FixedEdits:
    """The edits of a request, which all its choices share. A client may send an id for each token of the vocabulary,
    and converting these for each choice at each step would take seconds from all others."""

    allowed_ids: np.ndarray | None  # the only ids that may be drawn; None: all
    biased_ids: np.ndarray
    biases: np.ndarray  # float32, one for each of `biased_ids`
    stop_ids: np.ndarray  # ids that are forbidden before `min_tokens`

    @classmethod
    def of(cls, params: SamplingParams, stop_ids: Collection[int]) -> FixedEdits:
        allowed = params.allowed_token_ids
        bias = params.logit_bias
        return cls(
            None if allowed is None else np.array(allowed, dtype=np.int64),
            np.fromiter(bias, dtype=np.int64, count=len(bias)),
            np.fromiter(bias.values(), dtype=np.float32, count=len(bias)),
            np.fromiter(stop_ids, dtype=np.int64, count=len(stop_ids)),
        )
