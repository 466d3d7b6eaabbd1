"""Weights are packed into memory that was reserved for them, and what they leave of it is given back."""

import ctypes
import mmap
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from oaiserve.engine.decoder.blocks import FORMATS
from oaiserve.engine.decoder.description import Decoder
from oaiserve.engine.executors.native import reserved
from oaiserve.engine.executors.native.library import Library
from oaiserve.engine.executors.native.native import NativeDecoder
from oaiserve.engine.executors.native.reserved import ReservedMemory, packed_bytes, reserve
from oaiserve.engine.model.batch import build_batch
from oaiserve.engine.model.rehearsal import prompt
from oaiserve.runtime import ENDED
from tests.engine.doubles import new_world
from tests.engine.executors.native.small_models import BLOCK_SIZE, FAMILIES, load
from tests.models.described import SmallModel
from tests.models.gguf_files import random_blocks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is reserved on Linux only: run it there")
OUR_KINDS = 1000  # kinds from here on are of no file
SIZES = {"num_blocks": 4, "block_size": BLOCK_SIZE, "num_threads": 1}


@pytest.fixture(scope="module")
def llama() -> tuple[SmallModel, Decoder]:
    loaded = load(FAMILIES["llama"])
    return loaded, loaded.decoder


def resident_bytes(memory: ReservedMemory) -> int:
    """Return how much of the memory the system has given."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        begin, dash, end = line.split(" ")[0].partition("-")
        if dash and int(begin, 16) <= memory.address < int(end, 16):
            return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Rss:"))
    return 0


@pytest.mark.compiler
@pytest.mark.parametrize("num_bytes", [2**17, 2**22], ids=["too little", "too much"])
def test_a_decoder_in_reserved_memory_computes_the_same_and_keeps_what_it_needs(
    llama: tuple[SmallModel, Decoder], num_bytes: int
) -> None:
    loaded, decoder = llama
    step = prompt(9, loaded.vocab_size, BLOCK_SIZE)
    batch = build_batch(step, BLOCK_SIZE, loaded.device)
    expected = NativeDecoder(Library(loaded.dtype), decoder, **SIZES).forward(batch)
    kept = []

    class Memory(ReservedMemory):
        """Memory that says how much of it is kept."""

        def keep(self, num_bytes: int) -> None:
            kept.append(num_bytes)
            super().keep(num_bytes)

    memory = Memory(2**22, new_world())
    memory.num_bytes = num_bytes
    native = NativeDecoder(Library(loaded.dtype), decoder, **SIZES, reserved=memory)
    assert torch.equal(native.forward(batch), expected)
    (used,) = kept
    assert 2**16 < used <= num_bytes
    if num_bytes == 2**22:
        assert resident_bytes(memory) == -(-used // mmap.PAGESIZE) * mmap.PAGESIZE


@pytest.mark.compiler
def test_memory_is_not_taken_any_more_when_weights_are_written(
    monkeypatch: pytest.MonkeyPatch, llama: tuple[SmallModel, Decoder]
) -> None:
    def take_late(memory: ReservedMemory) -> int:
        ctypes.memset(memory.address, 255, memory.num_bytes)
        return ENDED

    monkeypatch.setattr(ReservedMemory, "_take", take_late)
    world = new_world()
    loaded, decoder = llama
    native = NativeDecoder(Library(loaded.dtype), decoder, **SIZES, reserved=ReservedMemory(2**22, world))
    world.settle()
    batch = build_batch(prompt(9, loaded.vocab_size, BLOCK_SIZE), BLOCK_SIZE, loaded.device)
    assert torch.isfinite(native.forward(batch)).all()


@pytest.mark.compiler
@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind < OUR_KINDS], ids=lambda kind: Kind(kind).name)
def test_packed_weights_of_a_file_fit_into_what_is_reserved_for_its_size(kind: int) -> None:
    n = 64
    k = 4096
    library = Library(torch.float32)
    blocks = random_blocks(np.random.default_rng(0), Kind(kind), n, k)
    rows = np.array([row.ctypes.data for row in blocks], np.uintp)
    kinds = np.full(n // 32, kind, np.int32)
    memory = ReservedMemory(2 * blocks.nbytes, new_world())
    decoder = library.decoder()
    library.lend_memory(decoder, memory.address, memory.num_bytes)
    library.add_blocks(decoder, rows.ctypes.data, None, kinds.ctypes.data, n, k, None)
    used = library.lent_bytes(decoder)
    library.free_decoder(decoder)
    assert blocks.nbytes < used <= packed_bytes(blocks.nbytes)


def test_what_is_reserved_is_taken_and_what_is_not_wanted_is_given_back() -> None:
    world = new_world()
    memory = reserve(2**23, world)
    world.settle()
    assert resident_bytes(memory) == memory.num_bytes == 2**23
    memory.keep(0)
    assert resident_bytes(memory) == 0


def test_more_than_half_of_what_is_there_is_not_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reserved, "available_bytes", lambda: 2**24 - 1)
    assert reserve(2**23, new_world()) is None
