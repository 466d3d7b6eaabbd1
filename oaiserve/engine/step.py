"""The data that passes between the scheduler and the model runner: what a step computes, and what came of it.

This is plain data: no torch, and nothing that knows how a step is scheduled or run.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from oaiserve.engine.sequence import Sequence


class Chunk(NamedTuple):
    """A chunk is a sequence's part in a step: the keys and values of tokens `start` to `start + num_tokens`.

    With `max_draws`, the last known token of the sequence is in the chunk, so that tokens after it are drawn: at most
    so many, at least one unless the sequence cannot go on. 0: the rest of the sequence is computed in later steps.

    The last tokens of a chunk may be a `draft`: a guess at the tokens that follow the known ones, computed with these
    to draw behind each of them. What is drawn counts up to the first token that is not the draft's.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    max_draws: int = 1
    draft: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def known_end(self) -> int:
        """Return the end of the tokens that are the sequence's own: what follows is the draft."""
        return self.start + self.num_tokens - len(self.draft)

    @property
    def num_known(self) -> int:
        return self.num_tokens - len(self.draft)

    def draws(self) -> list[Chunk]:
        """Return the chunk up to each token that it draws after: the last known one, then each one of its draft."""
        if not self.draft:
            return [self] if self.max_draws else []
        sequence, start, num_known, draft = self.sequence, self.start, self.num_known, self.draft
        return [Chunk(sequence, start, num_known + i, 1, draft[:i]) for i in range(len(draft) + 1)]

    def without_draft(self) -> Chunk:
        """Return the chunk of the known tokens alone."""
        return Chunk(self.sequence, self.start, self.num_known, 1) if self.draft else self

    def num_accepted(self, token_ids: list[int]) -> int:
        """Return how many tokens of the draft came true, given the tokens that follow the known ones."""
        number = 0
        for guess, token_id in zip(self.draft, token_ids, strict=False):
            if guess != token_id:
                break
            number += 1
        return number

    @property
    def waits_for_ids(self) -> bool:
        """Return whether the chunk's draw has to wait: it needs ids on the host that the step in flight still draws."""
        sequence = self.sequence
        return sequence.needs_ids and self.max_draws > 0 and self.known_end > len(sequence.token_ids)

    @property
    def ends_at_last_id(self) -> bool:
        """Return whether all ids of the chunk are known but for its draft, and none after it, so that it may draw."""
        return self.known_end == len(self.sequence.token_ids)

    @property
    def draws_late(self) -> bool:
        """Return whether the chunk's draw is none of those that a launch makes: it waits for ids, or for a mask."""
        sequence = self.sequence
        return sequence.needs_ids and self.max_draws > 0 and (sequence.constraint is not None or self.waits_for_ids)

    @property
    def is_superseded(self) -> bool:
        """Return whether the token that the chunk is to draw is known meanwhile, because a grammar has forced it."""
        return self.max_draws > 0 and self.known_end < len(self.sequence.token_ids)


class Masks(NamedTuple):
    """The masks of a step's draws: the ids that may be drawn for those of its sequences that a grammar constrains now.

    Bit i % 32 of word i // 32 says whether id i may be drawn. The masks behind a draft's tokens follow the first one.
    """

    rows: dict[Sequence, int]  # of `words`: the first draw of each sequence
    words: np.ndarray  # uint32 [number of rows, ceil(vocab / 32)]


@dataclass(slots=True)
class Step:
    """A step is what one run of the model computes. Chunks of one token come first: attention treats them as one batch.

    `copies` are blocks to copy (from, to) before anything else, in this order. A block that was copied from may be
    written to in the same step, so a step that is computed in parts copies its blocks once. So it is
    with `state_copies`, which are in order, too.
    """

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    state_copies: list[tuple[int, int]] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)  # they waited, and now have a chunk
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def num_draft_tokens(self) -> int:
        return sum(len(chunk.draft) for chunk in self.chunks)


class OutOfMemory(Exception):
    """The device had no memory for what the runner was asked to do. It has done nothing of it, and is as it was."""


@dataclass(slots=True)
class Logprobs:
    """Log-probabilities of the unmodified distribution at one position."""

    token_id: int
    logprob: float
    top_ids: list[int]  # best first
    top_logprobs: list[float]


@dataclass(slots=True)
class ChunkResult:
    """The result of one chunk of a step."""

    token_ids: list[int] = field(default_factory=list)  # that were drawn, at most `max_draws` of the chunk
    logprobs: list[Logprobs] | None = None  # one for each of `token_ids`, where the sequence asks for them
    prompt_logprobs: list[Logprobs] | None = None  # of tokens start+1 to min(end+1, prompt_len), where asked for
    error: str | None = None  # the sequence cannot go on, for this reason; the others can
    vector: array[float] | None = None  # 32-bit floats: what a sequence that is pooled comes to


class StepResult(NamedTuple):
    """The results of a step: one for each chunk, in the order of the chunks."""

    chunks: list[ChunkResult]
    # The device's own times, where it has a clock.
    device_ns: int | None = None  # how long it was busy with the step
    device_gap_ns: int | None = None  # between the end of the step before, whenever that was, and this step
