"""Selects the device and the dtype of a model, and moves the model there."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from oaiserve.errors import StartupError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# oneDNN compiles code for each shape of a bfloat16 product, nearly 1 MiB each, and caches the 1,024 shapes that were
# used last. torch also caches as many. A step of a new size has about five new shapes.
_CODE_LIMITS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
_MOST_SHAPES = 128


def select_device(name: str) -> torch.device:
    """Return the torch device of this name. Raises StartupError for CUDA without a GPU.

    `auto` is CUDA if torch sees a GPU.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise StartupError("--device cuda: torch sees no CUDA device here; use --device cpu, or install a CUDA build.")
    if name == "cuda":  # For each new length, planning cuDNN's attention takes longer than a step.
        torch.backends.cuda.enable_cudnn_sdp(enabled=False)
    return torch.device(name)


def suitable_dtype(stored: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype in which a device computes weights that are stored in another one."""
    if device.type == "cpu":
        # CPUs are slow in float16, and bfloat16 would be less precise.
        return torch.float32 if stored == torch.float16 else stored
    has_bfloat16 = device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)
    if stored == torch.float16 or not has_bfloat16:
        return torch.float16
    return torch.bfloat16  # In float32, tensor cores are idle, and the KV cache takes twice the memory.


def move(model: PreTrainedModel, device: torch.device, name: str) -> None:
    """Move the model to the device. Raises StartupError if the device has no room for the weights."""
    if device.type == "cpu":
        model.to(device)  # type: ignore[arg-type]
        return
    needed = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    try:
        free, total = torch.cuda.mem_get_info(device)
        model.to(device)  # type: ignore[arg-type]
    except torch.OutOfMemoryError as error:
        raise StartupError(
            f"The weights of '{name}' take {needed / 2**30:.1f} GiB in {str(model.dtype).removeprefix('torch.')}, but "
            f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB were free on {device}: end what else uses this GPU "
            "(nvidia-smi lists it), or take a smaller --dtype, quantized weights or another --device."
        ) from error
    except RuntimeError as error:  # For example, CUDA itself may have no memory because of other programs.
        text = " ".join(str(error).split()) or type(error).__name__
        text = text if len(text) <= 300 else text[:300] + "…"
        raise StartupError(f"--device {device}: CUDA does not start there: {text}") from error


def limit_compiled_shapes() -> None:
    """Limit the code that torch and oneDNN cache, unless the user sets limits. Both read them at first use."""
    for variable in _CODE_LIMITS:
        os.environ.setdefault(variable, str(_MOST_SHAPES))
