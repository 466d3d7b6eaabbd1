"""The data that passes between the scheduler and the model runner: what a step computes, and what came of it.

Plain data on the ground floor: no torch, and nothing that knows how steps are scheduled or run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from oaiserve.engine.sequence import Sequence


class Chunk(NamedTuple):
    """A sequence's part in a step: tokens `start` to `start + num_tokens` get their keys and values computed."""

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool = True  # the sequence's last token is in it, so the next one is drawn

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(slots=True)
class Step:
    """What one run of the model computes. Chunks of one token come first: attention treats them as one batch."""

    chunks: list[Chunk] = field(default_factory=list)
    # Blocks to copy (from, to) before anything else. The runner takes out those that it has copied: one that was copied
    # from may be written to in this step, so it must not be copied again.
    copies: list[tuple[int, int]] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)  # they waited, and now have a chunk
    preempted: list[Sequence] = field(default_factory=list)
    # Written by the runner with the results, where the device has a clock of its own.
    device_ns: int | None = None  # that it took
    device_gap_ns: int | None = None  # from the end of the step before, whenever that was

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)


class OutOfMemory(Exception):
    """The device had no memory for a step, which has not been computed. The runner is as it was before, but for blocks
    that it has copied."""


@dataclass(slots=True)
class Logprobs:
    """Log-probabilities of the unmodified distribution at one position."""

    token_id: int
    logprob: float
    top_ids: list[int]  # best first
    top_logprobs: list[float]


@dataclass(slots=True)
class ChunkResult:
    """What the runner has to say about one chunk of a step."""

    token_id: int | None = None  # None: the chunk does not sample
    logprobs: Logprobs | None = None  # of the sampled token, where the sequence asks for them
    prompt_logprobs: list[Logprobs] | None = None  # of tokens start+1 to min(end+1, prompt_len), where asked for
    error: str | None = None  # this sequence cannot go on; the others can
