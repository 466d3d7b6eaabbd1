"""A native call in which an allocation fails raises MemoryError, and is right when it is repeated.

Each allocation of the native code fails once.
"""

import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from oaiserve.engine.executors.native import build
from oaiserve.engine.model.batch import Batch, build_batch
from oaiserve.engine.sequences.step import Chunk, Step
from tests.engine.executors.native.small_models import MOE, config, described_by_files, load, native_of
from tests.engine.model.steps import BLOCK_SIZE, CPU, NUM_BLOCKS, sequence_of

pytestmark = pytest.mark.compiler
T = TypeVar("T")
FailAllocation = Callable[[int], None]
# Two layers that differ in their window, so that each has a plan of its own; with biases.
MODEL = config(
    "qwen2",
    num_hidden_layers=2,
    max_position_embeddings=1024,
    use_sliding_window=True,
    sliding_window=20,
    layer_types=["sliding_attention", "full_attention"],
)
MIXTURE = config("qwen3_moe", **MOE, num_hidden_layers=1, max_position_embeddings=1024)
SIZES = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "num_threads": 2}


@pytest.fixture(scope="module")
def fail_allocation() -> Iterator[FailAllocation]:
    """Use a library that has the function of failing_new.h, and return this function."""
    hook = Path(__file__).with_name("failing_new.h")
    digest = hashlib.sha256(hook.read_bytes()).hexdigest()  # so that a changed hook makes another library
    flags = ["-O1" if flag == "-O3" else flag for flag in build.FLAGS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "FLAGS", [*flags, f"-DHOOK={digest}", "-include", hook.name, "-Wl,-Bsymbolic"])
        patch.setenv("CPLUS_INCLUDE_PATH", str(hook.parent))  # A flag would compile it again in each checkout.
        library = build.load(torch.float32)
        patch.setattr(build, "load", lambda *_, **__: library)
        yield library.fail_allocation


def results_with_failures(
    fail_allocation: FailAllocation, prepare: Callable[[], list[Callable[[], T]]]
) -> Iterator[list[T]]:
    """Prepare some calls and make them while the n-th allocation fails, for each n. Yield their results.

    A call that raises MemoryError is repeated. The last results are those of calls in which nothing failed.
    """
    for n in count(1):
        calls = prepare()
        results = []
        failures = 0
        fail_allocation(n)
        for call in calls:
            try:
                results.append(call())
            except MemoryError:
                failures += 1
                results.append(call())
        fail_allocation(0)
        yield results
        if not failures:
            return
        assert failures == 1


def batch(*lengths: tuple[int, int]) -> Batch:
    """Return a batch of sequences, each given by how many of its tokens were computed before and are computed now."""
    step = Step()
    blocks = iter(range(NUM_BLOCKS))
    for num_before, num_now in lengths:
        ids = [(7 * i + 3) % 97 for i in range(num_before + num_now)]
        own = [next(blocks) for _ in range(-(-len(ids) // BLOCK_SIZE))]
        step.chunks.append(Chunk(sequence_of(ids, own), num_before, num_now))
    return build_batch(step, BLOCK_SIZE, CPU)


BATCHES = [batch((0, 20), (0, 3)), batch((20, 1), (3, 1), (0, 700), (0, 130))]


def test_building_a_decoder_can_be_repeated(fail_allocation: FailAllocation) -> None:
    build_native = partial(native_of, described_by_files(load(MODEL)), **SIZES)
    assert len(list(results_with_failures(fail_allocation, lambda: [build_native]))) > 40


@pytest.mark.parametrize("asked", [MODEL, MIXTURE], ids=["windows", "experts"])
@torch.inference_mode()
def test_a_step_can_be_repeated(asked: PreTrainedConfig, fail_allocation: FailAllocation) -> None:
    described = described_by_files(load(asked))

    def steps() -> list[Callable[[], Tensor]]:
        native = native_of(described, **SIZES)
        return [lambda step=step: native.forward(step).clone() for step in BATCHES]

    expected = [step() for step in steps()]
    actual = list(results_with_failures(fail_allocation, steps))
    assert len(actual) > 30
    for results in actual:
        for logits, wanted in zip(results, expected, strict=True):
            torch.testing.assert_close(logits, wanted, rtol=0, atol=0)
