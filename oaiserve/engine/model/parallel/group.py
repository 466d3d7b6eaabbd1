"""A model that several processes hold together, its *members*: each has a part of all large weights and of the cache.

transformers knows how a model is split, loads each member's part, and has the collectives in its forward. So members
run the same forward with the same batch at the same time, and member 0, the server, finds the whole logits.
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

# Nobody waits for so long: whoever ends is noticed by other means. It only has to be longer than any two members differ
# in loading their parts.
TIMEOUT = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Member:
    """One of `size` processes. `join` meets the others; it is called once the model has proved fit to be split, with
    the member's device, before the weights are loaded."""

    rank: int
    size: int
    join: Callable[[torch.device], None]


def place(device: torch.device, member: Member) -> torch.device:
    """The device of a member, where all are to have one of this kind. Raises StartupError where that cannot be."""
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
    if torch.cuda.is_available():  # transformers would take these
        raise StartupError(
            f"--tensor-parallel {member.size} with --device cpu needs CUDA_VISIBLE_DEVICES= (empty) in the environment."
        )
    return device


def refuse_unless_divisible(config: PreTrainedConfig, size: int, name: str, *, is_gguf: bool = False) -> None:
    """Raises StartupError for a model that transformers cannot split, or not into so many equal parts."""
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
    """The variables that torch.distributed and transformers read while members meet and load."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    ours = {
        # All members are on this machine, and nobody outside has to do with them.
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", loopback),
        "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", loopback),
        # Else a thread of NCCL's would end this process at once when another member is gone.
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
    """Meets the other members, by a file in `folder`, which they need until the end. Waits for all of them."""
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
    sys.excepthook = excepthook  # torch's puts a rank before each line of any traceback


def leave(*, broken: bool) -> None:
    """The others need not do the same. `broken`: one of them is gone, and this process may be waiting for it on the
    device; from now on it is not."""
    if not dist.is_initialized():
        return
    if dist.get_backend() == "nccl":
        # To destroy the group would mean to wait for the others.
        dist.distributed_c10d._abort_process_group()
    elif not broken:  # on a CPU, whoever waits for one that is gone has got an error
        dist.destroy_process_group()


def least(number: int, device: torch.device) -> int:
    """The smallest of the numbers that all members call this with."""
    tensor = torch.tensor([number], device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MIN)
    return int(tensor)


def keep_local(model: PreTrainedModel) -> None:
    """Makes the weights of split linear layers plain tensors. transformers' hooks take either; but with a distributed
    tensor they look for its local part in each call."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            for name, weight in module.named_parameters(recurse=False):
                if isinstance(weight, DTensor):
                    setattr(module, name, torch.nn.Parameter(weight.to_local(), requires_grad=False))
