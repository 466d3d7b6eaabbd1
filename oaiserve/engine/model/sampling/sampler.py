"""Sampling: token ids and log-probabilities are computed from logits, for the whole batch at once on its device.

A row is greedy (argmax), or drawn after temperature, min_p, top_k and top_p are applied in this order. A row costs only
the work of its own request. All results come back from the device in one copy, and the host waits for it only when it
needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from oaiserve.engine.model.sampling import numpy_sampling
from oaiserve.engine.model.sampling.logit_edits import edit_logits
from oaiserve.engine.model.sampling.sampled_ids import SampleIds
from oaiserve.engine.model.transfer import ReadBack, on_device
from oaiserve.engine.sequences.draw_rows import draw_row
from oaiserve.engine.sequences.step import Chunk, Logprobs, Masks

NUM_TOP = 20  # how many alternatives are looked up if any are requested; clients can't request more


class Sampled(NamedTuple):
    """The results of a `Sampling`, as lists with an entry for each row."""

    token_ids: list[int]
    are_finite: list[bool]  # False: the logits have NaN or infinity, or only -inf; the id means nothing
    logprobs: list[Logprobs | None]  # log-probabilities of the drawn ids, for sequences that request them
    known_logprobs: list[Logprobs]  # log-probabilities of the `known` tokens


class Sampling:
    """The next token of each chunk's sequence, and log-probabilities, while the device computes them.

    `logits` is [S + K, vocab]. The first S rows belong to the chunks, and are overwritten. The other K rows predict the
    tokens `known`, each given by its id and the number of alternatives wanted. Log-probabilities come from the
    unmodified logits. `sample_ids` replaces NumPy, as the one in `triton_sampling` does. Without `applies_masks`, it
    applies the masks.
    """

    def __init__(
        self,
        logits: torch.Tensor,
        chunks: list[Chunk],
        known: Sequence[tuple[int, int]] = (),
        sample_ids: SampleIds | None = None,
        *,
        masks: Masks | None = None,
        applies_masks: bool = True,
    ) -> None:
        self._num_rows = len(chunks)
        rows = logits[: len(chunks)]
        params = [chunk.sequence.params for chunk in chunks]
        self._asking = [row for row, its in enumerate(params) if its.logprobs is not None]
        self._num_top = [params[row].logprobs or 0 for row in self._asking]
        self._num_known_top = [count for _, count in known]
        if self._asking:
            unmodified = take(rows, self._asking).float().log_softmax(dim=-1)
        else:
            unmodified = None
        edited = edit_logits(rows, chunks, masks, applies_masks=applies_masks)
        draw = sample_ids or numpy_sampling.sample_ids
        results = [*draw(edited, [draw_row(chunk.sequence, chunk.end) for chunk in chunks])]
        self.token_ids = results[0]  # int64 [S], on the device
        if unmodified is not None:
            results += _look_up(unmodified, take(self.token_ids, self._asking), self._num_top)
        if known:
            logprobs = logits[len(chunks) :].float().log_softmax(dim=-1)
            known_ids = on_device([token_id for token_id, _ in known], logits.device)
            results += [*_look_up(logprobs, known_ids, self._num_known_top), _ranks(logprobs, known_ids)]
        self.read_back = ReadBack(results)

    def wait(self) -> Sampled:
        token_ids, are_finite, *logprobs = self.read_back.wait()
        of_asking = _logprobs(self._num_top, *logprobs[:2]) if self._asking else []
        of_row = dict(zip(self._asking, of_asking, strict=True))
        return Sampled(
            token_ids.tolist(),
            are_finite.astype(bool).tolist(),
            [of_row.get(row) for row in range(self._num_rows)],
            _logprobs(self._num_known_top, *logprobs[-3:]) if self._num_known_top else [],
        )


def take(tensor: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Return these rows of the tensor, in ascending order. If they are all rows, no copy is made."""
    if len(rows) == len(tensor):
        return tensor
    return tensor[on_device(rows, tensor.device)]


def _look_up(logprobs: torch.Tensor, token_ids: torch.Tensor, num_top: list[int]) -> list[torch.Tensor]:
    """Return ids and their `logprobs`, [R, 1 + k] each: first the `token_ids` [R], then the best ids of each row."""
    ids = token_ids[:, None]
    if any(num_top):
        # Which of several equal values `topk` returns depends on k. So k is the same, whatever other requests there
        # are.
        some = logprobs.topk(min(max(NUM_TOP, *num_top), logprobs.shape[-1]), dim=-1).indices.sort(dim=-1).values
        order = logprobs.gather(1, some).argsort(dim=-1, descending=True, stable=True)
        ids = torch.cat([ids, some.gather(1, order)[:, : max(num_top)]], dim=1)
    return [ids, logprobs.gather(1, ids)]


def _ranks(logprobs: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return the rank of each token in its row, from 1. Equal values are ranked by id, as in `_look_up`."""
    values = logprobs.gather(1, token_ids[:, None])
    if logprobs.device.type == "cpu":  # row by row, so that each stays in the cache: 20 times as fast as below
        rows = zip(logprobs.numpy(), values.numpy(), token_ids.tolist(), strict=True)
        better = [np.count_nonzero(row > value) + np.count_nonzero(row[:own] == value) for row, value, own in rows]
        return torch.tensor(better) + 1
    ids = torch.arange(logprobs.shape[-1], device=logprobs.device)
    is_before = (logprobs > values) | ((logprobs == values) & (ids < token_ids[:, None]))
    return is_before.sum(dim=-1) + 1


def _logprobs(
    num_top: list[int], ids: np.ndarray, values: np.ndarray, ranks: np.ndarray | None = None
) -> list[Logprobs]:
    of_tokens = [0] * len(num_top) if ranks is None else ranks.tolist()
    return [
        Logprobs(of_row[0], at_row[0], of_row[1 : 1 + count], at_row[1 : 1 + count], rank)
        for of_row, at_row, count, rank in zip(ids.tolist(), values.tolist(), num_top, of_tokens, strict=True)
    ]
