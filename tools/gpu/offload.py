"""Measures copies of KV blocks to pinned host memory and back, and how long steps wait for them. Then a prompt that was
evicted comes back to an engine, whose answer must be that of a prompt in the cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from oaiserve.config import Bytes
from oaiserve.engine.model.block_copies import BlockCopies, streams_of
from tests.models.decoders import real_shape
from tools.engine_load import greedy, random_prompts
from tools.gpu.models import described_on, sensitive
from tools.gpu.parts import Found, in_turn
from tools.gpu.sections import Target
from tools.gpu.timing import median_seconds
from tools.gpu.workload import BLOCK_SIZE, blocks_for, ids, running_engine

LAYERS = 32  # layers of a model of 8B, with 8 heads of 128
NUMBERS = 8 * 128
BLOCKS = (1, 4, 32, 128)  # copied at once
SMALL = Bytes("64MiB")


def run(target: Target) -> Iterator[Found]:
    yield from in_turn({"copies": partial(copies, target), "answers": partial(answers, target)})


def copies(target: Target) -> Iterator[Found]:
    sizes = BLOCKS[:2] if target.quick or target.is_dry else BLOCKS
    shape = (max(sizes), BLOCK_SIZE, NUMBERS)
    tensors = [torch.randn(shape, device=target.device).bfloat16() for _ in range(2 * LAYERS)]
    expected = tensors[-1].clone()
    streams = streams_of(target.device)
    made = BlockCopies(tensors, sum(tensor.nbytes for tensor in tensors), streams)

    def save(pairs: list[tuple[int, int]]) -> None:
        made.save(pairs, made.launched())

    def save_and_wait(pairs: list[tuple[int, int]]) -> None:
        save(pairs)
        streams.out.mark().synchronize()

    def restore(pairs: list[tuple[int, int]]) -> None:
        made.restore(pairs, made.launched()).synchronize()

    rows = []
    with target.turn():
        for number in sizes:
            pairs = [(index, index) for index in range(number)]
            # By the clock of the steps' stream: a step waits until the blocks have been gathered.
            step_waits = median_seconds(partial(save, pairs), target.device)
            row = {"blocks": number, "bytes": number * made.block_bytes, "step_waits_ms": 1e3 * step_waits}
            row["launch_ms"] = 1e3 * _shortest_seconds(partial(save, pairs))
            row["out_ms"] = 1e3 * _shortest_seconds(partial(save_and_wait, pairs))
            tensors[-1][:number].zero_()
            row["in_ms"] = 1e3 * _shortest_seconds(partial(restore, pairs))
            rows.append(row)
    yield {"copies": rows, "bytes": {"equal": torch.equal(tensors[-1], expected)}}


def _shortest_seconds(call: Callable[[], None], repeats: int = 5) -> float:
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return min(found)


def answers(target: Target) -> Iterator[Found]:
    config = sensitive(real_shape("llama-3.2-1b", tiny=target.quick or target.is_dry))
    config.num_hidden_layers = 2
    described = described_on(config, target.device, dtype=torch.float32)
    settings = {"max_running": 4, "max_model_len": 256, "kv_blocks": blocks_for(1, 256), "kv_offload": SMALL}
    prompts = random_prompts(6, 150, config.vocab_size)
    with target.turn(), running_engine(described, target, **settings) as engine:
        ids(engine, prompts[:1], greedy(32))
        cached = ids(engine, prompts[:1], greedy(32))
        for prompt in prompts[1:]:
            ids(engine, [prompt], greedy(32))
        restored = ids(engine, prompts[:1], greedy(32))
        numbers = engine.snapshot()
    hits = numbers.num_offload_hits
    yield {"restored prompt": {"equal": restored == cached and hits > 0, "hits": hits}}
