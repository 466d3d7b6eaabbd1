"""Measures the ways between which a start chooses by their time, one beside the other: in operations per second."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from oaiserve.engine.model.attention import Scoring
from oaiserve.engine.model.attention.long_prompts import LongPrompts
from oaiserve.engine.model.attention.triton import TritonAttention
from oaiserve.engine.model.gpu.triton_matrices import multiply
from oaiserve.engine.start.gpu.long_prompts import flash_attention
from oaiserve.engine.start.gpu.timing import Seconds, device_seconds
from tools.gpu.kernels import SHAPES, Case
from tools.gpu.packed import matrices
from tools.gpu.sections import Target


@torch.inference_mode()
def run(
    target: Target, find: Callable[[], Callable[..., torch.Tensor]] = flash_attention, seconds: Seconds = device_seconds
) -> Iterator[dict[str, Any]]:
    """Measure products of packed matrices as they are and unpacked, and long prompts by Triton and by a library."""
    rows: list[dict[str, Any]] = []
    n, columns = (70, 256) if target.quick else (28_672, 4096)  # gate and up of an 8B model
    for name, matrix in matrices(n, columns, target.device).items():
        for num_rows in (4,) if target.quick else (256, 512, 1024, 2048):
            x = torch.randn(num_rows, columns, device=target.device).bfloat16()
            ways = {"packed": num_rows + 1, "unpacked": num_rows}
            took = {way: seconds(partial(multiply, x, matrix, None, least)) for way, least in ways.items()}
            rows.append({"matrix": name, "rows": num_rows, **rates(2 * num_rows * n * columns, took)})
        yield {"products": rows}
    prompts: list[dict[str, Any]] = []
    attend, shape, tokens = find(), SHAPES["llama-3.1-8b"], 8 if target.quick else 2048
    for keys in (40,) if target.quick else (8192, 16_384, 32_768):
        case = Case([(keys - tokens, tokens)], **shape)  # type: ignore[arg-type]
        batch = case.batch(target.device)
        given = *case.inputs(batch), case.cache(batch), Scoring(case.key_dim**-0.5)
        backends = {"Triton": TritonAttention(batch), "library": TritonAttention(batch, LongPrompts(attend, 1, 1))}
        operations = 4 * case.heads * case.key_dim * tokens * (keys - (tokens - 1) / 2)
        took = {way: seconds(partial(backend, *given)) for way, backend in backends.items()}
        prompts.append({"tokens": tokens, "keys": keys, **rates(operations, took)})
        yield {"prompts": prompts, "by": torch.nn.attention.current_flash_attention_impl() or "FA2"}


def rates(operations: float, took: dict[str, float]) -> dict[str, float]:
    """Return the operations per second of each way, by its time."""
    return {way: operations / each for way, each in took.items()}
