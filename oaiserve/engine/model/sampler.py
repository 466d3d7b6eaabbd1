"""Logits to token ids, for the whole batch at once on its device.

The order of operations is vLLM's: allowed ids, min_tokens mask and logit bias, penalties, [greedy: argmax],
temperature, min_p, top_k, top_p, draw. Log-probabilities are those of the unmodified logits.
"""

from __future__ import annotations

from collections import Counter

import torch

from oaiserve.engine.draws import uniform
from oaiserve.engine.sequence import Logprobs, Sequence

GREEDY_BELOW = 1e-5  # a temperature below this is greedy


def sample(logits: torch.Tensor, sequences: list[Sequence]) -> tuple[list[int], list[bool]]:
    """Draws one token per row of `logits` [R, vocab]; row i belongs to `sequences[i]`.

    Returns the ids and, per row, whether its logits were numbers: where False (NaN or all -inf) the id means nothing.
    """
    logits = logits.float()
    if any(_modifies(sequence) for sequence in sequences):
        logits = _modify(logits.clone(), sequences)
    best, token_ids = logits.max(dim=-1)
    drawn = [row for row, sequence in enumerate(sequences) if sequence.params.temperature >= GREEDY_BELOW]
    if drawn:
        rows = torch.tensor(drawn, device=logits.device)
        token_ids[rows] = _draw(logits[rows], [sequences[row] for row in drawn])
    ids, are_finite = torch.stack([token_ids, best.isfinite().long()]).tolist()  # the one read-back
    return ids, [bool(is_finite) for is_finite in are_finite]


def logprobs_of(logits: torch.Tensor, token_ids: list[int], num_top: list[int]) -> list[Logprobs]:
    """Log-softmax of raw `logits` [R, vocab] at `token_ids`, and the best `num_top[i]` of each row."""
    logprobs = logits.float().log_softmax(dim=-1)
    rows = torch.arange(len(token_ids), device=logits.device)
    chosen = logprobs[rows, torch.tensor(token_ids, device=logits.device)].tolist()
    top_values, top_ids = logprobs.topk(min(max(num_top), logits.shape[-1]), dim=-1)
    return [
        Logprobs(token_id, logprob, ids[:count], values[:count])
        for token_id, logprob, ids, values, count in zip(
            token_ids, chosen, top_ids.tolist(), top_values.tolist(), num_top, strict=True
        )
    ]


def _modifies(sequence: Sequence) -> bool:
    params = sequence.params
    return bool(
        params.logit_bias
        or params.allowed_token_ids is not None
        or params.repetition_penalty != 1.0
        or params.frequency_penalty
        or params.presence_penalty
        or sequence.num_generated < params.min_tokens
    )


def _modify(logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    """Everything that comes before temperature, in place, for the rows that ask for it."""
    for row, sequence in enumerate(sequences):
        if not _modifies(sequence):
            continue
        params, scores = sequence.params, logits[row]
        if params.allowed_token_ids is not None:
            allowed = torch.tensor(params.allowed_token_ids, device=logits.device)
            kept = scores[allowed]
            scores.fill_(-torch.inf)
            scores[allowed] = kept
        if sequence.num_generated < params.min_tokens and sequence.stop_ids:
            scores[torch.tensor(sorted(sequence.stop_ids), device=logits.device)] = -torch.inf
        if params.logit_bias:
            biased = torch.tensor(list(params.logit_bias), device=logits.device)
            scores[biased] += torch.tensor(list(params.logit_bias.values()), device=logits.device)
        if params.repetition_penalty != 1.0:
            seen = torch.tensor(list(set(sequence.token_ids)), device=logits.device)
            seen_scores = scores[seen]
            penalised = torch.where(
                seen_scores > 0, seen_scores / params.repetition_penalty, seen_scores * params.repetition_penalty
            )
            scores[seen] = penalised
        if (params.frequency_penalty or params.presence_penalty) and sequence.num_generated:
            counts = Counter(sequence.generated_ids)
            generated = torch.tensor(list(counts), device=logits.device)
            times = torch.tensor(list(counts.values()), device=logits.device)
            scores[generated] -= params.frequency_penalty * times + params.presence_penalty
    return logits


def _draw(logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    """One id per row of `logits` [R, vocab], none of them greedy: int64 [R]."""
    device = logits.device
    params = [sequence.params for sequence in sequences]
    uniforms = torch.tensor([uniform(s.draw_key, len(s.token_ids)) for s in sequences], device=device)
    probs = (logits / torch.tensor([p.temperature for p in params], device=device)[:, None]).softmax(dim=-1)
    if any(p.min_p for p in params):
        floor = torch.tensor([p.min_p for p in params], device=device)[:, None] * probs.amax(dim=-1, keepdim=True)
        probs = probs.masked_fill(probs < floor, 0.0)
    token_ids = torch.empty(len(sequences), dtype=torch.int64, device=device)
    vocab = logits.shape[-1]
    truncated = [row for row, p in enumerate(params) if 0 < p.top_k < vocab or p.top_p < 1.0]
    if truncated:
        rows = torch.tensor(truncated, device=device)
        top_k = torch.tensor([params[row].top_k or vocab for row in truncated], device=device)
        top_p = torch.tensor([params[row].top_p for row in truncated], device=device)
        kept, order = _truncate(probs[rows], top_k, top_p)
        token_ids[rows] = order.gather(1, _invert(kept, uniforms[rows])[:, None]).squeeze(1)
    whole = [row for row in range(len(sequences)) if row not in set(truncated)]
    if whole:
        rows = torch.tensor(whole, device=device)
        token_ids[rows] = _invert(probs[rows], uniforms[rows])
    return token_ids


def _truncate(probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities [R, vocab] in descending order, 0 beyond top_k [R] and then top_p [R], and the ids of that order.

    The token that reaches top_p is the last one kept, so one always stays.
    """
    kept, order = probs.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(probs.shape[-1], device=probs.device)
    kept = kept.masked_fill(ranks >= top_k[:, None], 0.0)
    before = kept.cumsum(dim=-1) - kept
    beyond = before >= top_p[:, None] * kept.sum(dim=-1, keepdim=True)
    beyond[:, 0] = False
    return kept.masked_fill(beyond, 0.0), order


def _invert(probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Where the cumulative sum of each row of `probs` [R, vocab] passes `uniforms` [R] times its total: ids [R]."""
    cumulative = probs.cumsum(dim=-1)
    total = cumulative[:, -1:]
    index = torch.searchsorted(cumulative, uniforms[:, None] * total, right=True)
    # Rounding can put the target at the very end: then the last token that has any probability.
    last = (cumulative < total).sum(dim=-1, keepdim=True)
    return torch.minimum(index, last).squeeze(1)
