"""A step as packed tensors: all tokens of all chunks in one row, without padding."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from oaiserve.engine.sequence import Step


@dataclass(slots=True)
class Batch:
    """T tokens of B sequences. Rows `0..num_decodes-1` have one token each; the others have one or more.

    A token's *slot* is its place in the cache: block * block_size + offset. Host lists stand beside the tensors that
    attention needs for shapes, so that nothing has to be read back from the device.
    """

    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slots: torch.Tensor  # [T] int64
    block_tables: torch.Tensor  # [B, M] int64, rows padded with block 0
    query_start: torch.Tensor  # [B + 1] int64, offsets into T
    seq_lens: torch.Tensor  # [B] int64, cached tokens including this step's
    logits_rows: torch.Tensor  # [R] int64, the tokens whose logits are wanted
    num_decodes: int
    query_lens: list[int]
    context_lens: list[int]  # seq_lens on the host
    sample_chunks: list[int]  # chunks that sample, in order: their logits are the first rows
    prompt_rows: list[tuple[int, int, int]]  # (chunk, first row, number of rows) of prompt positions
    # What the reference backend works out once per step, not once per layer: masks by sliding window.
    masks: dict[int | None, list[torch.Tensor]] = field(default_factory=dict)


def build_batch(step: Step, block_size: int, device: torch.device) -> Batch:
    input_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    query_start = [0]
    last_rows: list[int] = []
    prompt_positions: list[int] = []
    sample_chunks: list[int] = []
    prompt_rows: list[tuple[int, int, int]] = []
    num_decodes = 0
    for index, chunk in enumerate(step.chunks):
        sequence, start, end = chunk.sequence, chunk.start, chunk.end
        first = len(input_ids)
        if chunk.num_tokens == 1:
            num_decodes += 1
            input_ids.append(sequence.token_ids[start])
            positions.append(start)
            slots.append(sequence.blocks[start // block_size] * block_size + start % block_size)
        else:
            input_ids += sequence.token_ids[start:end]
            positions += range(start, end)
            slots += [sequence.blocks[p // block_size] * block_size + p % block_size for p in range(start, end)]
        query_start.append(len(input_ids))
        if chunk.samples:
            sample_chunks.append(index)
            last_rows.append(len(input_ids) - 1)
        if sequence.wants_prompt_logprobs:
            # The logits at one position are about the next: the prompt's last position is about the answer.
            num_rows = max(0, min(end, sequence.prompt_len - 1) - start)
            prompt_rows.append((index, len(prompt_positions), num_rows))
            prompt_positions += range(first, first + num_rows)
    width = max(len(chunk.sequence.blocks) for chunk in step.chunks)
    tables = [chunk.sequence.blocks + [0] * (width - len(chunk.sequence.blocks)) for chunk in step.chunks]
    num_samples = len(last_rows)
    context_lens = [chunk.end for chunk in step.chunks]

    def tensor(values: list[int] | list[list[int]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)

    return Batch(
        input_ids=tensor(input_ids),
        positions=tensor(positions),
        slots=tensor(slots),
        block_tables=tensor(tables),
        query_start=tensor(query_start),
        seq_lens=tensor(context_lens),
        logits_rows=tensor(last_rows + prompt_positions),
        num_decodes=num_decodes,
        query_lens=[chunk.num_tokens for chunk in step.chunks],
        context_lens=context_lens,
        sample_chunks=sample_chunks,
        prompt_rows=[(index, num_samples + row, count) for index, row, count in prompt_rows],
    )
