"""The protocol of a runner, which computes steps and draws their tokens. The engine thread alone calls it."""

from __future__ import annotations

from typing import Any, Protocol

from oaiserve.engine.shortage import Copies
from oaiserve.engine.step import Masks, Step, StepResult


class Runner(Protocol):
    """The runner computes steps in the order of their launches, and writes into none of them.

    The draw of a chunk waits if its sequence `needs_ids` and the chunk ends with a token that the step in flight draws,
    or if a grammar constrains the sequence. `Chunk.draws_late` is true of these.
    """

    is_asynchronous: bool  # `launch` returns before the step has been computed
    kv_version: int  # sequences that began with different versions may have keys and values that differ in last bits

    @property
    def is_exact(self) -> bool:
        """Return whether a token's logits are bitwise the same whatever else is in its step."""

    def copy_blocks(self, copies: Copies) -> None:
        """Copy blocks of the KV cache (from, to), before the step that needs them is launched.

        May raise OutOfMemory, without having copied any.
        """

    def launch(self, step: Step) -> Any:
        """Begin to compute the step, and to draw for all chunks whose draw does not wait.

        Return what `draw` and `collect` are given. May raise OutOfMemory; the step may then come again in parts.
        """

    def draw(self, launched: Any, masks: Masks | None) -> None:
        """Draw for the chunks that wait, now that the results of the step before are committed.

        This is called once for each launched step, before its `collect` and before the next launch. A sequence may have
        ended meanwhile, or its chunk may be void or superseded: its result is dropped.
        """

    def collect(self, launched: Any) -> StepResult:
        """Wait until the step has been computed, and return its results."""
