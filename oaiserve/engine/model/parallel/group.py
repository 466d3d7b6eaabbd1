"""The group of the processes of a tensor-parallel model, its *members*: joining, leaving, and their agreements.

Each member holds a shard of every large weight and of the KV cache. transformers defines the shards of a model, loads
each member's, and calls the collectives in its forward. So members run the same forward with the same batch at the same
time, and member 0, the server, gets the whole logits.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import Thread

import torch
import torch.distributed as dist

from oaiserve.errors import StartupError

# This timeout is not how the end of a member is noticed. It only has to be longer than the difference between the times
# that two members take to load their shards.
TIMEOUT = timedelta(hours=1)
LEAVE_SECONDS = 5.0  # for which an abort of NCCL's group is waited for


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


class _Host:
    """The group of the hosts of members on GPUs, for their own messages. It ends with the others."""

    group: dist.ProcessGroup | None = None  # None: the one group that there is on a CPU


@contextmanager
def environment(rank: int) -> Iterator[None]:
    """Set the environment variables of torch.distributed and transformers during a join and a load."""
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
    """Join the group of all members, which meet by a file in `folder` that exists until they leave. Blocks."""
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.set_device(device)
        # NCCL reads this in the first capture. By default, it would exchange addresses there with the other members,
        # which one whose capture fails would leave waiting.
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
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
    if on_cuda:
        _Host.group = dist.new_group(backend="gloo", timeout=TIMEOUT)
    sys.excepthook = excepthook  # torch's would put the rank before each line of a traceback


def leave(*, broken: bool) -> None:
    """Leave the group; the other members need not do the same.

    `broken` means that another member is gone. This process may be waiting for it on the device, and stops waiting.
    """
    if not dist.is_initialized():
        return
    _Host.group = None
    if dist.get_backend() == "nccl":
        # Destroying the group would wait for the other members. Even an abort waits until all graphs with collectives
        # in them are gone, and until the device has come to its end.
        aborting = Thread(target=dist.distributed_c10d._abort_process_group, name="abort-group", daemon=True)
        aborting.start()
        aborting.join(LEAVE_SECONDS)
    elif not broken:  # on a CPU, a member that waits for one that is gone gets an error
        dist.destroy_process_group()


def all_agree(yes: bool) -> bool:
    """Return whether all members say yes. Blocks until all have called it; no device is waited for."""
    tensor = torch.tensor([int(yes)])
    dist.all_reduce(tensor, dist.ReduceOp.MIN, group=_Host.group)
    return bool(tensor)


def all_reduce_min(number: int, device: torch.device) -> int:
    """Return the smallest of the members' numbers. Blocks until all members have called it."""
    tensor = torch.tensor([number], device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MIN)
    return int(tensor)
