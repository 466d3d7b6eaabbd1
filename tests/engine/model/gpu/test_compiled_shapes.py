"""Code that is compiled for shapes of bfloat16 products on a CPU does not fill the memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Each number of rows is a shape. With the limit these take 80 to 130 MiB, without it 200 and more, where the CPU has
# such code at all.
PROGRAM = """
import torch
from oaiserve.engine.model.load import limit_compiled_shapes

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
    gained = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=120)
    assert float(gained.stdout) < 160
