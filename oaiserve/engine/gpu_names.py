"""Names the GPUs that torch finds on this machine. Imports torch late, because some processes never need it."""

from __future__ import annotations


def gpu_names() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
