"""What a GPU's memory is used for: measured in the largest step that there can be, before there is a KV cache."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.model.attention import Backend
from oaiserve.engine.model.load import LoadedModel
from oaiserve.engine.model.memory import MemoryUse, gib
from oaiserve.engine.model.runner import ModelRunner
from oaiserve.engine.model.sampler import NUM_TOP, Choose
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.sequence import Sequence
from oaiserve.engine.step import Chunk, OutOfMemory, Step
from oaiserve.errors import StartupError

# All that makes choosing a token take memory. Log-probabilities of prompts take more, in steps where they are asked
# for; if these do not fit, they are computed in parts.
COSTLY = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, logit_bias={0: 1.0}, logprobs=NUM_TOP)


class Reading(NamedTuple):
    """Of one GPU, in bytes."""

    total: int
    free: int  # for any program
    reserved: int  # by torch
    in_tensors: int  # of that
    most_in_tensors: int  # at any time since the reading before


class DeviceMemory(Protocol):
    def read(self) -> Reading:
        """When torch has given back what no tensor needs."""


class CudaMemory:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def read(self) -> Reading:
        device = self._device
        torch.cuda.synchronize(device)
        most_in_tensors = torch.cuda.max_memory_allocated(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        free, total = torch.cuda.mem_get_info(device)
        in_tensors, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        return Reading(total, free, reserved, in_tensors, most_in_tensors)


def measure(
    memory: DeviceMemory,
    loaded: LoadedModel,
    options: EngineOptions,
    *,
    max_step_tokens: int,
    backend: Backend,
    choose: Choose | None,
    graph_bytes: int,
) -> MemoryUse:
    """Raises StartupError where there is no memory even for that step. `backend` and `choose` as in ModelRunner."""
    before = memory.read()
    longest = max(1, min(loaded.max_model_len, before.total // loaded.kv_bytes_per_token))
    step = largest_step(
        max_step_tokens=max_step_tokens,
        max_running=options.max_running,
        longest=longest,
        block_size=options.block_size,
    )
    try:
        runner = ModelRunner(loaded, num_blocks=1, block_size=options.block_size, backend=backend, choose=choose)
        runner.collect(runner.launch(step))
    except (OutOfMemory, torch.OutOfMemoryError) as error:
        raise StartupError(
            f"The model's weights take {gib(before.in_tensors)} GiB, and the {gib(before.free)} GiB that are free "
            f"beside them are too little for its largest step, of {step.num_tokens} tokens of {len(step.chunks)} "
            f"sequences with {longest} tokens each: lower --max-step-tokens, --max-running or --max-model-len, end "
            "what else uses this GPU (nvidia-smi lists it), or take a smaller --dtype or more GPUs (--tensor-parallel)."
        ) from error
    del runner
    after = memory.read()
    return MemoryUse(
        total=after.total,
        weights=before.in_tensors,
        step=after.most_in_tensors - before.in_tensors,
        graphs=graph_bytes,
        others=max(0, after.total - after.free - after.reserved),
        utilization=options.gpu_memory_utilization,
    )


def largest_step(*, max_step_tokens: int, max_running: int, longest: int, block_size: int) -> Step:
    """As many sequences as may run, each at the end of `longest` tokens, so that all of them draw: one token each, but
    for those that prefill with what is left of the step's tokens. All their blocks are the first one: what is computed
    means nothing."""
    token_ids, blocks = [0] * longest, [0] * -(-longest // block_size)
    prefills: list[Chunk] = []
    decodes: list[Chunk] = []
    left = max_step_tokens
    for index in range(max_running):
        num_tokens = max(1, min(longest, left - (max_running - index - 1)))
        left -= num_tokens
        sequence = Sequence("largest step", index, [0], COSTLY, max_len=longest + 1)
        sequence.token_ids, sequence.num_tokens, sequence.blocks = token_ids, longest, blocks
        (decodes if num_tokens == 1 else prefills).append(Chunk(sequence, longest - num_tokens, num_tokens))
    return Step(decodes + prefills)
