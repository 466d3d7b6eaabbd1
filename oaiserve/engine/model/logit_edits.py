"""What a request's parameters do to its logits before temperature, for the whole batch at once on its device.

The host works out which logits are concerned, from the rows that ask; then each kind is one look-up and one write for
all of them together. The order is vLLM's: allowed ids, bad words and min_tokens, logit bias, penalties.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch

from oaiserve.engine.model.transfer import on_device
from oaiserve.engine.sequence import Sequence, TokenCounts

Rows = list[tuple[int, Sequence]]  # row of the logits, and whose it is
Index = tuple[torch.Tensor, torch.Tensor]  # rows and ids, int64 [N] each


def edit_logits(logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    """Row i of `logits` [R, vocab] as `sequences[i]` wants it, in float32: in place where they are that already."""
    asking = [(row, sequence) for row, sequence in enumerate(sequences) if is_edited(sequence)]
    if not asking:
        return logits
    assert not any(sequence.needs_ids and sequence.num_pending for _, sequence in asking), "an id is not known yet"
    logits = logits.float()
    _keep_allowed(logits, asking)
    _mask_banned(logits, asking)
    _add_bias(logits, asking)
    _penalise(logits, asking)
    return logits


def is_edited(sequence: Sequence) -> bool:
    """Whether its next logits are."""
    params = sequence.params
    return bool(
        params.allowed_token_ids is not None
        or sequence.bad_words
        or _is_too_short(sequence)
        or params.logit_bias
        or _has_penalty(sequence)
    )


def _is_too_short(sequence: Sequence) -> bool:
    return sequence.num_tokens - sequence.prompt_len < sequence.params.min_tokens


def _has_penalty(sequence: Sequence) -> bool:
    params = sequence.params
    return bool(params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty)


def _index(ids_by_row: Collection[tuple[int, Collection[int]]], device: torch.device) -> Index:
    rows = np.repeat([row for row, _ in ids_by_row], [len(ids) for _, ids in ids_by_row])
    columns = np.concatenate([np.asarray(ids, dtype=np.int64) for _, ids in ids_by_row])
    on_both = on_device(np.stack([rows, columns]), device)
    return on_both[0], on_both[1]


def _keep_allowed(logits: torch.Tensor, asking: Rows) -> None:
    allowed = [(row, ids) for row, sequence in asking if (ids := sequence.params.allowed_token_ids) is not None]
    if not allowed:
        return
    index = _index(allowed, logits.device)
    kept = logits[index]
    logits.index_fill_(0, on_device([row for row, _ in allowed], logits.device), -torch.inf)
    logits[index] = kept


def _mask_banned(logits: torch.Tensor, asking: Rows) -> None:
    banned = [(row, ids) for row, sequence in asking if (ids := _banned_ids(sequence))]
    if banned:
        logits[_index(banned, logits.device)] = -torch.inf


def _banned_ids(sequence: Sequence) -> list[int]:
    """What would end the answer before min_tokens, or complete a bad word that the answer ends with but for one id."""
    token_ids, num_tokens = sequence.token_ids, len(sequence.token_ids)
    banned = list(sequence.stop_ids) if _is_too_short(sequence) else []
    for *beginning, last in sequence.bad_words:
        start = num_tokens - len(beginning)
        if start >= sequence.prompt_len and token_ids[start:] == beginning:
            banned.append(last)
    return banned


def _add_bias(logits: torch.Tensor, asking: Rows) -> None:
    biases = [(row, bias) for row, sequence in asking if (bias := sequence.params.logit_bias)]
    if not biases:
        return
    index = _index([(row, list(bias)) for row, bias in biases], logits.device)
    values = [value for _, bias in biases for value in bias.values()]
    logits[index] += on_device(values, logits.device, torch.float32)


def _penalise(logits: torch.Tensor, asking: Rows) -> None:
    """Repetition penalty on the ids of prompt and answer; frequency and presence penalty on those of the answer."""
    ids, factors, subtrahends = [], [], []
    for row, sequence in asking:
        if not _has_penalty(sequence):
            continue
        params, counts = sequence.params, _token_counts(sequence)
        times = np.asarray(counts.times)
        ids.append((row, counts.ids))
        factors.append(np.full(len(times), params.repetition_penalty))
        subtrahends.append(params.frequency_penalty * times + params.presence_penalty * (times > 0))
    if not ids:
        return
    index = _index(ids, logits.device)
    amounts = np.stack([np.concatenate(factors), np.concatenate(subtrahends)])
    factor, subtrahend = on_device(amounts, logits.device, torch.float32)
    scores = logits[index]
    logits[index] = torch.where(scores > 0, scores / factor, scores * factor) - subtrahend


def _token_counts(sequence: Sequence) -> TokenCounts:
    """Kept with the sequence: to count thousands of tokens anew at each step would take longer than all the rest."""
    counts = sequence.token_counts
    if counts is None:
        repeats_count = sequence.params.repetition_penalty != 1.0
        counts = TokenCounts(sequence.token_ids[: sequence.prompt_len] if repeats_count else [])
        sequence.token_counts = counts
    counts.add(sequence.token_ids[sequence.prompt_len + counts.num_added :])
    return counts
