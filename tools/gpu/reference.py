"""Measures what any engine needs for a step, by torch's own kernels, in the process and at the clock of our steps.

These are the matrix products of a step alone, in a CUDA graph; attention over keys that lie one after the other; and a
copy that moves as many bytes as a decode step reads.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, scaled_dot_product_attention

from oaiserve.engine.decoder.description import MLP, Decoder
from oaiserve.engine.model.padded_head import aligned
from tools.gpu.timing import graph_of, median_seconds

# The weights of four layers already exceed the L2 cache several times, so further layers may reuse them.
DISTINCT_LAYERS = 4
COPIED_BYTES = 1 << 30  # at a time
MOST_IN_GRAPH = 256  # rows; more keep the device busy for longer than the host launches
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
ON_HOST = {"math": SDPBackend.MATH}


def matrix_shapes(decoder: Decoder) -> list[list[tuple[int, int]]]:
    """Return rows and columns of the matrices of each layer as executors join them, and then those of the head."""
    shapes = []
    for layer in decoder.layers:
        attention = layer.attention
        assert attention is not None
        assert isinstance(attention.qkv, list)
        assert isinstance(layer.mlp, MLP)
        inputs = [layer.mlp.up] if layer.mlp.gate is None else [layer.mlp.gate, layer.mlp.up]
        joined = [attention.qkv, [attention.out], inputs, [layer.mlp.down]]
        shapes.append([(sum(len(one.weight) for one in of_one), of_one[0].weight.shape[1]) for of_one in joined])
    rows, columns = decoder.head.weight.shape
    return [*shapes, [(aligned(rows), columns)]]


class Products:
    """The products of a step alone, with the shapes of a model."""

    def __init__(self, shapes: Sequence[Sequence[tuple[int, int]]], dtype: torch.dtype, device: torch.device) -> None:
        self._device = device
        *layers, head = shapes
        distinct = [self._random(layer, dtype) for layer in layers[:DISTINCT_LAYERS]]
        of_layers = itertools.islice(itertools.cycle(distinct), len(layers))
        self._of_layers: list[Tensor] = [weight for layer in of_layers for weight in layer]
        (self._head,) = self._random(head, dtype)

    def _random(self, shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> list[Tensor]:
        return [torch.empty(shape, dtype=dtype, device=self._device).normal_(std=0.02) for shape in shapes]

    @torch.inference_mode()
    def seconds(self, rows: int, logits: int) -> float:
        """Return the time of all products for this number of tokens, of which `logits` have logits."""
        widths = {weight.shape[1] for weight in (*self._of_layers, self._head)}
        dtype = self._head.dtype
        inputs = {width: torch.empty(rows, width, dtype=dtype, device=self._device).normal_() for width in widths}

        def multiply() -> None:
            for weight in self._of_layers:
                linear(inputs[weight.shape[1]], weight)
            linear(inputs[self._head.shape[1]][:logits], self._head)

        is_small = rows <= MOST_IN_GRAPH
        return median_seconds(graph_of(multiply, self._device) if is_small else multiply, self._device)


@torch.inference_mode()
def copy_seconds(num_bytes: float, device: torch.device, at_once: int = COPIED_BYTES) -> float:
    """Return the time of copies that read and write this number of bytes together."""
    source = torch.empty(at_once // 2, dtype=torch.uint8, device=device).random_(0, 256)
    target = torch.empty_like(source)
    count = max(1, math.ceil(num_bytes / at_once))

    def copy() -> None:
        for _ in range(count):
            target.copy_(source)

    return median_seconds(copy, device, repeats=3) * num_bytes / (count * at_once)


@torch.inference_mode()
def attention(
    heads: int, kv_heads: int, dim: int, tokens: int, earlier: int, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Yield the time of one layer's attention of a prompt's `tokens` behind `earlier` ones, by torch's own kernels.

    Keys and values lie one after the other. Earlier tokens, which all of these see, are a call of their own, so that
    each kernel needs only its plainest mask; the time to merge both is left out.
    """
    new = partial(torch.randn, dtype=torch.bfloat16, device=device)
    query = new(1, heads, tokens, dim)
    operations = 4.0 * heads * dim * tokens * (earlier + (tokens + 1) / 2)
    for name, backend in (BACKENDS if device.type == "cuda" else ON_HOST).items():
        row = {"by": name, "tokens": tokens, "earlier": earlier, "head_dim": dim, "operations": operations}
        try:
            seconds = 0.0
            for length, is_causal in ((tokens, True), (earlier, False)):
                if length:
                    keys = new(1, kv_heads, length, dim)
                    values = torch.randn_like(keys)
                    with sdpa_kernel([backend]):
                        seconds += _attention_seconds(query, keys, values, is_causal=is_causal)
            yield row | {"us": seconds * 1e6}
        except RuntimeError as error:  # not every card and version has each
            yield row | {"problem": str(error)[:200]}


def _attention_seconds(query: Tensor, keys: Tensor, values: Tensor, *, is_causal: bool) -> float:
    """Return the time of one attention. A kernel that takes no groups gets the keys and values of each head."""
    attend = partial(scaled_dot_product_attention, is_causal=is_causal)
    try:
        return median_seconds(partial(attend, query, keys, values, enable_gqa=True), query.device)
    except RuntimeError:
        group = query.shape[1] // keys.shape[1]
        each = (one.repeat_interleave(group, dim=1) for one in (keys, values))
        return median_seconds(partial(attend, query, *each), query.device)
