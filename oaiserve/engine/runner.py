"""The protocol of a runner, which computes steps and draws their tokens. The engine thread alone calls it."""

from __future__ import annotations

from typing import Any, Protocol

from oaiserve.engine.shortage import Copies
from oaiserve.engine.step import Masks, Step, StepResult


class Runner(Protocol):
    """The runner computes steps in the order of their launches, and writes into none of them."""

    is_asynchronous: bool  # `launch` returns before the step has been computed
    kv_version: int  # sequences that began with different versions may have keys and values that differ in last bits

    @property
    def is_exact(self) -> bool:
        """Return whether a token's logits are bitwise the same in any step."""

    def copy_blocks(self, copies: Copies) -> None:
        """Copy blocks of the KV cache (from, to), before the step that needs them is launched.

        May raise OutOfMemory, without having copied any.
        """

    def launch(self, step: Step) -> Any:
        """Begin to compute the step, and the draws of it that are AT_LAUNCH.

        Return a handle for `draw` and `collect`. May raise OutOfMemory; the step may then come again in parts.
        """

    def draw(self, launched: Any, masks: Masks | None) -> None:
        """Make the draws that are LATE, now that the step has been settled.

        This is called once for each launched step, before its `collect` and before the next launch.
        """

    def collect(self, launched: Any) -> StepResult:
        """Wait until the step has been computed, and return its results."""
