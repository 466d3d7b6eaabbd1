"""Sampling: token ids and log-probabilities are computed from logits, for the whole batch at once on its device.

A row is greedy (argmax), or drawn after temperature, min_p, top_k and top_p are applied in this order. A row costs only
what its own request asks for. All results come back from the device in one copy, and the host waits for it only when it
needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from oaiserve.engine.draws import uniform
from oaiserve.engine.model.logit_edits import ApplyMasks, edit_logits
from oaiserve.engine.model.transfer import ReadBack, on_device
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.step import Chunk, Logprobs, Masks

GREEDY_BELOW = 1e-5  # a temperature below this is greedy
NUM_TOP = 20  # the alternatives that are looked up if any are wanted; clients cannot ask for more

SampledIds = tuple[torch.Tensor, torch.Tensor]  # ids, int64 [R], and whether the logits were finite, bool [R]
# A function that draws one id for each chunk from its row of the logits [R, vocab], and leaves these unchanged.
SampleIds = Callable[[torch.Tensor, list[Chunk]], SampledIds]


class RowParameters(NamedTuple):
    """The parameters that a row's draw depends on, with its logits. A greedy row is drawn from its best token alone."""

    temperature: float
    min_p: float
    top_k: float  # 0: all ids stay
    top_p: float  # 1: all ids stay
    uniform: float  # the random number of the draw

    def cuts(self, vocab: int) -> bool:
        """Return whether top_k or top_p can exclude any of `vocab` ids."""
        return 0 < self.top_k < vocab or self.top_p < 1.0


def row_parameters(chunk: Chunk) -> RowParameters:
    """Return the parameters of the draw that follows the chunk's last token."""
    params = chunk.sequence.params
    if params.temperature < GREEDY_BELOW:
        return RowParameters(1.0, 0.0, 1.0, 1.0, 0.0)
    number = uniform(chunk.sequence.draw_key, chunk.end)
    return RowParameters(params.temperature, params.min_p, float(max(params.top_k, 0)), params.top_p, number)


class Sampled(NamedTuple):
    """The results of a `Sampling`, as lists with an entry for each row."""

    token_ids: list[int]
    are_finite: list[bool]  # False: the logits have NaN or infinity, or only -inf; the id means nothing
    logprobs: list[Logprobs | None]  # those of the id, if the sequence asks for them
    known_logprobs: list[Logprobs]  # those of the `known` tokens


class Sampling:
    """The next token of each chunk's sequence, and log-probabilities, while the device computes them.

    `logits` is [S + K, vocab]. The first S rows belong to the chunks, and are overwritten. The other K rows predict
    the tokens `known`, each given by its id and the number of alternatives wanted. Log-probabilities are those of the
    unmodified logits. `sample_ids` and `apply_masks` replace plain torch, as those of `triton_sampling` do.
    """

    def __init__(
        self,
        logits: torch.Tensor,
        chunks: list[Chunk],
        known: Sequence[tuple[int, int]] = (),
        sample_ids: SampleIds | None = None,
        *,
        masks: Masks | None = None,
        apply_masks: ApplyMasks | None = None,
    ) -> None:
        self._num_rows = len(chunks)
        rows = logits[: len(chunks)]
        params = [chunk.sequence.params for chunk in chunks]
        self._asking = [row for row, asked in enumerate(params) if asked.logprobs is not None]
        self._num_top = [params[row].logprobs or 0 for row in self._asking]
        self._num_known_top = [count for _, count in known]
        unmodified = take(rows, self._asking).float().log_softmax(dim=-1) if self._asking else None
        edited = edit_logits(rows, chunks, masks, apply_masks)
        results = [*(sample_ids or plain_sample_ids)(edited, chunks)]
        self.token_ids = results[0]  # int64 [S], on the device
        if unmodified is not None:
            results += _look_up(unmodified, take(self.token_ids, self._asking), self._num_top)
        if known:
            logprobs = logits[len(chunks) :].float().log_softmax(dim=-1)
            known_ids = on_device([token_id for token_id, _ in known], logits.device)
            results += _look_up(logprobs, known_ids, self._num_known_top)
        self.read_back = ReadBack(results)

    def wait(self) -> Sampled:
        """Return the results once they are on the host."""
        token_ids, are_finite, *found = self.read_back.wait()
        of_asking = _logprobs(self._num_top, *found[:2]) if self._asking else []
        of_row = dict(zip(self._asking, of_asking, strict=True))
        return Sampled(
            token_ids.tolist(),
            are_finite.astype(bool).tolist(),
            [of_row.get(row) for row in range(self._num_rows)],
            _logprobs(self._num_known_top, *found[-2:]) if self._num_known_top else [],
        )


