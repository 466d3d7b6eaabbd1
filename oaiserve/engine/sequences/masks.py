"""Fills the masks of a step: the ids that the grammars of its sequences allow next. Engine thread only, no torch."""

from __future__ import annotations

import numpy as np

from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.sequences.step import Chunk, Masks


def fill_masks(chunks: list[Chunk], vocab_size: int) -> tuple[Masks | None, list[tuple[Sequence, BaseException]]]:
    """Return the masks of chunks with late draws, and the sequences with a failed grammar, with the error.

    A chunk without a constraint has no mask; one with a draft has one for each of its draws.
    """
    drawing = [
        (chunk, constraint)
        for chunk in chunks
        if (constraint := chunk.sequence.constraint) is not None and not constraint.is_free
    ]
    if not drawing:
        return None, []
    num_rows = sum(1 + len(chunk.draft) for chunk, _ in drawing)
    words = np.zeros((num_rows, -(-vocab_size // 32)), dtype=np.uint32)
    rows: dict[Sequence, int] = {}
    failed: list[tuple[Sequence, BaseException]] = []
    first = 0
    for chunk, constraint in drawing:
        rows[chunk.sequence] = first
        of_chunk = words[first : first + 1 + len(chunk.draft)]
        first += len(of_chunk)
        try:
            constraint.fill_masks(of_chunk, chunk.known_end - chunk.sequence.prompt_len, chunk.draft)
        except BaseException as error:  # A panic in Rust code is not an Exception, and other requests must continue.
            failed.append((chunk.sequence, error))
    return Masks(rows, words), failed
