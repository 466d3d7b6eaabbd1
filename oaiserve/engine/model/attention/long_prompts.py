"""Attention of long prompts by a library, FlashAttention, to keys and values that are copied out of the cache for it.

Its forms read keys in one piece, or in pages of sizes that depend on version and GPU. To copy thousands of keys takes
far less time than a thousand tokens take to attend to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from oaiserve.engine.model.attention import LayerCache
from oaiserve.engine.model.attention.reference import gather
from oaiserve.engine.model.batch import Batch
from oaiserve.engine.model.transfer import on_device


class LongPrompts(NamedTuple):
    """The library's function, and which prompts are long enough for it, and not too long to be copied."""

    attend: Callable[..., torch.Tensor]  # as torch.nn.attention.varlen.varlen_attn
    least_tokens: int = 1024  # of a step
    least_keys: int = 8192
    most_keys: int = 131_072

    def take(self, lengths: Iterable[tuple[int, int]]) -> bool:
        """Decide whether prompts, by their tokens in a step and their keys, are all for the library."""
        return all(
            tokens >= self.least_tokens and self.least_keys <= keys <= self.most_keys for tokens, keys in lengths
        )

    def of(self, batch: Batch) -> LongPromptsOfStep | None:
        """Return the attention of a step's prompts; None: they are not for the library, see ahead, or are captured."""
        lengths = list(zip(batch.query_lens, batch.context_lens, strict=True))[batch.num_decodes :]
        if not lengths or batch.tiles is not None or batch.last_visible is not None or not self.take(lengths):
            return None
        return LongPromptsOfStep(self.attend, batch, lengths)


class LongPromptsOfStep:
    """The attention of the prompts of one step, behind its decodes."""

    def __init__(self, attend: Callable[..., torch.Tensor], batch: Batch, lengths: list[tuple[int, int]]) -> None:
        self._attend, self._lengths, self._first = attend, lengths, batch.num_decodes
        self._tables = batch.own_tables()
        ends = [[[0, tokens], [0, keys]] for tokens, keys in lengths]
        self._ends = on_device(ends, batch.block_tables.device, torch.int32)

    def __call__(self, query: torch.Tensor, cache: LayerCache, out: torch.Tensor, scale: float) -> None:
        """Compute the rows of prompts, whose keys and values are in the cache already, in `out` [T, heads, dim]."""
        first = self._first
        for row, ((tokens, keys), ends) in enumerate(zip(self._lengths, self._ends, strict=True), start=first):
            one_piece = gather(cache, self._tables[row : row + 1], keys, query.dtype)
            key, value = (heads[0].transpose(0, 1) for heads in one_piece)
            own = slice(first, first + tokens)
            out[own] = self._attend(query[own], key, value, *ends, tokens, keys, scale=scale, window_size=(-1, 0))
            first += tokens
