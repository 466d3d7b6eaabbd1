"""A step that the device has no memory for: computed in parts, and what the next steps may be. No torch.

Nobody is preempted for it. The KV cache was allocated at the start, so a sequence that gave way would free none of the
memory that a step lacks, which is for what it computes in between: less at once is all that helps.
"""

from __future__ import annotations

from collections.abc import Callable

from oaiserve.engine.step import Chunk, ChunkResult, OutOfMemory, Step

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

    def met(self, num_tokens: int, now_ns: int) -> None:
        """There was no memory for a step of so many tokens."""
        self.num_steps += 1
        self.step_tokens = min(self.step_tokens, max(LEAST_TOKENS, num_tokens // 2))
        self._since_ns = now_ns

    def passes(self, now_ns: int) -> None:
        """Time does."""
        if now_ns - self._since_ns >= RELIEF_NS:
            self.step_tokens = min(self._most_tokens, 2 * self.step_tokens)
            self._since_ns = now_ns


def compute_in_parts(
    compute: Callable[[Step], list[ChunkResult]], step: Step, most_tokens: int
) -> list[ChunkResult | None]:
    """The results of the step, as if it had been computed as a whole. None for a chunk of which one token alone does
    not fit.

    Parts have `most_tokens` at most, and fewer where `compute` raises OutOfMemory. Each is waited for before the next.
    Whatever a part that failed has written is written again, in the same places; but blocks are copied once, since
    those they were copied from may have been written to afterwards: all parts share the list, see Step.
    """
    if step.num_tokens <= most_tokens:
        try:
            return [*compute(step)]
        except OutOfMemory:
            pass
    if len(step.chunks) > 1:
        cut = _middle(step.chunks)
        halves = (Step(chunks, copies=step.copies) for chunks in (step.chunks[:cut], step.chunks[cut:]))
        return [result for half in halves for result in compute_in_parts(compute, half, most_tokens)]
    (chunk,) = step.chunks
    if chunk.num_tokens == 1:
        return [None]
    half = chunk.num_tokens // 2
    parts = [
        Chunk(chunk.sequence, chunk.start, half, samples=False),
        Chunk(chunk.sequence, chunk.start + half, chunk.num_tokens - half, chunk.samples),
    ]
    whole = ChunkResult()
    for part in parts:
        (result,) = compute_in_parts(compute, Step([part], copies=step.copies), most_tokens)
        if result is None:
            return [None]
        whole = _joined(whole, result)
    return [whole]


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
        last.token_id,
        last.logprobs,
        [row for part in rows for row in part] if rows else None,
        first.error or last.error,
    )
