"""The tolerance for a difference is wider than rounding."""

import pytest
import torch

from oaiserve.engine.start.compare import difference, tolerance


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 1.002), (torch.bfloat16, 1.2), (torch.float16, 1.2)])
def test_logits_that_differ_by_more_than_rounding_are_beyond_the_tolerance(dtype: torch.dtype, factor: float) -> None:
    logits = torch.linspace(-3, 3, 100)
    assert difference(logits * factor, logits) > tolerance(dtype)
    assert difference(logits.to(dtype), logits) < tolerance(dtype) / 10
    assert not difference(logits * torch.nan, logits) <= tolerance(dtype)
