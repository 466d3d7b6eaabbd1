"""Logits to token ids and log-probabilities, for the whole batch at once on its device.

A row is greedy (argmax), or drawn after temperature, min_p, top_k and top_p, in this order. No row pays for what others
ask for, and everything comes back from the device in one copy, for which nobody waits before it is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Sequenced
from typing import NamedTuple

import numpy as np
import torch

from oaiserve.engine.draws import uniform
from oaiserve.engine.model.logit_edits import edit_logits
from oaiserve.engine.model.transfer import ReadBack, on_device
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.sequence import Sequence
from oaiserve.engine.step import Logprobs

GREEDY_BELOW = 1e-5  # a temperature below this is greedy
NUM_TOP = 20  # alternatives that are looked for where any are wanted: no client can ask for more

Choice = tuple[torch.Tensor, torch.Tensor]  # ids, int64 [R], and whether the logits were numbers, bool [R]
Choose = Callable[[torch.Tensor, list[Sequence]], Choice]  # of logits [R, vocab], which it leaves as they are


class RowParameters(NamedTuple):
    """All that a draw depends on beside the logits. A greedy row is drawn from its best token alone."""

    temperature: float
    min_p: float
    top_k: float  # 0: none
    top_p: float  # 1: none
    uniform: float

    def cuts(self, vocab: int) -> bool:
        """Whether top_k or top_p leave out any of so many ids."""
        return 0 < self.top_k < vocab or self.top_p < 1.0


def row_parameters(sequence: Sequence) -> RowParameters:
    """For the next draw of the sequence."""
    params = sequence.params
    if params.temperature < GREEDY_BELOW:
        return RowParameters(1.0, 0.0, 1.0, 1.0, 0.0)
    number = uniform(sequence.draw_key, sequence.num_tokens)
    return RowParameters(params.temperature, params.min_p, float(max(params.top_k, 0)), params.top_p, number)


class Sampled(NamedTuple):
    """Lists by row."""

    token_ids: list[int]
    are_finite: list[bool]  # False: logits with NaN or infinity, or nothing but -inf; the id means nothing
    logprobs: list[Logprobs | None]  # of the id, where the sequence asks for it
    known_logprobs: list[Logprobs]


class Sampling:
    """The next token of each sequence, and log-probabilities: those of the unmodified logits. Made by the device, which
    may not have got there yet.

    `logits` is [S + K, vocab]. The first S rows belong to the sequences, and what is in them gets lost. The other K are
    about tokens that are `known`: each with its id, and how many alternatives are wanted. `choose` takes the place of
    the plain torch here, as `triton_sampling.choose` can.
    """

    def __init__(
        self,
        logits: torch.Tensor,
        sequences: list[Sequence],
        known: Sequenced[tuple[int, int]] = (),
        choose: Choose | None = None,
    ) -> None:
        self._num_rows = len(sequences)
        rows = logits[: len(sequences)]
        self._asking = [row for row, sequence in enumerate(sequences) if sequence.params.logprobs is not None]
        self._num_top = [sequences[row].params.logprobs or 0 for row in self._asking]
        self._num_known_top = [count for _, count in known]
        unmodified = _take(rows, self._asking).float().log_softmax(dim=-1) if self._asking else None
        results = [*(choose or _choose)(edit_logits(rows, sequences), sequences)]
        self.token_ids = results[0]  # int64 [S], on the device
        if unmodified is not None:
            results += _look_up(unmodified, _take(self.token_ids, self._asking), self._num_top)
        if known:
            logprobs = logits[len(sequences) :].float().log_softmax(dim=-1)
            known_ids = on_device([token_id for token_id, _ in known], logits.device)
            results += _look_up(logprobs, known_ids, self._num_known_top)
        self.read_back = ReadBack(results)

    def wait(self) -> Sampled:
        """The results on the host."""
        token_ids, are_finite, *found = self.read_back.wait()
        of_asking = _logprobs(self._num_top, *found[:2]) if self._asking else []
        of_row = dict(zip(self._asking, of_asking, strict=True))
        return Sampled(
            token_ids.tolist(),
            are_finite.astype(bool).tolist(),
            [of_row.get(row) for row in range(self._num_rows)],
            _logprobs(self._num_known_top, *found[-2:]) if self._num_known_top else [],
        )


def sample(
    logits: torch.Tensor,
    sequences: list[Sequence],
    known: Sequenced[tuple[int, int]] = (),
    choose: Choose | None = None,
) -> Sampled:
    """What `Sampling` does, waited for."""
    return Sampling(logits, sequences, known, choose).wait()


def _take(tensor: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """These rows, in ascending order; no copy where it is all of them."""
    return tensor if len(rows) == len(tensor) else tensor[on_device(rows, tensor.device)]


def _choose(logits: torch.Tensor, sequences: list[Sequence]) -> Choice:
    """The rows of each way to choose together, so that a greedy row costs none of what a drawn one needs."""
    rows_by_way: dict[Choose, list[int]] = {}
    for row, sequence in enumerate(sequences):
        rows_by_way.setdefault(_way(sequence.params, logits.shape[-1]), []).append(row)
    if len(rows_by_way) == 1:
        (choose,) = rows_by_way
        return choose(logits, sequences)
    token_ids = torch.empty(len(sequences), dtype=torch.int64, device=logits.device)
    are_finite = torch.empty(len(sequences), dtype=torch.bool, device=logits.device)
    for choose, rows in rows_by_way.items():
        index = on_device(rows, logits.device)
        token_ids[index], are_finite[index] = choose(logits[index], [sequences[row] for row in rows])
    return token_ids, are_finite


def _way(params: SamplingParams, vocab: int) -> Choose:
    if params.temperature < GREEDY_BELOW:
        return _take_best
    return _draw_from_best if 0 < params.top_k < vocab or params.top_p < 1.0 else _draw


def _take_best(logits: torch.Tensor, sequences: list[Sequence]) -> Choice:
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        # NumPy looks for the largest with vector instructions: eleven times as fast as torch.
        rows = logits.numpy()
        best_ids = rows.argmax(axis=-1)
        are_finite = np.isfinite(rows[np.arange(len(rows)), best_ids])
        return torch.from_numpy(best_ids), torch.from_numpy(are_finite)
    best, token_ids = logits.max(dim=-1)
    return token_ids, best.isfinite()


def _draw(logits: torch.Tensor, sequences: list[Sequence]) -> Choice:
    """From all ids, in their order."""
    cumulative = _probabilities(logits, sequences).cumsum(dim=-1)
    token_ids, are_finite = _invert(cumulative, cumulative[:, -1:].contiguous(), _uniforms(sequences, logits.device))
    return token_ids.squeeze(1), are_finite


def _draw_from_best(logits: torch.Tensor, sequences: list[Sequence]) -> Choice:
    """From those that top_k and then top_p leave, best first. The one that reaches top_p is the last that stays."""
    device, vocab = logits.device, logits.shape[-1]
    probs, order = _sort(_probabilities(logits, sequences))
    cumulative = probs.cumsum(dim=-1)
    last_by_top_k = on_device([[min(s.params.top_k or vocab, vocab) - 1] for s in sequences], device)
    top_p = _column([s.params.top_p for s in sequences], device)
    kept = cumulative.gather(1, last_by_top_k) * top_p
    places, are_finite = _invert(cumulative, kept, _uniforms(sequences, device))
    return order.gather(1, places).squeeze(1), are_finite


def _probabilities(logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    """After temperature and min_p, not normalised: float32 [R, vocab]. All NaN for a row that has no numbers."""
    temperatures = _column([s.params.temperature for s in sequences], logits.device)
    probs = (logits / temperatures).softmax(dim=-1)
    if any(s.params.min_p for s in sequences):
        floors = _column([s.params.min_p for s in sequences], logits.device) * probs.amax(dim=-1, keepdim=True)
        probs.masked_fill_(probs < floors, 0.0)
    return probs


def _uniforms(sequences: list[Sequence], device: torch.device) -> torch.Tensor:
    return _column([uniform(s.draw_key, s.num_tokens) for s in sequences], device)


def _column(values: list[float], device: torch.device) -> torch.Tensor:
    """float32 [R, 1]."""
    return on_device(values, device, torch.float32)[:, None]


def _sort(probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row of `probs` [R, vocab] in descending order, and the ids of that order; of equal ones the lowest first."""
    if probs.device.type != "cpu":
        return probs.sort(dim=-1, descending=True, stable=True)
    # NumPy sorts integers with vector instructions: with 49,152 ids, ten times as fast as torch sorts floats. The bits
    # of a float that is not negative are in the order of the floats, and an integer of 64 bits has room for the id too.
    keys = probs.view(torch.int32).to(torch.int64)
    keys.bitwise_left_shift_(32).neg_().add_(torch.arange(probs.shape[-1]))
    keys.numpy().sort(axis=-1)
    order = keys.bitwise_and_(0xFFFFFFFF)
    return probs.gather(1, order), order


