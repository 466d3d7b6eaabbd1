"""Logits to token ids and log-probabilities, for the whole batch at once on its device.

A row is greedy (argmax), or drawn after temperature, min_p, top_k and top_p, in this order. No row pays for what others
ask for, and everything comes back from the device in one copy.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Sequenced
from typing import NamedTuple

import numpy as np
import torch

from oaiserve.engine.draws import uniform
from oaiserve.engine.model.logit_edits import edit_logits, on_device
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.sequence import Logprobs, Sequence

GREEDY_BELOW = 1e-5  # a temperature below this is greedy
NUM_TOP = 20  # alternatives that are looked for where any are wanted: no client can ask for more

Choice = tuple[torch.Tensor, torch.Tensor]  # ids, int64 [R], and whether the logits were numbers, bool [R]


class Sampled(NamedTuple):
    """Lists by row."""

    token_ids: list[int]
    are_finite: list[bool]  # False: logits with NaN or infinity, or nothing but -inf; the id means nothing
    logprobs: list[Logprobs | None]  # of the id, where the sequence asks for it
    known_logprobs: list[Logprobs]


def sample(logits: torch.Tensor, sequences: list[Sequence], known: Sequenced[tuple[int, int]] = ()) -> Sampled:
    """The next token of each sequence, and log-probabilities: those of the unmodified logits.

    `logits` is [S + K, vocab]. The first S rows belong to the sequences, and what is in them gets lost. The other K are
    about tokens that are `known`: each with its id, and how many alternatives are wanted.
    """
    rows = logits[: len(sequences)]
    asking = [row for row, sequence in enumerate(sequences) if sequence.params.logprobs is not None]
    num_top = [sequences[row].params.logprobs or 0 for row in asking]
    unmodified = _take(rows, asking).float().log_softmax(dim=-1) if asking else None
    results = [*_choose(edit_logits(rows, sequences), sequences)]
    if unmodified is not None:
        results += _look_up(unmodified, _take(results[0], asking), num_top)
    known_ids, num_known_top = [token_id for token_id, _ in known], [count for _, count in known]
    if known:
        logprobs = logits[len(sequences) :].float().log_softmax(dim=-1)
        results += _look_up(logprobs, on_device(known_ids, logits.device), num_known_top)

    token_ids, are_finite, *found = _read_back(results)
    of_asking = _logprobs(num_top, *found[:2]) if asking else []
    of_row = dict(zip(asking, of_asking, strict=True))
    return Sampled(
        token_ids.tolist(),
        are_finite.astype(bool).tolist(),
        [of_row.get(row) for row in range(len(sequences))],
        _logprobs(num_known_top, *found[-2:]) if known else [],
    )


def _take(tensor: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """These rows, in ascending order; no copy where it is all of them."""
    return tensor if len(rows) == len(tensor) else tensor[on_device(rows, tensor.device)]


def _choose(logits: torch.Tensor, sequences: list[Sequence]) -> Choice:
    """The rows of each way to choose together, so that a greedy row costs none of what a drawn one needs."""
    rows_by_way: dict[Callable[[torch.Tensor, list[Sequence]], Choice], list[int]] = {}
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


def _way(params: SamplingParams, vocab: int) -> Callable[[torch.Tensor, list[Sequence]], Choice]:
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
    return _column([uniform(s.draw_key, len(s.token_ids)) for s in sequences], device)


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


def _read_back(tensors: list[torch.Tensor]) -> list[np.ndarray]:
    """The tensors on the host. They travel as one, since each copy waits for the device."""
    if tensors[0].device.type == "cpu":
        return [tensor.numpy() for tensor in tensors]
    words = [t if t.dtype == torch.float32 else t.to(torch.int32) for t in tensors]
    packed = torch.cat([t.view(torch.int32).flatten() for t in words]).cpu().numpy()
    arrays, start = [], 0
    for tensor in words:
        array = packed[start : start + tensor.numel()].reshape(tensor.shape)
        arrays.append(array.view(np.float32) if tensor.dtype == torch.float32 else array)
        start += tensor.numel()
    return arrays
