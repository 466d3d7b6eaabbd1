"""Blocks are expanded to the numbers that the reference implementation of their formats gives, to the last bit."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from oaiserve.engine.decoder.blocks import EXPANDERS, expand
from tests.models.gguf_files import random_blocks


@pytest.mark.parametrize("kind", EXPANDERS)
def test_each_format_is_expanded_as_its_reference_does(kind: int) -> None:
    data = random_blocks(np.random.default_rng(kind), Kind(kind), 5, 768)
    assert torch.equal(expand(data, kind), torch.from_numpy(gguf.dequantize(data, Kind(kind))))
