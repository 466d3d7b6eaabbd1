"""Measures the steps of a model in the engine: decodes of several batch sizes, prompts in chunks, and their kernels.

Times come from the engine's own records, which use the device's clock on a GPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from oaiserve.config import EngineOptions
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.errors import StartupError
from oaiserve.facts.record import StepKind, StepRecord
from tools.engine_load import complete, random_prompts
from tools.gpu.parts import measure_decodes, profile_steps
from tools.gpu.roofline import decode_bytes, prefill_operations
from tools.gpu.target import Target
from tools.gpu.workload import blocks_for, load, release, running_engine

CONTEXT = 512
CHUNK = 2048
PROMPT = 4 * CHUNK


def run(target: Target, model: str) -> Iterator[dict[str, Any]]:
    loaded = load(model, target)
    weights = weight_bytes(loaded.model)
    yield {"model": model, "weight_bytes": weights, "kv_bytes_per_token": loaded.kv_bytes_per_token}

    batches, context, num_tokens = ((1, 4), 40, 16) if target.quick else ((64, 1, 16, 256), CONTEXT, 128)
    prompt_len = context - num_tokens // 2  # then a sequence has `context` tokens on average over a run
    kv_blocks = blocks_for(max(batches), prompt_len + num_tokens)
    decode: list[dict[str, Any]] = []
    with running_engine(loaded, kv_blocks=kv_blocks, max_running=max(batches), prefix_cache=False) as engine:
        for batch in batches:
            prompts = random_prompts(batch, prompt_len, loaded.vocab_size)
            found = measure_decodes(engine, prompts, num_tokens, repeats=1 if target.quick else 2)
            num_bytes = decode_bytes(weights, loaded.kv_bytes_per_token, batch, context)
            decode.append({"context": context, "bytes": num_bytes, **found})
            yield {"decode": decode}
    del engine

    yield {"prefill": prefill(loaded, target, "auto")}
    release()

    sequences, prompt = (4, 16) if target.quick else (64, CHUNK)
    options = EngineOptions(
        compile=target.is_gpu,
        kv_blocks=blocks_for(sequences, max(context, prompt)),
        max_running=sequences,
        max_step_tokens=max(prompt, sequences),
    )
    yield {"parts": profile_steps(loaded, options, sequences=sequences, context=context, prompt=prompt)}
    if target.is_gpu:
        release()
        try:
            yield {"prefill_varlen": prefill(loaded, target, "varlen")}
        except StartupError as error:  # this device or this torch does not have varlen attention
            yield {"prefill_varlen": {"problem": str(error)}}


def prefill(loaded: LoadedModel, target: Target, attention: str) -> dict[str, Any]:
    chunk, length, count = (16, 64, 2) if target.quick else (CHUNK, PROMPT, 3)
    settings: dict[str, Any] = {"max_running": 16, "max_step_tokens": chunk, "prefix_cache": False, "cuda_graph": False}
    with running_engine(loaded, kv_blocks=blocks_for(count, length + 1), attention=attention, **settings) as engine:
        complete(engine, random_prompts(1, length, loaded.vocab_size), 1)
        engine.take_steps()
        complete(engine, random_prompts(count, length, loaded.vocab_size, seed=1), 1)
        return prefill_figures(loaded.model, engine.take_steps(), chunk, length)


def prefill_figures(model: PreTrainedModel, records: Sequence[StepRecord], chunk: int, length: int) -> dict[str, Any]:
    """Return figures of prompts of `length` tokens that were computed one after the other, a step for each chunk."""
    steps = [record for record in records if record.kind == StepKind.PREFILL and record.num_tokens == chunk]
    each = length // chunk
    if len(steps) % each or len(steps) != len(records):
        raise RuntimeError(f"Prompts of {each} chunks did not take {each} prefill steps each: {records}")
    config = model.config
    width = config.num_attention_heads * getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    linear = linear_parameters(model)
    operations = [
        prefill_operations(linear, config.num_hidden_layers, width, start, start + chunk)
        for start in range(0, length, chunk)
    ]
    times_ns = [[step.duration_ns for step in steps[place::each]] for place in range(each)]
    return {
        "chunk": chunk,
        "prompt": length,
        "steps": len(steps),
        "ms": [statistics.median(found) / 1e6 for found in times_ns],
        "operations": operations,
        "operations_per_second": sum(operations) / sum(statistics.median(found) / 1e9 for found in times_ns),
        "gap_ms": statistics.median(step.idle_ns / 1e6 for step in steps),
    }


def weight_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of all parameters that a step reads whole. Of an embedding it reads only some rows, unless the
    embedding is the output, too."""
    output = model.get_output_embeddings().weight
    read = {id(output): output}
    for module in model.modules():
        if not isinstance(module, torch.nn.Embedding):
            read |= {id(parameter): parameter for parameter in module.parameters(recurse=False)}
    return sum(parameter.numel() * parameter.element_size() for parameter in read.values())


def linear_parameters(model: PreTrainedModel) -> int:
    """Return the parameters of the matrices that every token is multiplied with. The output embedding is only for
    tokens that sample."""
    output = model.get_output_embeddings().weight
    return sum(
        parameter.numel()
        for module in model.modules()
        if not isinstance(module, torch.nn.Embedding)
        for parameter in module.parameters(recurse=False)
        if parameter.dim() == 2 and parameter is not output
    )
