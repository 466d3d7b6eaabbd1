"""How many blocks the KV cache gets."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.model.load import LoadedModel
from oaiserve.errors import StartupError

CUDA_SHARE = 0.8  # of the memory that is free once the weights are loaded; the rest is for activations
CPU_SHARE = 0.25
CPU_MOST_BYTES = 4 * 2**30


def kv_blocks(loaded: LoadedModel, options: EngineOptions, max_model_len: int) -> int:
    """The number asked for; or what fits the memory asked for, or a share of the free memory, but not more than all
    running sequences can use. Raises StartupError where not even one block fits."""
    if options.kv_blocks is not None:
        return options.kv_blocks
    block_bytes = loaded.kv_bytes_per_token * options.block_size
    memory = options.kv_cache_memory
    if memory is None:
        most = options.max_running * -(-max_model_len // options.block_size)
        return max(1, min(most, _default_bytes(loaded.device) // block_bytes))
    if memory < block_bytes:
        raise StartupError(f"--kv-cache-memory is {memory}, but one block of the KV cache takes {block_bytes} bytes.")
    return memory // block_bytes


def _default_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * CUDA_SHARE)
    return min(int(_available_bytes() * CPU_SHARE), CPU_MOST_BYTES)


def _available_bytes() -> int:
    """Memory that can be had without swapping; where the system does not tell, all there is."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
