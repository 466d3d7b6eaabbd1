"""The processes of a tensor-parallel model, called its *members*, and the device of each.

Each member holds a shard of every large weight and of the KV cache. transformers defines the shards of a model, loads
each member's, and calls the collectives in its forward. So members run the same forward with the same batch at the same
time, and member 0, the server, gets the whole logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from oaiserve.errors import StartupError


@dataclass(frozen=True, slots=True)
class Member:
    """A member of the group, which has `size` processes.

    `join` makes the process join the group. It is called with the member's device after the check that the model can be
    split, and before weights are loaded.
    """

    rank: int
    size: int
    join: Callable[[torch.device], None]


def place(device: torch.device, member: Member) -> torch.device:
    """Return the device of a member, of the type of `device`. Raises StartupError if there are too few devices."""
    if dist.is_initialized():
        raise StartupError(
            f"--tensor-parallel {member.size} is not possible here: this process is in a group of torch.distributed "
            "already. It can have one model that is split."
        )
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if count < member.size:
            raise StartupError(f"--tensor-parallel is {member.size}, but torch sees {count} CUDA devices here.")
        return torch.device("cuda", member.rank)
    if torch.cuda.is_available():  # transformers would use the GPUs
        raise StartupError(
            f"--tensor-parallel {member.size} with --device cpu needs CUDA_VISIBLE_DEVICES= (empty) in the environment."
        )
    return device
