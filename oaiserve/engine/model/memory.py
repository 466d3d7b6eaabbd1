"""How many blocks the KV cache gets."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from oaiserve.config import Bytes, EngineOptions
from oaiserve.engine.model.load import LoadedModel
from oaiserve.errors import StartupError

CUDA_SHARE = 0.8  # of the memory that is free once the weights are loaded; the rest is for activations
CPU_SHARE = 0.25
# On a CPU, others need memory, too. More than so many tokens would only be there for the prefix cache: it computes too
# slowly to have more in use.
CPU_TOKENS = 65_536
CPU_LONGEST_REQUESTS = 8


def kv_blocks(loaded: LoadedModel, options: EngineOptions, max_model_len: int) -> int:
    """The number asked for; or what fits the memory asked for, or a share of the free memory, but not more than all
    running sequences can use. Raises StartupError for more than there is, and where not even one block fits."""
    block_bytes = loaded.kv_bytes_per_token * options.block_size
    free = _free_bytes(loaded.device)
    if options.kv_blocks is not None:
        num_blocks = options.kv_blocks
        asked = f"--kv-blocks is {num_blocks}, which take {Bytes(num_blocks * block_bytes)}"
    elif options.kv_cache_memory is not None:
        num_blocks = options.kv_cache_memory // block_bytes
        asked = f"--kv-cache-memory is {options.kv_cache_memory}"
        if num_blocks == 0:
            raise StartupError(f"{asked}, but one block of the KV cache takes {block_bytes} bytes.")
    else:
        most = options.max_running * -(-max_model_len // options.block_size)
        if loaded.device.type == "cpu":
            most = min(most, max(CPU_TOKENS, CPU_LONGEST_REQUESTS * max_model_len) // options.block_size)
        share = CUDA_SHARE if loaded.device.type == "cuda" else CPU_SHARE
        return max(1, min(most, int(free * share) // block_bytes))
    if num_blocks * block_bytes > free:
        raise StartupError(f"{asked}, but only {free / 2**30:.1f} GiB are free on {loaded.device}.")
    return num_blocks


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return _available_bytes()


def _available_bytes() -> int:
    """Memory that can be had without swapping; where the system does not tell, all there is."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
