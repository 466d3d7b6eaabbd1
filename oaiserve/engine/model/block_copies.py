"""Copies KV blocks between a device and pinned host memory, on separate CUDA streams.

Blocks are gathered from all layers into a buffer on the device, so that the host starts few copies. Steps wait only
until the blocks are gathered; the copy from the buffer to the host runs while the device computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from oaiserve.engine.model.transfer import on_device

PIECE_BYTES = 32 << 20  # the size of each of the two buffers on the device


class Stream(Protocol):
    """Work that a device does in order."""

    def run(self, work: Callable[[], None]) -> None:
        """Start the work that `work` launches."""

    def mark(self) -> Any:
        """Return a marker after all work so far."""

    def wait(self, moment: Any) -> None:
        """Make all later work wait for a marker of another stream."""


class Streams(NamedTuple):
    steps: Stream
    out: Stream
    back: Stream


class BlockCopies:
    """Copies the blocks of a KV cache between its tensors and slots in `num_bytes` of host memory."""

    def __init__(self, tensors: list[Tensor], num_bytes: int, streams: Streams | None = None) -> None:
        """Reserve the host memory, and pin it for a GPU. The first dimension of the tensors is the block."""
        self._device = tensors[0].device
        rows = [tensor.view(torch.uint8).view(len(tensor), -1) for tensor in tensors]
        if all(one.shape[1] % 8 == 0 for one in rows):
            rows = [one.view(torch.int64) for one in rows]  # A device copies longer numbers in fewer instructions.
        self._rows = rows
        widths = [one.shape[1] for one in rows]
        width = sum(widths)
        self._places = [slice(sum(widths[:i]), sum(widths[: i + 1])) for i in range(len(widths))]
        self.block_bytes = width * rows[0].itemsize
        self.num_slots = num_bytes // self.block_bytes
        self._host = torch.empty((self.num_slots, width), dtype=rows[0].dtype, device="cpu")
        if self._device.type == "cuda":
            _pin(self._host)
        self._piece = max(1, PIECE_BYTES // self.block_bytes)
        size = (self._piece, width)
        self._leaving, self._coming = (torch.empty(size, dtype=rows[0].dtype, device=self._device) for _ in range(2))
        self._streams = streams or streams_of(self._device)

    def launched(self) -> Any:
        return self._streams.steps.mark()

    @torch.inference_mode()
    def save(self, pairs: list[tuple[int, int]], after: Any) -> None:
        out = self._streams.out
        out.wait(after)
        gathered = after
        for blocks, slots in self._pieces(pairs):
            out.run(partial(self._gather, blocks))
            gathered = out.mark()
            out.run(partial(self._store, slots))
        self._streams.steps.wait(gathered)

    @torch.inference_mode()
    def restore(self, pairs: list[tuple[int, int]], after: Any) -> Any:
        back = self._streams.back
        back.wait(after)
        back.wait(self._streams.out.mark())
        for slots, blocks in self._pieces(pairs):
            back.run(partial(self._load, slots))
            back.run(partial(self._scatter, blocks))
        return back.mark()

    def _pieces(self, pairs: list[tuple[int, int]]) -> Iterator[tuple[list[int], list[int]]]:
        for start in range(0, len(pairs), self._piece):
            some = pairs[start : start + self._piece]
            yield [one for one, _ in some], [other for _, other in some]

    def _gather(self, blocks: list[int]) -> None:
        index = on_device(blocks, self._device)
        for rows, place in zip(self._rows, self._places, strict=True):
            torch.index_select(rows, 0, index, out=self._leaving[: len(blocks), place])

    def _store(self, slots: list[int]) -> None:
        for number, slot in enumerate(slots):
            self._host[slot].copy_(self._leaving[number], non_blocking=True)

    def _load(self, slots: list[int]) -> None:
        for number, slot in enumerate(slots):
            self._coming[number].copy_(self._host[slot], non_blocking=True)

    def _scatter(self, blocks: list[int]) -> None:
        index = on_device(blocks, self._device)
        for rows, place in zip(self._rows, self._places, strict=True):
            rows.index_copy_(0, index, self._coming[: len(blocks), place])


class CudaStream:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)  # A thread that waits for a blocking event sleeps.
        event.record(self._stream)
        return event

    def wait(self, moment: torch.cuda.Event) -> None:
        self._stream.wait_event(moment)


class Inline:
    """A stream without a device: all work is done when `run` returns. It is its own marker."""

    def run(self, work: Callable[[], None]) -> None:
        work()

    def mark(self) -> Inline:
        return self

    def wait(self, moment: Inline) -> None: ...

    def synchronize(self) -> None: ...


def streams_of(device: torch.device) -> Streams:
    if device.type != "cuda":
        return Streams(Inline(), Inline(), Inline())
    steps = torch.cuda.default_stream(device)
    return Streams(*map(CudaStream, (steps, torch.cuda.Stream(device), torch.cuda.Stream(device))))


def _pin(memory: Tensor) -> None:
    """Pin memory that is already allocated.

    torch's pinned memory would take up to twice as much. Raises RuntimeError if the system refuses.
    """
    status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(status):
        raise RuntimeError(f"cudaHostRegister returned {status}")
