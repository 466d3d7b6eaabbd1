"""The members of a tensor-parallel model agree before each piece of work whether it fits into the memory of all.

A member without memory in the middle would leave the others waiting for its part of a sum.
"""

from __future__ import annotations

from typing import NamedTuple

from oaiserve.engine.model.gpu.device_memory import DeviceMemory
from oaiserve.engine.model.parallel import group
from oaiserve.engine.model.parallel.messages import BatchShape, Copies
from oaiserve.engine.model.spec import ModelSpec

ALWAYS_BYTES = 64 << 20  # lists and partial results, for any number of tokens


class Needs(NamedTuple):
    """Upper bounds of the memory of a member's work, in bytes."""

    of_token: int
    of_logits_row: int
    of_block: int  # that is copied

    @classmethod
    def of_model(cls, spec: ModelSpec, block_size: int, *, largest_step_bytes: int, max_step_tokens: int) -> Needs:
        """Return the needs of a model, by its measured largest step."""
        widest = max((shape.num_bytes(spec.dtype) for shape in spec.kv_shapes.values()), default=0)
        return cls(
            of_token=-(-largest_step_bytes // max_step_tokens),
            of_logits_row=2 * spec.vocab_size * spec.dtype.itemsize,  # this member's part, and the whole
            of_block=widest * block_size,
        )

    def of_work(self, work: Copies | BatchShape) -> int:
        match work:
            case Copies(blocks):
                return ALWAYS_BYTES + len(blocks) * self.of_block
            case BatchShape():
                rows = work.num_logits_rows
                return ALWAYS_BYTES + work.num_tokens * self.of_token + rows * self.of_logits_row


class Capacity:
    """The memory of this member. Without `memory`, on a CPU, all work fits: the system gives memory page by page."""

    def __init__(self, memory: DeviceMemory | None = None, needs: Needs | None = None) -> None:
        self._memory = memory
        self._needs = needs

    def agreed(self, work: Copies | BatchShape) -> bool:
        """Return whether this work fits at all members. Blocks until all have called it."""
        return group.all_agree(self.is_here(work))

    def is_here(self, work: Copies | BatchShape) -> bool:
        """Return whether it fits into this member's memory."""
        if self._memory is None or self._needs is None:
            return True
        return self._memory.fits(self._needs.of_work(work))
