"""The group of processes that a model is split over, called its *members*.

Each member holds a part of every large weight and of the KV cache. transformers defines how a model is split, loads
each member's part, and calls the collectives in its forward. So members run the same forward with the same batch at the
same time, and member 0, the server, gets the whole logits.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from oaiserve.errors import StartupError

# This timeout is not how the end of a member is noticed. It only has to be longer than the difference between the times
# that two members take to load their parts.
TIMEOUT = timedelta(hours=1)


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


def refuse_unless_divisible(config: PreTrainedConfig, size: int, name: str, *, is_gguf: bool = False) -> None:
    """Raise StartupError for a model that transformers cannot split into `size` equal parts."""
    if is_gguf:
        raise StartupError(f"--tensor-parallel {size} is not for GGUF files; '{name}' is one.")
    if not config.base_model_tp_plan:
        raise StartupError(
            f"'{name}' cannot be served with --tensor-parallel {size}: transformers does not know how to split a model "
            f"of type '{config.model_type}'."
        )
    heads = config.num_attention_heads
    sizes = {
        "attention heads": heads,
        "key-value heads": getattr(config, "num_key_value_heads", None) or heads,
        "values between the layers of its MLP": config.intermediate_size,
        "tokens in its vocabulary": config.vocab_size,
    }
    for what, number in sizes.items():
        if number % size:
            most = math.gcd(*sizes.values())
            allowed = ", ".join(str(n) for n in range(1, most + 1) if most % n == 0)
            raise StartupError(
                f"--tensor-parallel is {size}, but '{name}' has {number} {what}, which are to be split evenly. "
                f"Possible with this model: {allowed}."
            )


@contextmanager
def environment(rank: int) -> Iterator[None]:
    """Set the environment variables that torch.distributed and transformers read during a join and a load."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    ours = {
        # All members are on this machine, and nothing outside it needs to reach them.
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", loopback),
        "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", loopback),
        # By default, a thread of NCCL ends this process as soon as another member is gone.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "LOCAL_RANK": str(rank),
    }
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def join(rank: int, size: int, device: torch.device, folder: Path, num_threads: int) -> None:
    """Join the group, and block until all members have joined.

    Members meet by means of a file in `folder`, which has to exist until they leave.
    """
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, num_threads // size))
    excepthook = sys.excepthook
    dist.init_process_group(
        "nccl" if on_cuda else "gloo",
        init_method=f"file://{folder}/members",
        rank=rank,
        world_size=size,
        timeout=TIMEOUT,
        device_id=device if on_cuda else None,
    )
    sys.excepthook = excepthook  # torch's would put the rank before each line of a traceback


def leave(*, broken: bool) -> None:
    """Leave the group; the other members need not do the same.

    `broken` means that another member is gone. This process may be waiting for it on the device, and stops waiting.
    """
    if not dist.is_initialized():
        return
    if dist.get_backend() == "nccl":
        # Destroying the group would wait for the other members.
        dist.distributed_c10d._abort_process_group()
    elif not broken:  # on a CPU, a member that waits for one that is gone gets an error
        dist.destroy_process_group()


def all_reduce_min(number: int, device: torch.device) -> int:
    """Return the smallest of the members' numbers. Blocks until all members have called it."""
    tensor = torch.tensor([number], device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MIN)
    return int(tensor)


def keep_local(model: PreTrainedModel) -> None:
    """Make the weights of split linear layers plain tensors.

    transformers' hooks accept distributed tensors too, but look up their local part in each call.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            for name, weight in module.named_parameters(recurse=False):
                if isinstance(weight, DTensor):
                    setattr(module, name, torch.nn.Parameter(weight.to_local(), requires_grad=False))
