"""Cuts the work of a tower into pieces: between two, the engine thread continues with steps of other requests.

The tower's code runs in a separate thread, in turns with the engine thread: one of them always waits for the other.
Matrix products and attention are cut by rows, and each part begins with a pause.

A greenlet of the engine thread could pause just as well, but it would crash: when torch's C++ code creates an error, it
walks up the C stack, and where a greenlet's own frames end, the stack holds whatever the thread has put there since.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from threading import Thread, current_thread
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import conv1d, pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

ATTENTION = "oaiserve_tower"
# Multiplications and additions of a piece: some 10 ms on two cores, and less than a millisecond on a GPU.
ON_CPU = 5e8
ON_GPU = 1e11
T = TypeVar("T")


class _Dropped(BaseException):
    """Ends the code of a worker whose result nobody waits for."""


class _Result(NamedTuple, Generic[T]):
    value: T


class _Worker(Thread, Generic[T]):
    """A thread that runs code up to its next pause each time that it is resumed."""

    def __init__(self, code: Callable[[], T], size: float, num_threads: int | None) -> None:
        super().__init__(name="tower", daemon=True)
        self.size = size
        self._code = code
        self._num_threads = num_threads
        self._turns: SimpleQueue[bool] = SimpleQueue()  # False: the code is dropped
        self._pieces: SimpleQueue[_Result[T] | BaseException | None] = SimpleQueue()  # None: a pause

    def next_piece(self) -> _Result[T] | None:
        """Run the code up to its next pause, or to its end. Return its result, or raise its error."""
        if self.ident is None:
            num_threads = torch.get_num_threads()
            self.start()
            piece = self._pieces.get()
            # torch gives the number that was set last to each thread that computes for the first time.
            torch.set_num_threads(num_threads)
        else:
            self._turns.put(True)
            piece = self._pieces.get()
        if isinstance(piece, BaseException):
            try:
                raise piece
            finally:
                del piece  # The error refers to this frame, whose reference would keep both, and the code's tensors.
        return piece

    def end(self) -> None:
        """Wait for the thread's end. Code that is paused is dropped, with its tensors."""
        if self.ident is not None and not sys.is_finalizing():  # Daemon threads don't run while Python exits.
            self._turns.put(False)
            self.join()

    def pause(self) -> None:
        """Wait to be resumed. Called by the code."""
        self._pieces.put(None)
        if not self._turns.get():
            raise _Dropped

    def run(self) -> None:
        try:
            torch.get_num_threads()  # The first call in a thread would set the number again.
            if self._num_threads is not None:
                torch.set_num_threads(self._num_threads)
            with torch.inference_mode():
                result = self._code()
        except _Dropped:
            pass
        except BaseException as error:
            self._pieces.put(error)
        else:
            self._pieces.put(_Result(result))


def in_pieces(code: Callable[[], T], size: float, num_threads: int | None) -> Iterator[T | None]:
    """Run a tower's code in pieces. Yield None after each piece, and the result after the last one.

    A piece has about `size` multiplications. It uses `num_threads` of torch's threads, or torch's default if None.
    """
    worker = _Worker(code, size, num_threads)
    try:
        while (result := worker.next_piece()) is None:
            yield None
    finally:
        worker.end()
    yield result.value


def _parts(num_rows: int, cost_of_row: float) -> Iterator[slice]:
    """Yield the rows of each part, with a pause before it. Outside a worker, all are one part."""
    worker = current_thread()
    if not isinstance(worker, _Worker):
        yield slice(0, num_rows)
        return
    length = max(1, int(worker.size / cost_of_row))
    for start in range(0, num_rows, length):
        worker.pause()
        yield slice(start, start + length)


def cut_products(model: torch.nn.Module) -> None:
    """Let the linear layers of a model compute their rows in parts, and convolutions of sound their time steps."""
    for module in model.modules():
        if type(module) is torch.nn.Conv1d and module.groups == 1 and module.dilation == (1,):
            module.forward = _cut_in_time(module)  # type: ignore[assignment]
        if type(module) is torch.nn.Linear:
            module.forward = _cut(module.forward, module.in_features * module.out_features)  # type: ignore[assignment]


def _cut(plain: Callable[[Tensor], Tensor], cost_of_row: int) -> Callable[[Tensor], Tensor]:
    def forward(input: Tensor) -> Tensor:
        rows = input.reshape(-1, input.shape[-1])
        outputs = [plain(rows[part]) for part in _parts(len(rows), cost_of_row)]
        return (torch.cat(outputs) if len(outputs) > 1 else outputs[0]).view(*input.shape[:-1], -1)

    return forward


def _cut_in_time(conv: torch.nn.Conv1d) -> Callable[[Tensor], Tensor]:
    (width,) = conv.kernel_size
    (stride,) = conv.stride
    plain = conv.forward
    if conv.padding_mode != "zeros" or isinstance(conv.padding, str):
        return plain
    (around,) = conv.padding

    def forward(input: Tensor) -> Tensor:  # [B, channels, T]
        padded = pad(input, (around, around))
        num_steps = (padded.shape[-1] - width) // stride + 1
        outputs = [
            conv1d(padded[..., part.start * stride : (part.stop - 1) * stride + width], conv.weight, conv.bias, stride)
            for part in _parts(num_steps, len(input) * conv.in_channels * conv.out_channels * width)
        ]
        return torch.cat(outputs, -1)

    return forward


def _attend(
    module: torch.nn.Module,
    query: Tensor,  # [B, heads, Q, dim]
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # [B or 1, heads or 1, Q, K]
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute attention in both directions, with the signature of transformers' attention functions."""
    batch, heads, num_queries, dim = query.shape
    out = torch.empty(batch, num_queries, heads, value.shape[-1], dtype=query.dtype, device=query.device)
    for one in range(batch):
        if attention_mask is None:
            mask = None
        else:
            mask = attention_mask[one if len(attention_mask) > 1 else 0][None]
        for part in _parts(num_queries, 2.0 * heads * key.shape[2] * dim):
            if mask is None:
                of_part = None
            elif mask.shape[2] > 1:
                of_part = mask[:, :, part]
            else:
                of_part = mask
            attended = scaled_dot_product_attention(
                query[one : one + 1, :, part], key[one : one + 1], value[one : one + 1], of_part, scale=scaling
            )
            out[one, part] = attended[0].transpose(0, 1)
    return out, None


AttentionInterface.register(ATTENTION, _attend)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