def _invert(cumulative: torch.Tensor, kept: torch.Tensor, uniforms: torch.Tensor) -> Choice:
    """Draws from the shortest beginning of each row of `cumulative` [R, vocab] that has the mass `kept` [R, 1].

    Returns the places [R, 1] where the sums pass `uniforms` [R, 1] times the mass of that beginning.
    """
    # The last place has some probability, so no place is drawn that has none, however sums are rounded. Sums that are
    # NaN never reach anything: hence the clamp.
    last = torch.searchsorted(cumulative, kept).clamp_(max=cumulative.shape[-1] - 1)
    mass = cumulative.gather(1, last)
    places = torch.searchsorted(cumulative, uniforms * mass, right=True)
    return torch.minimum(places, last), mass.isfinite().squeeze(1)


def _look_up(logprobs: torch.Tensor, token_ids: torch.Tensor, num_top: list[int]) -> list[torch.Tensor]:
    """Ids and their values, [R, 1 + k] each: `token_ids` [R] first, then the best of each row of `logprobs`."""
    ids = token_ids[:, None]
    if any(num_top):
        # Which of equal ones `topk` takes depends on how many it takes; that must not depend on the other rows.
        some = logprobs.topk(min(max(NUM_TOP, *num_top), logprobs.shape[-1]), dim=-1).indices.sort(dim=-1).values
        order = logprobs.gather(1, some).argsort(dim=-1, descending=True, stable=True)
        ids = torch.cat([ids, some.gather(1, order)[:, : max(num_top)]], dim=1)
    return [ids, logprobs.gather(1, ids)]


def _logprobs(num_top: list[int], ids: np.ndarray, values: np.ndarray) -> list[Logprobs]:
    return [
        Logprobs(of_row[0], at_row[0], of_row[1 : 1 + count], at_row[1 : 1 + count])
        for of_row, at_row, count in zip(ids.tolist(), values.tolist(), num_top, strict=True)
    ]
