"""Fills the masks of a step: which ids the grammars of its sequences let come next. Engine thread only, no torch."""

from __future__ import annotations

import numpy as np

from oaiserve.engine.sequence import Sequence
from oaiserve.engine.step import Chunk, Masks


def fill_masks(chunks: list[Chunk], vocab_size: int) -> tuple[Masks | None, list[tuple[Sequence, BaseException]]]:
    """Return the masks of these chunks, which draw a token, and the sequences whose grammar has failed, with the error.

    There is no mask for a chunk that may draw any id, nor for one whose draw is dropped.
    """
    drawing = [
        (chunk, constraint)
        for chunk in chunks
        if (constraint := chunk.sequence.constraint) is not None and not constraint.is_free and chunk.ends_at_last_id
    ]
    if not drawing:
        return None, []
    words = np.zeros((len(drawing), -(-vocab_size // 32)), dtype=np.uint32)
    failed = []
    for row, (chunk, constraint) in zip(words, drawing, strict=True):
        try:
            constraint.fill_mask(row, chunk.end - chunk.sequence.prompt_len)
        except BaseException as error:  # a panic in Rust code is no Exception, and other requests go on
            failed.append((chunk.sequence, error))
    return Masks({chunk.sequence: row for row, (chunk, _) in enumerate(drawing)}, words), failed
