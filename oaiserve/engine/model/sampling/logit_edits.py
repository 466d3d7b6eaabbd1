"""Edits logits by the requests' parameters, before temperature is applied, for the whole batch on its device.

The host collects the ids that each row edits, so that each kind of edit is one look-up and one write. The order is
vLLM's, then the rules of plug-ins, and last the masks of grammars, so that nothing overrides them. A sequence may have
grown by the time of the draw: its length is taken from its chunk.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

import numpy as np
import torch

from oaiserve.engine.model.transfer import on_device
from oaiserve.engine.sequences.fixed_edits import FixedEdits, TokenCounts
from oaiserve.engine.sequences.forbidden_ids import banned_ids, is_too_short
from oaiserve.engine.sequences.step import Chunk, Masks

logger = logging.getLogger(__name__)

Rows = list[tuple[int, Chunk]]  # rows of the logits, and the chunk that each belongs to
RowIds = list[tuple[int, np.ndarray]]  # (row of the logits, int64 ids to edit in that row) pairs
Index = tuple[torch.Tensor, torch.Tensor]  # rows and ids, int64 [N] each

# For each byte of a mask, the limits of its eight logits: infinity or -infinity.
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_LIMITS = np.where(_BITS == 1, np.inf, -np.inf).astype(np.float32)


def edit_logits(
    logits: torch.Tensor, chunks: list[Chunk], masks: Masks | None = None, *, applies_masks: bool = True
) -> torch.Tensor:
    """Edit row i of `logits` [R, vocab] by the parameters of `chunks[i]`, and return the result.

    The result is in float32 if any row is edited. Logits in float32 are edited in place. The draws of counted sequences
    apply their penalties themselves, except for those that follow a draft. Without `applies_masks`, so do draws with
    masks.
    """
    asking = [(row, chunk) for row, chunk in enumerate(chunks) if is_edited(chunk)]
    if not asking:
        return logits
    device = logits.device
    if masks is None:
        masked = []
    else:
        masked = [(row, chunk) for row, chunk in asking if chunk.sequence in masks.rows]
    rows_of_masks = {row for row, _ in masked}
    allowed = [(row, ids) for row, c in asking if (ids := c.sequence.edits.allowed_ids) is not None]
    banned = [(row, ids) for row, c in asking if len(ids := banned_ids(c, has_mask=row in rows_of_masks))]
    biased = [(row, edits) for row, c in asking if len((edits := c.sequence.edits).biased_ids)]
    penalised = [(row, c) for row, c in asking if _has_penalty(c)]
    ruled = [(row, c) for row, c in asking if c.sequence.rules]
    if not applies_masks:
        masked = []
    if not (allowed or banned or biased or penalised or ruled or masked):
        return logits
    logits = logits.float()
    edit = _edit_on_cpu if device.type == "cpu" else _edit_on_device
    edit(logits, allowed, banned, biased)
    if penalised:
        penalise(logits, penalised)
    for row, chunk in ruled:
        _apply_rules(logits[row], chunk)
    if masks is not None and masked:
        apply = apply_masks_on_cpu if device.type == "cpu" else apply_masks_in_torch
        words = masks.words[[mask_row(masks, chunk) for _, chunk in masked]]
        apply(logits, [row for row, _ in masked], words)
    return logits


def mask_row(masks: Masks, chunk: Chunk) -> int:
    """Return the row of a draw's mask, or -1 if it has none."""
    first = masks.rows.get(chunk.sequence)
    return -1 if first is None else first + len(chunk.draft)


def _edit_on_cpu(logits: torch.Tensor, allowed: RowIds, banned: RowIds, biased: list[tuple[int, FixedEdits]]) -> None:
    """Restrict, ban and bias row by row. With many ids, one index for all rows would take ten times as long."""
    of_row = logits.numpy()
    for row, ids in allowed:
        allowed_logits = of_row[row, ids]
        of_row[row] = -np.inf
        of_row[row, ids] = allowed_logits
    for row, ids in banned:
        of_row[row, ids] = -np.inf
    for row, edits in biased:
        of_row[row, edits.biased_ids] += edits.biases


def _edit_on_device(
    logits: torch.Tensor, allowed: RowIds, banned: RowIds, biased: list[tuple[int, FixedEdits]]
) -> None:
    device = logits.device
    if allowed:
        index = _index(allowed, device)
        allowed_logits = logits[index]
        logits.index_fill_(0, on_device([row for row, _ in allowed], device), -torch.inf)
        logits[index] = allowed_logits
    if banned:
        # A Python number would be copied to the device, and the host would wait for that.
        logits.index_put_(_index(banned, device), logits.new_full((), -torch.inf))
    if biased:
        values = np.concatenate([edits.biases for _, edits in biased])
        index = _index([(row, edits.biased_ids) for row, edits in biased], device)
        logits[index] += on_device(values, device, torch.float32)


