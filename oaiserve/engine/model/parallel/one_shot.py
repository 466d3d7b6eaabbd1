"""Sums of small messages in one kernel: each member reads those of the others, from memory mapped by all.

NCCL needs several messages for a sum, one after the other, which takes longer than adding up the little of a decode.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

# The largest messages, by the number of members: each reads those of all others, while NCCL's are shared out.
_MOST_BYTES = {2: 4 << 20, 3: 1 << 20, 4: 512 << 10}
_MOST_BYTES_OF_MANY = 256 << 10
_ALIGNMENT = 16  # bytes that a thread reads at a time


def missing(device: torch.device, size: int) -> str | None:
    """Return the reason why one-shot sums are impossible here, or None, without asking other members."""
    try:
        from torch.distributed import _symmetric_memory  # noqa: F401

        torch.ops.symm_mem.one_shot_all_reduce_copy  # noqa: B018
    except (ImportError, AttributeError):
        return f"torch {torch.__version__} has no one_shot_all_reduce_copy"
    others = [other for other in range(size) if other != device.index]
    if not all(torch.cuda.can_device_access_peer(device, other) for other in others):
        return f"{device} cannot read the memory of all other members' GPUs"
    return None


class OneShotSums:
    """The sums of small tensors among all members."""

    def __init__(self, device: torch.device, size: int) -> None:
        """Map the memory of all members. Blocks until all do the same."""
        from torch.distributed import _symmetric_memory

        assert dist.group.WORLD is not None
        self._group = dist.group.WORLD.group_name
        self._memory = _symmetric_memory.empty(
            _MOST_BYTES.get(size, _MOST_BYTES_OF_MANY), dtype=torch.uint8, device=device
        )
        _symmetric_memory.rendezvous(self._memory, self._group)

    def fits(self, x: Tensor) -> bool:
        return x.nbytes <= self._memory.nbytes and x.nbytes % _ALIGNMENT == 0 and x.is_contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """Return the sum of a tensor that `fits`. It goes into the mapped memory in the same kernel."""
        return torch.ops.symm_mem.one_shot_all_reduce_copy(  # type: ignore[no-any-return]
            self._memory.view(x.dtype), x, "sum", self._group
        )
