"""The check of a model's logits when it starts."""

import math
from unittest.mock import Mock

import pytest
import torch

from oaiserve.engine.decoder.description import NotKnown
from oaiserve.engine.decoder.spec import ModelSpec
from oaiserve.engine.start.check import refuse_unless_finite

SPEC = ModelSpec(
    name="model",
    device=torch.device("cpu"),
    dtype=torch.float32,
    vocab_size=97,
    max_model_len=128,
    eos_token_ids=frozenset(),
    kv_shapes={},
)


@pytest.mark.parametrize("logit", [math.nan, -math.inf, 1e38])
def test_logits_that_are_or_become_no_numbers_are_refused(logit: float) -> None:
    executor = Mock()
    executor.forward.return_value = torch.tensor([[1.0, 1e6]])
    refuse_unless_finite(executor, SPEC, 16)
    executor.forward.return_value = torch.tensor([[1.0, logit]])
    with pytest.raises(NotKnown, match="no finite numbers"):
        refuse_unless_finite(executor, SPEC, 16)
