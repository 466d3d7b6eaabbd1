"""Names the GPUs that torch finds here. Imports torch late, for a process that may need none."""

from __future__ import annotations


def gpu_names() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
