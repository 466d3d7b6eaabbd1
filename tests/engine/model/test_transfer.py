"""Tensors are copied to the host as bytes, and come back as arrays."""

import numpy as np
import torch

from oaiserve.engine.model.transfer import pack, unpack


def test_packed_tensors_come_back_with_their_shapes_and_types() -> None:
    tensors = [torch.tensor([[3, 4]]), torch.tensor([0.5]), torch.tensor([True, False])]

    arrays = unpack(pack(tensors).numpy(), tensors)

    for tensor, array in zip(tensors, arrays, strict=True):
        np.testing.assert_array_equal(array, tensor.numpy(), strict=True)


def test_tensors_without_elements_are_packed_whatever_their_strides() -> None:
    empty = torch.empty(0, dtype=torch.int64).as_strided((0,), (0,))
    ids = torch.tensor([7])

    assert pack([empty, empty]).shape == (0,)
    arrays = unpack(pack([empty, ids]).numpy(), [empty, ids])

    assert [array.tolist() for array in arrays] == [[], [7]]
