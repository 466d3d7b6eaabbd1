"""The ids that a request's own parameters forbid at a draw. Engine thread only, no torch."""

from __future__ import annotations

import numpy as np

from oaiserve.engine.step import Chunk


def is_too_short(chunk: Chunk) -> bool:
    """Return whether the answer may not end with this draw."""
    return chunk.end - chunk.sequence.prompt_len < chunk.sequence.params.min_tokens


def banned_ids(chunk: Chunk, *, has_mask: bool) -> list[int]:
    """Return the ids that would end the answer before min_tokens, or complete a bad word.

    A grammar's mask has no ids that would end the answer before min_tokens, unless the grammar has no others.
    """
    sequence = chunk.sequence
    banned = list(sequence.stop_ids) if is_too_short(chunk) and not has_mask else []
    for *beginning, last in sequence.bad_words:
        start = chunk.end - len(beginning)
        if start >= sequence.prompt_len and _ids_between(chunk, start) == beginning:
            banned.append(last)
    return banned


def _ids_between(chunk: Chunk, start: int) -> list[int]:
    """Return the ids from `start` to the draw, with those of the chunk's draft."""
    known = chunk.sequence.token_ids[start : chunk.known_end]
    return [*known, *chunk.draft[max(0, start - chunk.known_end) :]] if chunk.draft else known


def leaves_no_token(chunk: Chunk, vocab_size: int) -> bool:
    """Return whether the parameters and the grammar together forbid all ids. Raises the errors of the grammar's
    mask."""
    sequence = chunk.sequence
    words = np.full(-(-vocab_size // 32), 0xFFFFFFFF, dtype=np.uint32)
    has_mask = sequence.constraint is not None and not sequence.constraint.is_free
    if has_mask:
        assert sequence.constraint is not None
        sequence.constraint.fill_mask(words, chunk.end - sequence.prompt_len)
    may_come = np.unpackbits(words.view(np.uint8), count=vocab_size, bitorder="little").astype(bool)
    if (allowed := sequence.params.allowed_token_ids) is not None:
        is_allowed = np.zeros(vocab_size, dtype=bool)
        is_allowed[list(allowed)] = True
        may_come &= is_allowed
    may_come[[token_id for token_id in banned_ids(chunk, has_mask=has_mask) if token_id < vocab_size]] = False
    return not may_come.any()
