"""The ids that a request's own parameters forbid at a draw. Engine thread only, no torch."""

from __future__ import annotations

import numpy as np

from oaiserve.engine.sequences.step import Chunk


def is_too_short(chunk: Chunk) -> bool:
    """Return whether the answer may not end with this draw."""
    min_tokens = chunk.sequence.params.min_tokens
    return min_tokens > 0 and chunk.end - chunk.sequence.prompt_len < min_tokens


def banned_ids(chunk: Chunk, *, has_mask: bool) -> np.ndarray:
    """Return the banned ids: ids that would complete a bad word, and end tokens before min_tokens unless a grammar's
    mask already excludes these."""
    sequence = chunk.sequence
    banned: list[int] = []
    for *beginning, last in sequence.bad_words:
        start = chunk.end - len(beginning)
        before = sequence.token_ids[start : chunk.known_end]  # includes the chunk's draft
        if chunk.draft:
            before += chunk.draft[max(0, start - chunk.known_end) :]
        if start >= sequence.prompt_len and before == beginning:
            banned.append(last)
    ids = np.array(banned, dtype=np.int64)
    if is_too_short(chunk) and not has_mask:
        return np.concatenate([sequence.edits.stop_ids, ids])
    return ids


def leaves_no_token(chunk: Chunk, vocab_size: int) -> bool:
    """Return whether parameters and grammar together forbid every id. Raises the errors of the grammar's mask."""
    sequence = chunk.sequence
    words = np.full(-(-vocab_size // 32), 0xFFFFFFFF, dtype=np.uint32)
    has_mask = sequence.constraint is not None and not sequence.constraint.is_free
    if has_mask:
        assert sequence.constraint is not None
        sequence.constraint.fill_masks(words[None], chunk.end - sequence.prompt_len, ())
    may_come = np.unpackbits(words.view(np.uint8), count=vocab_size, bitorder="little").astype(bool)
    if (allowed := sequence.edits.allowed_ids) is not None:
        is_allowed = np.zeros(vocab_size, dtype=bool)
        is_allowed[allowed] = True
        may_come &= is_allowed
    banned = banned_ids(chunk, has_mask=has_mask)
    may_come[banned[banned < vocab_size]] = False
    return not may_come.any()
