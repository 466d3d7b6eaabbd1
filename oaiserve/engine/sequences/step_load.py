"""The load of a step and of its chunks, in the terms of the cost of steps."""

from __future__ import annotations

from collections.abc import Iterable

from oaiserve.engine.sequences.step import Chunk, Step
from oaiserve.explain.step_cost import Load


def load_of(step: Step) -> Load:
    return load_of_chunks(step.chunks)


def load_of_chunks(chunks: Iterable[Chunk]) -> Load:
    decodes = context = cached = draws = 0
    others = []
    for chunk in chunks:
        sequence, start, num_tokens, max_draws, _, _ = chunk
        if num_tokens == 1 and not sequence.needs_ids:
            decodes += 1
            context += start
            cached += sequence.num_cached
            draws += max_draws
        else:
            others.append(chunk_load(chunk))
    if len(others) == 1 and not decodes:
        return others[0]
    plain = Load(decodes, context - cached, cached, 0, 0, draws)
    if others:
        return sum_of([plain, *others])
    return plain


def sum_of(loads: Iterable[Load]) -> Load:
    return Load(*map(sum, zip(*loads, strict=True)))


def chunk_load(chunk: Chunk) -> Load:
    """Return the load of a chunk. Its tokens attend to those before the chunk, and on average to half of the chunk."""
    sequence, start, num_tokens, max_draws, draft, _ = chunk
    drafted = len(draft)
    draws = max_draws if max_draws <= drafted else drafted + 1
    edits = draws if sequence.needs_ids else 0
    context = num_tokens * (2 * start + num_tokens - 1) // 2
    if num_tokens - drafted == 1:
        cached = num_tokens * sequence.num_cached
        return Load(num_tokens, context - cached, cached, 0, 0, draws, edits, drafted)
    return Load(0, 0, 0, num_tokens, context, draws, edits, drafted)
