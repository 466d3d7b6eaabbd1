"""Cuts prompts into tiles, each the work of one program of a kernel at a time."""

from __future__ import annotations

import torch

from oaiserve.engine.model.batch import Batch
from oaiserve.engine.model.transfer import on_device, pinned


def cut(
    query_lens: list[int], context_lens: list[int], num_tokens: int, first: int = 0, row: int = 0
) -> list[list[int]]:
    """Cut prompts into tiles of up to `num_tokens` tokens. `first` is the first token, and `row` the first sequence.

    A tile is the sequence, its first token, the number of tokens, and the position of the first one. Tiles that see the
    most keys come first, so that the device does not end with one long tile alone.
    """
    tiles = []
    for query_len, context_len in zip(query_lens, context_lens, strict=True):
        position = context_len - query_len
        for offset in range(0, query_len, num_tokens):
            tiles.append([row, first + offset, min(num_tokens, query_len - offset), position + offset])
        first += query_len
        row += 1
    tiles.sort(key=lambda tile: tile[3], reverse=True)
    return tiles


class BatchTiles:
    """The prompts of a batch, in tiles. The list is made once for each size of tile, since all layers share it."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._tiles: dict[int, torch.Tensor] = {}

    def of(self, num_tokens: int) -> torch.Tensor:
        """Return the tiles of up to `num_tokens` tokens, int32 [N, 4], see `cut`."""
        if num_tokens not in self._tiles:
            batch, row = self._batch, self._batch.num_decodes
            tiles = cut(batch.query_lens[row:], batch.context_lens[row:], num_tokens, first=row, row=row)
            self._tiles[num_tokens] = on_device(tiles, batch.block_tables.device, torch.int32)
        return self._tiles[num_tokens]


class StaticTiles:
    """The tiles of up to `most_tokens` tokens of `most_prompts` prompts, always at the same addresses.

    So work that reads them can be captured, and replayed for other prompts. The remaining tiles have no tokens. The
    prompts come behind `num_decodes` rows of one token.
    """

    def __init__(self, most_tokens: int, most_prompts: int, device: torch.device, num_decodes: int = 0) -> None:
        self._most_tokens, self._most_prompts, self._num_decodes = most_tokens, most_prompts, num_decodes
        self._device = device
        self._tiles: dict[int, torch.Tensor] = {}

    def of(self, num_tokens: int) -> torch.Tensor:
        """Return where the tiles of up to `num_tokens` tokens are, int32 [N, 4]."""
        if num_tokens not in self._tiles:
            number = self._most_tokens // num_tokens + self._most_prompts
            self._tiles[num_tokens] = torch.zeros(number, 4, dtype=torch.int32, device=self._device)
        return self._tiles[num_tokens]

    def update(self, query_lens: list[int], context_lens: list[int]) -> None:
        """Write the tiles of prompts, without waiting for the device."""
        for num_tokens, tiles in self._tiles.items():
            values = cut(query_lens, context_lens, num_tokens, first=self._num_decodes, row=self._num_decodes)
            values += [[0, 0, 0, 0]] * (len(tiles) - len(values))
            tiles.copy_(pinned(torch.tensor(values, dtype=torch.int32), self._device), non_blocking=True)
