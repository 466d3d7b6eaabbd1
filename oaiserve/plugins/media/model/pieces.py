"""Cuts the work of a tower into pieces: between two, the engine thread goes on with steps of other requests.

The tower's code runs in a greenlet of the engine thread. Its matrix products and its attention are cut by rows, and
each part begins with a pause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor
from torch.nn.functional import conv1d, pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

ATTENTION = "oaiserve_tower"
# Multiplications and additions of a piece: some 10 ms on two cores, and less than a millisecond on a GPU.
ON_CPU = 5e8
ON_GPU = 1e11
T = TypeVar("T")


class _Worker(greenlet):  # type: ignore[misc]
    """A greenlet whose code pauses between its pieces, and the size of these."""

    size = ON_CPU


def in_pieces(run: Callable[[], T], size: float, num_threads: int | None) -> Iterator[T | None]:
    """Run a tower's code in pieces. Yield None after each piece, and the result after the last one.

    A piece has about `size` multiplications. It uses `num_threads` of torch's threads, or the current number if None.
    """
    worker = _Worker(run)
    worker.size = size
    try:
        while not worker.dead:
            result = _piece(worker, num_threads)
            yield result if worker.dead else None
    finally:
        if not worker.dead:  # its work is dropped: the code's own frames would keep it, and all of their tensors
            worker.throw()


def _piece(worker: _Worker, num_threads: int | None) -> Any:
    """Run a worker up to its next pause, or to its end, and return its result."""
    before = torch.get_num_threads()
    try:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        with torch.inference_mode():  # This mode belongs to the thread: it must end with the piece.
            return worker.switch()
    finally:
        if num_threads is not None:
            torch.set_num_threads(before)


def _parts(num_rows: int, cost_of_row: float) -> Iterator[slice]:
    """Yield the rows of each part, with a pause before it. Outside a worker, all are one part."""
    worker = getcurrent()
    if not isinstance(worker, _Worker) or worker.parent is None:
        yield slice(0, num_rows)
        return
    length = max(1, int(worker.size / cost_of_row))
    for start in range(0, num_rows, length):
        worker.parent.switch()
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
