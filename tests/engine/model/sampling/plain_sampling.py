"""Draws in plain torch, for all rows at once: a reference, whose operations can be recorded as those of a graph are."""

import torch

from oaiserve.engine.model.sampling.sampled_ids import MOST_COUNT, DeviceEdits, SampledIds
from oaiserve.engine.model.transfer import on_device
from oaiserve.engine.sequences.draw_columns import DRAW_COLUMNS, DrawRow
from oaiserve.engine.sequences.draw_rows import parameters_of, seeds
from oaiserve.engine.sequences.noise import FACTOR_1, FACTOR_2, NOISE_BITS

_MASK32 = (1 << 32) - 1


def sample_ids(logits: torch.Tensor, rows: list[DrawRow], edits: DeviceEdits | None = None) -> SampledIds:
    """Draw an id from each row of `logits` [R, vocab]."""
    parameters = on_device(parameters_of(rows), logits.device, torch.float32)
    return draw(logits, parameters, on_device(seeds(rows), logits.device), edits)


def draw(
    logits: torch.Tensor, parameters: torch.Tensor, seeds: torch.Tensor, edits: DeviceEdits | None = None
) -> SampledIds:
    """Draw an id from each row of `logits` [R, vocab]. `parameters` float32 [columns, R] and `seeds` int64 [R]
    are those of the rows, see `draw_rows`. The ids of rows with penalties are counted."""
    if edits is None:
        return _draw(logits.double(), parameters, seeds)
    ids, are_finite = _draw(_edited(logits.float(), edits).double(), parameters, seeds)
    counts, _, rows = edits.penalties
    with_penalties = rows >= 0
    places = rows[with_penalties], ids[with_penalties]
    counts[places] = (counts[places].int() + 2).clamp_max(MOST_COUNT).short()
    return ids, are_finite


def _edited(logits: torch.Tensor, edits: DeviceEdits) -> torch.Tensor:
    """Return logits float32 [R, vocab] with their penalties and masks."""
    counts, factors, rows = edits.penalties
    counts = counts[rows].int().masked_fill((rows < 0)[:, None], 0)
    repetition, frequency, presence = factors[rows].T[..., None]
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(counts > 0, repeated, logits)
    logits = logits - torch.where(counts > 1, frequency * (counts >> 1) + presence, 0.0)
    if edits.masks is None:
        return logits
    words, rows = edits.masks
    bits = (words[rows][:, :, None] >> torch.arange(32, dtype=torch.int32) & 1).flatten(1)[:, : logits.shape[1]]
    return logits.masked_fill((bits == 0) & (rows >= 0)[:, None], -torch.inf)


def _draw(logits: torch.Tensor, parameters: torch.Tensor, seeds: torch.Tensor) -> SampledIds:
    rows = dict(zip(DRAW_COLUMNS, parameters.double()[:, :, None], strict=True))
    top_ks = rows["top_k"]
    highest = logits.amax(dim=-1, keepdim=True)
    scaled = (logits - highest) / rows["temperature"]
    scaled = scaled.masked_fill(scaled < rows["min_p"].log(), -torch.inf)
    scaled = scaled.masked_fill(~_stays(scaled, top_ks, rows["top_p"]), -torch.inf)
    scores = scaled + _noise(seeds[:, None], logits.shape[-1])
    return torch.where(top_ks == 1, logits, scores).argmax(dim=-1), highest.isfinite()[:, 0]


def _stays(scaled: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """Return where ids stay, bool [R, vocab], after top_k and then top_p, up to the id that reaches top_p."""
    in_order, order = scaled.sort(dim=-1, descending=True, stable=True)
    place = torch.arange(scaled.shape[-1], device=scaled.device)
    weights = in_order.exp().masked_fill((top_ks > 0) & (place >= top_ks), 0.0)
    sums = weights.cumsum(dim=-1)
    stays = (place == 0) | ((weights > 0) & (sums - weights < sums[:, -1:] * top_ps))
    return torch.zeros_like(stays).scatter(1, order, stays)


def _noise(seeds: torch.Tensor, vocab: int) -> torch.Tensor:
    """Return `noise.noise` of all ids for each of the seeds int64 [R, 1]: float64 [R, vocab]."""
    first = seeds >> 32 & _MASK32
    second = seeds & _MASK32
    mixed = _mix32(torch.arange(vocab, device=seeds.device))
    high = (mixed ^ first) * FACTOR_1 & _MASK32
    high = ((high ^ high >> 15) + second) * FACTOR_2 & _MASK32
    high = high ^ high >> 16
    low = _mix32((high + mixed & _MASK32) ^ second)
    bits = high << NOISE_BITS - 32 | low >> 64 - NOISE_BITS
    return -(-(-((bits.double() + 0.5) * 2.0**-NOISE_BITS)).log1p()).log()


def _mix32(x: torch.Tensor) -> torch.Tensor:
    """Return `noise.mix32` of each number, which is the lower half of an int64."""
    x = x ^ x >> 16
    x = x * FACTOR_1 & _MASK32
    x = x ^ x >> 15
    x = x * FACTOR_2 & _MASK32
    return x ^ x >> 16
