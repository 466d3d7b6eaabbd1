"""A model that runs out of memory keeps nothing of the step, and copies all blocks or none.

The tests of the engine cover what the engine does then, with a double of the device.
"""

from unittest.mock import Mock

import pytest
import torch

from oaiserve.engine.model.kv_cache import copy_blocks
from oaiserve.engine.sequences.step import Chunk, OutOfMemory, Step
from tests.engine.model.operations import Operations
from tests.engine.model.runners import eager_runner, reference_of
from tests.engine.model.steps import sequence_of
from tests.models.described import SmallModel


def test_the_exception_of_the_runner_keeps_no_tensors_in_memory(loaded: SmallModel) -> None:
    executor = reference_of(loaded, num_blocks=4, block_size=4)
    executor.forward = Mock(side_effect=torch.OutOfMemoryError("2 GiB were asked for"))
    runner = eager_runner(loaded, num_blocks=4, block_size=4, executor=executor)
    step = Step([Chunk(sequence_of([1, 2, 3], [1]), 0, 3)])
    with pytest.raises(OutOfMemory, match="2 GiB were asked for") as error:
        runner.launch(step)
    assert error.value.__context__ is None, "the traceback of a context would keep the tensors of the step"


def test_all_memory_is_allocated_before_the_first_block_is_copied() -> None:
    torch.manual_seed(0)
    caches = [(torch.rand(6, 4, 2, 3), torch.rand(6, 4, 2, 5)) for _ in range(2)]
    before = [blocks.clone() for cache in caches for blocks in cache]
    copies = [(1, 4), (2, 1), (1, 5)]
    with Operations() as operations:
        copy_blocks(caches, copies)
    for blocks, old in zip((blocks for cache in caches for blocks in cache), before, strict=True):
        expected = old.clone()
        for source, target in copies:
            expected[target] = old[source]
        assert torch.equal(blocks, expected)
    names = operations.overloads
    assert names.count("index_copy_.default") == 4
    after_first_copy = set(names[names.index("index_copy_.default") :])
    assert after_first_copy == {
        "index_copy_.default",
        "index_select.out",
        "select.int",
        "slice.Tensor",
        "view.default",
    }, "none of these allocates"
