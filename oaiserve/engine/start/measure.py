"""Measures the cache that transformers' own code makes, in short forwards of a model at its start."""

from __future__ import annotations

from io import BytesIO
from typing import Any, NamedTuple

import torch

from oaiserve.engine.executors.fallback import CachedForward, NoCache
from oaiserve.engine.model.memory import CacheSize
from oaiserve.engine.start.compare import difference, tolerance

_NUM_TOKENS = 32  # of the first chunk, and of those after it
_AT_ONCE = [_NUM_TOKENS - 8] + [1] * 8  # errors of a single token may add up
_ONE_BY_ONE = [1] * _NUM_TOKENS


class Measured(NamedTuple):
    """What short forwards show of a model."""

    vocab_size: int
    cache: CacheSize
    continues_chunks: bool  # else its code must have the tokens after its first chunk one by one


@torch.inference_mode()
def measure(forward: CachedForward) -> Measured:
    """Measure the cache of a model at two lengths, and compare its last logits with those of the text as a whole.

    Raises NoCache if they differ even where each token is computed alone.
    """
    device = next(forward.model.parameters()).device
    text = torch.arange(2 * _NUM_TOKENS, device=device)  # all vocabularies have these
    whole, _ = forward(text, 0, None, [len(text) - 2, len(text) - 1])
    for sizes in (_AT_ONCE, _ONE_BY_ONE):
        first, *others = text.split([_NUM_TOKENS, *sizes])
        logits, cache = forward(first, 0, None, [0])
        before = num_bytes(cache)
        start, found = len(first), []
        for piece in others:
            logits, cache = forward(piece, start, cache, [len(piece) - 1])
            found.append(logits)
            start += len(piece)
        if difference(torch.cat(found[-2:]), whole) <= tolerance(whole.dtype):
            per_token = max(0, num_bytes(cache) - before) / _NUM_TOKENS
            size = CacheSize(int(before - _NUM_TOKENS * per_token), per_token)
            return Measured(whole.shape[-1], size, continues_chunks=sizes is _AT_ONCE)
    raise NoCache("its code computes other logits with its cache than without it")


def num_bytes(cache: Any) -> int:
    """Return the bytes of the tensors in a cache, of whatever kind it is, to within a few thousand."""
    written = BytesIO()
    torch.save(cache, written)
    return written.tell()
