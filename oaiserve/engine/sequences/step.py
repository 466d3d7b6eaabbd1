"""The data between the scheduler and the model runner: a step, its chunks, and their results. `Runner` computes them.

This is plain data: no torch, and it must not read the state of a sequence, which changes while a step is computed.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

import numpy as np

from oaiserve.engine.sequences.sequence import Sequence


class Draw(Enum):
    """When a chunk draws, and whether its draws count. The scheduler decides this in two stages.

    In a new step, a chunk draws AT_LAUNCH or LATE. Once the previous step has been committed, `Scheduler.settle` may
    change either to SUPERSEDED or VOID, which is final:

        AT_LAUNCH, LATE    the last known token of the chunk is the last one of its sequence: the draw follows it
        SUPERSEDED         the sequence has more tokens: a grammar has forced the token that the chunk was to draw
        VOID               the sequence has fewer: the token that the chunk ends with was expected but never drawn
    """

    AT_LAUNCH = 1  # drawn together with the forward pass
    LATE = 2  # drawn after the last step's commit: to edit the logits, the host needs its ids or a grammar's mask
    SUPERSEDED = 3  # the draw is dropped; keys and values count
    VOID = 4  # The whole chunk doesn't count.


class Chunk(NamedTuple):
    """A sequence's part in a step: the keys and values of tokens `start` to `start + num_tokens`.

    If `max_draws` isn't 0, the chunk contains the last known token of the sequence, and tokens after it are drawn: at
    most `max_draws`, and at least one unless the sequence cannot continue. If it is 0, later steps compute the rest of
    the sequence.

    The last tokens of a chunk may be a `draft`: proposed next tokens, computed together with the known ones so that a
    token is drawn after each of them. Draws count up to the first token that differs from the draft.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    max_draws: int = 1
    draft: tuple[int, ...] = ()
    draw: Draw = Draw.AT_LAUNCH  # when the chunk draws, if it does

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def known_end(self) -> int:
        """Return the end of the sequence's known tokens, before the draft."""
        return self.start + self.num_tokens - len(self.draft)

    @property
    def num_known(self) -> int:
        return self.num_tokens - len(self.draft)

    def draws(self) -> list[Chunk]:
        """Return the chunk up to each token that is followed by a draw: the last known one, then each one of the
        draft."""
        if not self.draft:
            if self.max_draws:
                return [self]
            return []
        sequence = self.sequence
        start = self.start
        num_known = self.num_known
        draft = self.draft
        draw = self.draw
        return [Chunk(sequence, start, num_known + i, 1, draft[:i], draw) for i in range(len(draft) + 1)]

    def with_draft(self, draft: Collection[int]) -> Chunk:
        """Return the chunk's known tokens with another draft, which must not be longer."""
        num_tokens = self.num_known + len(draft)
        return Chunk(self.sequence, self.start, num_tokens, 1 + len(draft), tuple(draft), self.draw)

    def without_draft(self) -> Chunk:
        if self.draft:
            return self.with_draft(())
        return self

    def num_accepted(self, token_ids: list[int]) -> int:
        """Return how many tokens of the draft are right, given the tokens that came after the known ones."""
        number = 0
        for drafted, token_id in zip(self.draft, token_ids, strict=False):
            if drafted != token_id:
                break
            number += 1
        return number


class Masks(NamedTuple):
    """The masks of a step's late draws: the ids allowed next by grammars.

    Bit i % 32 of word i // 32 says whether id i may be drawn. The masks after a draft's tokens follow the first one.
    """

    rows: dict[Sequence, int]  # row of each sequence's first draw in `words`
    words: np.ndarray  # uint32 [number of rows, ceil(vocab / 32)]


class Left(NamedTuple):
    """A sequence that gave back its blocks when its last step was launched, although that step still reads them."""

    sequence: Sequence
    num_blocks: int  # blocks that no other sequence used
    since_ns: int


@dataclass(slots=True)
class Step:
    """One run of the model. Chunks of one token come first: attention treats them as one batch.

    `copies` are blocks to copy (from, to) before anything else, in this order. The source of a copy may be written to
    in the same step, so a step that is computed in parts copies its blocks only once. The same holds for
    `state_copies`.
    """

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    state_copies: list[tuple[int, int]] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)  # sequences that waited before this step
    preempted: list[Sequence] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)  # sequences that left when the step was launched

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

    def add(self, other: Step) -> None:
        """Add the work of a step of other sequences."""
        self.chunks = sorted(self.chunks + other.chunks, key=lambda chunk: chunk.num_tokens > 1)
        self.copies += other.copies
        self.admitted += other.admitted
        self.preempted += other.preempted

    @property
    def num_draft_tokens(self) -> int:
        return sum(len(chunk.draft) for chunk in self.chunks)


class OutOfMemory(Exception):
    """The device had no memory for the runner's work. None of it was done, and the runner is unchanged."""


@dataclass(slots=True)
class Logprobs:
    """Log-probabilities of the unmodified distribution at one position."""

    token_id: int
    logprob: float
    top_ids: list[int]  # best first
    top_logprobs: list[float]
    rank: int = 0  # rank of the token in the whole vocabulary, from 1; 0: not looked up


@dataclass(slots=True)
class ChunkResult:
    token_ids: list[int] = field(default_factory=list)  # drawn tokens, at most `max_draws` of the chunk
    logprobs: list[Logprobs] | None = None  # one for each of `token_ids`, if requested
    prompt_logprobs: list[Logprobs] | None = None  # for tokens start+1 to min(end+1, prompt_len), if requested
    error: str | None = None  # why the sequence cannot continue; the others can
    vector: array[float] | None = None  # 32-bit floats, for a pooled sequence


class StepResult(NamedTuple):
    """The results of a step: one for each chunk, in the order of the chunks."""

    chunks: list[ChunkResult]
    # The device's own times, if it has a clock.
    device_ns: int | None = None  # time for which the device was busy with the step
    device_gap_ns: int | None = None  # from the end of the previous step, whenever that was, to the start of this one


class Runner(Protocol):
    """Computes steps in the order in which they are launched, and never modifies them. Only the engine thread calls
    it."""

    is_asynchronous: bool  # `launch` returns before the step has been computed

    @property
    def is_exact(self) -> bool:
        """Return whether a token's logits are bitwise the same in any step."""

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy KV blocks (from, to) before their step is launched. May raise OutOfMemory without having copied any."""

    def launch(self, step: Step) -> Any:
        """Begin to compute the step and its AT_LAUNCH draws.

        Return a handle for `draw` and `collect`. May raise OutOfMemory; the step may then be launched again in parts.
        """

    def draw(self, launched: Any, masks: Masks | None) -> None:
        """Make the LATE draws of a settled step. Call this once per launched step that has any, before `collect` and
        the next launch."""

    def collect(self, launched: Any) -> StepResult:
        """Wait until the step has been computed, and return its results."""
