"""The GPUs that torch finds here."""

from __future__ import annotations

import torch


def gpu_names() -> list[str]:
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
