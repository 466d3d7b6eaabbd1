"""Decides whether a model can be split over several processes, called its *members*, and on which device each one is.

Each member holds a part of every large weight and of the KV cache. transformers defines how a model is split, loads
each member's part, and calls the collectives in its forward. So members run the same forward with the same batch at the
same time, and member 0, the server, gets the whole logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from oaiserve.errors import StartupError

# Families that transformers splits in a way in which no member can compute its part.
_NOT_SPLIT = {
    "doge": "transformers' plan for models of type 'doge' gives a part the keys of its own heads, and the masks of all",
    "gpt_oss": "transformers can only share out whole experts of models of type 'gpt_oss', not split each of them",
}


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
    if (reason := _NOT_SPLIT.get(config.model_type)) is not None:
        raise StartupError(
            f"'{name}' cannot be served with --tensor-parallel {size}: {reason}. Leave --tensor-parallel out, to serve "
            "it on one device."
        )
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
    if (of_experts := getattr(config, "moe_intermediate_size", None)) is not None:
        sizes["values between the layers of an expert"] = of_experts
    for what, number in sizes.items():
        if number % size:
            most = math.gcd(*sizes.values())
            allowed = ", ".join(str(n) for n in range(1, most + 1) if most % n == 0)
            raise StartupError(
                f"--tensor-parallel is {size}, but '{name}' has {number} {what}, which are to be split evenly. "
                f"Possible with this model: {allowed}."
            )
