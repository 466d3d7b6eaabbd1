"""Steps too large for the device's memory are computed in parts, and later steps are smaller for a while. No torch.

No sequence is preempted. The KV cache was allocated at the start, so preemption would free no memory for a step's
intermediate results. Only computing less at once does.
"""

from __future__ import annotations

from collections.abc import Callable

from oaiserve.engine.sequences.step import Chunk, ChunkResult, OutOfMemory, Step

Copies = list[tuple[int, int]]  # (from block, to block) pairs

LEAST_TOKENS = 16
RELIEF_NS = 10_000_000_000  # after this time without a shortage, steps may be twice as large


class Shortage:
    """The limit on the size of steps: halved when a step does not fit, and doubled after some time without failures.

    Decodes continue: if they alone exceed the limit, their step is computed in parts. Prompts get the rest, which may
    be nothing for a while. No new sequence starts to decode meanwhile, so there are fewer decodes over time, and
    prompts get their turn.
    """

    def __init__(self, most_tokens: int) -> None:
        self.step_tokens = self._most_tokens = most_tokens
        self.num_steps = 0  # steps that didn't fit into memory
        self._since_ns = 0

    @property
    def is_on(self) -> bool:
        return self.step_tokens < self._most_tokens

    def allows(self, step: Step) -> bool:
        return not self.is_on or step.num_tokens <= self.step_tokens

    def shrink(self, num_tokens: int, now_ns: int) -> None:
        """Halve the size of the next steps, because there was no memory for one of `num_tokens` tokens."""
        self.num_steps += 1
        self.step_tokens = min(self.step_tokens, max(LEAST_TOKENS, num_tokens // 2))
        self._since_ns = now_ns

    def recover(self, now_ns: int) -> None:
        """Double the size of the next steps, if the device has not lacked memory for some time."""
        if now_ns - self._since_ns >= RELIEF_NS:
            self.step_tokens = min(self._most_tokens, 2 * self.step_tokens)
            self._since_ns = now_ns


def compute_in_parts(
    compute: Callable[[Step], list[ChunkResult]], step: Step, most_tokens: int
) -> list[ChunkResult | None]:
    """Compute a step in parts, and return results as for a whole step.

    The result of a chunk is None if a single token or image of it does not fit, or, for a sequence that must be
    computed whole, if the chunk does not fit. Parts have at most `most_tokens`, and fewer where `compute` raises
    OutOfMemory. Each part ends before the next one begins. A failed part is computed again into the same slots. The
    blocks of the step must have been copied before.
    """
    chunk = step.chunks[0]
    half = chunk.num_tokens // 2
    if chunk.sequence.media is not None:
        half = chunk.sequence.media.whole_end(chunk.start, chunk.start + half) - chunk.start
    is_indivisible = len(step.chunks) == 1 and (half in (0, step.num_tokens) or chunk.sequence.is_whole)
    if step.num_tokens <= most_tokens or is_indivisible:
        try:
            return [*compute(step)]
        except OutOfMemory:
            pass
    if len(step.chunks) > 1:
        cut = _middle(step.chunks)
        halves = (Step(step.chunks[:cut]), Step(step.chunks[cut:]))
        return [result for half in halves for result in compute_in_parts(compute, half, most_tokens)]
    if is_indivisible:
        return [None]
    parts = [
        Chunk(chunk.sequence, chunk.start, half, max_draws=0),
        chunk._replace(start=chunk.start + half, num_tokens=chunk.num_tokens - half),
    ]
    whole = ChunkResult()
    for part in parts:
        (result,) = compute_in_parts(compute, Step([part]), most_tokens)
        if result is None:
            return [None]
        whole = _joined(whole, result)
    return [whole]


def copy_in_parts(copy: Callable[[Copies], None], copies: Copies) -> bool:
    """Copy blocks in order, in halves, and these in halves again if necessary. Return False if a single one doesn't
    fit."""
    if len(copies) == 1:
        return False
    half = len(copies) // 2
    for part in (copies[:half], copies[half:]):
        try:
            copy(part)
        except OutOfMemory:
            if not copy_in_parts(copy, part):
                return False
    return True


def _middle(chunks: list[Chunk]) -> int:
    """Return where to cut the chunks into two parts with about equal numbers of tokens and at least one chunk each."""
    tokens_left = sum(chunk.num_tokens for chunk in chunks) // 2
    for index, chunk in enumerate(chunks[:-1]):
        tokens_left -= chunk.num_tokens
        if tokens_left <= 0:
            return index + 1
    return len(chunks) - 1


def _joined(first: ChunkResult, last: ChunkResult) -> ChunkResult:
    rows = [part.prompt_logprobs for part in (first, last) if part.prompt_logprobs is not None]
    return ChunkResult(
        last.token_ids,
        last.logprobs,
        [row for part in rows for row in part] if rows else None,
        first.error or last.error,
    )
