"""Compares ways of computing steps on a GPU: plain torch, kernels launched one by one, and kernels in graphs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from oaiserve.engine.decoder.spec import ModelSpec
from oaiserve.engine.executors.runner import ModelRunner
from oaiserve.engine.model.adapters import probe_adapter
from oaiserve.engine.model.rehearsal import prompt, prompts_and_decodes
from oaiserve.engine.model.sampling import numpy_sampling
from oaiserve.engine.model.sampling.logit_edits import penalise
from oaiserve.engine.model.states import States
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.sequences.draw_columns import GREEDY
from oaiserve.engine.sequences.draw_rows import draw_row
from oaiserve.engine.sequences.step import Chunk, Step
from oaiserve.engine.start.compare import Difference, difference, tolerance
from oaiserve.plugins.cuda.executor.executor import CudaExecutor
from oaiserve.plugins.cuda.executor.kernels import Kernels
from oaiserve.plugins.cuda.executor.product_ways import ProductWays
from oaiserve.plugins.cuda.executor.step_graphs import StepGraphs
from oaiserve.plugins.cuda.start.on_gpu import Ready, executor_of

# The lengths of the sequences to compare. The keys of the last one are split among several programs.
LENGTHS = (9, 40, 17, 600)
CHUNK_TOKENS = 5  # tokens of the last sequence in a mixed step, in which the others decode
# The lengths of single prompts. Products have different tiles for each of these, and unpack matrices for the last.
ROWS = (20, 40, 100, 300, 2048)
# For each sequence, how its tokens are drawn, and the numbers of adapters. Penalties are negative, or factors far below
# 1, because tokens would be drawn without them otherwise.
_PARAMS = (
    SamplingParams(temperature=0.7, top_k=40, top_p=0.9),
    SamplingParams(temperature=0.0, frequency_penalty=-20.0, presence_penalty=-20.0),
    SamplingParams(temperature=1.0, min_p=0.05, repetition_penalty=0.01),
    SamplingParams(temperature=3.0, top_p=0.9),  # The distribution is so flat that most ids are candidates.
)
_NO_PENALTIES: dict[str, Any] = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
_ADAPTERS = (1, 0, 2, 1)
_ADAPTER_RANKS = {1: 3, 2: 20}
_PADDING = 32  # limit of the tokens that the graph of a small step adds as padding


@torch.inference_mode()
def difference_from_plain(own: Ready, graphs: StepGraphs | None) -> str | None:
    """Return the first difference from plain torch of kernels that are launched one by one or in `graphs`."""
    assert isinstance(own.executor, CudaExecutor)
    kernels = own.executor.kernels
    plain = _plain_runner(own, kernels.ways)
    runners = {"": own.new_runner()}
    if graphs is not None:
        runners[" in graphs"] = own.new_runner(graphs=graphs)
    has_adapters = kernels.adapters is not None
    if has_adapters:
        for number, rank in _ADAPTER_RANKS.items():
            adapter = probe_adapter(own.adaptable, own.spec.dtype, own.spec.device, rank)
            for runner in (plain, *runners.values()):
                runner.add_adapter(number, adapter)
    for with_adapters in (False, True) if has_adapters else (False,):
        for name, before, step in _steps(own, with_adapters=with_adapters):
            expected = _launched(plain, before, step)[0].clone()
            # Rounding moves outputs more if 8-bit numbers are in their sums, or were in those of the previous step.
            most_tokens = max(before.num_tokens, step.num_tokens) + _PADDING
            in_float8 = own.spec.has_float8_cache or kernels.ways.rounds(most_tokens)
            limit = tolerance(own.spec.dtype, in_float8=in_float8)
            for way, runner in runners.items():
                if graphs is not None:  # so that a replay that computes nothing doesn't leave the right logits
                    graphs.logits.zero_()
                if problem := _problem(step, limit, expected, *_launched(runner, before, step)):
                    return f"{problem} of {name}{' with adapters' * with_adapters}{way}"
    sampling = kernels.sampling
    if sampling is None or notices_infinite(sampling, own.spec):  # The host notices them where it draws.
        return None
    return "logits that are not finite would not be noticed"


def notices_infinite(sampling: ModuleType, spec: ModelSpec) -> bool:
    """Return whether draws report logits that are not finite."""
    infinite = torch.full((1, spec.vocab_size), torch.inf, dtype=spec.dtype, device=spec.device)
    return not bool(sampling.sample_ids(infinite, [GREEDY])[1].any())


def _plain_runner(own: Ready, ways: ProductWays) -> ModelRunner:
    kernels = Kernels(ways=ways)
    executor = executor_of(own.weights, own.spec, own.num_blocks, options=own.options, kernels=kernels)
    states = States.of(own.spec, own.num_states + 1)
    return ModelRunner(executor, own.spec.device, own.options.block_size, states=states)


def _launched(runner: ModelRunner, before: Step, step: Step) -> tuple[torch.Tensor, list[int]]:
    """Run a step after the one before it. Return its logits, which the next step may overwrite, and its draws."""
    if before.chunks:  # repeated for each step, because steps change states
        runner.launch(before)
    launched = runner.launch(step)
    ((_, sampling),) = launched.samplings
    return launched.logits, sampling.wait().token_ids


def _problem(
    step: Step, limit: float, expected: torch.Tensor, logits: torch.Tensor, token_ids: list[int]
) -> str | None:
    apart = Difference("the outputs", difference(logits, expected), limit)
    if apart.is_beyond_rounding:
        return f"{apart}"
    draws = [draw for chunk in step.chunks for draw in chunk.draws()]
    if counted := [(row, draw) for row, draw in enumerate(draws) if draw.sequence.is_counted]:
        logits = logits.float().clone()
        penalise(logits, counted)
    expected_ids, _ = numpy_sampling.sample_ids(logits, [draw_row(draw.sequence, draw.end) for draw in draws])
    return None if token_ids == expected_ids.tolist() else "other tokens would be drawn from the outputs"


def _steps(own: Ready, *, with_adapters: bool) -> Iterator[tuple[str, Step, Step]]:
    """Yield steps to compare: the name of each, the step that runs before it, and the step itself."""
    spec = own.spec
    block_size = own.options.block_size
    most = None if own.states is None else own.states.last
    lengths = [_possible(length, own) for length in LENGTHS[:most]]
    has_counts = own.counts is not None
    params = [one if has_counts else replace(one, **_NO_PENALTIES) for one in _PARAMS]
    prompts, decodes = prompts_and_decodes(lengths, spec.vocab_size, block_size, params, device_counts=has_counts)
    sequences = [chunk.sequence for chunk in prompts.chunks]
    for place, sequence in enumerate(sequences):
        sequence.state = place
        sequence.adapter = _ADAPTERS[place] * with_adapters
    yield "a decode", Step(prompts.chunks[:1]), Step(decodes.chunks[:1])
    yield f"{len(lengths)} decodes", prompts, decodes
    yield f"{len(lengths)} prompts", Step(), Step([Chunk(sequence, 0, sequence.num_tokens) for sequence in sequences])
    *before, last = decodes.chunks
    start = max(0, last.end - CHUNK_TOKENS)
    yield "decodes beside a prompt", prompts, Step([*before, Chunk(last.sequence, start, last.end - start)])
    alone = [prompt(_possible(length, own), spec.vocab_size, block_size) for length in ROWS]
    # Rotary tables end at the last position. All blocks of this sequence are the first one, except its last, which the
    # step writes: programs read earlier keys at the same time, and must not find the new one in their place.
    last_position = prompt(spec.max_model_len, spec.vocab_size, block_size, start=spec.max_model_len - 1)
    sequence = last_position.chunks[0].sequence
    sequence.blocks = [0] * (len(sequence.blocks) - 1) + [1]
    for step in (*alone, last_position):
        step.chunks[0].sequence.adapter = int(with_adapters)
        yield f"tokens up to {step.chunks[0].end}", Step(prompts.chunks[:1]), step


def _possible(length: int, own: Ready) -> int:
    """Return a length that `prompts_and_decodes`, the model and its cache support."""
    in_cache = own.num_blocks // len(LENGTHS) * own.options.block_size
    return max(3, min(length, own.spec.max_model_len, in_cache))
