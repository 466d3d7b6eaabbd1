"""Measures the cache that transformers' own code makes, in a few short forward passes of a model when it starts."""

from __future__ import annotations

import logging
import math
from io import BytesIO
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oaiserve.engine.executors.fallback import CachedForward, NoCache
from oaiserve.engine.model.memory import CacheSize
from oaiserve.engine.start.compare import FLOAT32_TOLERANCE, difference, tolerance

log = logging.getLogger(__name__)

_FIRST = 32  # tokens of the first chunk
_AT_ONCE = [7, 1]  # sizes of the next chunks
_ONE_BY_ONE = [1] * 8
_MORE_THAN_ROUNDING = 4  # multiple of the difference that computing single tokens makes


class Measured(NamedTuple):
    vocab_size: int
    cache: CacheSize
    continues_chunks: bool  # False: after the first chunk, the model's code takes only one token at a time


@torch.inference_mode()
def measure(forward: CachedForward) -> Measured:
    """Measure the cache of a model at two lengths, and compare its logits with those of the text as a whole.

    Raises NoCache if they are not finite, or if they differ in float32 even when tokens are computed one by one. In 16
    bits, rounding may cause the difference, so this only logs a warning.
    """
    weight = next(forward.model.parameters())
    text = torch.arange(_FIRST + sum(_ONE_BY_ONE), device=weight.device)  # All vocabularies have these ids.
    # The first token after a cache depends on it most, and at the last tokens errors have accumulated.
    whole, _ = forward(text, 0, None, [_FIRST, len(text) - 2, len(text) - 1])
    if not whole.isfinite().all():
        raise NoCache("its outputs are no finite numbers: its weights are damaged, or too large for their dtype")
    by_one, size = _in_parts(forward, text, _ONE_BY_ONE)
    apart = _most_apart(by_one, whole)
    if not apart <= tolerance(weight.dtype):  # NaN, too
        if weight.dtype == torch.float32 or not math.isfinite(apart):
            raise NoCache("its code computes other logits with its cache than without it")
        log.warning(
            "With its cache, transformers' code computes logits that differ by %.1f%% from those without it: much is "
            "rounded in 16 bits, or the code is wrong. --dtype float32 tells which",
            100 * apart,
        )
    at_once, _ = _in_parts(forward, text, _AT_ONCE)
    limit = max(FLOAT32_TOLERANCE, _MORE_THAN_ROUNDING * apart)
    return Measured(whole.shape[-1], size, continues_chunks=_most_apart(at_once, whole) <= limit)


def _in_parts(forward: CachedForward, text: Tensor, sizes: list[int]) -> tuple[Tensor, CacheSize]:
    """Compute a first chunk, then parts of these sizes. Return the logits [3, vocab] after the first token that follows
    the chunk and after the last two tokens, and the size of the cache."""
    first, *others = text.split([_FIRST, *sizes])
    _, cache = forward(first, 0, None, [])
    before = num_bytes(cache)
    start = len(first)
    parts: list[Tensor] = []
    for piece in others:
        logits, cache = forward(piece, start, cache, list(range(len(piece))))
        parts.append(logits)
        start += len(piece)
    per_token = max(0, num_bytes(cache) - before) / sum(sizes)
    return torch.cat(parts)[[0, -2, -1]], CacheSize(int(before - _FIRST * per_token), per_token)


def _most_apart(values: Tensor, expected: Tensor) -> float:
    """Return the largest difference between two rows, or NaN."""
    return float(torch.tensor([difference(*pair) for pair in zip(values, expected, strict=True)]).max())


def num_bytes(cache: Any) -> int:
    """Return the bytes of the tensors in any kind of cache, to within a few thousand."""
    written = BytesIO()
    torch.save(cache, written)
    return written.tell()