def is_edited(chunk: Chunk) -> bool:
    """Return whether the logits of the chunk's draw may be edited: a grammar decides at the draw."""
    sequence, _, _, _, draft, _ = chunk
    return sequence.has_edits or is_too_short(chunk) or bool(draft and sequence.is_counted)


def _has_penalty(chunk: Chunk) -> bool:
    """Return whether the host applies a penalty to the logits of a draw."""
    sequence = chunk.sequence
    params = sequence.params
    has_penalty = params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty
    return bool(has_penalty and not (sequence.is_counted and not chunk.draft))


def _index(ids_by_row: Collection[tuple[int, Collection[int]]], device: torch.device) -> Index:
    rows = np.repeat([row for row, _ in ids_by_row], [len(ids) for _, ids in ids_by_row])
    columns = np.concatenate([np.asarray(ids, dtype=np.int64) for _, ids in ids_by_row])
    on_both = on_device(np.stack([rows, columns]), device)
    return on_both[0], on_both[1]


def penalise(logits: torch.Tensor, penalised: Rows) -> None:
    """Apply penalties: repetition to ids of the prompt and the answer, frequency and presence to ids of the answer."""
    ids = []
    factors = []
    subtrahends = []
    for row, chunk in penalised:
        params = chunk.sequence.params
        counts = counts_of(chunk)
        times = np.asarray(counts.times)
        ids.append((row, counts.ids))
        factors.append(np.full(len(times), params.repetition_penalty))
        subtrahends.append(params.frequency_penalty * times + params.presence_penalty * (times > 0))
    index = _index(ids, logits.device)
    amounts = np.stack([np.concatenate(factors), np.concatenate(subtrahends)])
    factor, subtrahend = on_device(amounts, logits.device, torch.float32)
    scores = logits[index]
    logits[index] = torch.where(scores > 0, scores / factor, scores * factor) - subtrahend


def _apply_rules(logits: torch.Tensor, chunk: Chunk) -> None:
    """Apply the rules of plug-ins to the logits of one draw.

    If a rule raises, the logits become NaN, so that only this request fails.
    """
    sequence = chunk.sequence
    answer_ids = [*sequence.token_ids[sequence.prompt_len : chunk.known_end], *chunk.draft]
    for rule in sequence.rules:
        try:
            rule.edit(logits, answer_ids)
        except BaseException:  # The engine thread never gets a KeyboardInterrupt, and a SystemExit would end it.
            logger.exception("A sampling rule of plug-in '%s' failed on request %s", rule.plugin, sequence.request_id)
            sequence.failed_rule = chunk.known_end, rule.plugin
            logits.fill_(torch.nan)
            return


def apply_masks_in_torch(logits: torch.Tensor, rows: list[int], words: np.ndarray) -> None:
    """Set the logits float32 [R, vocab] of N rows to -infinity where a bit of `words` [N, ceil(vocab / 32)] is 0."""
    bits = on_device(words.view(np.int32), logits.device, torch.int32)[:, :, None] >> torch.arange(
        32, device=logits.device, dtype=torch.int32
    )
    is_banned = (bits & 1).flatten(1)[:, : logits.shape[1]] == 0
    index = on_device(rows, logits.device)
    logits[index] = logits[index].masked_fill(is_banned, -torch.inf)


def apply_masks_on_cpu(logits: torch.Tensor, rows: list[int], words: np.ndarray) -> None:
    """Do the same on a CPU.

    A table look-up per byte takes the same time for all masks. Writing only where bits are 0 takes ten times as long if
    half of the bits are 0.
    """
    of_row = logits.numpy()
    limits = np.empty((words.shape[1] * 4, 8), dtype=np.float32)
    for row, mask in zip(rows, words.view(np.uint8), strict=True):
        np.take(_LIMITS, mask, axis=0, out=limits, mode="clip")
        np.minimum(of_row[row], limits.ravel()[: logits.shape[1]], out=of_row[row])


def counts_of(chunk: Chunk) -> TokenCounts:
    """Return the counts of the sequence's tokens and of the chunk's draft.

    The counts of its own tokens stay with the sequence, because counting thousands of tokens in each step would take
    longer than all other edits.
    """
    sequence = chunk.sequence
    counts = sequence.token_counts
    if counts is None:
        repeats_count = sequence.params.repetition_penalty != 1.0
        prompt = sequence.token_ids[: sequence.prompt_len] if repeats_count else []
        counts = sequence.edits.counts_of_prompt(sequence.index // sequence.params.n, prompt)
        sequence.token_counts = counts
    counts.add(sequence.token_ids[sequence.prompt_len + counts.num_added :])
    if chunk.draft:
        counts = counts.copy()
        counts.add([*chunk.draft])
    return counts
