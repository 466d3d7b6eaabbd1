"""Torch's largest library is loaded before torch is imported."""

import subprocess
import sys

import pytest
import torch

from oaiserve.engine.start.torch_library import load_library

LOAD = """
import sys
from oaiserve.engine.start.torch_library import load_library
thread = load_library()
thread.join()
print("libtorch_cpu.so" in open("/proc/self/maps").read(), "torch" in sys.modules)
import torch
print(torch.ones(2).sum().item())
"""


@pytest.mark.skipif(sys.platform != "linux" or torch.backends.cuda.is_built(), reason="only for CPUs, on Linux")
def test_the_library_is_loaded_before_torch_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", LOAD], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.split() == ["True", "False", "2.0"]


def test_no_library_is_loaded_once_torch_is_imported() -> None:
    assert load_library() is None
