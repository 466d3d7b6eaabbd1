"""Models that are ready to run steps on a double of a GPU, whose tensors are on the CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

from oaiserve.config import EngineOptions
from oaiserve.engine.executors.runner import ModelRunner
from oaiserve.engine.model.states import States
from oaiserve.plugins.cuda.executor.block_tables import BlockTables
from oaiserve.plugins.cuda.executor.executor import CudaExecutor, CudaWeights
from oaiserve.plugins.cuda.executor.kernels import Kernels
from oaiserve.plugins.cuda.executor.token_counts import DeviceCounts
from oaiserve.plugins.cuda.start.on_gpu import Ready
from tests.engine.model.steps import CPU
from tests.plugins.cuda.executor.step_runs import Model, PlainSampler, padded_attention, padded_latent_attention

OPTIONS = EngineOptions(max_running=4, max_step_tokens=64)
NUM_BLOCKS = 64
BLOCK_SIZE = OPTIONS.block_size


def ready_model(model: Model, *, has_adapters: bool = False, options: EngineOptions = OPTIONS, **kernels: Any) -> Ready:
    adaptable = model.decoder.adaptable()
    if has_adapters:
        from oaiserve.plugins.cuda.executor.triton_adapters import TritonAdapters

        kernels = {"adapters": TritonAdapters(adaptable, 8, CPU), **kernels}
    attention = {"attention": padded_attention, "latent_attention": padded_latent_attention}
    own = Kernels(**{**attention, "sampling": PlainSampler(), **kernels})
    weights = CudaWeights(model.decoder, dtype=model.spec.dtype, device=CPU)
    num_blocks = options.kv_blocks or NUM_BLOCKS
    # What is padded writes into a block more, where the kernels write nothing.
    sizes = {"num_blocks": num_blocks + 1, "block_size": options.block_size}
    executor = CudaExecutor(weights, model.spec.kv_shapes, **sizes, kernels=own)
    tables = BlockTables.with_room(options.max_running, model.spec.max_model_len, options.block_size, CPU)
    states = States.of(model.spec, options.max_running + 1)
    counts = DeviceCounts(tables, model.spec.vocab_size)
    of_device = {"tables": tables, "counts": counts, "states": states, "sample_ids": own.sampling.sample_ids}
    new_runner = partial(ModelRunner, executor, CPU, options.block_size, **of_device)
    parts = executor, tables, counts, num_blocks, model.spec.max_model_len, options.max_running, states, new_runner
    return Ready(model.spec, options, adaptable, weights, *parts)
