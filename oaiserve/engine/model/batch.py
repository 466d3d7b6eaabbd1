"""Packs a step into a batch: tensors with all tokens of all chunks, concatenated without padding."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Sequenced
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from oaiserve.engine.model.adapters import Adapter
from oaiserve.engine.model.states import StepStates
from oaiserve.engine.model.transfer import on_device
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.sequences.step import Chunk, Step

ALIGNMENT = 16  # Each tensor of a batch begins at a multiple of 16 integers (128 bytes), as kernels prefer.
_NONE = torch.empty(0, dtype=torch.int64)


def aligned_size(size: int) -> int:
    """Return the size rounded up so that the next tensor begins at an aligned address."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(slots=True)
class BatchMedia:
    """The vectors of images and sounds that replace the embeddings of some tokens of a step."""

    rows: torch.Tensor  # [M] int64, the rows of these tokens, ascending
    vectors: torch.Tensor  # [M, hidden size], in the model's dtype
    deep: tuple[torch.Tensor, ...] = ()  # [M, hidden size] each, added to the outputs of the first layers


class CapturedAdapters(Protocol):
    """Applies the adapters of a captured step, which may change with each replay."""

    modules: Collection[str]

    def __call__(self, module: str, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add to the products `out` [tokens, rows of W] of a module, given its input [tokens, columns]."""


@dataclass(slots=True)
class Batch:
    """A batch has T tokens of B sequences. The first `num_decodes` sequences have one token each.

    A token's *slot* is its index in the cache: block * block_size + offset. The host has lists of the lengths, too,
    since attention needs them for shapes and must not read them back from the device.
    """

    input_ids: torch.Tensor  # [T] int64; 0 for ids that only the device has
    positions: torch.Tensor  # [T] int64, rotate queries and keys; in an image, they differ from the tokens' indices
    slots: torch.Tensor  # [T] int64
    block_tables: torch.Tensor  # [N, M] int64; only the first entries of a row are read, the blocks of its sequence
    table_rows: torch.Tensor  # [B] int64, the row of each sequence in the block tables
    query_start: torch.Tensor  # [B + 1] int64, offsets into T
    seq_lens: torch.Tensor  # [B] int64, cached tokens including this step's
    logits_rows: torch.Tensor  # [R] int64, the tokens whose logits are needed
    num_decodes: int
    query_lens: list[int]
    context_lens: list[int]  # seq_lens on the host
    # int64 [P] each: tokens whose ids only the device has, and their indices in the ids that the previous step draws.
    unknown_rows: torch.Tensor = _NONE
    drawn_rows: torch.Tensor = _NONE
    # The chunk of each draw, in order. Draws use the first rows of logits. A chunk with a draft has several draws.
    sample_chunks: list[int] = field(default_factory=list)
    # (chunk, first row, number of rows) for log-probabilities of prompts
    prompt_rows: list[tuple[int, int, int]] = field(default_factory=list)
    adapters: list[Adapter | None] = field(default_factory=list)  # each chunk's adapter; empty if no chunk has one
    captured_adapters: CapturedAdapters | None = None  # the adapters of captured steps, which replace `adapters`
    states: StepStates | None = None  # None if the model's layers keep no states
    media: BatchMedia | None = None
    axes: torch.Tensor | None = None  # [3, T] int64: positions by time, height and width; None: all equal `positions`
    # [num_decodes] int64: the slots of decodes in a captured step with prompts, for which `slots` has -1. The decodes
    # come first. The rest is padding, with -1, and has no tokens: the tokens after the decodes belong to prompts.
    decode_slots: torch.Tensor | None = None
    # [T] int64: the index of the last token of its sequence that each token sees. None: each token sees up to itself.
    last_visible: torch.Tensor | None = None

    def own_tables(self) -> torch.Tensor:
        """Return the block tables of the batch's sequences, [B, M]."""
        return self.block_tables.index_select(0, self.table_rows)


def rows_of(adapters: Sequenced[Adapter | None], query_lens: list[int]) -> dict[Adapter, list[int]]:
    """Return the rows of each adapter's tokens, given each sequence's adapter and number of tokens."""
    rows: dict[Adapter, list[int]] = {}
    first = 0
    for adapter, num_tokens in zip(adapters, query_lens, strict=True):
        if adapter is not None:
            rows.setdefault(adapter, []).extend(range(first, first + num_tokens))
        first += num_tokens
    return rows


@dataclass(slots=True)
class StepLists:
    """The tokens of a step and the rows of needed logits, as lists for the fields of `Batch`."""

    input_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    query_start: list[int] = field(default_factory=lambda: [0])
    logits_rows: list[int] = field(default_factory=list)
    prompt_positions: list[int] = field(default_factory=list)  # the tokens of `prompt_rows`
    unknown_rows: list[int] = field(default_factory=list)
    drawn_rows: list[int] = field(default_factory=list)
    sample_chunks: list[int] = field(default_factory=list)
    prompt_rows: list[tuple[int, int, int]] = field(default_factory=list)  # Their rows count from 0.
    num_decodes: int = 0
    with_media: list[tuple[int, Chunk]] = field(default_factory=list)  # the first token of each prompt with media


def lists_of(step: Step, block_size: int, drawn_rows: Mapping[Sequence, int] | None = None) -> StepLists:
    """Return the tokens of a step. `drawn_rows` is needed if the host doesn't have all of their ids yet.

    It maps each sequence that drew a token in the previous step to its row among the ids of that step.
    """
    lists = StepLists()
    input_ids = lists.input_ids
    positions = lists.positions
    slots = lists.slots
    for index, (sequence, start, num_tokens, max_draws, draft, _) in enumerate(step.chunks):
        first = len(input_ids)
        if num_tokens == 1:
            lists.num_decodes += 1
            if start < len(sequence.token_ids):
                input_ids.append(sequence.token_ids[start])
            else:
                assert drawn_rows is not None
                input_ids.append(0)
                lists.unknown_rows.append(first)
                lists.drawn_rows.append(drawn_rows[sequence])
            positions.append(start if sequence.media is None else sequence.media.position(start))
            slots.append(sequence.blocks[start // block_size] * block_size + start % block_size)
        else:
            end = start + num_tokens
            input_ids += sequence.token_ids[start : end - len(draft)]
            input_ids += draft
            own = range(start, end)
            positions += own if sequence.media is None else sequence.media.positions(0, start, end)
            slots += [sequence.blocks[p // block_size] * block_size + p % block_size for p in own]
        num_known = len(input_ids)
        lists.query_start.append(num_known)
        if sequence.media is not None and start < sequence.prompt_len:
            lists.with_media.append((first, step.chunks[index]))
        if draft:
            lists.sample_chunks += [index] * (1 + len(draft))
            lists.logits_rows += range(num_known - 1 - len(draft), num_known)
        elif max_draws:
            lists.sample_chunks.append(index)
            lists.logits_rows.append(num_known - 1)
        if sequence.wants_prompt_logprobs:
            # The logits at one position predict the next token, so the last row of the prompt belongs to the answer.
            num_rows = max(0, min(start + num_tokens, sequence.prompt_len - 1) - start)
            lists.prompt_rows.append((index, len(lists.prompt_positions), num_rows))
            lists.prompt_positions += range(first, first + num_rows)
    return lists


def build_batch(
    step: Step,
    block_size: int,
    device: torch.device,
    drawn_rows: Mapping[Sequence, int] | None = None,
    tables: tuple[torch.Tensor, list[int]] | None = None,
) -> Batch:
    """Pack a step into tensors on the device.

    `tables` are block tables on the device, and the row of each chunk in them. Without them, the batch gets its own
    tables, padded to the longest. For `drawn_rows` see `lists_of`.
    """
    lists = lists_of(step, block_size, drawn_rows)
    own_tables: list[int] = []
    table_rows = list(range(len(step.chunks))) if tables is None else tables[1]
    if tables is None:  # The tables of all sequences are padded to the longest one.
        width = max(len(chunk.sequence.blocks) for chunk in step.chunks)
        for chunk in step.chunks:
            own_tables += chunk.sequence.blocks
            own_tables += [0] * (width - len(chunk.sequence.blocks))
    context_lens = [chunk.end for chunk in step.chunks]
    num_draws = len(lists.logits_rows)
    media_rows, axes, last_visible = _media_lists(step, lists.with_media, lists.positions)
    tensors = _upload(
        [
            *(lists.input_ids, lists.positions, lists.slots, own_tables, table_rows),
            *(lists.query_start, context_lens, lists.logits_rows + lists.prompt_positions),
            *(lists.unknown_rows, lists.drawn_rows, media_rows, axes, last_visible),
        ],
        device,
    )
    return Batch(
        input_ids=tensors[0],
        positions=tensors[1],
        slots=tensors[2],
        block_tables=tensors[3].view(len(step.chunks), -1) if tables is None else tables[0],
        table_rows=tensors[4],
        query_start=tensors[5],
        seq_lens=tensors[6],
        logits_rows=tensors[7],
        unknown_rows=tensors[8],
        drawn_rows=tensors[9],
        num_decodes=lists.num_decodes,
        query_lens=[chunk.num_tokens for chunk in step.chunks],
        context_lens=context_lens,
        sample_chunks=lists.sample_chunks,
        prompt_rows=[(index, num_draws + row, count) for index, row, count in lists.prompt_rows],
        media=BatchMedia(tensors[10], *_vectors(lists.with_media)) if media_rows else None,
        axes=tensors[11].view(3, -1) if axes else None,
        last_visible=tensors[12] if last_visible else None,
    )


def _media_lists(
    step: Step, with_media: list[tuple[int, Chunk]], positions: list[int]
) -> tuple[list[int], list[int], list[int]]:
    """Return the rows of vectors, the positions on three axes, and the last visible tokens, as in Batch.

    A list is empty if no chunk needs it.
    """
    rows: list[int] = []
    last_visible: list[int] = []
    if not with_media:
        return rows, [], last_visible
    heights = list(positions)
    widths = list(positions)
    for first, (sequence, start, num_tokens, *_) in with_media:
        media = sequence.media
        end = start + num_tokens
        assert media is not None
        places = media.rows_in(start, end)
        rows += [place - start + first for place in media.places[places.start : places.stop]]
        if media.axes:
            heights[first : first + num_tokens] = media.positions(1, start, end)
            widths[first : first + num_tokens] = media.positions(2, start, end)
        runs = [(max(run[0], start), run[1]) for run in media.runs if run[0] < end and start < run[1]]
        if runs and not last_visible:
            last_visible = [index for chunk in step.chunks for index in range(chunk.start, chunk.end)]
        for run_start, run_end in runs:
            last_visible[run_start - start + first : run_end - start + first] = [run_end - 1] * (run_end - run_start)
    has_axes = any(chunk.sequence.media and chunk.sequence.media.axes for _, chunk in with_media)
    return rows, positions + heights + widths if has_axes else [], last_visible


def _vectors(with_media: list[tuple[int, Chunk]]) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Return the vectors that replace embeddings of these chunks, in order, and those added to layers' outputs."""
    parts: list[tuple[Any, ...]] = []  # for each medium: its vectors, then those for each layer
    for _, (sequence, start, num_tokens, *_) in with_media:
        assert sequence.media is not None
        rows = sequence.media.rows_in(start, start + num_tokens)
        first = 0
        for encoded in sequence.encoded:
            end = first + len(encoded.vectors)
            if first < rows.stop and rows.start < end:
                part = slice(max(rows.start - first, 0), rows.stop - first)
                parts.append(tuple(tensor[part] for tensor in (encoded.vectors, *encoded.deep)))
            first = end
    vectors, *deep = (torch.cat(same) for same in zip(*parts, strict=True))
    return vectors, tuple(deep)


def _upload(lists: list[list[int]], device: torch.device) -> list[torch.Tensor]:
    """Return each list as an int64 tensor on the device. They are parts of one tensor, so that one copy is enough."""
    packed: list[int] = []
    sizes: list[int] = []
    for values in lists:
        padding = -len(values) % ALIGNMENT
        packed += values
        packed += [0] * padding
        sizes += len(values), padding
    # NumPy converts a list over three times as fast as torch.
    tensor = on_device(torch.frombuffer(array("q", packed), dtype=torch.int64), device)
    return list(tensor.split(sizes))[::2]
