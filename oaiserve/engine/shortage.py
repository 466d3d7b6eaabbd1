"""A step that the device has no memory for: computed in parts, and what the next steps may be. No torch.

Nobody is preempted for it. The KV cache was allocated at the start, so a sequence that gave way would free none of the
memory that a step lacks, which is for what it computes in between: less at once is all that helps.
"""

from __future__ import annotations

from collections.abc import Callable

from oaiserve.engine.step import Chunk, ChunkResult, OutOfMemory, Step

Copies = list[tuple[int, int]]  # blocks: from, to

LEAST_TOKENS = 16
RELIEF_NS = 10_000_000_000  # after so long without a shortage, steps may be twice as large again


class Shortage:
    """How large steps may be. Once one did not fit, half as many tokens, until some time has passed without another.

    Whoever decodes goes on: a step that is larger all the same is computed in parts. Prompts get what decodes leave,
    which may be nothing for a while; nobody new decodes meanwhile, so that those who do get fewer, and it ends.
    """

    def __init__(self, most_tokens: int) -> None:
        self.step_tokens = self._most_tokens = most_tokens
        self.num_steps = 0  # for which there was no memory
        self._since_ns = 0

    @property
    def is_on(self) -> bool:
        return self.step_tokens < self._most_tokens

    def allows(self, step: Step) -> bool:
        """Whether it is worth while to launch it as a whole."""
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
    """Return the results of a step that is computed in parts, as if it had been computed as a whole.

    The result of a chunk is None where one token of it alone does not fit. Parts have at most `most_tokens`, and fewer
    where `compute` raises OutOfMemory. Each part has ended before the next begins. What a part that failed has written
    is written again, in the same places. The blocks of the step must have been copied before.
    """
    if step.num_tokens <= most_tokens:
        try:
            return [*compute(step)]
        except OutOfMemory:
            pass
    if len(step.chunks) > 1:
        cut = _middle(step.chunks)
        halves = (Step(step.chunks[:cut]), Step(step.chunks[cut:]))
        return [result for half in halves for result in compute_in_parts(compute, half, most_tokens)]
    (chunk,) = step.chunks
    if chunk.num_tokens == 1:
        return [None]
    half = chunk.num_tokens // 2
    parts = [
        Chunk(chunk.sequence, chunk.start, half, max_draws=0),
        Chunk(chunk.sequence, chunk.start + half, chunk.num_tokens - half, chunk.max_draws),
    ]
    whole = ChunkResult()
    for part in parts:
        (result,) = compute_in_parts(compute, Step([part]), most_tokens)
        if result is None:
            return [None]
        whole = _joined(whole, result)
    return [whole]


def copy_in_parts(copy: Callable[[Copies], None], copies: Copies) -> bool:
    """Copy blocks in halves, and in halves of these, in their order. Return False where a single one does not fit."""
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
    """Where to cut them, so that both parts have about as many tokens, and each has a chunk."""
    tokens_left = sum(chunk.num_tokens for chunk in chunks) // 2
    for index, chunk in enumerate(chunks[:-1]):
        tokens_left -= chunk.num_tokens
        if tokens_left <= 0:
            return index + 1
    return len(chunks) - 1


def _joined(first: ChunkResult, last: ChunkResult) -> ChunkResult:
    """Of two parts of one chunk."""
    rows = [part.prompt_logprobs for part in (first, last) if part.prompt_logprobs is not None]
    return ChunkResult(
        last.token_ids,
        last.logprobs,
        [row for part in rows for row in part] if rows else None,
        first.error or last.error,
    )
