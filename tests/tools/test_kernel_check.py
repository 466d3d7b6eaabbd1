"""The check of the Triton kernels runs in Triton's interpreter, each kind of comparison and of measurement once."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no wheels for this system")

from tools.gpu import kernel_check
from tools.gpu.kernel_check import AttentionShape, Case

# Rows without numbers are computed like the others, and then marked.
pytestmark = [pytest.mark.kernels, pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")]
CPU = torch.device("cpu")
SHAPE = AttentionShape(4, 2, 16, 16)


def test_kernels_equal_the_reference() -> None:
    torch.manual_seed(0)
    assert kernel_check.check_attention(Case(SHAPE, [(9, 1), (0, 5), (17, 3)]), CPU)["equal"]
    assert kernel_check.check_captured(SHAPE, CPU)["equal"]
    assert kernel_check.check_sampling(0.5, CPU, quick=True)["equal"]
    assert kernel_check.check_masks(100, CPU)["equal"]