def take(tensor: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Return these rows of the tensor, which are in ascending order. If they are all rows, no copy is made."""
    return tensor if len(rows) == len(tensor) else tensor[on_device(rows, tensor.device)]


def plain_sample_ids(logits: torch.Tensor, chunks: list[Chunk]) -> SampledIds:
    """Sample an id for each chunk in plain torch.

    Rows with the same method are sampled together, so a greedy row does not cost what a drawn row does.
    """
    rows_by_method: dict[SampleIds, list[int]] = {}
    for row, chunk in enumerate(chunks):
        rows_by_method.setdefault(_method(chunk.sequence.params, logits.shape[-1]), []).append(row)
    if len(rows_by_method) == 1:
        (sample_ids,) = rows_by_method
        return sample_ids(logits, chunks)
    token_ids = torch.empty(len(chunks), dtype=torch.int64, device=logits.device)
    are_finite = torch.empty(len(chunks), dtype=torch.bool, device=logits.device)
    for sample_ids, rows in rows_by_method.items():
        index = on_device(rows, logits.device)
        token_ids[index], are_finite[index] = sample_ids(logits[index], [chunks[row] for row in rows])
    return token_ids, are_finite


def _method(params: SamplingParams, vocab: int) -> SampleIds:
    if params.temperature < GREEDY_BELOW:
        return _take_best
    return _draw_from_best if 0 < params.top_k < vocab or params.top_p < 1.0 else _draw


def _take_best(logits: torch.Tensor, chunks: list[Chunk]) -> SampledIds:
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        # NumPy's argmax uses vector instructions, and is eleven times as fast as torch's.
        rows = logits.numpy()
        best_ids = rows.argmax(axis=-1)
        are_finite = np.isfinite(rows[np.arange(len(rows)), best_ids])
        return torch.from_numpy(best_ids), torch.from_numpy(are_finite)
    best, token_ids = logits.max(dim=-1)
    return token_ids, best.isfinite()


def _draw(logits: torch.Tensor, chunks: list[Chunk]) -> SampledIds:
    """Draw from all ids, in the order of ids."""
    cumulative = _probabilities(logits, chunks).cumsum(dim=-1)
    token_ids, are_finite = _invert(cumulative, cumulative[:, -1:].contiguous(), _uniforms(chunks, logits.device))
    return token_ids.squeeze(1), are_finite


def _draw_from_best(logits: torch.Tensor, chunks: list[Chunk]) -> SampledIds:
    """Draw from the ids that stay after top_k and then top_p, in the order of their probabilities, highest first.

    The id with which the sum reaches top_p is the last one that stays.
    """
    device, vocab = logits.device, logits.shape[-1]
    probs, order = _sort(_probabilities(logits, chunks))
    cumulative = probs.cumsum(dim=-1)
    last_by_top_k = on_device([[min(c.sequence.params.top_k or vocab, vocab) - 1] for c in chunks], device)
    top_p = _column([c.sequence.params.top_p for c in chunks], device)
    kept = cumulative.gather(1, last_by_top_k) * top_p
    places, are_finite = _invert(cumulative, kept, _uniforms(chunks, device))
    return order.gather(1, places).squeeze(1), are_finite


def _probabilities(logits: torch.Tensor, chunks: list[Chunk]) -> torch.Tensor:
    """Return probabilities after temperature and min_p, not normalised: float32 [R, vocab].

    A row whose logits are not finite gets NaN.
    """
    temperatures = _column([c.sequence.params.temperature for c in chunks], logits.device)
    probs = (logits / temperatures).softmax(dim=-1)
    if any(c.sequence.params.min_p for c in chunks):
        floors = _column([c.sequence.params.min_p for c in chunks], logits.device) * probs.amax(dim=-1, keepdim=True)
        probs.masked_fill_(probs < floors, 0.0)
    return probs


def _uniforms(chunks: list[Chunk], device: torch.device) -> torch.Tensor:
    return _column([uniform(c.sequence.draw_key, c.end) for c in chunks], device)


def _column(values: list[float], device: torch.device) -> torch.Tensor:
    """Return the values as a column on the device: float32 [R, 1]."""
    return on_device(values, device, torch.float32)[:, None]


def _sort(probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row of `probs` [R, vocab] in descending order, and its ids in that order.

    Of ids with equal probabilities, the lowest comes first.
    """
    if probs.device.type != "cpu":
        return probs.sort(dim=-1, descending=True, stable=True)
    # NumPy sorts integers with vector instructions, for 49,152 ids ten times as fast as torch sorts floats. The bits of
    # non-negative floats are ordered as the floats are, and an integer of 64 bits has room for the id too.
    keys = probs.view(torch.int32).to(torch.int64)
    keys.bitwise_left_shift_(32).neg_().add_(torch.arange(probs.shape[-1]))
    keys.numpy().sort(axis=-1)
    order = keys.bitwise_and_(0xFFFFFFFF)
    return probs.gather(1, order), order


def _invert(cumulative: torch.Tensor, kept: torch.Tensor, uniforms: torch.Tensor) -> SampledIds:
    """Draw a place from the shortest prefix of each row of `cumulative` [R, vocab] that has the mass `kept` [R, 1].

    Return the places [R, 1] where the sums pass `uniforms` [R, 1] times the mass of that prefix.
    """
    # The last place of the prefix has some probability, so no place without probability is drawn, however sums are
    # rounded. Sums that are NaN never reach `kept`, hence the clamp.
    last = torch.searchsorted(cumulative, kept).clamp_(max=cumulative.shape[-1] - 1)
    mass = cumulative.gather(1, last)
    places = torch.searchsorted(cumulative, uniforms * mass, right=True)
    return torch.minimum(places, last), mass.isfinite().squeeze(1)


def _look_up(logprobs: torch.Tensor, token_ids: torch.Tensor, num_top: list[int]) -> list[torch.Tensor]:
    """Return ids and their `logprobs`, [R, 1 + k] each: first those of `token_ids` [R], then the best of each row."""
    ids = token_ids[:, None]
    if any(num_top):
        # Which of several equal values `topk` takes depends on the number that it takes. So this number is the same
        # whatever the other rows ask for.
        some = logprobs.topk(min(max(NUM_TOP, *num_top), logprobs.shape[-1]), dim=-1).indices.sort(dim=-1).values
        order = logprobs.gather(1, some).argsort(dim=-1, descending=True, stable=True)
        ids = torch.cat([ids, some.gather(1, order)[:, : max(num_top)]], dim=1)
    return [ids, logprobs.gather(1, ids)]


def _logprobs(num_top: list[int], ids: np.ndarray, values: np.ndarray) -> list[Logprobs]:
    return [
        Logprobs(of_row[0], at_row[0], of_row[1 : 1 + count], at_row[1 : 1 + count])
        for of_row, at_row, count in zip(ids.tolist(), values.tolist(), num_top, strict=True)
    ]
