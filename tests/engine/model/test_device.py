"""A model that does not fit on its device is refused, and what a CPU compiles for it does not fill the memory."""

import subprocess
import sys
from typing import Any

import pytest
import torch

from oaiserve.engine.model.device import move
from oaiserve.errors import StartupError

GIB = 2**30


class TooLarge(torch.nn.Linear):
    dtype = torch.bfloat16

    def to(self, *_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")


def test_weights_that_do_not_fit_stop_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * GIB, 80 * GIB))
    model = TooLarge(2**10, 2**10, bias=False, dtype=torch.bfloat16)
    with pytest.raises(StartupError) as error:
        move(model, torch.device("cuda"), "org/model")
    assert str(error.value) == (
        "The weights of 'org/model' take 0.0 GiB in bfloat16, but 3.0 of 80.0 GiB were free on cuda: end what else "
        "uses this GPU (nvidia-smi lists it), or take a smaller --dtype, quantized weights or another "
        "--device."
    )


def test_a_gpu_without_memory_for_cuda_itself_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: torch.device) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "mem_get_info", refuse)
    with pytest.raises(StartupError, match="--device cuda: CUDA does not start there: CUDA error: out of memory"):
        move(TooLarge(4, 4), torch.device("cuda"), "m")


# Each number of rows is a shape. With the limit these take 80 to 130 MiB, without it 200 and more, where the CPU has
# such code at all.
PROGRAM = """
import torch
from oaiserve.engine.model.device import limit_compiled_shapes

def rss_mib():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20

limit_compiled_shapes()
torch.set_num_threads(1)
weight = torch.zeros(1536, 576, dtype=torch.bfloat16)
with torch.inference_mode():
    before = rss_mib()
    for rows in range(1, 401):
        torch.nn.functional.linear(torch.zeros(rows, 576, dtype=torch.bfloat16), weight)
    print(rss_mib() - before)
"""


def test_many_shapes_of_bfloat16_products_take_limited_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        monkeypatch.delenv(variable, raising=False)
    # Large buffers are given back at once, so that it is the code that is measured, not how glibc's heap is divided.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(2**17))
    gained = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert float(gained.stdout) < 160
